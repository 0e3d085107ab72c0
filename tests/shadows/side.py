"""Pretended ranks of an edited stock, which the path finds first: ``-m tests.shadows.side``.

In a process of its own, as compat follows the release that it finds at import.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import compat
from compat.swap import answers, shadow
from tests.parity.recording import Recorder, observed
from tests.shadows.dumping import Dump, dump_rank
from tests.shadows.patches import PATCHES
from tests.shadows.running import RANKS, WORLD

reports: list[list[str]] = []  # of the shadow run


def imported(is_swapped: bool) -> ModuleType | Dump:
    """Megatron's module as a script gets it, or how its import fails."""
    answers.report = lambda *report: reports.append(report[-1])
    install = compat.install if is_swapped else shadow.install
    install()
    try:
        return importlib.import_module("megatron.core.parallel_state")
    except Exception as error:
        return {"refused": type(error).__name__, "error": str(error)}


def seen_by(rank: int, module: ModuleType, words: dict[str, Any]) -> tuple[Dump, Any]:
    """What a caller sees on this rank, and the shadow run's differences, None if it did not run."""
    config = {"world_size": WORLD, "environment": {}}
    recorder = Recorder(module, config, rank, words["release"])
    with observed(recorder):
        c10d.new_group = dist.new_group  # one object, as in torch
        for name in words["patches"]:
            PATCHES[name](module)
        dump = dump_rank(module, words["arguments"], recorder)
    return dump, [*itertools.chain(*reports)] if reports else None


def main() -> None:
    words = json.loads(sys.argv[1])
    module = imported(words["is_swapped"])
    import compat.parallel_state  # noqa: F401  # once, for the shadow runs of all ranks

    for rank in RANKS:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        is_module = isinstance(module, ModuleType)
        seen = seen_by(rank, module, words) if is_module else (module, None)
        Path(f"{rank}.seen").write_bytes(pickle.dumps(seen))
        os._exit(0)


if __name__ == "__main__":
    main()
