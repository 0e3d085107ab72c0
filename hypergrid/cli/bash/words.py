"""The words and texts that a shell makes of a script's syntax: quotes, expansions, sums."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hypergrid.cli.bash.state import POSITIONAL, State
from hypergrid.cli.bash.sums import UnknownSumError, evaluated
from hypergrid.cli.bash.values import (
    QUOTED,
    Hole,
    Value,
    closed,
    has_open_words,
    is_pattern,
    is_unknown,
    opened,
    plain,
    split,
    touching,
)

if TYPE_CHECKING:
    from tree_sitter import Node

_NUMBER = re.compile(r"\s*(-?(?:0|[1-9]\d{0,17}))\s*")
_ESCAPED = re.compile(r'\\([\\"$`\n])')
_EXPANSIONS = {"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"}
# ${NAME}, ${NAME[index]}, and the operators that choose between a value and a default.
_BRACES = re.compile(r"\$\{(\w+|[@*])(\[[^\]]*\])?(:?[-=]|\}$)")


class Expander:
    """Makes words of syntax, in ``state``, which expansions such as ``${X:=1}`` change."""

    def __init__(self, state: State, takes_defaults: bool) -> None:
        self.state = state
        self.takes_defaults = takes_defaults
        self.assumed: list[str] = []  # "TP=8": the defaults that were taken
        self.source = b""

    def substituted(self, node: Node) -> None:
        """Follow a command substitution, whose output is not known."""
        raise NotImplementedError

    def line_of(self, node: Node) -> int:
        """The line of a node."""
        raise NotImplementedError

    def written(self, node: Node) -> str:
        """A node as it is written, without the blanks and line ends that the parser adds to it."""
        text = self.source[node.start_byte : node.end_byte].decode(errors="replace")
        return re.sub(r"^(\\\n|\s)+", "", text).strip()

    def words(self, nodes: Sequence[Node]) -> list[str]:
        """The words that nodes become: none, one or several each."""
        pieces = [piece for node in nodes for piece in self._pieces(node, False)]
        return [piece.replace(QUOTED, "") for piece in pieces if piece]

    def text(self, node: Node) -> str:
        """The text that a node becomes where words are not split, as in an assignment."""
        return closed(" ".join(self._pieces(node, True)))

    def inner_text(self, node: Node, opening: int, closing: int) -> str:
        """The text between a node's first and last characters, after its expansions."""
        source = self.source
        start = node.start_byte + opening
        parts = []
        for child in _outermost_expansions(node):
            # The parser gives blanks before a second $NAME to that node.
            written = source[child.start_byte : child.end_byte]
            first = child.start_byte + len(written) - len(written.lstrip())
            parts.append(_ESCAPED.sub(_escaped, source[start:first].decode(errors="replace")))
            parts.append(self.text(child))
            start = child.end_byte
        end = source[start : node.end_byte - closing].decode(errors="replace")
        return "".join(parts) + _ESCAPED.sub(_escaped, end)

    def _pieces(self, node: Node, is_quoted: bool) -> list[str]:
        """The words of a node; the first and the last join what touches the node."""
        written = self.written(node)
        match node.type:
            case "word" | "number" | "variable_name" | "special_variable_name" | "extglob_pattern":
                return [self._unescaped(written, is_quoted)]
            case "raw_string":
                return [QUOTED + written[1:-1]]
            case "string":
                if re.fullmatch(r'"\$(@|\{@\}|\{\w+\[@\]\})"', written):
                    return self._pieces(node.named_children[0], True)
                # Among other text, the words of a list cannot be told from one.
                is_list = re.search(r"\$\{?(\w+\[)?@", written) is not None
                whole = Hole(written)
                return [
                    self.state.holes.words(whole)
                    if is_list
                    else QUOTED + self.inner_text(node, 1, 1)
                ]
            case "command_name":
                return self._pieces(node.named_children[0], is_quoted)
            case "concatenation":
                return self._concatenated(node, is_quoted)
            case "simple_expansion":
                return self._split(self._named(written[1:], ""), is_quoted)
            case "expansion":
                return self._split(self._expansion(node), is_quoted)
            case "arithmetic_expansion" if written.startswith("$(("):
                return [self.sum_text(self.inner_text(node, 3, 2), written)]
            case "command_substitution":
                self.substituted(node)
                return self._split([self.state.holes.text(Hole(written))], is_quoted)
            case "ansi_c_string" | "translated_string":
                return [self.state.holes.text(Hole(written))]
            case "process_substitution":
                self.substituted(node)
                return [self.state.holes.text(Hole(written))]
            case "comment":
                return []
        if "=" in written:  # it may assign
            self.state.forget(f"line {self.line_of(node)} is not understood")
        return [self.state.holes.words(Hole(written))]

    def _unescaped(self, written: str, is_quoted: bool) -> str:
        """A word without its backslashes, and the holes that tildes, files and braces leave."""
        bare = re.sub(r"\\.", "", written, flags=re.S)
        text = re.sub(r"\\(.?)", _escaped, written, flags=re.S)
        if written.startswith("~"):
            text += self.state.holes.text(Hole(written, "HOME"))
        if not is_quoted and (is_pattern(bare) or "{" in bare):
            text += self.state.holes.words(Hole(written, why="files that match take its place"))
        return text

    def _concatenated(self, node: Node, is_quoted: bool) -> list[str]:
        parts = []
        place = node.start_byte
        for child in node.named_children:
            # The parser leaves out some characters between the parts.
            gap = self.source[place : child.start_byte].decode(errors="replace").strip()
            parts.append([self._unescaped(gap, is_quoted)] if gap else [])
            parts.append(self._pieces(child, is_quoted))
            place = child.end_byte
        return touching(parts)

    def _split(self, values: list[str], is_quoted: bool) -> list[str]:
        if is_quoted:
            return [QUOTED + value for value in values]
        if "IFS" in self.state.variables and any(values):
            return [self.state.holes.words(Hole("$IFS", why="it is assigned"))]
        pieces = [piece for value in values for piece in split(value)]
        for number, piece in enumerate(pieces):
            if is_pattern(piece):
                hole = Hole(plain(piece), why="files that match take its place")
                pieces[number] += self.state.holes.words(hole)
        return pieces

    # Variables.

    def _expansion(self, node: Node) -> list[str]:
        """The values of ``${...}``."""
        written = self.written(node)
        found = _BRACES.match(written)
        if found is None:
            # Its words may assign, and what is assigned in them is not known.
            self.inner_text(node, 2, 1)
            names = re.findall(r"[A-Za-z_]\w*", written)
            if "=" in written:
                self.state.lose(names, f"line {self.line_of(node)} uses {written}")
            return [self.state.holes.words(Hole(written, names[0] if names else ""))]
        name, bracket, operator = found.groups()
        index = (bracket or "")[1:-1]
        if "$" in index or "'" in index or '"' in index:
            (subscript,) = (child for child in node.named_children if child.type == "subscript")
            index = self.inner_text(subscript, len(name) + 1, 1)
        values = self._named(name, index)
        if operator == "}":
            return values
        return self._chosen(node, name, operator, values)

    def _named(self, name: str, index: str) -> list[str]:
        """The values of ``name[index]``: one, or those of a list."""
        state = self.state
        if name in ("@", "*"):
            value = state.value(POSITIONAL)
            index = name
        elif name.isdigit() and name != "0" and name not in state.fixed:
            return [self._element(state.value(POSITIONAL), int(name) - 1, name)]
        else:
            value = state.value(name)
        values = value if isinstance(value, list) else []
        if isinstance(value, str):  # what is not known may be an array
            values = [opened(value)] if index and is_unknown(value) else [value]
        if index in ("@", "*"):
            return [" ".join(values)] if index == "*" and not has_open_words(values) else values
        if isinstance(value, str) and not index:
            return values
        place = self.number(index or "0")
        if isinstance(place, Hole):
            return [state.holes.text(Hole(f"${name}[{plain(index)}]", place.name, place.why))]
        return [self._element(values, place, name)]

    def _element(self, values: Value, place: int, name: str) -> str:
        assert isinstance(values, list)
        if has_open_words(values[: place + 1] if place >= 0 else values):
            return self.state.unknown(name, self.state.why)
        # A negative place counts from the end.
        return values[place] if -len(values) <= place < len(values) else ""

    def _chosen(self, node: Node, name: str, operator: str, values: list[str]) -> list[str]:
        """``${NAME:-default}`` and its kind."""
        state = self.state
        written = self.written(node)
        operands = [child for child in node.named_children if child.type != "subscript"][1:]
        holes = state.holes.in_text("".join(values))
        is_of_environment = name not in state.variables and name not in state.fixed
        default = self._operand(operands)
        if self.takes_defaults and is_of_environment and not state.why:
            self.assumed.append(f"{name}={plain(default)}")
        elif any(plain(value) for value in values):
            return values
        elif holes or ":" not in operator:
            if "=" in operator:
                state.lose([name], f"line {self.line_of(node)} uses {written}")
            hole = holes[0] if holes else Hole(written, name)
            return [state.holes.words(Hole(written, hole.name, hole.why))]
        if "=" in operator:
            state.assign(name, default, self.line_of(node))
        return [default]

    def _operand(self, nodes: Sequence[Node]) -> str:
        return "".join(self.text(node) for node in nodes)

    # Sums.

    def sum_text(self, text: str, written: str) -> str:
        """The value of an expression as text."""
        number = self.number(text)
        if isinstance(number, Hole):
            return self.state.holes.text(Hole(written, number.name, number.why))
        return str(number)

    def number(self, text: str) -> int | Hole:
        """The value of an expression; a hole if it is not known."""

        def number_of(name: str) -> int:
            value = self._named(name, "")[0]
            unknown = self.state.holes.in_text(value)
            if unknown:
                raise UnknownSumError(unknown[0])
            found = _NUMBER.fullmatch(value or "0")
            if found is None:
                raise UnknownSumError(Hole(f"${name}"))
            return int(found[1])

        try:
            unknown = self.state.holes.in_text(text)
            if unknown:
                raise UnknownSumError(unknown[0])
            return evaluated(text, number_of)
        except UnknownSumError as error:
            self.lose_assigned(text)
            return error.args[0] if error.args else Hole(plain(text))

    def lose_assigned(self, text: str) -> None:
        """What a sum may assign becomes unknown; a variable in it may hold another sum."""
        names = re.findall(r"[A-Za-z_]\w*", text)
        why = f"{plain(text).strip()} may assign it"
        values = [self.state.variables.get(name, "") for name in names]
        texts = [value for value in values if isinstance(value, str) and not is_unknown(value)]
        if not all(_NUMBER.fullmatch(value or "0") for value in texts):
            self.state.forget(why)
        if re.search(r"(?<![=!<>])=(?!=)|\+\+|--", text):
            self.state.lose(names, why)


def _escaped(found: re.Match[str]) -> str:
    return found[1].strip("\n")


def _outermost_expansions(node: Node) -> Iterator[Node]:
    for child in node.named_children:
        if child.type in _EXPANSIONS:
            yield child
        else:
            yield from _outermost_expansions(child)
