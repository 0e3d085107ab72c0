"""The code blocks of README and docs, and the world that a page says they run in.

A comment before a block says what the block alone cannot:

    <!-- run: ranks=8 -->       Python from here on runs on eight real ranks with a default group
    <!-- run: torchrun=4 -->    the same, but they have only the environment that torchrun gives
    <!-- run: fake=120 -->      in one process of a fake world, as its rank 0
    <!-- run: alone -->         in one process without a world, which is how each page starts
    <!-- given: CODE -->        Python that runs before the block: what its reader already has
    <!-- output: OF WHAT -->    the block is not code: what it shows, and why it is not run

Each `run` starts afresh; until the next one the blocks share their names, in the order of the
page. `file=NAME` beside a world tells under which name the page has its reader save the block.
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
    said: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}-{self.language or 'unlabelled'}"

    @property
    def file(self) -> str | None:
        found = re.search(r"file=(\S+)", self.said.get("run", ""))
        return found and found[1]


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order; a ValueError where a comment has no block."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found: list[Block] = []
    said: dict[str, str] = {}
    for part in _PARTS.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        kind, _, rest = (part["comment"] or "").strip().partition(":")
        if kind in ("run", "given", "output"):
            said[kind] = rest.strip()
        elif part["fence"]:
            indent = len(part["indent"])
            body = "".join(each[indent:] for each in part["text"].splitlines(keepends=True))
            found.append(Block(name, line, part["language"], body, said))
            said = {}
        elif part["prose"] and said:
            raise ValueError(f"{name}:{line}: no block follows the comment {said}.")
    if len(re.findall(r"^ *(?:```|~~~)", text, re.M)) != 2 * len(found):
        raise ValueError(f"{name}: a fence is not closed, or inside another.")
    return found


def chains(found: list[Block]) -> list[list[Block]]:
    """The Python blocks of a page, those that share a world and their names together."""
    together: list[list[Block]] = []
    for block in found:
        if block.language == "python":
            if "run" in block.said or not together:
                together.append([])
            together[-1].append(block)
    return together
