"""All programs on one release, stock and the replacement: ``{program: [what differs]}``."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback

from tests.clients.programs import PROGRAMS, REAL
from tests.clients.watching import differences, ours, stock, watch, watch_ranks


def main(release: str, real: bool) -> None:
    found: dict[str, list[str]] = {}
    ours()
    with contextlib.suppress(ImportError):  # seconds, which every process would spend otherwise
        import megatron.core.utils  # noqa: F401
    for name, program in (REAL if real else PROGRAMS).items():
        if not real and release not in program.releases:
            continue
        found[name] = []
        try:
            if real:
                theirs = watch_ranks(program, stock(release), release)
                mine = watch_ranks(program, ours, release)
                pairs = list(zip(range(program.world), theirs, mine, strict=True))
            else:
                ranks = sorted({0, program.world * 5 // 6})
                pairs = [
                    (
                        rank,
                        *(watch(program, load, release, rank) for load in (stock(release), ours)),
                    )
                    for rank in ranks
                ]
        except Exception:
            found[name].append(traceback.format_exc())
            continue
        for rank, one, other in pairs:
            if one["outcome"] != "ok":
                found[name].append(f"rank {rank}: stock itself: {one['outcome']}")
            found[name] += [f"rank {rank}: {line}" for line in differences(one, other)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], "--real" in sys.argv[2:])
