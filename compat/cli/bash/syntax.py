"""The syntax tree of a script, by tree-sitter's grammar of bash."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from compat.cli.bash.values import LONGEST, ScriptError
from hypergrid.messages import install_command

if TYPE_CHECKING:
    from tree_sitter import Node


def check_length(text: str) -> bytes:
    """The text in bytes; a ScriptError if it cannot be read."""
    if len(text) > LONGEST:
        raise ScriptError(f"the launch line is longer than {LONGEST:,} characters.")
    if re.search(r"(?<!\\)\\[ \t]+\n", text):
        raise ScriptError("the launch line has a blank between a backslash and the line's end.")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ScriptError("the launch line is not valid Unicode.") from None


def parsed(source: bytes, end: float) -> Node:
    """The root of the tree, if it is ready before the time ``end``."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        raise ImportError(
            f"reading a launch line needs {error.name}: {install_command('cli')}."
        ) from None
    # The grammar's scanner reads beyond its tables at characters above U+00FF, so it gets others,
    # of as many bytes, in their place.
    text = re.sub(r"[^\x00-\xff]", _in_table, source.decode())
    safe = text.encode()
    parser = Parser(Language(tree_sitter_bash.language()))
    try:
        tree = parser.parse(
            lambda place, _: safe[place : place + 4096],
            progress_callback=lambda place, has_error: time.monotonic() > end,
        )
    except ValueError:
        raise ScriptError("the launch line takes too long to parse. Paste less of it.") from None
    return tree.root_node


def _in_table(found: re.Match[str]) -> str:
    size = len(found[0].encode())
    return "\xa7" * (size // 2) + "x" * (size % 2)


def first_error(node: Node) -> Node:
    """The first node that is not bash."""
    while not (node.is_error or node.is_missing):
        node = next(child for child in node.children if child.has_error)
    return node
