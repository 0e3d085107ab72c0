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
from compat.cli.bash.conditions import COMPARED, LITERAL, Status, holds, negated
from compat.cli.bash.parser import Statement, statements_of, words_of
from compat.cli.bash.state import NAME, POSITIONAL, State, joined
from compat.cli.bash.values import OPEN, Hole, ScriptError, Word, is_unknown, opened, plain
from compat.cli.bash.words import Expander

_SECONDS = 3  # to follow a script
_DEEPEST = 50  # functions and scripts in each other
_MOST_TURNS = 1000  # of a loop
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[(.*?)\])?(\+?)=(.*)", re.S)
_SUBSTITUTION = re.compile(r"\$\(|`|\$\{\w+:?=")
_SUM = re.compile(r"\$\(\(|\$\{\w+:?=")


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
        self._depth = 0
        self._prefix: list[str] = []  # the words before `bash -c`
        self._outer_line: int | None = None  # of a command whose argument is followed
        self._end = time.monotonic() + _SECONDS

    def run(self, text: str) -> Status:
        """Follow a whole script, or the text of an ``eval``."""
        return self._nested(lambda: self._statements(statements_of(text)))

    def evaluate(self, text: str, line: int) -> Status:
        """Follow a text as code. What is not known in it may be any code."""
        outer_line = self._outer_line
        self._outer_line = line
        why = f"line {line} runs a text of which a part is not known"
        if is_unknown(text):
            self.state.forget(why)
        try:
            status = self.run(opened(text))
        finally:
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

    def output_of(self, script: str) -> str:
        """What a substitution prints, if it is one ``echo``."""
        statements = statements_of(script)
        printed: list[str] = []

        def follow() -> None:
            match statements:
                case [Statement(kind="simple", words=["echo", *written], redirects=[])] if (
                    "echo()" not in self.state.values
                ):
                    printed.append(" ".join(self.words(written)))
                case _:
                    self.evaluate(script, self.line)

        self.apart(follow)
        text = "".join(printed)
        # With an option or a backslash it prints other characters.
        if not printed or is_unknown(text) or re.match(r"-|.*\\", text, re.S):
            return self._hole(f"$({script})")
        return text.rstrip("\n")

    def _nested(self, step: Callable[[], Status]) -> Status:
        """Do a step one level deeper."""
        if self._depth == _DEEPEST:
            raise ScriptError("the launch line is nested too deeply.")
        self._depth += 1
        try:
            return step()
        finally:
            self._depth -= 1

    def _refuse(self, statement: Statement) -> NoReturn:
        raise ScriptError(
            f"line {statement.line} of the launch line, {statement.kind}, cannot be followed."
        )

    # Ways through a script.

    def _statements(self, statements: Iterable[Statement]) -> Status:
        """Follow statements one after another."""
        status: Status = True
        for statement in statements:
            if time.monotonic() > self._end:
                raise ScriptError(
                    f"the launch line takes more than {_SECONDS} seconds to read. Paste less of it."
                )
            self.line = self._outer_line or statement.line
            status = self._statement(statement)
            for operator, target in statement.redirects:
                # It assigns for some commands and not for others.
                if _SUM.search(target):
                    self.state.forget(f"line {self.line} redirects to what may assign")
                if not operator.startswith("<<"):
                    status = None  # there may be no such file
        return status

    def _statement(self, statement: Statement) -> Status:
        """Follow one statement by its kind."""
        words = statement.words
        bodies = statement.bodies
        match statement.kind:
            case "simple":
                return self._simple(words)
            case "sum":
                return self.sum_holds(words[0])
            case "test":
                return self._test(words)
            case "if":
                return self._if(bodies)
            case "case":
                return self._case(statement)
            case "for":
                return self._for(statement)
            case "while" | "until":
                return self._while(statement)
            case "group":
                return self._statements(bodies[0])
            case "not":
                return negated(self._statements(bodies[0]))
            case "&&" | "||":
                return self._list(statement)
            case "function":
                # Its words are followed before they are looked up.
                if words[0] in builtins.DECLARING:
                    self._refuse(statement)
                self.state.values[f"{words[0]}()"] = bodies[0]
                return True
        # Subshells, the commands of a pipeline, and those in the background.
        for body in bodies:
            self.apart(partial(self._statements, body))
        return True if statement.kind == "background" else None

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

    def _if(self, bodies: Sequence[list[Statement]]) -> Status:
        if not bodies:
            return True
        # Conditions and bodies take turns; the condition of `else` is empty, which holds.
        condition, body, *remaining = bodies
        return self._branch(
            self._statements(condition),
            lambda: self._statements(body),
            lambda: self._if(remaining),
        )

    def _case(self, statement: Statement, first: int = 0) -> Status:
        if first == len(statement.bodies):
            return True
        value = self.text(statement.words[0])
        return self._branch(
            self._matches(value, statement.patterns[first]),
            lambda: self._statements(statement.bodies[first]),
            lambda: self._case(statement, first + 1),
        )

    def _matches(self, value: str, patterns: Sequence[str]) -> Status:
        if "*" in patterns:
            return True
        if is_unknown(value):
            return None
        for pattern in patterns:
            # A pattern such as [0-9]* is not compared.
            if not re.fullmatch(r"""[\w./:=,@%"'-]*""", pattern):
                return None
            if self.text(pattern) == value:
                return True
        return False

    def _list(self, statement: Statement) -> Status:
        """``a && b``, ``a || b``."""
        first, second = statement.bodies
        status = self._statements(first)
        goes_on = status
        if statement.kind == "||":
            goes_on = negated(status)
        return self._branch(goes_on, lambda: self._statements(second), lambda: status)

    def sum_holds(self, text: str) -> Status:
        """Whether an expression is not zero."""
        number = self.number(self.text(text, in_quotes=True))
        if isinstance(number, Hole):
            return None
        return number != 0

    def _test(self, words: Sequence[str]) -> Status:
        """``[[ ... ]]``: one comparison, whose words are not split."""
        if words[:1] == ["!"]:
            return negated(self._test(words[1:]))
        if {"(", ")", "<", ">", "=~", "&&", "||"}.intersection(words):
            if COMPARED.keys() & set(words) or _SUM.search(" ".join(words)):
                self.state.forget(f"line {self.line} has a condition that may assign it")
            return None
        match [self.text(word) for word in words]:
            case [first, operator, second] if operator in COMPARED:
                # Both sides are sums.
                numbers = [self.number(first), self.number(second)]
                if any(isinstance(number, Hole) for number in numbers):
                    return None
                return holds([str(numbers[0]), operator, str(numbers[1])])
            case [_, _, pattern] if not LITERAL.fullmatch(pattern):
                return None  # the right side is a pattern
            case texts:
                return holds(texts)

    # Loops.

    def _for(self, statement: Statement) -> Status:
        name, *written = statement.words
        words = self.words(written)
        if any(OPEN in word for word in words):
            return self._open_loop(statement, lambda: None, [name])
        remaining = iter(words)

        def goes_on() -> Status:
            word = next(remaining, None)
            if word is not None:
                self.state.assign(name, word, self.line)
            return word is not None

        return self._loop(statement, goes_on)

    def _while(self, statement: Statement) -> Status:
        condition = statement.bodies[0]

        def goes_on() -> Status:
            status = self._statements(condition)
            if statement.kind == "until":
                return negated(status)
            return status

        return self._loop(statement, goes_on)

    def _loop(self, statement: Statement, goes_on: Callable[[], Status]) -> Status:
        """Do a loop as often as its test holds."""
        for _ in range(_MOST_TURNS):
            status = goes_on()
            if status is None:
                return self._open_loop(statement, goes_on, [])
            if not status:
                return None
            ending = self._turn(statement)
            if ending == "break":
                return None
            if ending not in ("", "continue"):
                raise Leaving(ending)
        self._refuse(statement)  # it may never end

    def _turn(self, statement: Statement) -> str:
        self.loops += 1
        ending = self._way(lambda: self._statements(statement.bodies[-1]))
        self.loops -= 1
        return ending

    def _open_loop(
        self, statement: Statement, goes_on: Callable[[], Status], names: Sequence[str]
    ) -> Status:
        """Do a loop any number of times: repeat it until nothing more becomes unknown."""
        why = f"the loop in line {statement.line} may change it"
        first = len(self.commands)
        last_tested = None
        while True:
            self.state.lose(names, why)
            if self.state == last_tested:
                return None
            last_tested = self.state.copy()
            # The programs of an earlier turn start again, with less that is known.
            del self.commands[first:]
            ending = self._turn(statement)
            if ending == "return":
                self._refuse(statement)
            # Where the body ends the shell, what goes on had no further turn.
            if ending == "exit":
                self.state = last_tested
            self.state = joined(last_tested, self.state, why)
            after_turn = self.state.copy()
            self._way(goes_on)
            self.state = joined(after_turn, self.state, why)

    # Commands.

    def _simple(self, written: Sequence[str]) -> Status:
        """A simple command: assignments, a function, a builtin or a program."""
        count = 0
        while count < len(written) and _ASSIGNED.fullmatch(written[count]):
            count += 1
        assignments = written[:count]
        if count == len(written):
            status: Status = True
            for assignment in assignments:
                # A=$(false) B=2 has the status of the substitution.
                status = self.assign(assignment) and status
            return status
        for assignment in assignments:
            if _SUM.search(assignment):
                self.state.forget(f"line {self.line} assigns for one command")
        if written[count] in builtins.DECLARING:
            if assignments:
                builtins.refuse(self, written)
            return builtins.declare(self, written[count], written[count + 1 :])
        words = self.words(written[count:])
        if words:
            return self._start(words, assignments)
        # $CMD was empty.
        return self._simple(assignments)

    def assign(self, written: str) -> Status:
        """One assignment ``NAME=VALUE``, ``NAME+=VALUE``, ``NAME=(A B)``."""
        match = _ASSIGNED.fullmatch(written)
        assert match is not None
        name, index, adds, value = match.groups()
        state = self.state
        old_value = state.value(name)
        if value.startswith("("):
            elements = words_of(value[1:-1])
            words = self.words(elements)
            if adds and old_value is not None:
                words = [*state.elements(name), *words]
            if any(re.match(r"\[.*\]\+?=", element) for element in elements):
                state.lose([name], f"line {self.line} assigns parts of it")
            else:
                state.assign(name, words, self.line)
            return True
        text = self.text(value)
        unknown = state.holes.in_text(text)
        # In N=$(nproc) only the job knows the right side, and --set can give N.
        if len(text) == 1 and unknown and not unknown[0].name:
            hole = replace(unknown[0], name=name)
            text = state.holes.mark(hole)
        if index is not None:
            self.number(self.text(index))  # A[I++]=8 assigns I
        if index is not None or isinstance(old_value, list):
            state.lose([name], f"line {self.line} assigns a part of it")
        elif adds:
            state.assign(name, (old_value or "") + text, self.line)
        else:
            state.assign(name, text, self.line)
        # Its status is that of a substitution in it.
        if _SUBSTITUTION.search(value):
            return None
        return True

    def _start(self, words: list[str], assignments: Sequence[str]) -> Status:
        """Start a command by its name: a function, a builtin or a program."""
        name = words[0]
        is_function = f"{name}()" in self.state.values
        builtin = builtins.BUILTINS.get(name)
        # Whether its variables last depends on the command, and on POSIX's rules.
        if assignments and (is_function or (builtin and name not in builtins.UNCHANGED)):
            builtins.refuse(self, [*assignments, *words])
        if is_function:
            return self._nested(lambda: self._call(name, words[1:]))
        if builtin is not None:
            return builtin(self, words)
        self.program(words, assignments)
        return None

    def _call(self, name: str, arguments: list[str]) -> Status:
        """Call a function: its arguments and its local variables are of its level."""
        body = self.state.values[f"{name}()"]
        if body is None:
            why = f"line {self.line} calls {name}, which is not known"
            self.program([self._hole(name, why=why), *arguments])
            return None
        outer = self.loops, self._outer_line
        self.loops = 0
        self.level += 1
        outer_arguments = self.state.value(POSITIONAL)
        self.state.values[f"{self.level} {POSITIONAL}"] = outer_arguments
        self.state.values[POSITIONAL] = arguments
        status: Status = None

        def follow() -> None:
            nonlocal status
            status = self._statements(body)

        ending = self._way(follow)
        for key in list(self.state.values):
            level, _, local = key.rpartition(" ")
            if level == str(self.level):
                self.state.values[local] = self.state.values.pop(key)
                self.state.values.pop(f"export {local}", None)
        self.level -= 1
        self.loops, self._outer_line = outer
        if ending == "exit":
            raise Leaving(ending)
        # The status of `return 1` is not followed.
        if ending:
            return None
        return status

    def program(self, words: list[str], assignments: Sequence[str] = ()) -> None:
        """A program; of ``bash -c`` the script is followed too."""
        entry = self.state
        self.state = entry.copy()
        for assignment in assignments:
            self.assign(assignment)
            self.state.values[f"export {_name_of(assignment)}"] = True
        environment = self.state
        self.state = entry
        texts = [plain(word) for word in words]
        # It may be a function, or a builtin. After `source` every name may be a function.
        is_program = not entry.why or texts[0] in builtins.PROGRAMS
        if is_unknown(words[0]) or not is_program:
            name = texts[0] or "a command"
            entry.forget(f"line {self.line} runs {name}, which is not known")
        for key in list(environment.values):
            is_exported = environment.values.get(f"export {key}")
            if key.isidentifier() and not is_exported:
                environment.lose([key], "it is assigned, and perhaps not exported")
        for place in range(len(texts)):
            if texts[place].rpartition("/")[2] in ("bash", "sh"):
                options = "".join(texts[place + 1 : place + 2])
                if re.fullmatch(r"-\w*c", options) and place + 2 < len(words):
                    self._shell(words, place, bool({"l", "i"} & set(options)), environment)
                    return
                if not options or options.startswith("-"):
                    raise ScriptError(
                        f"line {self.line} of the launch line starts a shell that reads its script."
                    )
        holes = entry.holes
        variables = {}
        for name, value in environment.values.items():
            if name.isidentifier() and isinstance(value, str):
                variables[name] = holes.word(value, self.line)
        command = [holes.word(word, self.line) for word in (*self._prefix, *words)]
        self.commands.append(Command(command, variables, self.line))

    def _shell(self, words: list[str], place: int, reads_files: bool, environment: State) -> None:
        """``bash -c SCRIPT NAME ARGUMENTS``: it gets what is exported, and nothing comes back."""
        outer = self.state, self._prefix, self.level
        if reads_files:
            environment.forget(f"line {self.line} starts a shell that reads its own files first")
        for key in list(environment.values):
            if key.endswith("()"):
                environment.values[key] = None  # it may be exported
            elif key[0].isdigit():
                del environment.values[key]  # of a function that is running here
        script = words[place + 2]
        environment.values[POSITIONAL] = words[place + 4 :]
        self.state = environment
        self._prefix = [*self._prefix, *words[:place]]
        self.level = 0
        self.apart(lambda: self.evaluate(script, self.line))
        self.state, self._prefix, self.level = outer


def _name_of(assignment: str) -> str:
    match = NAME.match(assignment)
    assert match is not None
    return match[0]
