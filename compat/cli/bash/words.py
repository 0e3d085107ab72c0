"""The words and texts that a shell makes of written ones: quotes, expansions, sums."""

from __future__ import annotations

import re
from collections.abc import Iterable

from compat.cli.bash.arithmetic import UnknownSumError, evaluated
from compat.cli.bash.state import NAME, POSITIONAL, State
from compat.cli.bash.tokens import Token, tokens
from compat.cli.bash.values import OPEN, Hole, ScriptError, is_unknown, opened, plain

_BRACES = re.compile(r"(#?)(\w+|[@*#])(?:\[(.*?)\])?(?:(:?)([-+=?])(.*))?", re.S)
_NUMBER = re.compile(r"[ \t]*(-?(?:0|[1-9]\d{0,17}))[ \t]*")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.S)
_INCREMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*([+-])\2\s*")
MAY_ASSIGN = re.compile(r"(?<![=!<>])=(?!=)|\+\+|--")
# Files that match take the place of such a word.
_PATTERN = re.compile(r"[*?]|\A[^[]*\[.*\]", re.S)
_BRACE_LIST = re.compile(r"\A[^{]*\{.*\}", re.S)
_HOME = re.compile(r"(\A|[=:])~")


class _Fields:
    """The words that are being put together of pieces."""

    def __init__(self, splits: bool) -> None:
        self.splits = splits
        self.words: list[str] = []
        self.unfinished: str | None = None

    def add(self, text: str) -> None:
        """A piece that is not split: it makes a word even if it is empty."""
        self.unfinished = (self.unfinished or "") + text

    def add_list(self, texts: Iterable[str], keeps_empty: bool) -> None:
        """Words of which the first and the last touch what stands beside them."""
        for number, text in enumerate(texts):
            if number:
                self.end()
            if text or keeps_empty:
                self.add(text)

    def end(self) -> None:
        """The word ends here."""
        if self.unfinished is not None:
            self.words.append(self.unfinished)
        self.unfinished = None


class Expander:
    """Makes words over a state."""

    def __init__(self, state: State, takes_defaults: bool) -> None:
        self.state = state
        self.line = 0  # of the command that is followed
        self.takes_defaults = takes_defaults
        self.assumed: list[str] = []  # NAME=VALUE

    # What a text becomes.

    def words(self, written: Iterable[str]) -> list[str]:
        """The words that written words become."""
        words: list[str] = []
        for text in written:
            # One written word may become none, as $EMPTY, or several, as $ARGS.
            words.extend(self._expanded(text, splits=True))
        return words

    def text(self, written: str, in_quotes: bool = False) -> str:
        """The text that a word becomes where words are not split, as in an assignment."""
        words = self._expanded(written, splits=False, in_quotes=in_quotes)
        return " ".join(words).replace(OPEN, "")

    def _expanded(self, written: str, splits: bool, in_quotes: bool = False) -> list[str]:
        fields = _Fields(splits)
        bare = ""  # what stands outside of quotes, which may be a pattern
        for token in tokens(written, in_quotes):
            self._add(fields, token, in_quotes)
            if token.kind == "plain" and not in_quotes:
                bare += token.content
        if _HOME.search(bare):
            fields.add(self._hole(written, "HOME"))
        if splits:
            is_pattern = _PATTERN.search(bare) is not None
            # No file is called --flag=*.
            if written.startswith("-"):
                is_pattern = False
            if is_pattern or _BRACE_LIST.search(bare):
                hole = self._hole(written, why="files or lists take its place")
                fields.add(hole + OPEN)
        fields.end()
        return fields.words

    def _add(self, fields: _Fields, token: Token, in_quotes: bool) -> None:
        content = token.content
        match token.kind:
            case "continuation":
                pass
            case "quotes":
                if not content:
                    fields.add("")
                for inner in tokens(content, in_quotes=True):
                    self._add(fields, inner, in_quotes=True)
            case "escape":
                fields.add(content[1:])
            case "single":
                fields.add(content[1:-1])
            case "variable":
                values = self._named(content[1:], None)
                self._add_values(fields, content[1:], values, in_quotes)
            case "braces":
                self._add_values(fields, content, self._braces(content), in_quotes)
            case "sum":
                fields.add(self.sum_text(content))
            case "substitution" | "backquotes":
                self._add_values(fields, "", [self.output_of(content)], in_quotes)
            case "process":
                self.output_of(content)
                fields.add(self._hole(content))
            case _:
                fields.add(content)

    def _add_values(
        self, fields: _Fields, content: str, values: list[str], in_quotes: bool
    ) -> None:
        """Add the values of an expansion."""
        text = " ".join(values)
        # Quotes in ${X:-"a b"} keep words together.
        if re.search(r"['\"\\]", content) and text.split() != values:
            text = self._hole(content) + OPEN
            values = [text]
        if not fields.splits:
            fields.add(text)
            return
        if in_quotes:
            # "$@" and "${A[@]}" become a word for each element, and "$*" becomes one.
            if re.match(r"@|\w+\[@\]", content):
                fields.add_list(values, keeps_empty=True)
            else:
                fields.add(text)
            return
        for number, value in enumerate(values):
            if number:
                fields.end()
            # "" before a leading and behind a trailing blank, where a word ends.
            pieces = re.split(r"[ \t\n]+", opened(value))
            fields.add_list(map(self._matched, pieces), keeps_empty=False)

    def _matched(self, piece: str) -> str:
        """An unquoted piece: files that match take its place."""
        if not _PATTERN.search(plain(piece)):
            return piece
        return piece + self._hole(piece, why="files that match take its place") + OPEN

    def _hole(self, written: str, name: str = "", why: str = "") -> str:
        return self.state.holes.mark(Hole(plain(written), name, why))

    def output_of(self, script: str) -> str:
        """What a substitution prints."""
        raise NotImplementedError

    # Variables.

    def _named(self, name: str, index: str | None) -> list[str]:
        """The values of ``name[index]``: one, or those of a list."""
        state = self.state
        if name in ("@", "*"):
            index = name
            name = POSITIONAL
        if name == "#":
            arguments = state.elements(POSITIONAL)
            return [self._length(arguments, "$#")]
        # $1 may be given by --set; $0 is the script's name.
        if name.isdigit() and name != "0" and name not in state.fixed:
            arguments = state.elements(POSITIONAL)
            return [self._element(arguments, int(name) - 1, name)]
        if index in ("@", "*"):
            values = state.elements(name)
            if index == "*" and not any(OPEN in value for value in values):
                values = [" ".join(values)]
            return values
        value = state.value(name)
        if isinstance(value, str) and index is None:
            return [value]
        # $A of an array is ${A[0]}.
        place = self.number(self.text(index or "0"))
        if isinstance(place, Hole):
            return [self._hole(f"${name}[{index}]", place.name, place.why)]
        return [self._element(state.elements(name), place, name)]

    def _element(self, values: list[str], place: int, name: str) -> str:
        # A negative place counts from the end.
        before = values
        if place >= 0:
            before = values[: place + 1]
        # $A before it may be any number of elements.
        if any(OPEN in value for value in before):
            return "".join(self.state.unknown(name, self.state.why) or "")
        if -len(values) <= place < len(values):
            return values[place]
        return ""

    def _length(self, values: list[str], written: str) -> str:
        unknown = [value for value in values if OPEN in value]
        if unknown:
            return self._open_hole(written, unknown)
        return str(len(values))

    def _open_hole(self, written: str, values: list[str]) -> str:
        """The hole of an expansion of values that are not known."""
        hole = self.state.holes.in_text("".join(values))[0]
        return self._hole(written, hole.name, hole.why)

    def _braces(self, content: str) -> list[str]:
        """The values of ``${content}``."""
        written = f"${{{content}}}"
        match = _BRACES.fullmatch(content)
        if match is None or (match[1] and match[5]):
            # ${X%.py}, ${X/a/b}, ${!X}, ${X:1}
            match_of_name = NAME.search(content)
            if MAY_ASSIGN.search(content):
                self.state.forget(f"line {self.line} uses {plain(written)}")
            name = match_of_name[0] if match_of_name else ""
            is_list = "@" in content or "!" in content
            return [self._hole(written, name) + OPEN * is_list]
        has_length, name, index, colon, operator, operand = match.groups()
        if has_length and index in ("@", "*"):
            return [self._length(self.state.elements(name), written)]
        values = self._named(name, index)
        text = " ".join(values)
        if has_length:
            if is_unknown(text):
                return [self._open_hole(written, values)]
            # Characters or bytes, by the locale.
            if not text.isascii():
                return [self._hole(written)]
            return [str(len(text))]
        if operator is None:
            return values
        # Whether $1 or an element is set is not followed, only whether it is empty.
        if not colon and (index is not None or not name.isidentifier()):
            is_list = "@" in (index, name)
            return [self._hole(written, name) + OPEN * is_list]
        return self._chosen(written, name, colon + operator, operand, values)

    def _chosen(
        self, written: str, name: str, operator: str, operand: str, values: list[str]
    ) -> list[str]:
        """``${NAME:-default}`` and its kind."""
        state = self.state
        sign = operator[-1]
        text = " ".join(values)
        is_absent = False  # whether the operand takes the value's place
        if self._takes_default(name) and sign in "-=":
            self.assumed.append(f"{name}={plain(self.text(operand))}")
            is_absent = True
        elif is_unknown(text) and not plain(text):
            # It may be empty, and then the operand counts.
            why = f"line {self.line} uses {plain(written)}"
            if sign in "=?":
                state.lose([name], why)
            if MAY_ASSIGN.search(operand):
                state.forget(why)
            hole = self._open_hole(written, values)
            return [hole + OPEN * (OPEN in text)]
        elif not text:
            # ${X-8} asks whether X is set, ${X:-8} whether it is empty.
            is_absent = ":" in operator or state.value(name) is None
        if sign == "+":
            if is_absent:
                return []
            return [self.text(operand)]
        if not is_absent:
            return values
        if sign == "?":
            raise ScriptError(f"line {self.line} of the launch line ends at {plain(written)}.")
        default = self.text(operand)
        if sign == "=":
            state.assign(name, default, self.line)
        return [default]

    def _takes_default(self, name: str) -> bool:
        """Whether ``--defaults`` is given, and nothing in the script may have set the variable."""
        state = self.state
        is_set = name in state.values or name in state.fixed
        return self.takes_defaults and not is_set and not state.why

    # Sums.

    def sum_text(self, written: str) -> str:
        """The value of an expression as text."""
        number = self.number(self.text(written, in_quotes=True))
        if isinstance(number, Hole):
            return self._hole(f"$(({written}))", number.name, number.why)
        return str(number)

    def number(self, text: str) -> int | Hole:
        """The value of an expression, which may assign; a hole if it is not known."""
        try:
            unknown = self.state.holes.in_text(text)
            if unknown:
                raise UnknownSumError(unknown[0])
            return self._assigned_number(text)
        except UnknownSumError as error:
            self._lose_assigned(text)
            return error.args[0] if error.args else Hole(plain(text))

    def _assigned_number(self, text: str) -> int:
        assignment = _ASSIGNMENT.fullmatch(text)
        increment = _INCREMENT.fullmatch(text)
        if assignment is not None:
            name, operator, operand = assignment.groups()
            if operator:  # X *= 2 + 1 is X = X * (2 + 1)
                operand = f"{name} {operator} ({operand})"
            number = evaluated(operand, self._number_of)
            self.state.assign(name, str(number), self.line)
            return number
        if increment is not None:
            name, sign = increment.groups()
            number = self._number_of(name)
            step = int(f"{sign}1")
            self.state.assign(name, str(number + step), self.line)
            return number  # I++ is the number before
        return evaluated(text, self._number_of)

    def _number_of(self, name: str) -> int:
        value = self._named(name, None)[0]
        unknown = self.state.holes.in_text(value)
        if unknown:
            raise UnknownSumError(unknown[0])
        match = _NUMBER.fullmatch(value or "0")
        if match is None:
            raise UnknownSumError(Hole(f"${name}"))
        return int(match[1])

    def _lose_assigned(self, text: str) -> None:
        """What a sum may assign becomes unknown; a variable in it may hold another sum."""
        why = f"{plain(text).strip()} may assign it"
        names = NAME.findall(plain(text))
        for name in names:
            value = self.state.values.get(name)
            # X=TP=8; $((X)) assigns TP.
            if isinstance(value, str) and not re.fullmatch(rf"{_NUMBER.pattern}|", plain(value)):
                self.state.forget(why)
        if MAY_ASSIGN.search(text):
            self.state.lose(names, why)
