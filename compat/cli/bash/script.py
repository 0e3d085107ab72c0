"""Follows a script as bash would run it, as far as its text decides, and starts nothing.

One principle: what is not understood makes what it may assign unknown. Where the text does not
decide which way is taken, all are followed, and what differs behind them is unknown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from compat.cli.bash import builtins
from compat.cli.bash.conditions import holds, single_holds
from compat.cli.bash.state import NAME, POSITIONAL, State, joined
from compat.cli.bash.syntax import check_length, first_error, parsed
from compat.cli.bash.tokens import commands_in
from compat.cli.bash.values import OPEN, Hole, ScriptError, Word, is_unknown, opened, plain
from compat.cli.bash.words import Expander

if TYPE_CHECKING:
    from tree_sitter import Node

SECONDS = 3  # to parse a script and to follow it
_DEEPEST = 50  # functions and scripts in each other
_MOST_TURNS = 1000  # of a loop
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[(.*?)\])?(\+?)=(.*)", re.S)
_SUBSTITUTION = re.compile(r"\$\(|`|\$\{\w+:?=")
Status: TypeAlias = bool | None  # of a command; None: not known


@dataclass(frozen=True)
class Command:
    """A program that a script starts."""

    words: Sequence[Word]
    variables: Mapping[str, Word]  # of its environment, as far as the script sets them
    line: int


class _Branch(NamedTuple):
    """What is done if a test holds."""

    test: Callable[[], Status]
    body: Sequence[Node]


class Script(Expander):
    """One run of a script: its state now, and the programs that were started so far."""

    state: Any  # a State; None where the shell has ended

    def __init__(self, state: State, takes_defaults: bool) -> None:
        super().__init__(state, takes_defaults)
        self.commands: list[Command] = []
        # The states in which loops were broken off or continued, and functions returned.
        self.left: dict[str, list[State]] = {"break": [], "continue": [], "return": []}
        self.is_in_loop = False
        self.output: list[str] | None = None  # what echo printed; None: it is not known
        self._depth = 0
        self._prefix: list[str] = []  # the words before `bash -c`
        self._outer_line: int | None = None  # of a command whose argument is followed
        self._end = time.monotonic() + SECONDS

    def run(self, text: str) -> Status:
        """Follow a whole script, or the text of an ``eval``."""
        source = check_length(text)
        root = parsed(source, self._end)
        if root.has_error:
            error = first_error(root)
            near = plain(_written(error, source).partition("\n")[0])[:60]
            raise ScriptError(
                f"line {self._line_of(error)} of the launch line cannot be read as bash, at "
                f"{near!r}. Close its quotes and brackets."
            )
        return self.nested(lambda: self._with_source(source, root.children))

    def _with_source(self, source: bytes, nodes: Sequence[Node]) -> Status:
        outer_source = getattr(self, "_source", b"")
        self._source = source
        status = self._statements(nodes)
        self._source = outer_source
        return status

    def nested(self, step: Callable[[], Status]) -> Status:
        """Do a step one level deeper."""
        if self._depth == _DEEPEST:
            raise ScriptError("the launch line is nested too deeply.")
        self._depth += 1
        status = step()
        self._depth -= 1
        return status

    def apart(self, step: Callable[[], object]) -> Status:
        """Do a step in a shell of its own, of which no variable comes back."""
        outer = self.state, self.left, self.is_in_loop
        self.state = self.state.copy()
        self.left = {"break": [], "continue": [], "return": []}
        self.is_in_loop = False
        step()
        self.state, self.left, self.is_in_loop = outer
        return None

    def output_of(self, script: str) -> str:
        """What a substitution prints, if only ``echo`` does."""
        outer_output = self.output
        self.output = []
        self.apart(lambda: self.evaluate(script, self.line))
        output = self.output
        self.output = outer_output
        if output is None or any(is_unknown(text) for text in output):
            return self._hole(f"$({script})")
        return "\n".join(output).rstrip("\n")

    def _line_of(self, node: Node) -> int:
        return node.start_point[0] + 1 if self._outer_line is None else self._outer_line

    def _text_of(self, node: Node) -> str:
        return _written(node, self._source)

    # Ways through a script.

    def _statements(self, nodes: Sequence[Node]) -> Status:
        """Follow statements one after another, until the shell ends."""
        status: Status = True
        for number, node in enumerate(nodes):
            if not node.is_named or node.type == "comment":
                continue
            if time.monotonic() > self._end:
                raise ScriptError(
                    f"the launch line takes more than {SECONDS} seconds to read. Paste less of it."
                )
            if self.state is None:
                break
            if number + 1 < len(nodes) and nodes[number + 1].type == "&":
                self._check_lines(node)
                self.apart(partial(self._statement, node))
                status = True
            else:
                status = self._statement(node)
        return status

    def _statement(self, node: Node) -> Status:
        """Follow one statement; its status."""
        self.line = self._line_of(node)
        follow = _STATEMENTS.get(node.type)
        if follow is None:
            self._refuse(node)
        return follow(self, node)

    def _fork(self, first: Callable[[], object], second: Callable[[], object], line: int) -> None:
        """Follow both of two ways, of which the text does not decide one."""
        entry = self.state.copy()
        first()
        first_exit = self.state
        self.state = entry
        second()
        self._join([first_exit], f"line {line} may assign it")

    def _join(self, states: Sequence[State | None], why: str) -> None:
        for state in states:
            self.state = joined(self.state, state, why)

    def _branches(self, branches: Sequence[_Branch]) -> Status:
        """Follow the first branch whose test holds."""
        if not branches:
            return True
        test, body = branches[0]
        line = self.line
        is_true = test()
        if self.state is None:
            return None
        if is_true:
            return self._statements(body)
        if is_true is False:
            return self._branches(branches[1:])
        self._fork(lambda: self._statements(body), lambda: self._branches(branches[1:]), line)
        return None

    def _if(self, node: Node) -> Status:
        clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        own_children = [child for child in node.children if child not in clauses]
        branches = []
        for children in (own_children, *(clause.children for clause in clauses)):
            then = next((i for i, child in enumerate(children) if child.type == "then"), None)
            if then is None:
                branches.append(_Branch(lambda: True, children))
            else:
                condition = children[1:then]
                branches.append(_Branch(partial(self._statements, condition), children[then + 1 :]))
        return self._branches(branches)

    def _case(self, node: Node) -> Status:
        items = [child for child in node.named_children if child.type == "case_item"]
        value = self.text(self._text_of(node.named_children[0]))
        branches = []
        for item in items:
            closing = next(i for i, child in enumerate(item.children) if child.type == ")")
            head = self._source[item.start_byte : item.children[closing].start_byte].decode()
            patterns = re.split(r"\s*\|\s*", head.strip(" (\n"))
            if item.children[-1].type in (";&", ";;&"):
                self._refuse(item)
            test = partial(self._matches, value, patterns)
            branches.append(_Branch(test, item.children[closing + 1 :]))
        return self._branches(branches)

    def _matches(self, value: str, patterns: Sequence[str]) -> Status:
        if "*" in patterns:
            return True
        texts = [self.text(pattern) for pattern in patterns]
        is_literal = all(re.fullmatch(r"""[\w./:=,@%"'-]*""", pattern) for pattern in patterns)
        if is_unknown(value) or not is_literal:
            return None
        return value in texts

    def _refuse(self, node: Node) -> NoReturn:
        raise ScriptError(
            f"line {self._line_of(node)} of the launch line cannot be followed: "
            f"{plain(self._text_of(node))[:60]!r}."
        )

    def _for(self, node: Node) -> Status:
        body = _part(node, "body")
        head = self._source[node.start_byte : body.start_byte].decode().rstrip("; \t\n")
        match = re.fullmatch(r"for\s+(\w+)(?:\s+in\b(.*))?", head, re.S)
        if match is None:
            self._refuse(node)
        name = match[1]
        listed = commands_in('"$@"' if match[2] is None else match[2]).words
        words = self.words(listed[0] if listed else [])
        if any(OPEN in word for word in words):
            return self._loop(lambda: None, body, [name])
        if len(words) > _MOST_TURNS:
            self._refuse(node)
        remaining = iter(words)

        def goes_on() -> Status:
            word = next(remaining, None)
            if word is not None:
                self.state.assign(name, word, self.line)
            return word is not None

        return self._loop(goes_on, body, [])

    def _while(self, node: Node) -> Status:
        body = _part(node, "body")
        condition = node.children[1 : node.children.index(body)]
        is_until = node.children[0].type == "until"

        def goes_on() -> Status:
            status = self._statements(condition)
            return status if status is None else status != is_until

        return self._loop(goes_on, body, [])

    def _c_for(self, node: Node) -> Status:
        body = _part(node, "body")
        head = self._source[node.start_byte : body.start_byte].decode()
        match = re.fullmatch(r"for\s*\(\((.*?);(.*?);(.*?)\)\)[\s;]*", head, re.S)
        if match is None:
            self._refuse(node)
        first, test, step = match.groups()
        self.sum_text(first)
        is_first = True

        def goes_on() -> Status:
            nonlocal is_first
            if not is_first:
                self.sum_text(step)
            is_first = False
            return self.sum_holds(test or "1")

        return self._loop(goes_on, body, [])

    def _loop(self, goes_on: Callable[[], Status], body: Node, names: Sequence[str]) -> Status:
        """Do a loop as often as its test holds; any number of times where that is not known."""
        why = f"the loop in line {self._line_of(body)} may change it"
        outer_left, outer_in_loop = self.left, self.is_in_loop
        self.left = {"break": [], "continue": [], "return": outer_left["return"]}
        self.is_in_loop = True
        turns = 0
        started = None
        last_tested = None
        while self.state is not None:
            status = goes_on()
            if status is False or self.state is None:
                break
            turns += 1
            if turns > _MOST_TURNS:
                self._refuse(body)
            tested = None
            if status is None:
                # Repeated until nothing more becomes unknown. Programs of earlier turns come again.
                self.state.lose(names, why)
                if self.state == last_tested:
                    break
                tested = last_tested = self.state.copy()
                started = len(self.commands) if started is None else started
                del self.commands[started:]
            self._statements(body.children)
            self._join(self.left["continue"], why)
            self.left["continue"] = []
            self._join([tested], why)
        self._join(self.left["break"], why)
        self.left, self.is_in_loop = outer_left, outer_in_loop
        return None

    def _list(self, node: Node) -> Status:
        """``a && b``, ``a || b``."""
        first, second = (child for child in node.named_children if child.type != "comment")
        self._check_lines(second)
        is_and = any(child.type == "&&" for child in node.children)
        line = self._line_of(second)
        status = self._statement(first)
        if self.state is None:
            return None
        if status is None:
            self._fork(lambda: self._statement(second), lambda: None, line)
            return None
        return self._statement(second) if status == is_and else status

    def _negated(self, node: Node) -> Status:
        self._check_lines(node)
        status = self._statements(node.children[1:])
        return None if status is None else not status

    def _group(self, node: Node) -> Status:
        if node.children[0].type == "((":
            return self.sum_holds(self._text_of(node)[2:-2])
        return self._statements(node.children)

    def _subshell(self, node: Node) -> Status:
        return self.apart(lambda: self._statements(node.children))

    def _pipeline(self, node: Node) -> Status:
        self._check_lines(node)
        for child in node.named_children:
            self.apart(partial(self._statement, child))
        self.output = None
        return None

    def _function(self, node: Node) -> Status:
        name = _part(node, "name")
        text = self._text_of(name)
        if text in _FIRST_WORDS:
            self._refuse(node)
        self.state.functions[text] = (node, self._source)
        return True

    def _test(self, node: Node) -> Status:
        return holds(self, self._text_of(node))

    def _redirected(self, node: Node) -> Status:
        body = node.child_by_field_name("body")
        may_fail = False
        for redirect in node.named_children:
            if redirect == body:
                continue
            text = self._text_of(redirect)
            is_file = redirect.type == "file_redirect"
            may_fail |= is_file and not re.search(r"(/dev/null|&[0-9-])$", text)
            has_command = redirect.type == "heredoc_redirect" and any(
                child.type not in ("heredoc_start", "heredoc_body", "heredoc_end", "file_redirect")
                for child in redirect.named_children
            )
            if has_command:
                self._refuse(redirect)
            self._check_redirection(text)
        self.output = None
        status: Status = True
        if body is None:
            pass
        elif body.type in _SIMPLE:
            # The parser takes words behind a redirection for a part of it.
            heredoc = next((c for c in node.named_children if c.type == "heredoc_redirect"), None)
            end = node.end_byte if heredoc is None else heredoc.start_byte
            status = self._simple(self._source[node.start_byte : end].decode())
        else:
            status = self._statement(body)
        return None if may_fail else status

    def _check_redirection(self, text: str) -> None:
        """An expansion in a redirection assigns for some commands and not for others."""
        if re.search(r"\$\(\(|\$\{\w+:?=", text):
            self.state.forget(f"line {self.line} redirects to what may assign")

    # Commands.

    def sum_holds(self, text: str) -> Status:
        """Whether an expression is not zero."""
        number = self.number(self.text(text, in_quotes=True))
        return None if isinstance(number, Hole) else number != 0

    def _command(self, node: Node) -> Status:
        return self._simple(self._text_of(node))

    def _check_lines(self, node: Node) -> None:
        """The parser joins ``true || A=1 B=2`` with the next line, which bash does not."""
        last = node
        while last.type in _OF_PARTS:
            last = last.named_children[-1]
        body = last.child_by_field_name("body")
        is_simple = last.type in _SIMPLE or (body is not None and body.type in _SIMPLE)
        has_document = any(child.type == "heredoc_redirect" for child in last.children)
        if is_simple and not has_document and len(commands_in(self._text_of(last)).words) > 1:
            self._refuse(last)

    def _simple(self, text: str) -> Status:
        """Simple commands, one a line."""
        commands, targets = commands_in(text)
        for target in targets:
            self._check_redirection(target)
        line = self.line
        status: Status = True
        for written in commands:
            if self.state is not None:
                self.line = line
                status = self.simple(written)
        return status

    def simple(self, written: Sequence[str]) -> Status:
        """A simple command: assignments, a function, a builtin or a program."""
        count = 0
        while count < len(written) and _ASSIGNED.fullmatch(written[count]):
            count += 1
        assignments = written[:count]
        if count == len(written):  # also of a lone `time`
            statuses = [self.assign(assignment) for assignment in assignments]
            return None if None in statuses else True
        command, *arguments = written[count:]
        for assignment in assignments:
            self._check_redirection(assignment)
        if assignments and command in _FIRST_WORDS:
            raise ScriptError(f"line {self.line} of the launch line has words before {command}.")
        if command == "time":  # a word of the shell: what follows is run in it
            return self.simple(arguments[1:] if arguments[:1] == ["-p"] else arguments)
        if command in ("[", "test"):
            return single_holds(self, arguments[:-1] if command == "[" else arguments)
        if command in builtins.DECLARING:
            return builtins.declare(self, command, arguments)
        words = self.words(written[count:])
        if not words:  # of an empty variable
            return True if not assignments else self.simple(assignments)
        return self.start(words, assignments)

    def assign(self, written: str) -> Status:
        """One assignment ``NAME=VALUE``, ``NAME+=VALUE``, ``NAME[I]=VALUE``, ``NAME=(A B)``."""
        match = _ASSIGNED.fullmatch(written)
        assert match is not None
        name, index, adds, value = match.groups()
        old = self.state.value(name)
        line = self.line
        if value.startswith("("):
            elements = [word for words in commands_in(value[1:-1]).words for word in words]
            words = self.words(elements)
            if any(re.match(r"\[.*\]\+?=", element) for element in elements):
                self.state.lose([name], f"line {line} assigns parts of it")
                return True
            before = self.state.values(name) if adds and old is not None else []
            self.state.assign(name, [*before, *words], line)
            return True
        text = self.text(value)
        unknown = self.state.holes.in_text(text)
        if len(text) == 1 and unknown and not unknown[0].name:
            text = self.state.holes.mark(replace(unknown[0], name=name))  # --set can give it
        if index is not None:
            self._assign_element(name, index, text)
        elif isinstance(old, list):
            self.state.lose([name], f"line {line} assigns a part of it")
        else:
            self.state.assign(name, (old or "") + text if adds else text, line)
        # Its status is that of a substitution in it.
        return None if _SUBSTITUTION.search(value) else True

    def _assign_element(self, name: str, index: str, text: str) -> None:
        place = self.number(self.text(index))
        values = self.state.values(name)
        if (
            isinstance(place, Hole)
            or place != len(values)
            or any(OPEN in value for value in values)
        ):
            self.state.lose([name], f"line {self.line} assigns a part of it")
        else:
            self.state.assign(name, [*values, text], self.line)

    def start(self, words: list[str], assignments: Sequence[str]) -> Status:
        """Start a command by its name."""
        name = words[0]
        functions = self.state.functions
        builtin = builtins.BUILTINS.get(name)
        if name in functions or (builtin is not None and name not in builtins.UNCHANGED):
            # Whether they last depends on the command, and on POSIX's rules.
            for assignment in assignments:
                self.assign(assignment)
            names = [_name_of(assignment) for assignment in assignments]
            why = f"line {self.line} assigns it for one command"
            self.state.lose(names, why)
            status: Status = None
            if name in functions:
                status = self.nested(lambda: self._call(name, words[1:]))
            elif builtin is not None:
                status = builtin(self, words)
            if self.state is not None:
                self.state.lose(names, why)
            return status
        if builtin is not None:
            return builtin(self, words)
        self.output = None
        self.program(words, assignments)
        return None

    def _call(self, name: str, arguments: list[str]) -> Status:
        state = self.state
        function = state.functions[name]
        if function is None:
            why = f"line {self.line} calls {name}, which is not known"
            self.output = None
            self.program([self._hole(name, why=why), *arguments])
            return None
        node, source = function
        outer_left, outer_in_loop, outer_line = self.left, self.is_in_loop, self._outer_line
        self.left = {"break": [], "continue": [], "return": []}
        self.is_in_loop = False
        state.frames.append({POSITIONAL: state.value(POSITIONAL)})
        state.variables[POSITIONAL] = arguments
        body = _part(node, "body")
        status = self._with_source(source, [body])
        if self.left["return"]:
            status = None
        self._join(self.left["return"], f"{name} in line {self.line} may return before it")
        self.left, self.is_in_loop, self._outer_line = outer_left, outer_in_loop, outer_line
        if self.state is not None:
            self.state.leave()
        return status

    def program(self, words: list[str], assignments: Sequence[str] = ()) -> None:
        """A program; of ``bash -c`` the script is followed too."""
        entry = self.state.copy()
        for assignment in assignments:
            self.assign(assignment)
            self.state.exported.add(_name_of(assignment))
        environment = self.state
        self.state = entry
        line = self.line
        if is_unknown(words[0]) or (entry.why and words[0] not in builtins.PROGRAMS):
            # It may be a function, or a builtin.
            entry.forget(f"line {line} runs {plain(words[0]) or 'a command'}, which is not known")
        place = _script_place([plain(word) for word in words])
        if place:
            self._shell(words, place, environment)
            return
        if re.search(r"(^|/)(ba)?sh( -.*)?$", " ".join(map(plain, words))):
            raise ScriptError(
                f"line {line} of the launch line starts a shell that reads its script."
            )
        holes = entry.holes
        variables = {}
        for name, value in environment.variables.items():
            if name not in environment.exported:
                value = environment.unknown(name, "it is assigned, and perhaps not exported")
            if isinstance(value, str):
                variables[name] = holes.word(value, line)
        texts = [holes.word(word, line) for word in (*self._prefix, *words)]
        self.commands.append(Command(texts, variables, line))

    def _shell(self, words: list[str], place: int, environment: State) -> None:
        """``bash -c SCRIPT NAME ARGUMENTS``: it gets what is exported, and nothing comes back."""
        outer = self.state, self._prefix, self._outer_line
        inner = environment.copy()
        inner.lose(
            sorted(environment.variables.keys() - environment.exported - {POSITIONAL}),
            "it is assigned, and perhaps not exported",
        )
        inner.functions = dict.fromkeys(inner.functions)
        inner.frames = []
        inner.variables[POSITIONAL] = words[place + 2 :]
        texts = [plain(word).rpartition("/")[2] for word in words[:place]]
        shell = max(i for i, text in enumerate(texts) if text in ("bash", "sh"))
        if any(re.match(r"-\w*[li]", text) for text in texts[shell + 1 :]):
            inner.forget(f"line {self.line} starts a shell that reads its own files first")
        self.state = inner
        self._prefix = [*self._prefix, *words[:shell]]
        self.apart(lambda: self.evaluate(words[place], self.line))
        self.state, self._prefix, self._outer_line = outer

    def evaluate(self, text: str, line: int) -> Status:
        """Follow a text as code. What is not known in it may be any code."""
        outer_line = self._outer_line
        self._outer_line = line
        why = f"line {line} runs a text of which a part is not known"
        if is_unknown(text):
            self.state.forget(why)
        status = self.run(opened(text))
        self._outer_line = outer_line
        self.line = line
        if is_unknown(text) and self.state is not None:
            self.state.forget(why)
            return None
        return status


def _part(node: Node, name: str) -> Node:
    """A child that every node of this type has."""
    child = node.child_by_field_name(name)
    assert child is not None
    return child


def _name_of(assignment: str) -> str:
    match = NAME.match(assignment)
    assert match is not None
    return match[0]


def _written(node: Node, source: bytes) -> str:
    return source[node.start_byte : node.end_byte].decode(errors="replace").strip()


def _script_place(words: Sequence[str]) -> int:
    """The place of the script in ``bash -lc SCRIPT``; 0 without one."""
    shells = (i for i, word in enumerate(words) if word.rpartition("/")[2] in ("bash", "sh"))
    for i in range(next(shells, len(words)) + 1, len(words) - 1):
        if re.fullmatch(r"-\w*c\w*", words[i]):
            return i + 1
        if not words[i].startswith(("-", "+")) and words[i - 1] not in ("-o", "+o"):
            break
    return 0


_OF_PARTS = ("list", "pipeline", "negated_command")
# Of commands that are not looked up by their name.
_FIRST_WORDS = {"[", "test", "time", *builtins.DECLARING}
_SIMPLE = {
    "command",
    "variable_assignment",
    "variable_assignments",
    "declaration_command",
    "unset_command",
}
_STATEMENTS: Mapping[str, Callable[[Script, Node], Status]] = {
    **dict.fromkeys(_SIMPLE, Script._command),
    "redirected_statement": Script._redirected,
    "if_statement": Script._if,
    "list": Script._list,
    "pipeline": Script._pipeline,
    "for_statement": Script._for,
    "c_style_for_statement": Script._c_for,
    "while_statement": Script._while,
    "case_statement": Script._case,
    "test_command": Script._test,
    "negated_command": Script._negated,
    "compound_statement": Script._group,
    "do_group": Script._group,
    "subshell": Script._subshell,
    "function_definition": Script._function,
}
