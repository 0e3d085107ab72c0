"""The edits of one release, in a process of its own (see ``scripts/shadow_fuzz``)."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.shadows.dumping import Dump
from tests.shadows.grammar import Arguments, Edit, draw, draw_arguments
from tests.shadows.running import Side, pretended, torchrun, write_tree
from tests.support.stock import source

ASIDE = ("error",)  # sentences differ on purpose


class Verdict:
    """What the shadow run said of an edit, and what is wrong about that."""

    def __init__(self, edit: Edit, stock: Side, swapped: Side, plain: list[Dump]) -> None:
        self.differing = differing(stock.dumps, swapped.dumps, plain)
        # Where stock's import or initialisation fails, a shadow run compares nothing, and says so.
        self.is_compared = stock.differences is not None
        self.says_same = stock.differences == []
        refused = [dump for dump in swapped.dumps if "import" in dump]
        refused += [dump for dump in swapped.dumps if dump.get("initialisation") in REFUSALS]
        works = "import" not in stock.dumps[0] and stock.dumps[0]["initialisation"] not in REFUSALS
        self.complaints = []
        if self.says_same and self.differing:
            self.complaints.append(f"untrue same: {self.differing[:3]}")
        if self.is_compared and not self.says_same and not self.differing:
            self.complaints.append(f"false alarm: {(stock.differences or [])[:3]}")
        unseen = edit.must_work or not differing(stock.dumps, plain, plain)
        # By design: a default that is no constant may be anything.
        unseen &= not edit.rule.startswith(UNREADABLE)
        if works and refused and unseen:
            self.complaints.append(f"false refusal: {refused[0].get('error')}")

    def kind(self) -> str:
        if not self.is_compared:
            return "nothing compared"
        return "same" if self.says_same else "difference"


UNREADABLE = ("type_of_a_default", "value_of_a_default", "none_that_means")
REFUSALS = (
    *("TypeError", "ValueError", "RuntimeError", "AssertionError"),
    *("AttributeError", "ImportError", "NameError", "KeyError", "IndexError"),
)


def differing(first: list[Dump], second: list[Dump], plain: list[Dump]) -> list[str]:
    """What differs between the dumps of all ranks.

    A function, class or constant that only the second has counts if unedited stock has it: our
    module has helpers of its own.
    """
    lines = []
    for rank, (one, other) in enumerate(zip(first, second, strict=True)):
        for name in [*one, *(name for name in other if name not in one)]:
            is_helper = name not in one and name not in plain[rank]
            if name in ASIDE or (is_helper and name.startswith(HELPERS)):
                continue
            if one.get(name) != other.get(name):
                lines.append(f"rank {rank} {name}: {_apart(one.get(name), other.get(name))}")
    return lines


HELPERS = ("function ", "class ", "constant ", "get_", "is_", "has_", "model_parallel_is_")


def _apart(first: Any, second: Any) -> str:
    """The texts of two values, from shortly before the place where they begin to differ."""
    texts = (str(first), str(second))
    same = 0
    for character, other in zip(*texts, strict=False):
        if character != other:
            break
        same += 1
    return " | ".join(text[max(0, same - 60) : same + 120] for text in texts)


def judge(release: str, edit: Edit, arguments: Arguments, pretend: bool, plains: Any) -> Verdict:
    """Run an edit on both sides, and unedited stock once for all edits with these arguments."""
    plain = source(release)
    key = (repr(arguments), pretend)
    if key not in plains:
        plains[key] = _side(release, plain, False, arguments, pretend).dumps
    stock = _side(release, edit.text, False, arguments, pretend)
    swapped = _side(release, edit.text, True, arguments, pretend)
    return Verdict(edit, stock, swapped, plains[key])


def _side(release: str, text: str, is_swapped: bool, arguments: Arguments, pretend: bool) -> Side:
    with tempfile.TemporaryDirectory(prefix="shadow-") as name:
        folder = Path(name)
        write_tree(folder, release, text)
        if pretend:
            return pretended(folder, is_swapped, arguments, (source(release), text))
        return torchrun(folder, is_swapped, arguments, release)


def main() -> int:
    """Judge the edits; print a line for each complaint, and one of counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True)
    for name in ("-n", "--first", "--torchrun"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # once, for all forks

    started = time.monotonic()
    text = source(options.release)
    counts = Counter[str]()
    complaining = 0
    plains: dict[Any, list[Dump]] = {}
    for number in range(options.first, options.first + options.n):
        rng = random.Random(f"{options.seed}/{options.release}/{number}")
        pretend = not options.torchrun or number % options.torchrun != options.torchrun - 1
        edit = draw(text, rng, pretend)
        arguments = draw_arguments(text, rng, pretend)
        where = f"{options.release} #{number} {edit.rule} {edit.what!r} {arguments}"
        try:
            verdict = judge(options.release, edit, arguments, pretend, plains)
        except Exception as error:
            counts["failed"] += 1
            complaining += 1
            print(f"{where}: {error}", flush=True)
            continue
        counts[verdict.kind()] += 1
        counts["with torchrun"] += not pretend
        complaining += bool(verdict.complaints)
        for complaint in verdict.complaints:
            counts[complaint.partition(":")[0]] += 1
            print(f"{where}\n    {complaint}", flush=True)
        if options.verbose and not verdict.complaints:
            print(f"{where}: {verdict.kind()}", flush=True)
    seconds = time.monotonic() - started
    print(f"{options.release} {options.n} edits, {dict(counts)}, {seconds:.0f} s", flush=True)
    return 1 if complaining else 0


if __name__ == "__main__":
    sys.exit(main())
