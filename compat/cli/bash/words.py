"""The words and texts that a shell makes of written ones: quotes, expansions, sums."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from compat.cli.bash.conditions import matches
from compat.cli.bash.state import NAME, POSITIONAL, State
from compat.cli.bash.sums import number
from compat.cli.bash.tree import (
    Node,
    is_assigning,
    literal_of,
    nodes_in,
    pattern_of,
    texts_in,
)
from compat.cli.bash.values import OPEN, Hole, ScriptError, is_unknown, opened, plain

_NUMBER = re.compile(r"-?\d+")
# Files that match take the place of such a word.
_PATTERN = re.compile(r"[*?]|\A[^[]*\[.*\]", re.S)
_BRACE_LIST = re.compile(r"\A[^{]*\{.*\}", re.S)
_HOME = re.compile(r"(\A|[=:])~")
# What is read of ${...}. The rest, such as ${X%.py} and ${!X}, is not known.
_READ = {"Type", "Line", "Written", "Short", "Param", "Index", "Length", "Exp"}
_LONGEST_CUT = 256  # characters of X in ${X%pattern}, where each part of it is compared
_CUTTING = {"#", "##", "%", "%%"}
_READ_OPERATORS = {"", "-", ":-", "+", ":+", "?", ":?", "=", ":=", *_CUTTING}
_BRACE_RANGE = re.compile(r"\{(0|[1-9]\d{0,3})\.\.(0|[1-9]\d{0,3})\}")  # {1..8}


class Expander:
    """Makes words over a state."""

    def __init__(self, state: State, takes_defaults: bool) -> None:
        self.state = state
        self.line = 0  # of the command that is followed
        self.takes_defaults = takes_defaults
        self.assumed: list[str] = []  # NAME=VALUE

    # What a word becomes.

    def words(self, written: Iterable[Node]) -> list[str]:
        """The words that written words become: none of $EMPTY, several of $ARGS."""
        words: list[str] = []
        for word in written:
            brace_range = _BRACE_RANGE.fullmatch(literal_of(word))
            if brace_range is not None:
                first, last = (int(number) for number in brace_range.groups())
                step = 1 if first <= last else -1
                words.extend(str(number) for number in range(first, last + step, step))
                continue
            # A field that stays None, as that of $EMPTY, is no word.
            fields: list[str | None] = [None]
            for texts, keeps_empty in self._pieces(word["Parts"], splits=True):
                for place, text in enumerate(texts):
                    if place:
                        fields.append(None)
                    if text or keeps_empty:
                        fields[-1] = (fields[-1] or "") + text
            words.extend(field for field in fields if field is not None)
        return words

    def text(self, word: Node) -> str:
        """The text that a word becomes where words are not split, as in an assignment."""
        text = ""
        for texts, _ in self._pieces(word["Parts"], splits=False):
            text += " ".join(texts)
        return text.replace(OPEN, "")

    def _pieces(
        self, parts: Sequence[Node], splits: bool, in_quotes: bool = False
    ) -> Iterator[tuple[list[str], bool]]:
        """Texts, of which the first touches what stands before, and whether they count if empty."""
        bare = ""  # what stands outside of quotes, which may be a pattern
        for part in parts:
            kind = part["Type"]
            text = part.get("Value", "")
            if "Dollar" in part or (kind == "SglQuoted" and in_quotes):
                # $'\x41', and "${X:-it's}", in which a quote means nothing.
                yield [self._hole("a quote")], True
            elif kind == "Lit" and in_quotes:
                yield [re.sub(r'\\([$`"\\])', r"\1", text)], True
            elif kind == "Lit":
                bare += re.sub(r"\\.", "", text, flags=re.S)
                yield [re.sub(r"\\(.)", r"\1", text, flags=re.S)], True
            elif kind == "SglQuoted":
                yield [text], True
            elif kind == "DblQuoted":
                if "Parts" not in part:
                    yield [""], True
                yield from self._pieces(part.get("Parts", []), splits, in_quotes=True)
            elif kind == "ParamExp":
                yield self._parameter_pieces(part, splits, in_quotes)
            elif kind == "ArithmExp":
                yield [self._sum_text(part)], True
            elif kind == "CmdSubst":
                output = self.output_of(part.get("Stmts", []))
                if output is None:  # $(nproc)
                    yield [self._hole(part["Written"]) + OPEN * (not in_quotes)], in_quotes
                else:
                    yield self._split([output], splits, in_quotes)
            else:
                # <(sort x) runs what it holds; @(a|b) is a pattern.
                self.may_happen(part)
                yield [self._hole(part["Written"]) + OPEN * (not in_quotes)], in_quotes
        if _HOME.search(bare):
            yield [self._hole(bare, "HOME")], True
        # No file is called --flag=*.
        is_pattern = _PATTERN.search(bare) and not bare.startswith("-")
        if splits and (is_pattern or _BRACE_LIST.search(bare)):
            yield [self._hole(bare, why="files or lists take its place") + OPEN], True

    def _parameter_pieces(
        self, part: Node, splits: bool, in_quotes: bool
    ) -> tuple[list[str], bool]:
        values = self._values(part)
        # "$@" and "${A[@]}" become a word for each element, and "$*" becomes one.
        if in_quotes and "@" not in (part["Param"]["Value"], _index_of(part)):
            values = [" ".join(values)]
        return self._split(values, splits, in_quotes)

    def _split(self, values: list[str], splits: bool, in_quotes: bool) -> tuple[list[str], bool]:
        """The words that values of an expansion become where they are split."""
        if in_quotes or not splits:
            return values, True
        pieces = []
        for value in values:
            # "" before a leading and behind a trailing blank, where a word ends.
            for piece in re.split(r"[ \t\n]+", opened(value)):
                if _PATTERN.search(plain(piece)):
                    piece += self._hole(piece, why="files that match take its place") + OPEN
                pieces.append(piece)
        return pieces, False

    def _hole(self, written: str, name: str = "", why: str = "") -> str:
        return self.state.holes.mark(Hole(plain(written), name, why))

    def _hole_of(self, written: str, text: str) -> str:
        """The hole of an expansion of a text that is not known."""
        hole = self.state.holes.in_text(text)[0]
        return self._hole(written, hole.name, hole.why)

    def may_happen(self, node: object) -> None:
        """Follow what bash expands or not, or in a way that is not known."""
        why = f"line {self.line} may assign it"
        for below in nodes_in(node):
            kind = below.get("Type")
            if kind in ("CmdSubst", "ProcSubst"):
                self.output_of(below.get("Stmts", []))
            elif kind == "BinaryTest" and below["Op"].startswith("-"):
                self.state.forget(why)  # [[ TP=8 -eq 8 ]]
            elif kind == "ParamExp" and is_assigning(below.get("Exp", {})):
                self.state.lose([below["Param"]["Value"]], why)
            elif kind in ("ArithmExp", "BinaryArithm", "UnaryArithm"):
                for name in filter(NAME.fullmatch, texts_in(below)):
                    if is_assigning(below):
                        self.state.lose([name], why)
                    # X=TP=8; $((X)) assigns TP.
                    value = plain("".join(self.state.value(name)))
                    if value and not _NUMBER.fullmatch(value):
                        self.state.forget(why)

    def output_of(self, statements: Sequence[Node]) -> str | None:
        """The text that statements print in a shell of their own; None if it is not known."""
        raise NotImplementedError

    def check_time(self) -> None:
        """Refuse a script that takes too long to follow."""
        raise NotImplementedError

    # Variables.

    def _values(self, part: Node) -> list[str]:
        """The values of ``$X`` or ``${...}``: one, or those of a list."""
        name = part["Param"]["Value"]
        index = _index_of(part)
        written = part["Written"]
        operator = part.get("Exp", {}).get("Op", "")
        is_read = not part.keys() - _READ and operator in _READ_OPERATORS
        # Whether $1 or an element is set is not followed, only whether it is empty.
        if operator in ("-", "+", "?", "=", ":=") and ("Index" in part or not name.isidentifier()):
            is_read = False
        if {"@", "*"} & {name, index} and operator in _CUTTING:
            is_read = False
        if not is_read:
            self.may_happen(part)
            # ${!X} may be an array, and ${X@A} several words.
            is_list = "@" in (name, index, operator) or "Excl" in part
            return [self._hole(written, name) + OPEN * is_list]
        if "Length" in part and {"@", "*"} & {name, index}:
            array = POSITIONAL if name in ("@", "*") else name
            return [self._length(array, written)]
        values = self.elements(name, part.get("Index"))
        if "Length" in part:
            return [self._characters(written, "".join(values))]
        if operator in _CUTTING:
            return [self._cut(part, "".join(values))]
        if operator:
            return self._chosen(part, values)
        return values

    def elements(self, name: str, index: Node | None) -> list[str]:
        """The values of ``name[index]``: one, or those of a list."""
        state = self.state
        sign = literal_of(index) if index else ""
        if name in ("@", "*"):
            sign = name
            name = POSITIONAL
        if name == "#":
            return [self._length(POSITIONAL, "$#")]
        place = 0
        counts_back = False
        array = name
        # $1 may be given by --set; $0 is the script's name.
        if name.isdigit() and name != "0" and name not in state.fixed:
            array = POSITIONAL
            place = int(name) - 1
        values = state.value(array)
        if sign == "*" and OPEN not in "".join(values):
            return [" ".join(values)]
        if sign in ("@", "*"):
            return values
        if index:
            value = number(self, index)
            if isinstance(value, Hole):
                return [self._hole(f"${name}[{value.text}]", value.name, value.why)]
            place = value
            # A[-1] is the last element.
            counts_back = value < 0
            if counts_back:
                place += len(values)
        before = "".join(values if counts_back else values[: place + 1])
        # $A before it may be any number of elements.
        if OPEN in before or place < 0:
            why = f"line {self.line} reads an element that is not known"
            if OPEN in before:
                why = state.holes.in_text(before)[0].why
            return [state.unknown(name, why)[0].replace(OPEN, "")]
        return values[place : place + 1] or [""]

    def _length(self, name: str, written: str) -> str:
        values = self.state.value(name)
        text = "".join(values)
        if OPEN in text:
            return self._hole_of(written, text)
        return str(len(values))

    def _characters(self, written: str, text: str) -> str:
        """``${#X}``."""
        if is_unknown(text):
            return self._hole_of(written, text)
        # What counts as a character depends on the locale.
        if not text.isascii():
            return self._hole(written)
        return str(len(text))

    def _cut(self, part: Node, text: str) -> str:
        """``${X#pattern}``, ``${X%pattern}``: the text without a part that matches."""
        operator = part["Exp"]["Op"]
        pattern = pattern_of(part["Exp"].get("Word", {"Parts": []}))
        if pattern is None:
            self.may_happen(part["Exp"])
        places = list(range(len(text) + 1))
        # The shortest part that matches counts, and the longest of ## and %%.
        if operator not in ("#", "%%"):
            places.reverse()
        for place in places:
            matched, kept = text[:place], text[place:]
            if operator in ("%", "%%"):
                matched, kept = kept, matched
            status = matches(pattern, matched, _LONGEST_CUT)
            if status is None or is_unknown(text):
                return self._hole(part["Written"], part["Param"]["Value"])
            if status:
                return kept
        return text

    def _chosen(self, part: Node, values: list[str]) -> list[str]:
        """``${NAME:-default}``, ``${NAME:+text}``, ``${NAME:?message}``."""
        state = self.state
        name = part["Param"]["Value"]
        operator = part["Exp"]["Op"]
        operand = part["Exp"].get("Word", {"Parts": []})
        text = " ".join(values)
        is_set = name in state.values or name in state.fixed or state.why
        is_absent = not text and (":" in operator or not state.value(name))
        takes_default = operator.endswith(("-", "="))
        is_assumed = self.takes_defaults and not is_set and takes_default
        if is_assumed:
            is_absent = True
        elif is_unknown(text) and not plain(text):
            # It may be empty, and then the operand counts.
            self.may_happen(part)
            return [self._hole_of(part["Written"], text) + OPEN * (OPEN in text)]
        if is_absent == operator.endswith("+"):
            return values
        if operator.endswith("?"):
            raise ScriptError(f"line {self.line} of the launch line ends at {part['Written']}.")
        chosen = self.text(operand)
        if is_assumed:
            self.assumed.append(f"{name}={plain(chosen)}")
        # Quotes in ${X:-"a b"} keep words together.
        has_quotes = any("Quoted" in word_part["Type"] for word_part in operand["Parts"])
        if (has_quotes or "\\" in part["Written"]) and chosen.split() != [chosen]:
            chosen = self._hole(part["Written"]) + OPEN
        if operator.endswith("="):
            chosen = chosen.replace(OPEN, "")
            state.assign(name, [chosen], self.line)
        return [chosen]

    def _sum_text(self, part: Node) -> str:
        value = number(self, part["X"])
        if isinstance(value, Hole):
            return self._hole(part["Written"], value.name, value.why)
        return str(value)


def _index_of(part: Node) -> str:
    """``@`` of ``${A[@]}``."""
    index = part.get("Index")
    return literal_of(index) if index else ""
