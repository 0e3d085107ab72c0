"""The benchmark's count of a rank's calls to torch: ``bench_creation.py '{"job": NAME, ...}'``."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

from bench_real import count_new_groups
from bench_sides import SIZES, answer, load, start_fake_world

from hypergrid.groups import creation


def creation_calls(side: str, way: str, world: int) -> int:
    """How often a rank in the middle of a fake world asks torch for groups.

    ``way`` is hypergrid's choice ``creation``. The fake backend cannot split, so a split is
    counted and then created by its members: only the number of calls is measured, not their time.
    """
    os.environ["HYPERGRID_CREATION"] = way
    module = load(side)
    rank = world // 2 + 3
    start_fake_world(rank, world)
    calls: Counter[str] = Counter()

    def split(label: str, groups: Any, epoch: str, **options: Any) -> Any:
        calls["split"] += 1
        members = next((ranks for ranks in groups if rank in ranks), [rank])
        return creation.by_members(label, sorted(members), epoch, **options)

    with (
        mock.patch.object(creation, "_can_split", lambda: True),
        mock.patch.object(creation, "by_split", split),
    ):
        if way == "members" or side == "stock":
            count_new_groups(calls)
        module.initialize_model_parallel(**SIZES, create_gloo_process_groups=False)
    return calls.total()


if __name__ == "__main__":
    answer(creation_calls)
