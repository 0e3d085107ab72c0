"""One host of `scripts/multihost_test`: forks its ranks, which make groups until the fault comes.

Each rank writes to the shared folder what it met: `gate.RANK` (its process) where the fault shall
strike, `outcome.RANK` when it has raised or finished, and to `log.RANK` where it hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from checkout import fork_ranks, watched_new_group, write_whole

from compat import parallel_state


def main() -> None:
    """Fork the ranks, keep the store as torchrun's agent does, and note who has ended."""
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    folder = Path(options.folder)
    address = ("10.77.0.1", options.port)
    tester = os.getppid()
    children = fork_ranks(
        partial(rank_of_job, options, folder), options.ranks, folder, *address, options.world
    )
    store = None
    if 0 in options.ranks:
        store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
    while children:
        process, status = os.wait()
        write_whole(folder / f"ended.{children.pop(process)}", status)
    while store is not None and os.getppid() == tester:  # it ends us when nobody needs the store
        time.sleep(1)


def rank_of_job(options: SimpleNamespace, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()  # the world is there, connected, before anything breaks
    calls = 0
    struck = folder / "struck"

    def gate() -> None:
        """Say who came, and stop here if this rank is to until the fault has struck."""
        nonlocal calls
        if calls == options.at:
            write_whole(folder / f"gate.{rank}", os.getpid())
            while rank in options.held and not struck.exists():
                time.sleep(0.01)
        calls += 1

    gate()
    faulthandler.dump_traceback_later(options.patience)
    outcome: dict[str, Any] = {"error": ""}
    start = time.monotonic()
    try:
        with watched_new_group(gate):
            parallel_state.initialize_model_parallel(
                2, 2, distributed_timeout_minutes=options.timeout / 60
            )
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    now = time.monotonic()
    if struck.exists():
        start = max(start, json.loads(struck.read_text()))
    outcome.update(
        seconds=now - start,
        groups=len(dist.distributed_c10d._world.pg_map) - 1,
        initialized=parallel_state.is_initialized(),
    )
    write_whole(folder / f"outcome.{rank}", outcome)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
