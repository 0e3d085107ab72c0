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
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from hypergrid.cli.bash import builtins
from hypergrid.cli.bash.conditions import holds
from hypergrid.cli.bash.state import POSITIONAL, State, joined
from hypergrid.cli.bash.syntax import check_length, first_error, parsed, part
from hypergrid.cli.bash.values import (
    ScriptError,
    Value,
    Word,
    is_unknown,
    opened,
    plain,
)
from hypergrid.cli.bash.words import Expander

if TYPE_CHECKING:
    from tree_sitter import Node

SECONDS = 3  # to parse a script and to follow it
_DEEPEST = 50  # functions and scripts in each other
Status: TypeAlias = bool | None  # of a command; None: not known


@dataclass(frozen=True)
class Command:
    """A program that a script starts."""

    words: Sequence[Word]
    variables: Mapping[str, Word]  # of its environment, as far as the script sets them
    line: int


class Script(Expander):
    """One run of a script: its state now, and the programs that were started so far."""

    state: Any  # a State; None where the shell has ended

    def __init__(self, state: State, takes_defaults: bool) -> None:
        super().__init__(state, takes_defaults)
        self.commands: list[Command] = []
        self.loops = 0  # around this place
        self.left: list[State] = []  # where a loop was broken off, or continued
        self.returned: list[State] = []
        self._depth = 0
        self._prefix: list[str] = []  # the words before `bash -c`
        self._line: int | None = None  # of that command, for all in its script
        self._end = time.monotonic() + SECONDS

    def run(self, text: str) -> Status:
        """Follow a whole script, or the text of an ``eval``."""
        outer_source = self.source
        self.source = check_length(text)
        root = parsed(self.source, self._end)
        if root.has_error:
            error = first_error(root)
            near = plain(self.written(error).partition("\n")[0])[:60]
            raise ScriptError(
                f"line {self.line_of(error)} of the launch line cannot be read as bash, at "
                f"{near!r}. Close its quotes and brackets."
            )
        try:
            status = self.nested(lambda: self.statements(root.children))
        finally:
            self.source = outer_source
        return status

    def nested(self, step: Callable[[], Status]) -> Status:
        """Do a step one level deeper."""
        if self._depth == _DEEPEST:
            raise ScriptError("the launch line is nested too deeply.")
        self._depth += 1
        status = step()
        self._depth -= 1
        return status

    def line_of(self, node: Node) -> int:
        return node.start_point[0] + 1 if self._line is None else self._line

    # Ways through a script.

    def statements(self, nodes: Sequence[Node]) -> Status:
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
                self.apart(partial(self.statement, node))
                status = True
            else:
                status = self.statement(node)
        return status

    def statement(self, node: Node) -> Status:
        """Follow one statement; its status."""
        follow = _STATEMENTS.get(node.type)
        if follow is not None:
            return follow(self, node)
        raise ScriptError(
            f"line {self.line_of(node)} of the launch line cannot be followed: "
            f"{plain(self.written(node))[:60]!r}."
        )

    def fork(self, first: Callable[[], object], second: Callable[[], object], why: str) -> Status:
        """Follow both of two ways, of which the text does not decide one."""
        entry = self.state and self.state.copy()
        first()
        first_exit = self.state
        self.state = entry
        second()
        self.state = joined(first_exit, self.state, why)
        return None

    def apart(self, step: Callable[[], object]) -> Status:
        """Do a step in a shell of its own, of which no variable comes back."""
        outer = self.state, self.loops, self.left, self.returned
        self.state = self.state.copy()
        self.loops = 0
        self.left = []
        self.returned = []
        step()
        self.state, self.loops, self.left, self.returned = outer
        return None

    def _loop(self, node: Node) -> Status:
        """Do a loop any number of times: until nothing more becomes unknown."""
        why = f"the loop in line {self.line_of(node)} may change it"
        body = part(node, "body")
        head = node.children[1 : node.children.index(body)]
        names = []
        test = []
        if node.type == "while_statement":
            test = head
        elif node.type == "for_statement":
            variable, *listed = node.named_children[:-1]
            names = [self.written(variable)]
            self.words(listed)
        else:
            sums = " ".join(map(self.written, head))
            self.lose_assigned(sums)
            names = re.findall(r"[A-Za-z_]\w*", sums)
        outer = self.left
        self.loops += 1
        while self.state is not None:
            entry = self.state
            started = len(self.commands)
            self.state = entry.copy()
            self.left = []
            self.state.lose(names, why)
            self.statements([*test, *body.children])
            for state in (*self.left, entry):
                self.state = joined(self.state, state, why)
            if self.state == entry:
                break
            del self.commands[started:]
        self.loops -= 1
        self.left = outer
        return None

    def _if(self, node: Node) -> Status:
        inner = [
            child for child in node.children if child.type not in ("elif_clause", "else_clause")
        ]
        clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        branches = [inner, *(clause.children for clause in clauses)]
        return self._branch(branches)

    def _branch(self, branches: Sequence[Sequence[Node]]) -> Status:
        if not branches:
            return True
        first = list(branches[0])
        then = next((i for i, child in enumerate(first) if child.type == "then"), 0)
        body = first[then + 1 :]
        is_true = self.statements(first[1:then]) if then else True
        if is_true:
            return self.statements(body)
        if is_true is False:
            return self._branch(branches[1:])
        why = f"line {self.line_of(first[0])} may assign it"
        return self.fork(lambda: self.statements(body), lambda: self._branch(branches[1:]), why)

    def _case(self, node: Node) -> Status:
        """Each item may be followed, and the next one behind it."""
        value, *items = node.named_children
        self.text(value)
        for item in items:
            if item.type != "case_item" or self.state is None:
                continue
            why = f"line {self.line_of(item)} may assign it"
            closing = next(i for i, child in enumerate(item.children) if child.type == ")")
            for pattern in item.children[:closing]:
                if pattern.is_named:
                    self.text(pattern)
            self.fork(partial(self.statements, item.children[closing + 1 :]), lambda: None, why)
        return None

    def _list(self, node: Node) -> Status:
        """``a && b``, ``a || b``."""
        first, second = (child for child in node.named_children if child.type != "comment")
        is_and = any(child.type == "&&" for child in node.children)
        status = self.statement(first)
        if self.state is None:
            return None
        if status is None:
            why = f"line {self.line_of(second)} may assign it"
            return self.fork(lambda: self.statement(second), lambda: None, why)
        return self.statement(second) if status == is_and else status

    def _negated(self, node: Node) -> Status:
        status = self.statements(node.children[1:])
        return None if status is None else not status

    def _group(self, node: Node) -> Status:
        if node.children[0].type != "((":
            return self.statements(node.children)
        self.sum_text(self.inner_text(node, 2, 2), self.written(node))
        return None

    def _subshell(self, node: Node) -> Status:
        return self.apart(lambda: self.statements(node.children))

    def _pipeline(self, node: Node) -> Status:
        for child in node.named_children:
            self.apart(partial(self.statement, child))
        return None

    def _test(self, node: Node) -> Status:
        return holds(self, node)

    def _function(self, node: Node) -> Status:
        self.state.functions[self.written(part(node, "name"))] = (node, self.source)
        return True

    def _redirected(self, node: Node) -> Status:
        body = node.child_by_field_name("body")
        redirects = [child for child in node.named_children if child != body]
        inner = [target for redirect in redirects for target in _targets(redirect)]
        # `a > file b`: the parser takes b for a file too.
        more = [
            target
            for redirect in redirects
            for target in redirect.children_by_field_name("destination")[1:]
        ]
        # What they assign is unknown, for a program may start in a process of its own.
        for target in inner:
            self.text(target)
        if body is None:
            return True
        return self.command(body, more) if body.type == "command" else self.statement(body)

    # Commands.

    def _assignments(self, node: Node) -> Status:
        for assignment in node.named_children:
            self._assign(assignment)
        return True

    def _assign(self, node: Node) -> Status:
        target = part(node, "name")
        value = node.child_by_field_name("value")
        line = self.line_of(node)
        adds = any(child.type == "+=" for child in node.children)
        if target.type != "variable_name":
            return self._assign_element(target, value, line)
        name = self.written(target)
        old = self.state.value(name)
        if value is not None and value.type == "array":
            self._assign_array(name, value, old if adds else None, line)
            return True
        text = "" if value is None else self.text(value)
        unknown = self.state.holes.in_text(text)
        if len(text) == 1 and unknown and not unknown[0].name:
            text = self.state.holes.text(replace(unknown[0], name=name))  # --set can give it
        if not adds:
            if isinstance(old, list):
                self.state.lose([name], f"line {line} assigns a part of it")
            else:
                self.state.assign(name, text, line)
        elif isinstance(old, list):
            self.state.lose([name], f"line {line} assigns a part of it")
        else:
            self.state.assign(name, (old or "") + text, line)
        # Its status is that of a substitution in it.
        return None if value is not None and "$(" in self.written(value) else True

    def _assign_element(self, target: Node, value: Node | None, line: int) -> Status:
        name = self.written(target).partition("[")[0]
        if value is not None:
            self.text(value)
        self.number(self.inner_text(target, len(name) + 1, 1))
        self.state.lose([name], f"line {line} assigns a part of it")
        return True

    def _assign_array(self, name: str, value: Node, old: Value | None, line: int) -> None:
        words = self.words(value.named_children)
        if any(self.written(child).startswith("[") for child in value.named_children):
            self.state.lose([name], f"line {line} assigns parts of it")
            return
        before = [old] if isinstance(old, str) else list(old or [])
        if isinstance(old, str) and is_unknown(old):
            before = [self.state.holes.words(self.state.holes.in_text(old)[0])]
        self.state.assign(name, [*before, *words], line)

    def command(self, node: Node, more: Sequence[Node] = ()) -> Status:
        """A simple command: a function, a builtin or a program."""
        children = [*node.named_children, *more]
        assignments = [child for child in children if child.type == "variable_assignment"]
        named = [
            child
            for child in children
            if child.type != "variable_assignment" and not child.type.endswith("redirect")
        ]
        for before, after in pairwise(children):
            gap = self.source[before.end_byte : after.start_byte]
            if b"\n" not in gap.replace(b"\\\n", b""):
                continue
            # The parser takes assignments in the line before a command for a part of it.
            if before not in assignments:
                raise ScriptError(
                    f"line {self.line_of(before)} of the launch line is not understood: put a "
                    f"semicolon at its end."
                )
            for assignment in assignments[: assignments.index(before) + 1]:
                self._assign(assignment)
            assignments = assignments[assignments.index(before) + 1 :]
        words = self.words(named)
        line = self.line_of(node)
        if not words:
            for assignment in assignments:
                self._assign(assignment)
            return None
        return self.start(words, assignments, line)

    def _declaration(self, node: Node) -> Status:
        """``export A=$B``: what looks like an assignment is not split."""
        words = []
        for child in node.children:
            if child.type != "variable_assignment":
                words += self.words([child]) if child.is_named else [self.written(child)]
                continue
            name = self.written(part(child, "name"))
            if builtins.is_local(words[0]) and self.state.frames:
                self.state.make_local(name)
            self._assign(child)
            words.append(name)
        return self.start(words, [], self.line_of(node))

    def start(self, words: list[str], assignments: Sequence[Node], line: int) -> Status:
        """Run a command: a function, a builtin, or a program."""
        name = words[0]
        state = self.state
        builtin = builtins.BUILTINS.get(name)
        if name not in state.functions and builtin is None:
            return self.program(words, assignments, line)
        texts = "".join(map(self.written, assignments))
        if assignments and (name not in builtins.UNCHANGED or re.search(r":=|\$\(\(", texts)):
            state.forget(f"line {line} sets variables for {name}")
        if name in state.functions:
            return self._call(words, line)
        assert builtin is not None
        return builtin(self, words, line)

    def _call(self, words: list[str], line: int) -> Status:
        function = self.state.functions[words[0]]
        if function is None and words[0] in builtins.PROGRAMS:
            raise ScriptError(
                f"line {line} of the launch line calls {words[0]}, which may be a function there."
            )
        if function is None:
            self.state.forget(f"line {line} calls {words[0]}, which is not known there")
            return None
        node, source = function
        outer = self.source, self.returned, self.loops
        self.source = source
        self.returned = []
        self.loops = 0
        self.state.frames.append({})
        self.state.make_local(POSITIONAL)
        self.state.variables[POSITIONAL] = words[1:]
        body = part(node, "body")
        self.nested(lambda: self.statement(body))
        for state in self.returned:
            self.state = joined(self.state, state, f"{words[0]} returns")
        if self.state is not None:
            self.state.leave()
        self.source, self.returned, self.loops = outer
        return None

    def program(self, words: list[str], assignments: Sequence[Node], line: int) -> Status:
        """A program; of ``bash -c`` the script is followed too."""
        entry = self.state.copy()
        for assignment in assignments:
            self._assign(assignment)
            self.state.exported.add(self.written(part(assignment, "name")))
        environment = self.state
        self.state = entry
        if is_unknown(words[0]) or (entry.why and words[0] not in builtins.PROGRAMS):
            # It may be a function, or a builtin.
            entry.forget(f"line {line} runs {plain(words[0]) or 'a command'}, which is not known")
        place = _script_place([plain(word) for word in words])
        if place:
            self._shell(words, place, environment, line)
            return None
        line = line if self._line is None else self._line
        holes = entry.holes
        variables = {
            name: holes.word(value if name in environment.exported else environment.unknown(
                name, "it is assigned, and perhaps not exported"), line)
            for name, value in environment.variables.items()
            if isinstance(value, str)
        }  # fmt: skip
        texts = [holes.word(word, line) for word in (*self._prefix, *words)]
        self.commands.append(Command(texts, variables, line))
        return None

    def _shell(self, words: list[str], place: int, environment: State, line: int) -> None:
        """``bash -c SCRIPT NAME ARGUMENTS``: it gets what is exported, and nothing comes back."""
        outer = self.state, self._prefix, self._line
        inner = environment.copy()
        for name in environment.variables.keys() - environment.exported:
            inner.lose([name], "it is assigned, and perhaps not exported")
        inner.functions = dict.fromkeys(inner.functions)
        inner.variables[POSITIONAL] = words[place + 2 :]
        shell = _shell_place(words, place)
        if any(re.match(r"-\w*[li]", plain(word)) for word in words[shell:place]):
            inner.forget(f"line {line} starts a shell that reads its own files first")
        self.state = inner
        self._prefix = [*self._prefix, *words[:shell]]
        self._line = line if self._line is None else self._line
        self.apart(lambda: self.evaluate(words[place], line))
        self.state, self._prefix, self._line = outer

    def evaluate(self, text: str, line: int) -> Status:
        """Follow a text as code. What is not known in it may be any code."""
        text = opened(text)
        if is_unknown(text):
            self.state.forget(f"line {line} runs a text of which a part is not known")
        status = self.run(text)
        if is_unknown(text) and self.state is not None:
            self.state.forget(f"line {line} runs a text of which a part is not known")
            return None
        return status

    def substituted(self, node: Node) -> None:
        if self.written(node).startswith("$(("):  # the parser takes a sum for a command
            self.state.forget(f"line {self.line_of(node)} is not understood")
        self.apart(lambda: self.statements(node.children))


def _targets(redirect: Node) -> list[Node]:
    """The nodes of a redirection whose expansions take place."""
    if redirect.type == "heredoc_redirect":
        bodies = [child for child in redirect.named_children if child.type == "heredoc_body"]
        return [
            child for body in bodies for child in body.named_children if "content" not in child.type
        ]
    return redirect.children_by_field_name("destination")[:1]


def _shell_place(words: Sequence[str], place: int) -> int:
    names = [plain(word).rpartition("/")[2] for word in words[:place]]
    return max(i for i, name in enumerate(names) if name in ("bash", "sh"))


def _script_place(words: Sequence[str]) -> int:
    """The place of the script in ``bash -lc SCRIPT``; 0 without one."""
    shells = (i for i, word in enumerate(words) if word.rpartition("/")[2] in ("bash", "sh"))
    for i in range(next(shells, len(words)) + 1, len(words) - 1):
        if re.fullmatch(r"-\w*c\w*", words[i]):
            return i + 1
        if not words[i].startswith(("-", "+")) and words[i - 1] not in ("-o", "+o"):
            break
    return 0


_STATEMENTS: Mapping[str, Callable[[Script, Node], Status]] = {
    "variable_assignment": Script._assign,
    "variable_assignments": Script._assignments,
    "command": Script.command,
    "declaration_command": Script._declaration,
    "unset_command": Script._declaration,
    "redirected_statement": Script._redirected,
    "if_statement": Script._if,
    "list": Script._list,
    "pipeline": Script._pipeline,
    "for_statement": Script._loop,
    "c_style_for_statement": Script._loop,
    "while_statement": Script._loop,
    "case_statement": Script._case,
    "test_command": Script._test,
    "negated_command": Script._negated,
    "compound_statement": Script._group,
    "do_group": Script._group,
    "subshell": Script._subshell,
    "function_definition": Script._function,
    "comment": lambda script, node: True,
}
