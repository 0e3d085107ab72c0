"""Conditions: ``[ ... ]`` and ``[[ ... ]]`` of one comparison, as far as the text decides them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt, ne
from typing import TYPE_CHECKING

from hypergrid.cli.bash.values import has_open_words, is_unknown
from hypergrid.cli.bash.words import Expander

if TYPE_CHECKING:
    from tree_sitter import Node

_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge,
}  # fmt: skip
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})")


def holds(expander: Expander, test: Node) -> bool | None:
    """Whether a condition holds; None if the text does not decide it."""
    # What an expansion in it may assign becomes unknown.
    text = expander.inner_text(test, 0, 0)
    if text.startswith("[[") and re.search(r"-(eq|ne|lt|le|gt|ge)\b", text):
        expander.lose_assigned(text)
    if len(test.named_children) != 1:
        return None
    node = test.named_children[0]
    is_double = test.children[0].type == "[["
    operators = [
        expander.written(child)
        for child in node.children
        if not child.is_named or child.type == "test_operator"
    ]
    operands = [child for child in node.named_children if child.type != "test_operator"]
    words = [expander.words([child]) for child in operands]
    texts = [expander.text(child) for child in operands]
    is_single = all(len(word) == 1 and not has_open_words(word) for word in words)
    if any(map(is_unknown, texts)) or not (is_double or is_single):
        return None
    match operators, texts:
        case ["-z"], [text]:
            return text == ""
        case ["-n"], [text]:
            return text != ""
        case ["=" | "==" | "!=" as operator], [left, right]:
            # The right side of [[ ]] is a pattern.
            if is_double and not re.fullmatch(r"[\w./:=,@%-]*", right):
                return None
            return (left == right) == (operator != "!=")
        case [operator], [left, right] if operator in _COMPARED:
            if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
                return _COMPARED[operator](int(left), int(right))
    return None
