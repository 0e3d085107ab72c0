"""Conditions: ``[ ... ]`` and ``[[ ... ]]``, as far as the text decides them."""

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
    if not test.named_children:
        return None
    return _holds(expander, test.named_children[0], test.children[0].type == "[[")


def _holds(expander: Expander, node: Node, splits_nothing: bool) -> bool | None:
    operands = node.named_children
    operators = [
        expander.written(child)
        for child in node.children
        if (not child.is_named or child.type == "test_operator") and child.type not in "()"
    ]
    operator = operators[0] if operators else ""
    if node.type == "parenthesized_expression" and splits_nothing:
        return _holds(expander, operands[0], True)
    if node.type == "unary_expression" and operator == "!":
        inner = _holds(expander, operands[-1], splits_nothing)
        return None if inner is None else not inner
    if node.type == "binary_expression" and operator in ("&&", "||"):
        first = _holds(expander, operands[0], splits_nothing)
        if first == (operator == "||"):
            return first
        results: list[bool | None] = []

        def evaluate() -> None:
            results.append(_holds(expander, operands[-1], splits_nothing))

        if first is None:
            expander.maybe(evaluate, expander.written(node))
            return None
        evaluate()
        return results[0]
    texts = [_operand(expander, child, splits_nothing) for child in operands]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    texts_of_words = [known[i] for i, child in enumerate(operands) if child.type != "test_operator"]
    if node.type == "unary_expression" and operator in ("-z", "-n"):
        return (texts_of_words[0] == "") == (operator == "-z")
    if node.type != "binary_expression" or len(texts_of_words) != 2:
        return None
    left, right = texts_of_words
    if operator in ("=", "==", "!="):
        is_same = expander.matches(left, operands[-1]) if splits_nothing else left == right
        return None if is_same is None else is_same == (operator != "!=")
    if operator in _COMPARED and _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return _COMPARED[operator](int(left), int(right))
    return None


def _operand(expander: Expander, node: Node, splits_nothing: bool) -> str | None:
    """The text of an operand; None if it is not known, or not one word in ``[ ]``."""
    if node.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
        return None
    if node.type == "test_operator":
        return ""
    if splits_nothing:
        text = expander.text(node)
    else:
        words = expander.words([node])
        if len(words) != 1 or has_open_words(words):
            return None
        text = words[0]
    return None if is_unknown(text) else text
