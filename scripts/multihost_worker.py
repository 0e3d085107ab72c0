"""One host of `scripts/multihost_test`: forks its ranks, which make groups until the fault comes.

Each rank writes to the shared folder what it met: `gate.RANK` (its process) where the fault shall
strike, `outcome.RANK` when it has raised or finished, `trace.RANK` when it hangs.
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
from unittest import mock

import torch
import torch.distributed as dist

from compat import members_only, parallel_state
from tests.support import forked

LAYOUT: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def main() -> None:
    """Fork the ranks, keep the store as torchrun's agent does, and note who has ended."""
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    options.folder = Path(options.folder)
    address, port = options.address, options.port
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(options.world))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # every rank is a client of it
    tester = os.getppid()
    children = {}
    for rank in options.ranks:
        log = options.folder / f"rank{rank}.log"
        children[forked.fork_logged(partial(_rank, rank, options), log)] = rank
    store = None
    if 0 in options.ranks:
        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    while children:
        pid, status = os.wait()
        _write(options.folder, f"ended.{children.pop(pid)}", status)
    while store is not None and os.getppid() == tester:  # it ends us when nobody needs the store
        time.sleep(1)


def _rank(rank: int, options: SimpleNamespace) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    dist.barrier()  # the world is there, connected, before anything breaks
    new_group = dist.new_group
    calls = 0

    @members_only
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == options.at:
            _gate(rank, options)
        return new_group(*args, **kwargs)

    if options.at == 0:
        _gate(rank, options)
    with open(options.folder / f"trace.{rank}", "w") as trace:
        faulthandler.dump_traceback_later(options.patience, file=trace)
        outcome: dict[str, Any] = {"rank": rank, "type": None, "text": ""}
        start = time.monotonic()
        try:
            with mock.patch.object(dist, "new_group", counted):
                parallel_state.initialize_model_parallel(
                    **LAYOUT, distributed_timeout_minutes=options.timeout / 60
                )
        except Exception as error:
            outcome.update(type=type(error).__name__, text=str(error))
        struck = options.folder / "struck"
        now = time.monotonic()
        if struck.exists():
            start = max(start, json.loads(struck.read_text()))
        outcome.update(
            seconds=now - start,
            groups=len(dist.distributed_c10d._world.pg_map) - 1,
            initialized=parallel_state.is_initialized(),
        )
        _write(options.folder, f"outcome.{rank}", outcome)
        dist.destroy_process_group()


def _gate(rank: int, options: SimpleNamespace) -> None:
    """Say who came, and stop here if this rank is to until the fault has struck."""
    _write(options.folder, f"gate.{rank}", os.getpid())
    while rank in options.held and not (options.folder / "struck").exists():
        time.sleep(0.01)


def _write(folder: Path, name: str, value: Any) -> None:
    """Whole or not at all, for whoever reads it meanwhile."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(value))
    part.rename(folder / name)


if __name__ == "__main__":
    main()
