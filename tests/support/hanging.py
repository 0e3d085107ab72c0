"""Real ranks that really hang: forked processes, each of which records what a job leaves.

``hang`` runs any body. ``call_on_gloo`` is the body that makes the calls of a program of
``programs``, and ``hang_gpt`` hangs the demo's GPT on eight ranks:

    python -m tests.support.hanging DIRECTORY [FAULT...]    # by default every fault

The recording of that hang is in DIRECTORY/FAULT. Sends and receives are recorded, except with
HYPERGRID_RECORD_P2P=0. With HANGING_ON=cuda over NCCL: ranks share the GPUs that are there.
"""

from __future__ import annotations

import builtins
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hypergrid
from hypergrid.hangs import record
from tests.support import ROOT, forked
from tests.support.programs import Op, Program

_LOOK = 0.25  # seconds between looks at the processes
_STILL = 5  # looks that find a process at rest: longer than the diagnosis' patience
PATIENCE = 120  # seconds until a hang must have come to rest


def hang(
    world: int,
    body: Callable[[int], Any],
    directory: Path,
    *,
    begun: Callable[[], bool] = lambda: True,
    busy: Collection[int] = (),
    ends: bool = False,
) -> Path:
    """Call ``body(rank)`` on each rank; when all stand still, they record. All are killed then.

    Of a rank whose process has ended or is stopped there is no recording, but what it wrote itself.
    The ranks are not looked at before ``begun()``, and those of ``busy`` never come to rest. With
    ``ends`` a process ends with its body; else its connections stay open, as where a thread of the
    script goes on.
    """
    directory.mkdir(exist_ok=True)
    with _forked(world, partial(_rank, world, body, directory, ends)) as rank_of:
        for rank in range(world):
            started = directory / f"{rank}.started"
            _wait_for(started.exists, f"rank {rank} did not start")
        _wait_for(begun, "the fault did not happen")
        _wait_for_rest([pid for pid, rank in rank_of.items() if rank not in busy])
        _ask(rank_of, directory)
    return directory


def _rank(world: int, body: Callable[[int], Any], directory: Path, ends: bool, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()  # pytest's: gloo aborts where another dtype arrives
    log = os.open(directory / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(TORCH_FR_BUFFER_SIZE="2000")
    try:
        torch.set_num_threads(1)
        record._LOOK = _LOOK
        hypergrid.record(directory)
        backend = "gloo"
        if os.environ.get("HANGING_ON") == "cuda":
            backend = "nccl"
            torch.cuda.set_device(forked.device_of(rank))
        store = dist.FileStore(str(directory / ".store"), world)
        timeout = timedelta(seconds=300)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        (directory / f"{rank}.started").touch()
        body(rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    while not ends:
        time.sleep(1)


@contextmanager
def _forked(world: int, run: Callable[[int], object]) -> Iterator[dict[int, int]]:
    """Fork a process for each rank, which ends after ``run``; gives the rank of each process."""
    rank_of = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            run(rank)
            os._exit(0)
        rank_of[pid] = rank
    try:
        yield rank_of
    finally:
        for pid in rank_of:
            os.kill(pid, signal.SIGKILL)
        for pid in rank_of:
            os.waitpid(pid, 0)


def _wait_for(condition: Callable[[], object], title: str) -> None:
    """Wait until the condition holds; TimeoutError with the title where it does not in time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(title)
        time.sleep(_LOOK)


def _wait_for_rest(processes: Iterable[int]) -> None:
    """Wait until none of the processes uses its processor any more."""
    still_looks = 0
    before = None

    def are_at_rest() -> bool:
        nonlocal still_looks, before
        used = [_used(pid) for pid in processes]
        is_running = any(state == "R" for _, state in used)
        still_looks = 0 if is_running or used != before else still_looks + 1
        before = used
        return still_looks >= _STILL

    _wait_for(are_at_rest, "the ranks did not come to rest")


def _ask(rank_of: Mapping[int, int], directory: Path) -> None:
    """Have every rank that still runs write at once."""
    begin = time.time_ns()
    running = {}
    for pid, rank in rank_of.items():
        _, state = _used(pid)
        if state not in "ZT":
            running[pid] = rank
    (directory / record.ASKED).touch()
    for rank in running.values():
        stack = directory / f"stack_{rank}.json"
        _wait_for(lambda stack=stack: _written(stack) >= begin, f"rank {rank} did not write")


def _written(stack: Path) -> int:
    """When these stacks were written, in nanoseconds; 0 before they are there."""
    return int(json.loads(stack.read_text())["written_ns"]) if stack.exists() else 0


def _used(pid: int) -> tuple[int, str]:
    """Hundredths of seconds of processor time of its main thread, and that thread's state."""
    try:
        status = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    except OSError:
        return 0, "Z"
    fields = status.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]), fields[0]


# What a rank does that makes no call any more, by the words of programs.


def fail(error: str) -> None:
    """Raise an error such as "ValueError: the batch is empty", as the script's own."""
    name, _, text = error.partition(": ")
    raise getattr(builtins, name)(text)


def spin() -> None:
    while True:
        pass


ACTIONS: dict[str, Callable[[], object]] = {
    "stuck": partial(time.sleep, 1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "spin": spin,
}


# A program of ``programs``.


def call_on_gloo(program: Program, rank: int) -> None:
    """What the program has for this rank."""
    groups: dict[str, dist.ProcessGroup | None] = {"default_pg": None}
    for label, groups_of_label in program.groups.items():
        for members in groups_of_label if label != "default_pg" else ():
            group = dist.new_group(list(members), group_desc=label)
            if rank in members:
                groups[label] = group
    for op in program.ops[rank]:
        if op.do == "raise":
            fail(program.error)
        elif op.do in ACTIONS:
            ACTIONS[op.do]()
        else:
            _call(op, groups[op.group])


def _call(op: Op, group: dist.ProcessGroup | None) -> None:
    tensor = torch.ones(op.size, dtype=getattr(torch, op.dtype.lower()))
    match op.do:
        case "all_reduce":
            dist.all_reduce(tensor, group=group)
        case "all_gather":
            world = dist.get_world_size(group)
            dist.all_gather([torch.ones(op.size) for _ in range(world)], tensor, group=group)
        case "all_to_all":
            dist.all_to_all_single(torch.ones(op.size), tensor, group=group)
        case "broadcast":
            dist.broadcast(tensor, group_src=0, group=group)
        case "send":
            dist.send(tensor, group_dst=op.peer, group=group)
        case "recv":
            dist.recv(tensor, group_src=op.peer, group=group)
        case "barrier":
            dist.barrier(group)
        case "monitored_barrier":
            dist.monitored_barrier(group)
        case "new_group":
            dist.new_group()
        case _:
            raise ValueError(f"invalid call: {op.do}")


# The demo's GPT: the layout is tp=2 pp=2 dp=2.

RANKS = 8
RANK = 5  # who does it: tp=1 dp=0 pp=1
STEP = 3  # in which it does it
MODEL = "--tp 2 --pp 2 --steps 6 --global-batch-size 8 --layers 2 --hidden-size 32 --seq-length 32"
torch_all_reduce = dist.all_reduce


def in_forward(act):
    """Do ``act`` at the start of a forward pass of the step."""

    def arm(train_gpt, begun):
        original = train_gpt.forward_step

        def forward_step(*args):
            if begun():
                act()
            return original(*args)

        train_gpt.forward_step = forward_step

    return arm


def in_the_losses(act):
    """Do ``act`` in place of the step's last call, the all_reduce of the loss over the world."""

    def arm(train_gpt, begun):
        def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, **options):
            if begun() and group is None and tensor.numel() == 1 and op == dist.ReduceOp.MAX:
                return act(tensor)
            return torch_all_reduce(tensor, op, group, **options)

        dist.all_reduce = all_reduce

    return arm


def twice(tensor):
    torch_all_reduce(tensor, dist.ReduceOp.MAX)
    torch_all_reduce(tensor, dist.ReduceOp.MAX)


raising = partial(fail, "ValueError: the batch holds a token that is not in the vocabulary")
FAULTS = {
    "stopped": in_forward(ACTIONS["stop"]),
    "killed": in_forward(ACTIONS["die"]),
    "spinning": in_forward(spin),
    "skips": in_the_losses(lambda tensor: None),
    "adds": in_the_losses(twice),
    "another": in_the_losses(lambda tensor: dist.broadcast(tensor, 0)),
    "dtype": in_the_losses(lambda tensor: torch_all_reduce(tensor.double())),
    "raised": in_forward(raising),
    "raised and stays": in_forward(raising),
    "slow": in_forward(lambda: time.sleep(4)),
}


def hang_gpt(train_gpt: Any, fault: str, directory: Path) -> None:
    """Hang a job in this way."""
    begun = directory / "begun"

    def train(rank: int) -> None:
        if rank == RANK:
            FAULTS[fault](train_gpt, _begins(train_gpt, begun))
        train_gpt.main(MODEL.split())

    busy = [RANK] if fault in ("spinning", "slow") else []
    ends = fault != "raised and stays"
    hang(RANKS, train, directory, begun=begun.exists, busy=busy, ends=ends)


def _begins(train_gpt: Any, begun: Path) -> Callable[[], bool]:
    """A function that says whether the step has come; the file then exists."""
    spy = mock.Mock(wraps=train_gpt.micro_batches)
    train_gpt.micro_batches = spy

    def has_come() -> bool:
        *_, step = spy.call_args.args if spy.called else (0,)
        if step >= STEP:
            begun.touch()
        return step >= STEP

    return has_come


def main(directory: str, *faults: str) -> None:
    import compat

    compat.install()
    sys.path[:0] = [str(ROOT / "scripts")]
    import train_gpt

    os.environ.setdefault("HYPERGRID_RECORD_P2P", "1")
    for fault in faults or FAULTS:
        start = time.monotonic()
        hang_gpt(train_gpt, fault, Path(directory, fault.replace(" ", "_")))
        print(f"{fault}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
