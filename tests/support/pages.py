"""The code blocks of README and docs, and the world that a page says they run in.

A comment before a block says what the block alone cannot:

    <!-- run: ranks=8 -->       Python from here on runs on eight real ranks with a default group
    <!-- run: torchrun=4 -->    the same, but they have only the environment that torchrun gives
    <!-- run: fake=120 -->      in one process of a fake world, as its rank 0
    <!-- run: alone -->         in one process without a world, which is how each page starts
    <!-- given: CODE -->        Python that runs before the block: what its reader already has
    <!-- output: OF WHAT -->    the block is not code: what it shows, and why it is not run

Each `run` starts afresh; until the next one the blocks share their names, in the order of the
page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_PARTS = re.compile(
    r"<!--(?P<comment>.*?)-->"
    r"|^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>\S*)[^\n]*\n(?P<text>.*?)^ *(?P=fence) *$"
    r"|(?P<prose>\S)",
    re.S | re.M,
)


@dataclass
class Block:
    """One fenced block, with the comments before it by their first word."""

    page: str
    line: int
    language: str
    text: str
    comments: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}-{self.language or 'unlabelled'}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order; a ValueError where a comment has no block."""
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    page_blocks: list[Block] = []
    comments: dict[str, str] = {}
    for part in _PARTS.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        kind, _, rest = (part["comment"] or "").strip().partition(":")
        if kind in ("run", "given", "output"):
            comments[kind] = rest.strip()
        elif part["fence"]:
            indent = len(part["indent"])
            body = ""
            for text_line in part["text"].splitlines(keepends=True):
                body += text_line[indent:]
            page_blocks.append(Block(name, line, part["language"], body, comments))
            comments = {}
        elif part["prose"] and comments:
            raise ValueError(f"{name}:{line}: no block follows the comment {comments}.")
    if len(re.findall(r"^ *(?:```|~~~)", text, re.M)) != 2 * len(page_blocks):
        raise ValueError(f"{name}: a fence is not closed, or inside another.")
    return page_blocks


def chains(page_blocks: list[Block]) -> list[list[Block]]:
    """The Python blocks of a page, those that share a world and their names together."""
    together: list[list[Block]] = []
    for block in page_blocks:
        if block.language == "python":
            if "run" in block.comments or not together:
                together.append([])
            together[-1].append(block)
    return together
