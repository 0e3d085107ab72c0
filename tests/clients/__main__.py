"""All programs on one release, stock and the replacement: ``{program: [what differs]}``."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator

from tests.clients import Program
from tests.clients.programs import PROGRAMS, REAL
from tests.clients.watching import Answers, differences, ours, stock, watch, watch_ranks


def main(release: str, on_real_ranks: bool) -> None:
    differences_of: dict[str, list[str]] = {}
    ours()
    with contextlib.suppress(ImportError):  # seconds, which every process would spend otherwise
        import megatron.core.utils  # noqa: F401
    programs = REAL if on_real_ranks else PROGRAMS
    for name, program in programs.items():
        if release not in program.releases and not on_real_ranks:
            continue
        try:
            pairs = list(views(program, release, on_real_ranks))
        except Exception:
            differences_of[name] = [traceback.format_exc()]
            continue
        lines = []
        for rank, on_stock, on_ours in pairs:
            if on_stock["outcome"] != "ok":
                lines.append(f"rank {rank}: stock itself: {on_stock['outcome']}")
            lines += [f"rank {rank}: {line}" for line in differences(on_stock, on_ours)]
        differences_of[name] = lines
    print(json.dumps(differences_of))


def views(
    program: Program, release: str, on_real_ranks: bool
) -> Iterator[tuple[int, Answers, Answers]]:
    """A rank, and what its client sees on stock and on ours."""
    if on_real_ranks:
        on_stock = watch_ranks(program, stock(release), release)
        on_ours = watch_ranks(program, ours, release)
        yield from zip(range(program.world), on_stock, on_ours, strict=True)
        return
    for rank in sorted({0, program.world * 5 // 6}):
        seen_on_stock = watch(program, stock(release), release, rank)
        yield rank, seen_on_stock, watch(program, ours, release, rank)


if __name__ == "__main__":
    main(sys.argv[1], "--real" in sys.argv[2:])
