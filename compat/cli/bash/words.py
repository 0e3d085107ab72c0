"""The words and texts that a shell makes of a command's tokens: quotes, expansions, sums."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from compat.cli.bash.arithmetic import UnknownSumError, evaluated
from compat.cli.bash.state import NAME, POSITIONAL, State
from compat.cli.bash.tokens import Token, tokens
from compat.cli.bash.values import OPEN, Hole, ScriptError, is_unknown, opened, plain

_BRACES = re.compile(r"(#?)(\w+|[@*#])(?:\[(.*?)\])?((:?[-+=?])(.*))?", re.S)
_NUMBER = re.compile(r"[ \t]*(-?(?:0|[1-9]\d{0,17}))[ \t]*")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.S)
_INCREMENT = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*))\s*")
MAY_ASSIGN = re.compile(r"(?<![=!<>])=(?!=)|\+\+|--")
# Files that match take the place of such a word, or several words do.
_PATTERN = re.compile(r"[*?]|\[.*\]", re.S)
_BRACE_LIST = re.compile(r"\{.*(,|\.\.).*\}", re.S)
_LETTERS = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class _Fields:
    """The words that are being put together of pieces."""

    def __init__(self, splits: bool) -> None:
        self.splits = splits
        self.words: list[str] = []
        self.current: str | None = None

    def add(self, text: str) -> None:
        """A piece that is not split: it makes a word even if it is empty."""
        self.current = (self.current or "") + text

    def add_list(self, texts: Iterable[str]) -> None:
        """Words of which the first and the last touch what stands beside them."""
        for number, text in enumerate(texts):
            if number:
                self.end()
            self.add(text)

    def add_split(self, pieces: Sequence[str]) -> None:
        """The pieces of a value, "" before a leading and behind a trailing blank."""
        for number, piece in enumerate(pieces):
            if number:
                self.end()
            if piece:
                self.add(piece)

    def end(self) -> None:
        """The word ends here."""
        if self.current is not None:
            self.words.append(self.current)
        self.current = None


class Expander:
    """Makes words over a state."""

    def __init__(self, state: State, takes_defaults: bool) -> None:
        self.state: State = state
        self.line = 0  # of the command that is followed
        self.takes_defaults = takes_defaults
        self.assumed: list[str] = []  # NAME=VALUE

    # What a text becomes.

    def words(self, written: Iterable[str]) -> list[str]:
        """The words that written words become."""
        words: list[str] = []
        for text in written:
            fields = self._fields(text, splits=True)
            fields.end()
            words.extend(fields.words)
        return words

    def text(self, written: str, in_quotes: bool = False) -> str:
        """The text that a word becomes where words are not split, as in an assignment."""
        fields = self._fields(written, splits=False, in_quotes=in_quotes)
        fields.end()
        return " ".join(fields.words).replace(OPEN, "")

    def _fields(self, written: str, splits: bool, in_quotes: bool = False) -> _Fields:
        fields = _Fields(splits)
        bare = ""  # what stands outside of quotes, which may be a pattern
        for token in tokens(written, in_quotes=in_quotes):
            self._add(fields, token)
            if token.kind in ("plain", "list") and not token.in_quotes:
                bare += token.content
        if re.search(r"(\A|[=:])~", bare):
            fields.add(self._hole(written, "HOME"))
        is_pattern = _PATTERN.search(bare) and not written.startswith("-")
        if splits and (is_pattern or _BRACE_LIST.search(bare)):
            fields.add(self._hole(written, why="files or lists take its place") + OPEN)
        return fields

    def _add(self, fields: _Fields, token: Token) -> None:
        match token.kind:
            case "quote":
                pass
            case "escape":
                # A backslash before a line's end joins it with the next line.
                if token.content != "\\\n":
                    fields.add(token.content[1:])
            case "single" | "empty":
                fields.add(token.content[1:-1])
            case "variable":
                self._add_values(fields, token, self._named(token.content[1:], None))
            case "braces":
                self._add_values(fields, token, self._braces(token.content))
            case "sum":
                fields.add(self.sum_text(token.content))
            case "substitution":
                self._add_values(fields, token, [self.output_of(token.content)])
            case "ansi" if token.content.startswith("$'"):
                fields.add(self._ansi(token.content))
            case "plain" | "blank" | "newline":
                fields.add(token.content)
            case "process":
                self.output_of(token.content)
                fields.add(self._hole(token.content))
            case _:
                if MAY_ASSIGN.search(token.content):
                    self.state.forget(f"line {self.line} is not understood")
                fields.add(self._hole(token.content) + OPEN)

    def _add_values(self, fields: _Fields, token: Token, values: list[str]) -> None:
        is_list = re.match(r"\$?@|\w+\[@\]", token.content) is not None
        if re.search(r"['\"\\]", token.content) and " ".join(values).split() != values:
            # Quotes in ${X:-"a b"} keep words together.
            values = [self._hole(token.content) + OPEN]
        if not fields.splits:
            fields.add(" ".join(values))
        elif token.in_quotes and is_list:
            fields.add_list(values)
        elif token.in_quotes:
            fields.add(" ".join(values))
        elif "IFS" in self.state.variables and any(values):
            fields.add(self._hole("$IFS", why="it is assigned") + OPEN)
        else:
            for number, value in enumerate(values):
                if number:
                    fields.end()
                pieces = re.split(r"[ \t\n]+", opened(value))
                fields.add_split([self._matched(piece) for piece in pieces])

    def _matched(self, piece: str) -> str:
        """An unquoted piece: files that match take its place."""
        if not _PATTERN.search(plain(piece)):
            return piece
        return piece + self._hole(piece, why="files that match take its place") + OPEN

    def _ansi(self, written: str) -> str:
        text = re.sub(r"\\(.)", lambda match: _LETTERS.get(match[1], "\0"), written[2:-1])
        return self._hole(written) if "\0" in text else text

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
            return self._of_list(state.values(POSITIONAL), name)
        if name == "#":
            return [self._length(state.values(POSITIONAL), "$#")]
        if name.isdigit() and name != "0" and name not in state.fixed:
            return [self._element(state.values(POSITIONAL), int(name) - 1, name)]
        value = state.value(name)
        if index in ("@", "*"):
            return self._of_list(state.values(name), index)
        if isinstance(value, str) and index is None:
            return [value]
        place = self.number(self.text(index or "0"))
        if isinstance(place, Hole):
            return [self._hole(f"${name}[{index}]", place.name, place.why)]
        return [self._element(state.values(name), place, name)]

    def _of_list(self, values: list[str], index: str) -> list[str]:
        """``$*`` in quotes is one word."""
        if index == "@" or any(OPEN in value for value in values):
            return values
        if "IFS" in self.state.variables and len(values) > 1:
            return [self._hole("$IFS", why="it is assigned") + OPEN]
        return [" ".join(values)]

    def _element(self, values: list[str], place: int, name: str) -> str:
        before = values[: place + 1] if place >= 0 else values
        if any(OPEN in value for value in before):
            value = self.state.unknown(name, self.state.why)
            return value if isinstance(value, str) else value[0] if value else ""
        # A negative place counts from the end.
        return values[place] if -len(values) <= place < len(values) else ""

    def _length(self, values: list[str], written: str) -> str:
        unknown = [value for value in values if OPEN in value]
        return self._open_hole(written, unknown) if unknown else str(len(values))

    def _open_hole(self, written: str, values: list[str]) -> str:
        """The hole of an expansion of values that are not known."""
        hole = self.state.holes.in_text("".join(values))[0]
        return self._hole(written, hole.name, hole.why)

    def _braces(self, content: str) -> list[str]:
        """The values of ``${content}``."""
        written = f"${{{content}}}"
        match = _BRACES.fullmatch(content)
        if match is None or (match[1] and match[4]):
            names = NAME.findall(content)
            if MAY_ASSIGN.search(content):
                self.state.forget(f"line {self.line} uses {plain(written)}")
            is_list = "@" in content or "!" in content
            return [self._hole(written, names[0] if names else "") + OPEN * is_list]
        length, name, index, tail, operator, operand = match.groups()
        if length and index in ("@", "*"):
            return [self._length(self.state.values(name), written)]
        values = self._named(name, index)
        if length:
            text = " ".join(values)
            if is_unknown(text):
                return [self._open_hole(written, values)]
            # Characters or bytes, by the locale.
            return [str(len(text)) if text.isascii() else self._hole(written)]
        if not tail:
            return values
        # Whether $1 or an element is set is not followed, only whether it is empty.
        if ":" not in operator and (index is not None or not name.isidentifier()):
            return [self._hole(written, name) + OPEN * (index == "@" or name == "@")]
        return self._chosen(name, operator, operand, values)

    def _chosen(self, name: str, operator: str, operand: str, values: list[str]) -> list[str]:
        """``${NAME:-default}`` and its kind."""
        state = self.state
        written = f"${{{name}{operator}{operand}}}"
        text = " ".join(values)
        is_of_environment = name not in state.variables and name not in state.fixed
        is_absent = False  # whether the operand takes the value's place; None: not known
        if self.takes_defaults and is_of_environment and not state.why and operator[-1] in "-=":
            self.assumed.append(f"{name}={plain(self.text(operand))}")
            is_absent = True
        elif plain(text):
            is_absent = False
        elif is_unknown(text):
            if operator[-1] in "=?":
                state.lose([name], f"line {self.line} uses {plain(written)}")
            if MAY_ASSIGN.search(operand):
                state.forget(f"line {self.line} uses {plain(written)}")
            return [self._open_hole(written, values) + OPEN * (OPEN in text)]
        else:
            is_absent = ":" in operator or state.value(name) is None
        if operator[-1] == "+":
            return [] if is_absent else [self.text(operand)]
        if not is_absent:
            return values
        if operator[-1] == "?":
            raise ScriptError(f"line {self.line} of the launch line ends at {plain(written)}.")
        default = self.text(operand)
        if operator[-1] == "=":
            state.assign(name, default, self.line)
        return [default]

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
            self.lose_assigned(text)
            return error.args[0] if error.args else Hole(plain(text))

    def _assigned_number(self, text: str) -> int:
        assignment = _ASSIGNMENT.fullmatch(text)
        increment = _INCREMENT.fullmatch(text)
        if assignment is not None:
            name, operator, operand = assignment.groups()
            expression = f"{name} {operator} ({operand})" if operator else operand
            number = evaluated(expression, self._number_of)
            self.state.assign(name, str(number), self.line)
            return number
        if increment is not None:
            name = increment[1] or increment[4]
            old_number = self._number_of(name)
            new_number = old_number + (1 if "++" in text else -1)
            self.state.assign(name, str(new_number), self.line)
            return old_number if increment[1] else new_number
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

    def lose_assigned(self, text: str) -> None:
        """What a sum may assign becomes unknown; a variable in it may hold another sum."""
        names = NAME.findall(plain(text))
        why = f"{plain(text).strip()} may assign it"
        values = [self.state.variables.get(name, "") for name in names]
        texts = [value for value in values if isinstance(value, str) and not is_unknown(value)]
        if not all(_NUMBER.fullmatch(value or "0") for value in texts):
            self.state.forget(why)
        if MAY_ASSIGN.search(text):
            self.state.lose(names, why)
