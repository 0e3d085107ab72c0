"""What the shadow run says of edits of stock, and what is wrong about that."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.shadows.patches import PATCHES
from tests.shadows.running import RANKS, run_side, write_tree
from tests.support import ROOT
from tests.support.stock import load_stock, source

# By kind and name, the edits of stock's text: what is replaced (null: it is added to the end), and
# the new text. A visible one begins with the name of the arguments that show it.
TABLE = json.loads((ROOT / "tests" / "shadows" / "edits.json").read_text())
ARGUMENTS: dict[str, dict[str, Any]] = TABLE["arguments"]
VISIBLE: dict[str, list[str]] = TABLE["visible"]
# Not drawn by seed: an argument of new_group that no caller sees afterwards.
SEEN_BY_TORCH: dict[str, list[str]] = TABLE["seen by torch"]
HARMLESS: dict[str, list[str]] = TABLE["harmless"]


Dump = dict[str, Any]


class Edit(NamedTuple):
    """An edited stock: its text, what clients replace then, and how it is initialised."""

    name: str
    text: str
    patches: tuple[str, ...]
    arguments: dict[str, Any]


class Verdict(NamedTuple):
    """Whether the shadow run compared, what it said, and what a caller sees differ, by rank."""

    is_compared: bool
    said: list[str]
    differing: list[str]

    @property
    def kind(self) -> str:
        if not self.is_compared:
            return "nothing compared"
        return "difference" if self.said else "same"

    @property
    def complaint(self) -> str:
        """What is wrong about what the shadow run said, or nothing."""
        if self.kind == "same" and self.differing:
            return f"untrue same: {self.differing[:3]}"
        if self.kind == "difference" and not self.differing:
            return f"false alarm: {self.said[:3]}"
        return ""


def has_arguments(text: str, arguments: dict[str, Any]) -> bool:
    """Whether the initialisation of this text has all arguments: a branch may lack one."""
    return all(f"    {name}: " in text for name in arguments)


def edited(text: str, old: str | None, new: str) -> str:
    """The text with ``new`` in place of ``old``, or at its end if that is None."""
    assert old is None or old in text, old
    return text + new if old is None else text.replace(old, new)


def draw(release: str, seed: str) -> Edit:
    """One to three rows, each at one place of the text that is drawn, and a patch or none."""
    rng = random.Random(f"{seed}/{release}")
    text = source(release)
    patches = tuple(rng.sample(sorted(PATCHES), rng.randint(0, 1)))
    # A client's function sees arguments of new_group that nobody else does.
    rows = VISIBLE if patches else {**VISIBLE, **HARMLESS}
    names = []
    for name in rng.sample(sorted(rows), rng.randint(1, 3)):
        *_, old, new = rows[name]
        places = text.split(old) if old else [text, ""]
        if len(places) == 1:
            continue
        place = rng.randrange(1, len(places))
        before = (old or "").join(places[:place])
        after = (old or "").join(places[place:])
        text = before + new + after
        names.append(name)
    names += patches
    fitting = [name for name, sizes in ARGUMENTS.items() if has_arguments(text, sizes)]
    arguments = rng.choice(fitting)
    return Edit(f"{', '.join(names)} ({arguments})", text, patches, ARGUMENTS[arguments])


def judge(release: str, edit: Edit) -> Verdict:
    """Run an edit with a shadow run beside it, and swapped."""
    with tempfile.TemporaryDirectory(prefix="shadow-") as name:
        folder = Path(name)
        write_tree(folder, release, edit.text)
        words = (release, edit.arguments, edit.patches)
        stock_ranks = run_side(folder, *words, is_swapped=False)
        swapped_ranks = run_side(folder, *words, is_swapped=True)
    said, differing = [], []
    is_compared = True
    for rank, stock, swapped in zip(RANKS, stock_ranks, swapped_ranks, strict=True):
        is_compared &= stock.differences is not None
        said += [f"rank {rank}: {line}" for line in stock.differences or ()]
        for line in differences(release, stock.dump, swapped.dump):
            differing.append(f"rank {rank}: {line}")
    return Verdict(is_compared, said, differing)


@functools.cache
def _names(release: str) -> set[str]:
    return set(vars(load_stock(release)))


def differences(release: str, stock: Dump, swapped: Dump) -> Iterator[str]:
    """What differs between two dumps, but for functions of ours that stock never had."""
    for name in sorted({*stock, *swapped}):
        is_helper = name not in stock and name not in _names(release)
        if name == "error" or (is_helper and name.isidentifier() and "refused" not in swapped):
            continue
        if stock.get(name) != swapped.get(name):
            yield f"{name}: {str(stock.get(name))[:160]} | {str(swapped.get(name))[:160]}"
