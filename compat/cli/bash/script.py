"""Follows a script as bash would run it, as far as its text decides, and starts nothing.

One principle: what is not understood makes what it may assign unknown. Where the text does not
decide which way is taken, all are followed, and what differs behind them is unknown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from compat.cli.bash import builtins
from compat.cli.bash.builtins import Leaving
from compat.cli.bash.conditions import COMPARED, LITERAL, Status, holds, matches, negated
from compat.cli.bash.state import POSITIONAL, State, joined
from compat.cli.bash.sums import number
from compat.cli.bash.tree import (
    Node,
    is_assigning,
    literal_of,
    nodes_in,
    pattern_of,
    statements_of,
)
from compat.cli.bash.values import LONGEST, OPEN, Hole, ScriptError, Word, is_unknown, opened, plain
from compat.cli.bash.words import Expander

_SECONDS = 3  # to follow a script
_MOST_TURNS = 1000  # of a loop
_EMPTY: Node = {"Parts": []}
_READ_OF_STATEMENT = {"Line", "Cmd", "Redirs", "Negated", "Background"}


@dataclass(frozen=True)
class Command:
    """A program that a script starts."""

    words: Sequence[Word]
    variables: Mapping[str, Word]  # of its environment, as far as the script sets them
    line: int


class Script(Expander):
    """One run of a script: its state now, and the programs that were started so far."""

    def __init__(self, state: State, takes_defaults: bool) -> None:
        super().__init__(state, takes_defaults)
        self.commands: list[Command] = []
        self.level = 0  # of functions that call each other
        self.loops = 0  # around the command, in its function
        self.output: str | None = None  # of the substitution that is followed; None: not known
        self._prefix: list[str] = []  # the words before `bash -c`
        self._outer_line: int | None = None  # of a command whose argument is followed
        self._end = time.monotonic() + _SECONDS

    def evaluate(self, text: str, line: int) -> Status:
        """Follow a text as code. What is not known in it may be any code."""
        outer_line = self._outer_line
        self._outer_line = line
        why = f"line {line} runs a text of which a part is not known"
        if is_unknown(text):
            self.state.forget(why)
        status = self.follow(statements_of(opened(text)))
        self._outer_line = outer_line
        self.line = line
        if is_unknown(text):
            self.state.forget(why)
            return None
        return status

    def apart(self, step: Callable[[], object]) -> Status:
        """Do a step in a shell of its own, of which no variable comes back."""
        outer = self.state, self.loops
        self.state = self.state.copy()
        self.loops = 0
        self._way(step)
        self.state, self.loops = outer
        return None

    def output_of(self, statements: Sequence[Node]) -> str | None:
        """The text that the statements of a substitution print; None if it is not known."""
        line = self.line
        outer_output = self.output
        self.output = ""
        self.apart(lambda: self.follow(statements))
        output = self.output
        self.output = outer_output
        self.line = line
        # Bash takes the line ends behind it away.
        return None if output is None else output.rstrip("\n")

    def prints(self, text: str | None) -> None:
        """Add to what the substitution prints that is followed; None: it is not known what."""
        if text is None or self.output is None or len(self.output + text) > LONGEST:
            self.output = None
        else:
            self.output += text

    def refuse(self, what: str) -> NoReturn:
        """Refuse a command that changes what later ones mean, or that is not followed."""
        raise ScriptError(
            f"line {self.line} of the launch line, {plain(what)}, cannot be followed."
        )

    def check_time(self) -> None:
        """Refuse a script that takes too long to follow."""
        if time.monotonic() > self._end:
            raise ScriptError(
                f"the launch line takes more than {_SECONDS} seconds to read. Paste less of it."
            )

    # Ways through a script.

    def follow(self, statements: Iterable[Node]) -> Status:
        """Follow statements one after another."""
        status: Status = True
        for statement in statements:
            status = self._statement(statement)
        return status

    def _statement(self, statement: Node) -> Status:
        self.check_time()
        self.line = self._outer_line or statement["Line"]
        if statement.keys() - _READ_OF_STATEMENT:
            self.refuse("coproc")
        has_file = False
        for redirect in statement.get("Redirs", []):
            if redirect["Op"] not in ("<<", "<<-", "<<<"):
                self.prints(None)
                # There may be no such file.
                has_file |= literal_of(redirect.get("Word", _EMPTY)) != "/dev/null"
            # {fd}>log assigns, and >${LOG:=x} for some commands and not for others.
            if "N" in redirect and "{" in redirect["N"]["Value"]:
                self.refuse("a redirection that assigns")
            self._check_assigns_nothing(redirect)
            self.may_happen(redirect)
        status: Status = True
        if "Background" in statement:
            self.prints(None)
            self.apart(partial(self._command, statement["Cmd"]))
            return True
        if "Cmd" in statement:
            status = self._command(statement["Cmd"])
        if has_file:
            return None
        if "Negated" in statement:
            return negated(status)
        return status

    def _check_assigns_nothing(self, node: object) -> None:
        if any(is_assigning(below) for below in nodes_in(node)):
            self.refuse("an expansion that assigns")

    def _command(self, command: Node) -> Status:
        """Follow a command by its type."""
        match command["Type"]:
            case "CallExpr":
                return self._simple(command.get("Assigns", []), command.get("Args", []))
            case "DeclClause":
                return builtins.declare(self, command)
            case "ArithmCmd":
                value = number(self, command["X"])
                return None if isinstance(value, Hole) else value != 0
            case "TestClause":
                operators = {node.get("Op") for node in nodes_in(command["X"])}
                # shfmt reads `a && b || c` as `a && (b || c)`, and bash as `(a && b) || c`.
                if {"&&", "||"} <= operators:
                    self.may_happen(command["X"])
                    return None
                return self._test(command["X"])
            case "Block":
                return self.follow(command["Stmts"])
            case "TimeClause" if "Stmt" in command:
                return self._statement(command["Stmt"])
            case "Subshell":
                return self.apart(lambda: self.follow(command["Stmts"]))
            case "BinaryCmd":
                return self._two_sides(command)
            case "IfClause":
                return self._if(command)
            case "CaseClause":
                return self._case(self.text(command["Word"]), command.get("Items", []))
            case "ForClause" if command["Loop"]["Type"] == "CStyleLoop":
                return self._counting(command["Loop"], command["Do"])
            case "ForClause" if "Select" not in command:
                return self._for(command)
            case "WhileClause" if "Until" in command:
                return self._loop(lambda: negated(self.follow(command["Cond"])), command["Do"])
            case "WhileClause":
                return self._loop(lambda: self.follow(command["Cond"]), command["Do"])
            case "FuncDecl" if "Name" in command:
                name = command["Name"]["Value"]
                # Such a word is not looked up among functions.
                if name not in builtins.DECLARING:
                    self.state.values[f"{name}()"] = command["Body"]
                    return True
        self.refuse(command["Type"])

    def _two_sides(self, command: Node) -> Status:
        """``a && b``, ``a || b``, ``a | b``."""
        first = partial(self._statement, command["X"])
        second = partial(self._statement, command["Y"])
        if command["Op"] not in ("&&", "||"):
            self.prints(None)
            self.apart(first)
            return self.apart(second)
        status = first()
        goes_on = status
        if command["Op"] == "||":
            goes_on = negated(status)
        return self._branch(goes_on, second, lambda: status)

    def _way(self, step: Callable[[], object]) -> str:
        """Follow a way; how the shell, a function or a loop is left on it, "" if none is."""
        try:
            step()
        except Leaving as leaving:
            return leaving.how
        return ""

    def _fork(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Follow both of two ways, of which the text does not decide one."""
        line = self.line
        self.prints(None)
        entry = self.state.copy()
        first_ending = self._way(first)
        first_state = self.state
        self.state = entry
        second_ending = self._way(second)
        ending = first_ending
        if first_ending == "exit":
            ending = second_ending
        elif second_ending == "exit":
            self.state = first_state
        elif first_ending == second_ending:
            self.state = joined(first_state, self.state, f"line {line} may assign it")
        else:
            raise ScriptError(
                f"line {line} of the launch line may {first_ending or second_ending}, which its "
                f"text does not decide."
            )
        if ending:
            raise Leaving(ending)

    def _branch(
        self, status: Status, body: Callable[[], Status], other: Callable[[], Status]
    ) -> Status:
        """Follow one of two ways, or both where the status does not decide."""
        if status is None:
            self._fork(body, other)
            return None
        if status:
            return body()
        return other()

    def _if(self, clause: Node | None) -> Status:
        if clause is None:
            return True
        # `else` has no condition, which holds.
        return self._branch(
            self.follow(clause.get("Cond", [])),
            lambda: self.follow(clause["Then"]),
            lambda: self._if(clause.get("Else")),
        )

    def _case(self, value: str, items: Sequence[Node]) -> Status:
        if not items:
            return True
        item, *remaining = items
        if item["Op"] != ";;":
            self.refuse(item["Op"])
        return self._branch(
            self._matches(value, item["Patterns"]),
            lambda: self.follow(item.get("Stmts", [])),
            lambda: self._case(value, remaining),
        )

    def _matches(self, value: str, patterns: Sequence[Node]) -> Status:
        for pattern in patterns:
            if literal_of(pattern) == "*":
                return True
            status = matches(self._pattern(pattern), value)
            if status is None:
                self.may_happen(patterns)
                return None
            if status:
                return True
        return False

    def _pattern(self, word: Node) -> str | None:
        """A pattern as a regular expression; None if it is not known."""
        expression = pattern_of(word)
        if expression is not None:
            return expression
        text = self.text(word)
        return re.escape(text) if LITERAL.fullmatch(text) else None

    def _test(self, test: Node) -> Status:
        """``[[ ... ]]``, whose words are not split."""
        operator = test.get("Op", "")
        if test["Type"] == "Word":
            return holds([self.text(test)])
        # shfmt reads `! a || b` as `! (a || b)`, and bash as `(! a) || b`.
        if operator == "!" and test["X"].get("Op") not in ("&&", "||"):
            return negated(self._test(test["X"]))
        if test["Type"] == "UnaryTest" and operator != "!":
            return holds([operator, self.text(test["X"])])
        if operator in ("&&", "||"):
            status = self._test(test["X"])
            if status is None:
                self.may_happen(test["Y"])
            elif status == (operator == "&&"):
                return self._test(test["Y"])
            return status
        if operator in COMPARED:
            # Both sides are sums.
            first_number = number(self, test["X"])
            second_number = number(self, test["Y"])
            if isinstance(first_number, Hole) or isinstance(second_number, Hole):
                return None
            return COMPARED[operator](first_number, second_number)
        if operator in ("=", "==", "!="):
            first = self.text(test["X"])
            status = matches(self._pattern(test["Y"]), first)
            return negated(status) if operator == "!=" else status
        # =~, <, >, parentheses, ! before several
        self.may_happen(test)
        return None

    # Loops.

    def _for(self, command: Node) -> Status:
        # `for X` without a list and `for X in ;` look the same here.
        if "Items" not in command["Loop"]:
            self.refuse("for without a list")
        name = command["Loop"]["Name"]["Value"]
        words = self.words(command["Loop"]["Items"])
        if any(OPEN in word for word in words):
            return self._open_loop(lambda: None, command["Do"], [name])
        remaining = iter(words)

        def goes_on() -> Status:
            word = next(remaining, None)
            if word is not None:
                self.state.assign(name, [word], self.line)
            return word is not None

        return self._loop(goes_on, command["Do"])

    def _counting(self, loop: Node, body: Sequence[Node]) -> Status:
        """``for ((i = 0; i < 8; i++))``."""
        if "Init" in loop:
            number(self, loop["Init"])
        is_first = True

        def goes_on() -> Status:
            nonlocal is_first
            if "Post" in loop and not is_first:
                number(self, loop["Post"])
            is_first = False
            if "Cond" not in loop:
                return True
            value = number(self, loop["Cond"])
            return None if isinstance(value, Hole) else value != 0

        return self._loop(goes_on, body)

    def _loop(self, goes_on: Callable[[], Status], body: Sequence[Node]) -> Status:
        """Do a loop as often as its test holds."""
        for _ in range(_MOST_TURNS):
            status = goes_on()
            if status is None:
                return self._open_loop(goes_on, body, [])
            if not status or self._turn(body) == "break":
                return None
        self.refuse("a loop that may never end")

    def _turn(self, body: Sequence[Node]) -> str:
        self.loops += 1
        ending = self._way(lambda: self.follow(body))
        self.loops -= 1
        if ending in ("exit", "return"):
            raise Leaving(ending)
        return ending

    def _open_loop(
        self, goes_on: Callable[[], Status], body: Sequence[Node], names: Sequence[str]
    ) -> Status:
        """Do a loop any number of times: repeat it until nothing more becomes unknown."""
        why = f"the loop in line {self.line} may change it"
        first = len(self.commands)

        def turn() -> None:
            self._turn(body)
            goes_on()

        while True:
            self.state.lose(names, why)
            before = self.state.copy()
            # The programs of an earlier turn start again, with less that is known.
            del self.commands[first:]
            self._fork(turn, lambda: None)
            if self.state == before:
                return None

    # Commands.

    def _simple(self, assignments: Sequence[Node], written: Sequence[Node]) -> Status:
        """A simple command: assignments, a function, a builtin or a program."""
        # shfmt takes an else without an if for a program.
        if written and literal_of(written[0]) in ("else", "elif"):
            self.refuse("else")
        words = self.words(written)
        if not words:
            status: Status = True
            for assignment in assignments:
                # A=$(false) B=2 has the status of the substitution.
                status = self.assign(assignment) and status
            return status
        self._check_assigns_nothing(assignments)
        name = words[0]
        is_function = f"{name}()" in self.state.values
        builtin = builtins.BUILTINS.get(name)
        # Whether its variables last depends on the command, and on POSIX's rules.
        if assignments and (is_function or (builtin and name not in builtins.UNCHANGED)):
            self.refuse(f"variables before {name}")
        if is_function:
            return self._call(name, words[1:])
        if builtin is not None:
            if name not in builtins.SILENT:
                self.prints(None)
            return builtin(self, words)
        self.program(words, assignments)
        return None

    def assign(self, assignment: Node) -> Status:
        """One assignment ``NAME=VALUE``, ``NAME+=VALUE``, ``NAME=(A B)``; its status."""
        state = self.state
        name = assignment["Name"]["Value"]
        old_value = state.value(name)
        status: Status = True
        for node in nodes_in(assignment):
            if node.get("Type") == "CmdSubst":
                status = None
        elements = assignment.get("Array", {}).get("Elems", [])
        value: list[str] | None
        if "Array" in assignment:
            value = self.words(element["Value"] for element in elements if "Value" in element)
            if "Append" in assignment:
                value = old_value + value
            # A=([1]=8)
            for element in elements:
                if "Index" in element:
                    number(self, element["Index"])  # X=TP=8; A[X]=1 assigns TP
                    value = None
        else:
            value = self._with_text(assignment, old_value)
        if value is None:
            state.lose([name], f"line {self.line} assigns a part of it")
        else:
            state.assign(name, value, self.line)
        return status

    def _with_text(self, assignment: Node, old_value: list[str]) -> list[str] | None:
        """A value after ``NAME=TEXT``, ``NAME+=TEXT``, ``NAME[1]=TEXT``; None if not known."""
        holes = self.state.holes
        text = self.text(assignment.get("Value", _EMPTY))
        has_index = "Index" in assignment
        place = 0
        if has_index:
            index = number(self, assignment["Index"])
            if isinstance(index, Hole):
                return None
            # A[-1] is the last element.
            place = index + len(old_value) if index < 0 else index
        if "Append" in assignment:
            if has_index or len(old_value) > 1:
                return None
            text = "".join(old_value).replace(OPEN, "") + text
        unknown = holes.in_text(text)
        # In N=$(nproc) only the job knows the right side, and --set can give N.
        if len(text) == 1 and unknown and not unknown[0].name:
            text = holes.mark(replace(unknown[0], name=assignment["Name"]["Value"]))
        is_array = has_index or len(old_value) > 1
        if not is_array:
            return [text]
        # A gap between elements, or elements of which the number is not known.
        if OPEN in "".join(old_value) or not 0 <= place <= len(old_value):
            return None
        return [*old_value[:place], text, *old_value[place + 1 :]]

    def _call(self, name: str, arguments: list[str]) -> Status:
        """Call a function: its arguments and its local variables are of its level."""
        values = self.state.values
        body = values[f"{name}()"]
        if body is None:
            self.refuse(f"{name}, a function that may have changed")
        outer_loops = self.loops
        outer_line = self._outer_line
        self.loops = 0
        self.level += 1
        values[f"{self.level} {POSITIONAL}"] = self.state.value(POSITIONAL)
        values[POSITIONAL] = arguments
        statuses: list[Status] = []
        ending = self._way(lambda: statuses.append(self._statement(body)))
        values = self.state.values
        for key in list(values):
            level, _, local = key.rpartition(" ")
            if level == str(self.level):
                values[local] = values.pop(key)
                values.pop(f"export {local}", None)
        self.level -= 1
        self.loops = outer_loops
        self._outer_line = outer_line
        if ending == "exit":
            raise Leaving(ending)
        # The status of `return 1` is not followed.
        return None if ending else statuses[0]

    def program(self, words: list[str], assignments: Sequence[Node] = ()) -> None:
        """A program; of ``bash -c`` the script is followed too."""
        self.prints(None)
        outer = self.state
        self.state = environment = outer.copy()
        for assignment in assignments:
            self.assign(assignment)
            environment.values[f"export {assignment['Name']['Value']}"] = True
        self.state = outer
        for key in list(environment.values):
            if key.isidentifier() and not environment.values.get(f"export {key}"):
                environment.lose([key], "it is assigned, and perhaps not exported")
        texts = [plain(word) for word in words]
        # It may be a function, or a builtin. After `source` every name may be a function.
        is_program = not outer.why or texts[0] in builtins.PROGRAMS
        if is_unknown(words[0]) or not is_program:
            name = texts[0] or "a command"
            outer.forget(f"line {self.line} runs {name}, which is not known")
        for place, text in enumerate(texts):
            if text.rpartition("/")[2] not in ("bash", "sh"):
                continue
            option = "".join(texts[place + 1 : place + 2])
            if re.fullmatch(r"-[eux]*c", option) and place + 2 < len(words):
                self._shell(words, place, environment)
                return
            # It reads a script that is not here, or its own files first.
            if not option or option.startswith("-"):
                self.refuse(" ".join(texts))
        holes = outer.holes
        variables = {}
        for name, value in environment.values.items():
            if name.isidentifier() and value:
                variables[name] = holes.word(value[0], self.line)
        command = [holes.word(word, self.line) for word in (*self._prefix, *words)]
        self.commands.append(Command(command, variables, self.line))

    def _shell(self, words: list[str], place: int, environment: State) -> None:
        """``bash -c SCRIPT NAME ARGUMENTS``: it gets what is exported, and nothing comes back."""
        outer = self.state, self._prefix, self.level
        for key in list(environment.values):
            # No function is exported, and what is local is of a function that is running here.
            if key.endswith("()") or key[0].isdigit():
                del environment.values[key]
        environment.values[POSITIONAL] = words[place + 4 :]
        self.state = environment
        self._prefix = [*self._prefix, *words[:place]]
        self.level = 0
        self.apart(lambda: self.evaluate(words[place + 2], self.line))
        self.state, self._prefix, self.level = outer
