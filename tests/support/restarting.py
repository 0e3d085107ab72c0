"""A program like NVRx's basic example, with our Abort: gloo ranks, one of which fails.

The wrapped function starts torch's default group itself. Each rank prints a line of JSON for each
iteration: its rank, the world, the sum over all. To see it run:

    PYTHONPATH=.cache/resiliency:. python -c \
        "from tests.support.restarting import job; job('kill', '/tmp')"; cat /tmp/out.*
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta

from tests.support import ROOT

sys.path.append(str(ROOT / ".cache" / "resiliency"))
import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from compat import parallel_state as ps
from compat.resiliency import Abort, Initialize

QUICK = {
    "monitor_thread_interval": timedelta(seconds=0.2),
    "monitor_process_interval": timedelta(seconds=0.2),
    "heartbeat_interval": timedelta(seconds=0.2),
    "heartbeat_timeout": timedelta(seconds=8),
    "progress_watchdog_interval": timedelta(seconds=0.2),
    "soft_timeout": timedelta(seconds=10),
    "hard_timeout": timedelta(seconds=13),
    "last_call_wait": timedelta(seconds=0.2),
    "termination_grace_time": timedelta(seconds=1),
}


def say(**what):
    print(json.dumps(what), flush=True)


def basic(how: str) -> None:
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=os.environ["RANK"] == "0", wait_for_workers=False
    )

    @inprocess.Wrapper(
        store_kwargs={"port": port + 1, "timeout": timedelta(seconds=60)},
        initialize=inprocess.initialize.RetryController(max_iterations=4),
        abort=Abort(),
        **QUICK,
    )
    def train(call: inprocess.CallWrapper = None) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=40),
        )
        ps.initialize_model_parallel()
        total = torch.ones(1)
        dist.all_reduce(total, group=ps.get_data_parallel_group())
        say(iteration=call.iteration, rank=rank, world=world, total=total.item())
        if call.iteration == 0 and rank == 1:
            if how == "exception":
                raise RuntimeError("as if the hardware had failed")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        if call.iteration == 0:  # the others wait for it
            dist.all_reduce(total, group=ps.get_data_parallel_group())
        ps.destroy_model_parallel()
        dist.destroy_process_group()

    train()
    say(ended=os.environ["RANK"])


def without_store() -> None:
    """There is no torchrun, and Initialize is given no store."""

    @inprocess.Wrapper(initialize=Initialize(backend="gloo"), abort=Abort(), **QUICK)
    def train() -> None:
        say(trains=os.environ["RANK"])

    train()


def job(how: str, folder: str) -> None:
    """Three ranks, forked from this process; waits until all have ended."""
    torch.set_num_threads(1)
    port = 20000 + os.getpid() % 6000 * 2
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="3")
    children = []
    for rank in range(3):
        children.append(os.fork())
        if not children[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{name}.{rank}", os.O_WRONLY | os.O_CREAT), number)
            try:
                without_store() if how == "no store" else basic(how)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    deadline = time.monotonic() + 100
    while children and time.monotonic() < deadline:
        children = [pid for pid in children if not os.waitpid(pid, os.WNOHANG)[0]]
        time.sleep(0.05)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
