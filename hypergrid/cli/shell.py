"""The commands that a shell script would start, as far as its text decides. tree-sitter parses it.

A value that the text does not decide stays in place as a mark, one character of Unicode's private
use area, until the words of a command are read. So it survives quotes, arrays and ``bash -c``.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import add, eq, ge, gt, le, lt, mul, ne, sub
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from compat.planned.job import VARIABLES, JobError, Word
from hypergrid.messages import install_command, shown

if TYPE_CHECKING:
    from tree_sitter import Node

LONGEST = 1 << 17  # characters of a launch line, and of each value in it
_SECONDS = 3  # to parse and to follow it
_FIRST, _MOST = 0xE000, 6_400  # the private use area
_QUOTED = chr(_FIRST)  # the first mark: a word in quotes is a word even if it is empty
_MARKS = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + _MOST - 1)}]")
_NUMBER = re.compile(r"\s*-?\d{1,18}\s*")
Value: TypeAlias = str | list[str]  # with marks


class _Mark(NamedTuple):
    kind: Literal["quoted", "unknown", "assumed", "condition"]
    text: str = ""
    name: str = ""  # of the variable that --set can give


@dataclass(frozen=True)
class Command:
    """A command that a script starts, with the ``VARIABLES`` that are set then."""

    words: Sequence[Word]
    variables: Mapping[str, Word]
    line: int
    condition: str  # not decided by the text; "" without one
    assumed: tuple[str, ...]  # "TP=8": defaults that conditions rest on


def commands(text: str, given: Mapping[str, str] | None = None) -> list[Command]:
    """The commands that the script starts, and those that ``bash -c`` starts in them.

    Assignments, arrays, defaults, sums and conditions are followed, and ``#SBATCH`` sets SLURM's
    variables. ``given`` are variables that nothing in the script changes. JobError if the text is
    not bash, or too long.
    """
    _encoded(text)  # refuses what is too long, before anything is read
    if _MARKS.search(text):
        raise JobError("the launch line has characters of Unicode's private use area.")
    shell = _Shell({name: _QUOTED + value for name, value in (given or {}).items()})
    shell.variables = {**_of_slurm(text), **shell.given}
    try:
        shell.run(re.sub(r"\\\s*\Z", "", text.replace("\r\n", "\n")))
    except RecursionError:
        raise JobError("the launch line is nested too deeply.") from None
    return shell.commands


_SLURM = {
    ("-N", "--nodes"): ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    ("-n", "--ntasks"): ("SLURM_NTASKS", "SLURM_NPROCS"),
    ("--ntasks-per-node",): ("SLURM_NTASKS_PER_NODE",),
    ("--gpus-per-node",): ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    ("--gres",): ("SLURM_GPUS_ON_NODE",),
}


def _of_slurm(text: str) -> dict[str, Value]:
    """The variables that SLURM sets for the options in the script's head."""
    head = re.match(r"(?:[^\S\n]*(?:#.*)?\n)*", f"{text}\n")
    found: dict[str, Value] = {}
    for line in re.findall(r"(?m)^#SBATCH(.*)", head[0] if head else ""):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise JobError(f"#SBATCH{line} cannot be read: {error}.") from None
        for word, behind in zip(words, [*words[1:], ""], strict=False):
            option, has_value, value = word.partition("=")
            if not word.startswith("--"):
                option, has_value, value = word[:2], word[2:], word[2:]
            value = (value if has_value else behind).rpartition(":")[2]  # gpu:h100:8
            for names in (names for options, names in _SLURM.items() if option in options):
                found |= dict.fromkeys(names, value)
    tasks = [found.get(name, "") for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE")]
    if "SLURM_NTASKS" not in found and all(re.fullmatch(r"\d{1,9}", str(n)) for n in tasks):
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(int(tasks[0]) * int(tasks[1]))  # type: ignore[arg-type]
    return found


class _Shell:
    """One way through a script: its variables, and the commands so far."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.commands: list[Command] = []
        self.given, self.variables = given, dict[str, Value]()
        self._marks = [_Mark("quoted")]
        self._condition = ""
        self._rests = ""  # marks of the defaults that decided conditions rest on
        self._before: list[str] = []  # the words before `bash -c`
        self._line: int | None = None  # of that command, for all in its script
        self._end = time.monotonic() + _SECONDS
        self._source = b""

    def run(self, text: str) -> None:
        """Follow a whole script."""
        outer, self._source = self._source, _encoded(text)
        root = _parsed(self._source, self._end)
        if root.has_error:
            bad = _first_error(root)
            near = _plain(self._text(bad).partition("\n")[0])
            raise JobError(
                f"line {self._line_of(bad)} of the launch line cannot be read as bash, at "
                f"{shown(near)}. Close its quotes and brackets."
            )
        self._walk([root])
        self._source = outer

    def _walk(self, nodes: Iterable[Node]) -> None:
        follow: Mapping[str, Callable[[Node], object]] = {
            "variable_assignment": self._assign,
            "command": self._command,
            "redirected_statement": self._redirected,
            "if_statement": self._if,
            "list": self._list,
            "for_statement": self._open_ended,
            "c_style_for_statement": self._open_ended,
            "while_statement": self._open_ended,
            "case_statement": self._open_ended,
            "test_command": lambda node: None,
        }
        for node in nodes:
            if time.monotonic() > self._end:
                raise _too_long()
            if node.type in follow:
                follow[node.type](node)
            else:
                self._walk(node.named_children)

    # Statements.

    def _assign(self, node: Node) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None or target.type != "variable_name":
            return  # A[0]=1
        name, adds = self._text(target), any(child.type == "+=" for child in node.children)
        old = self.variables.get(name, "")
        if value is not None and value.type == "array":
            words = [field for child in value.named_children for field in self._fields(child)]
            before = [old] if isinstance(old, str) and old else list(old)
            self._set(name, before + words if adds else words)
            return
        text = "" if value is None else " ".join(self._pieces(value, True))
        mark = text.strip(_QUOTED)
        if _MARKS.fullmatch(mark):  # all of it is not known: --set can give it by this name
            found = self._marks[ord(mark) - _FIRST]
            if found.kind == "unknown" and not found.name:
                text = self._mark("unknown", found.text, name)
        if adds and isinstance(old, list):
            self._set(name, ["".join(old[:1]) + text, *old[1:]])
        else:
            self._set(name, f"{old}{text}" if adds else text)

    def _set(self, name: str, value: Value) -> None:
        if sum(map(len, value)) > LONGEST:
            raise JobError(f"{name} of the launch line is longer than {LONGEST:,} characters.")
        if name not in self.given:
            self.variables[name] = value

    def _list(self, node: Node) -> bool | None:
        """Follow ``a && b``, ``a || b``; whether it ended well."""
        first, *rest = node.named_children
        if first.type == "list":
            holds = self._list(first)
        elif first.type in ("test_command", "negated_command"):
            holds = self._holds(first)
        else:
            holds = True  # a command is expected to succeed
            self._walk([first])
        if holds is None:
            self._undecided(rest, self._text(first))
        elif holds == any(child.type == "&&" for child in node.children):
            self._walk(rest)
            return True
        return holds

    def _if(self, node: Node) -> None:
        others = [c for c in node.children if c.type in ("elif_clause", "else_clause")]
        holds: bool | None = False
        for clause in (node, *others):
            test, body = _parts(clause)
            if holds is False:
                holds = self._holds(test[-1]) if test else True
                about = self._text(test[-1]) if test else ""
                if holds:
                    self._walk(body)
            if holds is None:
                self._undecided(body, about)

    def _open_ended(self, node: Node) -> None:
        """A loop, or a case: what it changes is not known."""
        for child in node.named_children:
            if child.type == "variable_name":
                self._set(
                    self._text(child),
                    self._mark("unknown", f"${self._text(child)}", self._text(child)),
                )
        self._undecided(node.named_children, self._text(node).partition("\n")[0])

    def _undecided(self, nodes: Iterable[Node], about: str) -> None:
        """Follow what the script may leave out: words that it adds are marked, others unknown."""
        before, condition = dict(self.variables), self._condition
        self._condition = condition or about
        self._walk(nodes)
        self._condition = condition
        for name, value in self.variables.items():
            old = before.get(name)
            if value != old:
                size = len(old or "")
                if isinstance(value, list) and isinstance(old, list) and value[:size] == old:
                    mark = self._mark("condition", about)
                    self.variables[name] = old + [word + mark for word in value[size:]]
                else:
                    self.variables[name] = self._mark("unknown", f"${name}", name)

    def _redirected(self, node: Node) -> None:
        body, *redirects = node.named_children
        files = [child.children_by_field_name("destination") for child in redirects]
        if body.type == "command":  # `a > file b`: the parser takes b for a file too
            self._command(body, [word for each in files for word in each[1:]])
        else:
            self._walk([body])

    def _command(self, node: Node, more: Sequence[Node] = ()) -> None:
        words, before = list[str](), dict(self.variables)
        for child in (*node.named_children, *more):
            if child.type == "variable_assignment":
                self._assign(child)  # of this command alone
            elif child.type == "command_name" and self._text(child) in ("[", "[["):
                raise JobError(  # the parser takes the line before it for a part of the command
                    f"line {self._line_of(child)} of the launch line is not understood: put a "
                    f"semicolon at the end of the line before it."
                )
            elif not child.type.endswith("redirect"):
                words += self._fields(child)
        own, self.variables = self.variables, before
        plain = [*map(_plain, words)]
        place = _script(plain)
        if place:
            outer, line = self._before, self._line
            self._before, self._line = [*outer, *words[: place - 1]], self._line_of(node)
            self.run(words[place] if plain[0] != "eval" else " ".join(words[1:]))
            self._before, self._line = outer, line
        elif words:
            line = self._line_of(node)
            found = [self._word(word, line) for word in (*self._before, *words)]
            texts = {
                name: self._word(value, line)
                for name in VARIABLES
                if isinstance(value := own.get(name), str)
            }
            rests = self._word(self._rests, line).assumed
            self.commands.append(Command(found, texts, line, self._condition, rests))

    # Words.

    def _fields(self, node: Node) -> list[str]:
        """The words that a node of the syntax becomes: none, one or several."""
        return [field for field in self._pieces(node) if field]

    def _pieces(self, node: Node, quoted: bool = False) -> list[str]:
        """The same; the first and the last join what touches the node."""
        text = self._text(node).lstrip()
        match node.type:
            case "word" | "number" | "variable_name" | "regex" | "extglob_pattern":
                return [re.sub(r"\\(.?)", lambda found: found[1].strip("\n"), text, flags=re.S)]
            case "raw_string":
                return [_QUOTED + text[1:-1]]
            case "string":
                return _touching([[_QUOTED], self._inside(node, 1, True)])
            case "concatenation" | "command_name":
                return self._inside(node, 0, quoted)
            case "simple_expansion":
                return self._expanded(text, text[1:], quoted)
            case "expansion":
                return self._braces(node, quoted)
            case "arithmetic_expansion":
                return [self._sum(node)]
            case "comment":
                return []
        return [self._mark("unknown", text)]

    def _inside(self, node: Node, quotes: int, quoted: bool) -> list[str]:
        """The pieces of a node's children, and of the text between them."""
        source, start, at = self._source[node.start_byte : node.end_byte], node.start_byte, quotes
        parts: list[list[str]] = []
        for child in (*(c for c in node.named_children if c.type != "string_content"), None):
            end = len(source) - quotes
            if child is not None:  # the parser gives blanks before a second $NAME to that node
                own = self._source[child.start_byte : child.end_byte]
                end = child.start_byte - start + len(own) - len(own.lstrip())
            text = source[at:end].decode()
            parts.append([re.sub(r'\\([\\"$`\n])', lambda found: found[1].strip("\n"), text)])
            if child is not None:
                parts.append(self._pieces(child, quoted))
                at = child.end_byte - start
        return _touching(part for part in parts if part != [""])

    def _expanded(self, whole: str, name: str, quoted: bool, index: str | None = None) -> list[str]:
        value = self.variables.get(name)
        if value is None:
            return [self._mark("unknown", whole, name)]
        values = [value] if isinstance(value, str) else value
        if index == "*" and quoted:
            values = [" ".join(values)]
        elif index not in ("@", "*"):
            values = values[int(index or 0) :][:1]
        return [field for value in values for field in _split(value, quoted)]

    def _braces(self, node: Node, quoted: bool) -> list[str]:
        """``${NAME}``, ``${NAME:-8}``, ``${NAME[@]}``, ``${#NAME[@]}``; all else is not known."""
        whole = self._text(node).lstrip()
        found = re.match(r"\$\{(#?)(\w+|@)(?:\[([@*]|\d{1,6})\])?(:?[-=]|\})", whole)
        if found is None:
            return [self._mark("unknown", whole)]
        counted, name, index, operator = found.groups()
        value = self.variables.get(name)
        if counted and value is not None:
            return [str(len(value) if index else len(_plain("".join(value))))]
        if operator == "}" or (value is not None and ("".join(value) or ":" not in operator)):
            return self._expanded(whole, name, quoted, index)
        pieces = _touching(self._pieces(each, quoted) for each in node.named_children[1:])
        if value is None:
            mark = self._mark("assumed", f"{name}={_plain(' '.join(pieces))}")
            pieces = [piece + mark for piece in pieces] or [mark]
        if operator.endswith("="):
            self._set(name, " ".join(pieces))
        return [field for piece in pieces for field in _split(piece, quoted)]

    def _sum(self, node: Node) -> str:
        """The value of ``$((A * B))``, with the marks of what it rests on."""
        texts: list[str] = []
        try:
            (inner,) = node.named_children
            number = self._number(inner, texts)
            if abs(number) < 1 << 63:
                return str(number) + "".join(dict.fromkeys(_MARKS.findall("".join(texts))))
        except (ValueError, ZeroDivisionError):
            for mark in self._kinds("".join(texts)):
                if mark.kind == "unknown" and mark.name:
                    return self._mark(*mark)
        return self._mark("unknown", self._text(node))

    def _number(self, node: Node, texts: list[str]) -> int:
        inner, operator = node.named_children, self._operator(node)
        if node.type == "parenthesized_expression":
            return self._number(inner[-1], texts)
        if node.type == "binary_expression" and len(inner) == 2:
            left, right = (self._number(each, texts) for each in inner)
            if operator in ("/", "%"):  # towards zero
                whole = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
                return whole if operator == "/" else left - whole * right
            if operator in _SUMS and abs(left * right) < 1 << 127:
                return _SUMS[operator](left, right)
            raise ValueError
        if node.type == "variable_name":
            texts += self._expanded(f"${self._text(node)}", self._text(node), True)
        else:
            texts += [" ".join(self._pieces(node, True))]
        if self._is_open(texts[-1]) or not _NUMBER.fullmatch(_plain(texts[-1])):
            raise ValueError
        return int(_plain(texts[-1]))

    # Conditions.

    def _holds(self, node: Node) -> bool | None:
        """Whether a condition holds; None if the text does not decide it."""
        inner, operator = node.named_children, self._operator(node)
        match node.type:
            case "test_command" | "parenthesized_expression":
                return self._holds(inner[-1]) if inner else None
            case "negated_command":
                holds = self._holds(inner[-1])
                return None if holds is None else not holds
            case "list" | "binary_expression" if operator in ("&&", "||"):
                sides = [self._holds(inner[0]), self._holds(inner[-1])]
                wins = operator == "||"  # what decides alone
                return wins if wins in sides else None if None in sides else not wins
            case "binary_expression":
                texts = [" ".join(self._pieces(each, True)) for each in (inner[0], inner[-1])]
                return self._compared(operator, *texts)
            case "unary_expression" if operator in ("!", "-z", "-n"):
                if operator == "!":
                    holds = self._holds(inner[-1])
                    return None if holds is None else not holds
                text = " ".join(self._pieces(inner[-1], True))
                return self._compared("=" if operator == "-z" else "!=", text, _QUOTED)
        return None

    def _compared(self, operator: str, one: str, other: str) -> bool | None:
        if self._is_open(one + other):
            return None
        self._rests += "".join(
            self._mark(*m) for m in self._kinds(one + other) if m.kind != "quoted"
        )
        literal, one, other = _QUOTED in other, _plain(one), _plain(other)
        if operator in ("=", "==", "!="):
            same = one == other if literal else fnmatchcase(one, other)
            return same == (operator != "!=")
        if operator in _COMPARED and _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
            return _COMPARED[operator](int(one), int(other))
        return None

    # Marks.

    def _mark(
        self, kind: Literal["quoted", "unknown", "assumed", "condition"], text: str, name: str = ""
    ) -> str:
        mark = _Mark(kind, _plain(text), name)
        if mark not in self._marks:
            if len(self._marks) == _MOST:
                raise JobError("too much of the launch line is not decided by its text.")
            self._marks.append(mark)
        return chr(_FIRST + self._marks.index(mark))

    def _kinds(self, text: str) -> list[_Mark]:
        return [self._marks[ord(mark) - _FIRST] for mark in dict.fromkeys(_MARKS.findall(text))]

    def _is_open(self, text: str) -> bool:
        return any(mark.kind in ("unknown", "condition") for mark in self._kinds(text))

    def _word(self, text: str, line: int) -> Word:
        kinds = self._kinds(text)
        unknown = next((mark for mark in kinds if mark.kind == "unknown"), _Mark("unknown"))
        condition = next((mark.text for mark in kinds if mark.kind == "condition"), "")
        assumed = tuple(mark.text for mark in kinds if mark.kind == "assumed")
        return Word(_plain(text), line, unknown.text, unknown.name, assumed, condition)

    # Nodes.

    def _text(self, node: Node) -> str:
        return self._source[node.start_byte : node.end_byte].decode(errors="replace")

    def _operator(self, node: Node) -> str:
        found = (c for c in node.children if not c.is_named or c.type == "test_operator")
        return next((self._text(child) for child in found if child.type not in ("(", ")")), "")

    def _line_of(self, node: Node) -> int:
        return node.start_point[0] + 1 if self._line is None else self._line


_SUMS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    **{"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge},
    **{"<": lt, "<=": le, ">": gt, ">=": ge},
}


def _encoded(text: str) -> bytes:
    if len(text) > LONGEST:
        raise JobError(f"the launch line is longer than {LONGEST:,} characters.")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise JobError("the launch line is not valid Unicode.") from None


def _parsed(source: bytes, end: float) -> Node:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        raise ImportError(
            f"reading a launch line needs {error.name}: {install_command('cli')}."
        ) from None
    try:
        return (
            Parser(Language(tree_sitter_bash.language()))
            .parse(
                lambda at, _: source[at : at + 4096],
                progress_callback=lambda at, has_error: time.monotonic() > end,
            )
            .root_node
        )
    except ValueError:
        raise _too_long() from None


def _too_long() -> JobError:
    return JobError(
        f"the launch line takes more than {_SECONDS} seconds to read. Paste less of it."
    )


def _first_error(node: Node) -> Node:
    while not (node.is_error or node.is_missing):
        node = next(child for child in node.children if child.has_error)
    return node


def _plain(text: str) -> str:
    return _MARKS.sub("", text)


def _touching(parts: Iterable[Sequence[str]]) -> list[str]:
    """The pieces of all parts: the last of each and the first of the next are one."""
    whole: list[str] = []
    for first, *rest in filter(None, parts):
        whole = [*whole[:-1], "".join(whole[-1:]) + first, *rest]
    return whole


def _split(value: str, quoted: bool) -> list[str]:
    """A variable's value as the shell splits it, with an empty piece before and behind blanks."""
    return [value] if quoted else re.split(r"[ \t\n]+", value.replace(_QUOTED, ""))


def _parts(clause: Node) -> tuple[list[Node], list[Node]]:
    """The condition and the body of an if, an elif or an else."""
    named = [
        c for c in clause.children if c.is_named and c.type not in ("elif_clause", "else_clause")
    ]
    then = next((c.start_byte for c in clause.children if c.type == "then"), -1)
    return [c for c in named if c.start_byte < then], [c for c in named if c.start_byte > then]


def _script(words: Sequence[str]) -> int:
    """The place of the script in ``bash -lc SCRIPT`` and ``eval SCRIPT``; 0 without one."""
    if words[:1] == ["eval"]:
        return 1
    shells = (i for i, word in enumerate(words) if word.rpartition("/")[2] in ("bash", "sh"))
    for i in range(next(shells, len(words)) + 1, len(words) - 1):
        if re.fullmatch(r"-\w*c\w*", words[i]):
            return i + 1
        if not words[i].startswith("-"):
            break
    return 0
