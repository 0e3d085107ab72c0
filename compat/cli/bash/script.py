"""Follows a script as bash would run it, as far as its text decides, and starts nothing.

One principle: what is not understood makes what it may assign unknown. Where the text does not
decide which way is taken, all are followed, and what differs behind them is unknown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from compat.cli.bash import builtins
from compat.cli.bash.conditions import COMPARED, Status, holds, negated
from compat.cli.bash.state import NAME, POSITIONAL, State, joined
from compat.cli.bash.tree import Node, literal_of, statements_of
from compat.cli.bash.values import (
    OPEN,
    PRIVATE,
    Holes,
    ScriptError,
    Word,
    is_unknown,
    opened,
    plain,
)
from compat.cli.bash.words import Expander

_SECONDS = 3  # to follow a script
# They open no file that could be missing.
_CERTAIN_TARGETS = ("/dev/null", "1", "2", "-")
# A pattern that only the text itself matches.
_LITERAL = re.compile(r"[\w./:=,@%-]*")
Step: TypeAlias = Callable[[], Status]


@dataclass(frozen=True)
class Command:
    """A program that a script starts."""

    words: Sequence[Word]
    variables: Mapping[str, Word]  # of its environment, as far as the script sets them
    line: int


class Leaving(Exception):
    """The shell ends here, or a function, a loop, or a turn of a loop."""


class Script(Expander):
    """One run of a script: its state now, and the programs that were started so far."""

    def __init__(self, state: State, takes_defaults: bool) -> None:
        super().__init__(state, takes_defaults)
        self.commands: list[Command] = []
        # The states in which `return` leaves the function, `break` the loop, `continue` the turn.
        # "local": the names of the function's variables.
        self.left: dict[str, list[Any]] = {}
        self.traps: list[tuple[str, int]] = []  # code that runs at any time, and its line
        self.functions: dict[str, Any] = {}  # wherever they are defined
        self.end = time.monotonic() + _SECONDS

    # Ways through a script.

    def follow(self, statements: Iterable[Node]) -> Status:
        """Follow statements one after another."""
        status: Status = True
        for statement in statements:
            status = self._statement(statement)
        return status

    def evaluate(self, text: str, state: State | None = None) -> Status:
        """Follow a text as code, in a shell of its own if that begins with a state."""
        statements = statements_of(opened(text), self.state.line)
        # What is not known in it may be any code.
        if is_unknown(text):
            (state or self.state).forget()
        elif state is None:
            return self.follow(statements)
        return self.apart(statements, state)

    def apart(self, statements: Sequence[Node], state: State | None = None) -> Status:
        """Follow statements in a shell of their own, of which no variable comes back."""
        outer = self.state
        outer_left = self.left
        self.state = state or outer.copy()
        # `return` and `break` end such a shell, in ways that are not followed: they are refused.
        self.left = {}
        with suppress(Leaving):
            self.follow(statements)
        self.state = outer
        self.left = outer_left
        return None

    def leave(self, how: str) -> None:
        """Leave a function, a loop or a turn, or the shell."""
        if how != "exit":
            self.left[how].append(self.state)
        raise Leaving

    def _ways(self, *ways: Step, until: str = "") -> Status:
        """Follow each of several ways, of which the text does not decide one.

        Behind them meet all that do not leave, and those that leave by ``until``.
        """
        if len(ways) == 1 and not until:
            return ways[0]()
        entry = self.state
        outer_left = self.left
        states: list[State] = []
        if until:
            self.left = {**outer_left, until: states}
        for way in ways:
            self.state = entry.copy()
            with suppress(Leaving):
                way()
                states.append(self.state)
        self.left = outer_left
        # All ways leave: if [ -f x ]; then exit 1; else exit 2; fi
        if not states:
            raise Leaving
        self.state = joined(states, entry.line)
        return None

    def _perhaps(self, statements: Sequence[Node], until: str = "") -> Status:
        """Follow statements that may be followed or not."""
        return self._ways(partial(self.follow, statements), partial(self.follow, []), until=until)

    def _any_number_of_times(self, statements: Sequence[Node]) -> None:
        """Follow the turns of a loop, until nothing more becomes unknown."""
        first = len(self.commands)
        before = None
        while self.state != before:
            before = self.state
            # The programs of an earlier turn start again, with less that is known.
            del self.commands[first:]
            self._perhaps(statements, until="continue")

    # Statements.

    def _statement(self, statement: Node) -> Status:
        if time.monotonic() > self.end:
            raise ScriptError(
                f"the launch line takes more than {_SECONDS} seconds to read. Paste less of it."
            )
        self.state.line = statement["Line"]
        may_fail = False
        for redirect in statement.get("Redirs", []):
            # {fd}>log assigns, and >${LOG:=x} for some commands and not for others.
            descriptor = redirect.get("N", {}).get("Value", "")
            self.state.lose(NAME.findall(descriptor))
            self.unread(redirect)
            target = literal_of(redirect.get("Word", {}))
            is_text = redirect["Op"].startswith("<<")
            if not is_text and target not in _CERTAIN_TARGETS:
                may_fail = True
        if "Cmd" not in statement:
            return None
        bare = [{"Line": self.state.line, "Cmd": statement["Cmd"]}]
        # torchrun p.py &
        if "Background" in statement:
            self.apart(bare)
            return True
        # A command whose file cannot be opened is not run.
        if may_fail:
            return self._perhaps(bare)
        status = self._command(statement["Cmd"])
        # ! command
        if "Negated" in statement:
            return negated(status)
        return status

    def _command(self, command: Node) -> Status:
        """Follow a command by its type."""
        match command:
            # X=8 torchrun p.py
            case {"Type": "CallExpr"}:
                return self._simple(command.get("Assigns", []), command.get("Args", []))
            # export X=8
            case {"Type": "DeclClause"}:
                return builtins.declare(self, command)
            # ((N > 8))
            case {"Type": "ArithmCmd", "X": expression}:
                number = self.sum_of(expression)
                if is_unknown(number):
                    return None
                return number != "0"
            # [[ $N -gt 8 && $X == a ]]
            case {"Type": "TestClause", "X": test}:
                # What stands behind && may be expanded or not.
                self.unread(test)
                return self._test(test)
            # { ...; }
            case {"Type": "Block", "Stmts": statements}:
                return self.follow(statements)
            case {"Type": "TimeClause", "Stmt": statement}:
                return self._statement(statement)
            # ( ... )
            case {"Type": "Subshell", "Stmts": statements}:
                return self.apart(statements)
            case {"Type": "BinaryCmd", "Op": "&&" | "||" as operator, "X": first, "Y": second}:
                status = self._statement(first)
                if status is None:
                    return self._perhaps([second])
                # false && second
                if status != (operator == "&&"):
                    return status
                return self._statement(second)
            # first | second
            case {"Type": "BinaryCmd", "X": first, "Y": second}:
                self.apart([first])
                return self.apart([second])
            case {"Type": "IfClause"}:
                return self._if(command)
            case {"Type": "CaseClause", "Word": word}:
                return self._case(self.text(word), command.get("Items", []))
            case {"Type": "ForClause" | "WhileClause"}:
                return self._ways(partial(self._loop, command), until="break")
            # A word such as export is not looked up among functions.
            case {"Type": "FuncDecl", "Name": {"Value": name}, "Body": body}:
                if name not in builtins.DECLARING:
                    self.state.values[f"{name}()"] = body
                    self.functions[f"{name}()"] = body
                    return True
        # coproc, let, [[ in a function's name: their whole script is refused.
        self.refuse(command["Type"])

    def _if(self, clause: Node) -> Status:
        # `else` has no condition, which holds.
        status = self.follow(clause.get("Cond", []))
        body = partial(self.follow, clause["Then"])
        otherwise = partial(self.follow, [])
        if "Else" in clause:
            otherwise = partial(self._if, clause["Else"])
        if status is None:
            return self._ways(body, otherwise)
        if status:
            return body()
        return otherwise()

    def _case(self, value: str, clauses: Sequence[Node]) -> Status:
        ways = []  # that may be taken
        for clause in clauses:
            if clause["Op"] != ";;":
                self.refuse(clause["Op"])
            # What a pattern may assign depends on those before it.
            self.unread(clause["Patterns"])
            statuses = [self._matches(value, pattern) for pattern in clause["Patterns"]]
            if any(status is not False for status in statuses):
                ways.append(partial(self.follow, clause.get("Stmts", [])))
            if True in statuses:
                break
        else:
            ways.append(partial(self.follow, []))
        return self._ways(*ways)

    def _matches(self, value: str, word: Node) -> Status:
        """Whether a value matches a pattern, of which only texts and ``*`` alone are read."""
        pattern = self.text(word)
        if pattern == "*":
            return True
        if not _LITERAL.fullmatch(pattern):
            return None
        return holds([value, "=", pattern])

    def _test(self, test: Node) -> Status:
        """``[[ ... ]]``, whose words are not split."""
        if test["Type"] == "Word":
            return holds([self.text(test)])
        operator = test.get("Op", "")
        operands = [test[side] for side in ("X", "Y") if side in test]
        if any(operand["Type"] != "Word" for operand in operands):
            statuses = [self._test(operand) for operand in operands]
            # shfmt reads ! a && b as ! (a && b).
            if operator == "!" and operands[0].get("Op") not in ("&&", "||"):
                return negated(statuses[0])
            return None
        if operator in ("=", "=="):
            return self._matches(self.text(operands[0]), operands[1])
        if operator == "!=":
            return negated(self._matches(self.text(operands[0]), operands[1]))
        if operator in COMPARED:
            # Both sides are sums.
            first, second = map(self.sum_of, operands)
            return holds([first, operator, second])
        texts = [self.text(operand) for operand in operands]
        return holds([operator, *texts])

    def _loop(self, command: Node) -> None:
        body = command["Do"]
        loop = command.get("Loop", {})
        name = loop.get("Name", {}).get("Value", "")
        words = [OPEN]
        # `for X` without a list and `for X in ;` look the same here.
        if "Items" in loop and "Select" not in command:
            words = self.words(loop["Items"])
        if OPEN not in "".join(words):
            for word in words:
                self.state.assign(name, [word])
                self._ways(partial(self.follow, body), until="continue")
            return

        # The text does not decide how often the loop turns.
        self.unread(loop)
        if name:
            self.state.lose([name])
        # for ((i = 0; i < 8; i++))
        for part in loop.keys() & {"Init", "Cond", "Post"}:
            self.sum_of(loop[part])
        condition = command.get("Cond", [])
        self._any_number_of_times([*condition, *body])
        self.follow(condition)

    # Commands.

    def _simple(self, assignments: Sequence[Node], written: Sequence[Node]) -> Status:
        """A simple command: assignments, a function, a builtin or a program."""
        words = self.words(written)
        if not words:
            status: Status = None if written else True
            for assignment in assignments:
                value = self.value_of(assignment)
                self.state.assign(assignment["Name"]["Value"], value)
                # A=$(false) has the status of the substitution.
                if is_unknown("".join(value)):
                    status = None
            return status
        # What they assign beside their variables lasts.
        self.unread(assignments)
        # Bash looks among functions first, then among builtins.
        name = words[0]
        is_function = f"{name}()" in self.state.values
        is_builtin = name in builtins.BUILTINS
        # Whether its variables last depends on the command, and on POSIX's rules.
        if assignments and (is_function or is_builtin) and name not in builtins.UNCHANGED:
            self.refuse(f"variables before {name}")
        if is_function:
            return self._call(name, words[1:])
        if is_builtin:
            return builtins.run(self, words)
        return self.program(words, assignments)

    def value_of(self, assignment: Node) -> list[str]:
        """The value after ``NAME=VALUE``, ``NAME+=VALUE``, ``NAME=(A B)``."""
        name = assignment["Name"]["Value"]
        old_value = self.state.value(name)
        elements = assignment.get("Array", {}).get("Elems", [])
        if any("Index" in node for node in (assignment, *elements)):
            # A[1]=8 and A=([1]=8); with X=TP=8, A[X]=1 assigns TP
            self.unread(assignment)
            return self.state.unknown(name, self.state.here) * 2
        if "Array" in assignment:
            value = self.words(element["Value"] for element in elements)
            # Of A=($X) the number of elements is not known: it is an array also with one.
            if len(value) == 1 and OPEN in value[0]:
                value *= 2
            if "Append" in assignment:
                return [*old_value, *value]
            return value
        text = self.text(assignment.get("Value", {}))
        # The first of several elements is assigned.
        if len(old_value) > 1:
            return self.state.unknown(name, self.state.here) * 2
        if "Append" in assignment:
            return ["".join(old_value) + text]
        # In N=$(nproc) only the job knows the right side, and --set can give N.
        holes = self.state.holes.in_text(text)
        if len(text) == 1 and holes and not holes[0].name:
            hole = replace(holes[0], name=name)
            text = self.state.holes.mark(hole)
        return [text]

    def _call(self, name: str, arguments: list[str]) -> Status:
        """Call a function."""
        body = self.state.values[f"{name}()"]
        if body is None:
            self.refuse(f"{name}, a function that may have changed")
        # $1, $2 and so on are its own, and come back behind it.
        outer_arguments = self.state.value(POSITIONAL)
        outer_left = self.left
        names: list[str] = []
        self.left = {"local": names}
        self.state.values[POSITIONAL] = arguments
        status = self._ways(partial(self._statement, body), until="return")
        self.left = outer_left
        # What a local variable hides is not followed.
        self.state.lose(names)
        self.state.values[POSITIONAL] = outer_arguments
        return status

    def program(self, words: list[str], assignments: Sequence[Node] = ()) -> Status:
        """A program; of ``bash -c`` the script is followed too."""
        environment = self._environment(assignments)
        state = self.state
        name = plain(words[0]) or "a command"
        # After `source` every name may be a function.
        may_be_function = state.why and name not in builtins.PROGRAMS
        if is_unknown(words[0]) or may_be_function:
            state.forget()
        for place, word in enumerate(words):
            if word.rpartition("/")[2] not in ("bash", "sh"):
                continue
            match words[place + 1 :]:
                case [option, _, *_] if re.fullmatch(r"-[eux]*c", option):
                    self._shell(words[:place], words[place + 2 :], environment)
                    return None
                # It reads its own files first.
                case [option, *_] if option.startswith("-"):
                    self.refuse(" ".join(words))
                # It reads a script that is not here.
                case []:
                    self.refuse(" ".join(words))
        variables = {}
        for key, value in environment.values.items():
            if key.isidentifier() and value:
                variables[key] = state.holes.word(value[0], state.line)
        started = [state.holes.word(word, state.line) for word in words]
        self.commands.append(Command(started, variables, state.line))
        return None

    def _environment(self, assignments: Sequence[Node]) -> State:
        """The variables that a program sees, with the assignments before it."""
        outer = self.state
        self.state = outer.copy()
        for assignment in assignments:
            name = assignment["Name"]["Value"]
            self.state.assign(name, self.value_of(assignment))
            self.state.values[f"export {name}"] = True
        environment = self.state.exported()
        self.state = outer
        return environment

    def _shell(self, before: list[str], words: list[str], state: State) -> None:
        """``bash -c SCRIPT NAME ARGUMENTS``, behind other words; nothing comes back from it."""
        state.values[POSITIONAL] = words[2:]
        first = len(self.commands)
        self.evaluate(words[0], state)
        # srun -N 2 bash -c "torchrun p.py" starts srun -N 2 torchrun p.py
        outer_words = [state.holes.word(word, state.line) for word in before]
        for place, command in enumerate(self.commands[first:], first):
            self.commands[place] = replace(command, words=[*outer_words, *command.words])


def commands(
    text: str,
    fixed: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    takes_defaults: bool = False,
) -> tuple[list[Command], list[str]]:
    """The programs that a script starts, and the defaults ``NAME=VALUE`` that were taken.

    ``fixed`` are variables that nothing in the script changes (``@``: the script's arguments),
    ``environment`` those with which it begins. ScriptError if the text is not bash, or cannot be
    followed.
    """
    if PRIVATE.search(text):
        raise ScriptError("the launch line has characters of Unicode's private use area.")
    state = State(Holes(), dict(fixed or {}))
    for name, value in (environment or {}).items():
        state.values[name] = [value]
        state.values[f"export {name}"] = True
    if POSITIONAL in state.fixed:
        state.values[POSITIONAL] = state.fixed.pop(POSITIONAL).split()
    script = Script(state, takes_defaults)
    # A pasted line may end in the backslash before the next one.
    pasted = re.sub(r"\\\n*\Z", "", text)
    try:
        script.apart(statements_of(pasted))
        for code, state.line in script.traps:
            state.values = dict(script.functions)
            script.evaluate(code, replace(state, why="a trap may run at any time"))
    except RecursionError:
        raise ScriptError("the launch line is nested too deeply.") from None
    return script.commands, script.assumed
