"""The words and texts that a shell makes of written ones: quotes, expansions, sums."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add, eq, floordiv, ge, gt, le, lt, mod, mul, ne, sub
from typing import NoReturn

from compat.cli.bash.conditions import NUMBER
from compat.cli.bash.state import NAME, POSITIONAL, State
from compat.cli.bash.tree import Node, literal_of, nodes_in
from compat.cli.bash.values import (
    END,
    OPEN,
    QUOTED,
    Hole,
    ScriptError,
    is_unknown,
    names_in,
    opened,
    plain,
)

# Files that match, or the words of a list, take the place of such a word. No file is --flag=*.
_REPLACED = re.compile(r"\A(?!-).*([*?]|\[.*\])|\{.*\}", re.S)
_HOME = re.compile(r"(\A|[=:])~")
_ESCAPED = re.compile(r"\\(.)", re.S)
_ESCAPED_IN_QUOTES = re.compile(r'\\([$`"\\])')
_BLANKS = re.compile(rf"[ \t\n{END}]+")
# What is read of ${...}. The rest, such as ${X%.py} and ${!X}, is not known.
_READ = names_in("Type Pos End Line Written Dollar Rbrace Short Param Index Exp")
_READ_OPERATORS = {"", "-", ":-", "+", ":+", "?", ":?", "=", ":="}
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": floordiv,
    "%": mod,
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}
_ASSIGNING = names_in("= += -= *= /= %= &= |= ^= <<= >>= ++ --")


class Expander:
    """Makes words over a state."""

    def __init__(self, state: State, takes_defaults: bool) -> None:
        self.state = state
        self.takes_defaults = takes_defaults
        self.assumed: list[str] = []  # NAME=VALUE

    def refuse(self, command: str) -> NoReturn:
        """Refuse a command that changes what later ones mean, or that is not followed."""
        raise ScriptError(
            f"line {self.state.line} of the launch line, {plain(command)}, cannot be followed."
        )

    def apart(self, statements: Sequence[Node], state: State | None = None) -> object:
        """Follow statements in a shell of their own, of which no variable comes back."""
        raise NotImplementedError

    # What a word becomes.

    def words(self, written: Iterable[Node]) -> list[str]:
        """The words that written words become: none of $EMPTY, several of $ARGS."""
        words = []
        for word in written:
            for text in self._expanded(word["Parts"], splits=True).split(END):
                if text:
                    words.append(text.replace(QUOTED, ""))
        return words

    def text(self, word: Node, in_quotes: bool = False) -> str:
        """The text that a word becomes where words are not split, as in an assignment."""
        text = self._expanded(word.get("Parts", []), in_quotes=in_quotes)
        return text.replace(QUOTED, "").replace(END, " ").replace(OPEN, "")

    def _expanded(
        self, parts: Sequence[Node], splits: bool = False, in_quotes: bool = False
    ) -> str:
        """The text of the parts of a word, with END between the words that it becomes."""
        expanded = ""
        bare = ""  # what stands outside of quotes
        # "a $X"b is two parts: a text in quotes with a variable, and b.
        for part in parts:
            kind = part["Type"]
            text = part.get("Value", "")
            if kind == "Lit" and in_quotes:
                expanded += _ESCAPED_IN_QUOTES.sub(r"\1", text)
            elif kind == "Lit":
                bare += _ESCAPED.sub("", text)
                expanded += _ESCAPED.sub(r"\1", text)
            elif kind == "SglQuoted" and "Dollar" not in part and not in_quotes:
                expanded += QUOTED + text
            elif kind == "DblQuoted" and "Dollar" not in part:
                # "$@" may be no word at all.
                if "Parts" not in part:
                    expanded += QUOTED
                expanded += self._expanded(part.get("Parts", []), in_quotes=True)
            elif kind == "ParamExp":
                expanded += self._parameter(part, splits, in_quotes)
            elif kind == "ArithmExp":
                expanded += self._hole_of(part, self.sum_of(part["X"]))
            else:
                # $(nproc), <(sort x), @(a|b), $'\x41', and "${X:-it's}", where a quote is text.
                self.unread(part)
                expanded += self._hole(part["Written"]) + OPEN * (not in_quotes)
        if _HOME.search(bare):
            expanded += self._hole(bare, "HOME")
        if splits and _REPLACED.search(bare):
            expanded += self._hole(bare, why="files or lists take its place") + OPEN
        return expanded

    def _hole(self, written: str, name: str = "", why: str = "") -> str:
        return self.state.holes.mark(Hole(plain(written), name, why))

    def _hole_of(self, part: Node, text: str) -> str:
        """The text of an expansion; if a part of it is not known, one hole."""
        holes = self.state.holes.in_text(text)
        if not holes:
            return text
        return self._hole(part["Written"], holes[0].name, holes[0].why)

    def unread(self, node: object) -> None:
        """Lose what an expansion that is not read may assign, and follow what it may run."""
        for below in nodes_in(node):
            match below:
                case {"Type": "CmdSubst" | "ProcSubst", "Stmts": statements}:
                    self.apart(statements)
                case {"Type": "ArithmExp", "X": expression}:
                    self.sum_of(expression)
                case {"Exp": {"Op": "@"}} | {"Exp": _, "Excl": _}:  # ${X@P}, ${!X:=8}
                    self.state.forget()
                case {"Exp": {"Op": "=" | ":="}, "Param": {"Value": name}}:
                    self.state.lose([name])
            # ${A[X = 8]}, ${A:X = 8}
            for field in ("Index", "Offset", "Length"):
                index = below.get(field)
                if isinstance(index, dict) and literal_of(index) not in ("@", "*"):
                    self.sum_of(index)

    # Variables.

    def _parameter(self, part: Node, splits: bool, in_quotes: bool) -> str:
        """The text that ``$X`` or ``${...}`` becomes."""
        name = part["Param"]["Value"]
        index = literal_of(part.get("Index", {}))
        operator = part.get("Exp", {}).get("Op", "")
        is_list = name in ("@", "*") or index in ("@", "*")
        is_read = not part.keys() - _READ
        # ${X%.py}
        if operator not in _READ_OPERATORS:
            is_read = False
        # ${A[1]}
        if "Index" in part and not is_list:
            is_read = False
        # ${1:=x} and ${A[@]:=x}
        if operator.endswith("=") and (is_list or not name.isidentifier()):
            is_read = False
        if not is_read:
            self.unread(part)
            # ${!X} may be an array, and ${X@A} several words.
            may_be_list = splits or "@" in part["Written"] or "Excl" in part
            return self._hole(part["Written"]) + OPEN * may_be_list
        values = self.state.value(POSITIONAL if name == "*" else name)
        if not is_list:
            # $A is the first element, and one word in quotes.
            first = values[:1]
            values = [value.replace(OPEN, "") for value in first]
        if operator:
            values = self._chosen(part, values, splits, in_quotes)
        if in_quotes:
            # "$@" and "${A[@]}" become a word for each element, and "$*" becomes one.
            if "@" not in (name, index):
                values = [" ".join(values)]
            return END.join(QUOTED + value for value in values)
        text = END.join(values)
        return self._split(text) if splits else text

    def _split(self, text: str) -> str:
        """The words that an expansion becomes outside of quotes, with END between them."""
        pieces = []
        for piece in _BLANKS.split(opened(text)):
            pieces.append(piece)
            if _REPLACED.search(plain(piece)):
                pieces[-1] += self._hole(piece, why="files that match take its place") + OPEN
        return END.join(pieces)

    def _chosen(self, part: Node, values: list[str], splits: bool, in_quotes: bool) -> list[str]:
        """``${NAME:-default}``, ``${NAME:+text}``, ``${NAME:?message}``."""
        name = part["Param"]["Value"]
        operator = part["Exp"]["Op"]
        is_assumed = False
        # --defaults: what nothing in the script sets is not set.
        if self.takes_defaults and operator.endswith(("-", "=")):
            of_environment = self.state.unknown(name, "")[0].replace(OPEN, "")
            is_assumed = values == [of_environment]
        if is_assumed:
            values = []
        text = " ".join(values)
        if is_unknown(text) and not plain(text):
            # It may be empty, and then the operand counts.
            self.unread(part)
            return [self._hole_of(part, text) + OPEN * (OPEN in text)]
        is_absent = not values
        # ${X-8} is 8 where X is not set, and ${X:-8} also where it is empty.
        if ":" in operator:
            is_absent = text == ""
        if is_absent == operator.endswith("+"):
            return values
        if operator.endswith("?"):
            self.refuse(part["Written"])
        chosen = self.text(part["Exp"].get("Word", {}), in_quotes)
        if is_assumed:
            self.assumed.append(f"{name}={plain(chosen)}")
        if operator.endswith("="):
            self.state.assign(name, [chosen])
        # Quotes in ${X:-"a b"} keep words together.
        if splits and "Word" in part["Exp"] and not re.fullmatch(r"\S+", chosen):
            chosen = self._hole(part["Written"]) + OPEN
        return [chosen]

    # Sums.

    def sum_of(self, node: Node) -> str:
        """The number that a sum gives: ``$((8 * N))``. What is not known in it is a hole."""
        if node["Type"] == "Word":
            return self._operand(node)
        if node["Type"] == "ParenArithm":
            return self.sum_of(node["X"])
        operator = node["Op"]
        operands = [self.sum_of(node[side]) for side in ("X", "Y") if side in node]
        # X = 8, X++: what is assigned is not followed.
        if operator in _ASSIGNING:
            target = literal_of(node["X"])
            if NAME.fullmatch(target):
                self.state.lose([target])
            else:  # A[1] = 8, $X = 8
                self.state.forget()
        # A hole of an operand says what decides the sum.
        text = "".join(operands)
        # -1 has one operand, and A ? B : C an operator that is not read.
        if is_unknown(text) or operator not in _OPERATIONS or len(operands) == 1:
            return text + self._hole("$((...))")
        first, second = map(int, operands)
        if operator in ("/", "%") and second == 0:
            self.refuse("a division by zero")
        number = int(_OPERATIONS[operator](first, second))
        # Bash rounds -7 / 2 in another way, and has 64 bits.
        if not NUMBER.fullmatch(str(number)):
            return text + self._hole("$((...))")
        return str(number)

    def _operand(self, word: Node) -> str:
        """The number that a word in a sum is: ``8``, ``N``, ``$N``."""
        text = self.text(word)
        # N is $N.
        if NAME.fullmatch(literal_of(word)):
            text = "".join(self.state.value(text)[:1]) or "0"
        # Another text is a sum of its own, which may assign, or an error that ends the command.
        is_number = NUMBER.fullmatch(text) is not None
        if not is_number and not is_unknown(text):
            raise ScriptError(
                f"line {self.state.line} of the launch line computes {text!r}, which cannot be "
                f"followed. Write the number in its place."
            )
        return text
