"""Hangs the demo's GPT on eight gloo ranks, in one way after the other, and records each.

    python -m tests.support.hanging DIRECTORY [FAULT...]

A hang's recording is in DIRECTORY/FAULT, with ``fault.json``, which says what was done to whom, and
the ranks' output in ``rank_N.log``. One process imports megatron and forks the ranks. Sends and
receives are recorded, except with HYPERGRID_RECORD_P2P=0.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import compat

compat.install()
from tests.support import ROOT, forked  # noqa: E402

sys.path[:0] = [str(ROOT / "scripts")]
import train_gpt  # noqa: E402

import hypergrid  # noqa: E402

RANKS, RANK, STEP = 8, 5, 3  # who does it (tp=1 dp=0 pp=1), and in which step
MODEL = "--tp 2 --pp 2 --steps 6 --global-batch-size 8 --layers 2 --hidden-size 32 --seq-length 32"
PATIENCE = 120  # seconds until a hang must have come to rest


def in_forward(act):
    """Do ``act`` at the start of a forward pass of the step."""

    def arm(begun):
        original = train_gpt.forward_step

        def forward_step(*args):
            if begun():
                act()
            return original(*args)

        train_gpt.forward_step = forward_step

    return arm


def in_the_losses(act):
    """Do ``act`` in place of the step's last call, the all_reduce of the loss over the world."""

    def arm(begun):
        original = dist.all_reduce

        def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, **options):
            if begun() and group is None and tensor.numel() == 1 and op == dist.ReduceOp.MAX:
                return act(tensor)
            return original(tensor, op, group, **options)

        dist.all_reduce = all_reduce
        dist._original_all_reduce = original

    return arm


def in_other_order(begun):
    """Reduce the loss over the world before the data-parallel group."""
    original = train_gpt.loss_everywhere

    def loss_everywhere(losses, group):
        if begun():
            loss = torch.stack(losses).mean().view(1)
            dist.all_reduce(loss, op=dist.ReduceOp.MAX)
            dist.all_reduce(loss, group=group)
            return loss.item()
        return original(losses, group)

    train_gpt.loss_everywhere = loss_everywhere


def sending_twice(begun):
    """Send the step's first activations a second time."""
    original, again = dist.isend, []

    def isend(tensor, dst=None, group=None, tag=0, **options):
        if begun() and not again:
            again.append(original(tensor, dst, group, tag, **options))
        return original(tensor, dst, group, tag, **options)

    dist.isend = dist.distributed_c10d.isend = isend
    original_batch = dist.batch_isend_irecv

    def batch_isend_irecv(operations):
        if begun() and not again:
            sends = [each for each in operations if each.op is not dist.irecv]
            if sends:
                again.append(sends)
                operations = [*sends, *operations]
        return original_batch(operations)

    dist.batch_isend_irecv = batch_isend_irecv


def end_by(number):
    return lambda: os.kill(os.getpid(), number)


def fail():
    raise ValueError("the batch holds a token that is not in the vocabulary")


def spin():
    while True:
        pass


def twice(tensor):
    dist._original_all_reduce(tensor, dist.ReduceOp.MAX)
    dist._original_all_reduce(tensor, dist.ReduceOp.MAX)


def other_dtype(tensor):
    dist._original_all_reduce(tensor.double())


# The rank that does it, and what.
FAULTS = {
    "stopped": (RANK, in_forward(end_by(signal.SIGSTOP))),
    "killed": (RANK, in_forward(end_by(signal.SIGKILL))),
    "ended": (RANK, in_forward(lambda: os._exit(0))),
    "sleeping": (RANK, in_forward(lambda: time.sleep(3600))),
    "spinning": (RANK, in_forward(spin)),
    "skips": (RANK, in_the_losses(lambda tensor: None)),
    "adds": (RANK, in_the_losses(twice)),
    "another": (RANK, in_the_losses(lambda tensor: dist.broadcast(tensor, 0))),
    "size": (RANK, in_the_losses(lambda tensor: dist._original_all_reduce(tensor.repeat(3)))),
    "dtype": (RANK, in_the_losses(other_dtype)),
    "order": (RANK, in_other_order),
    "sends twice": (1, sending_twice),
    "raised": (RANK, in_forward(fail)),
    "raised and stays": (RANK, in_forward(fail)),
    "slow": (RANK, in_forward(lambda: time.sleep(4))),
}
RESTLESS = ("spinning", "slow")


def hang(fault, directory, seconds=PATIENCE):
    """Hang a job in this way; its recording is in ``directory`` afterwards. All ranks are ended."""
    directory.mkdir(parents=True)
    rank, _ = FAULTS[fault]
    begun = directory / "begun"
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(RANKS)
    children = {}
    with listener:
        for each in range(RANKS):
            pid = os.fork()
            if pid == 0:
                _rank(each, fault, directory, listener, begun)
            children[pid] = each
        try:
            _rest(children, begun, fault, time.monotonic() + seconds)
            asked = _ask(children, directory, time.monotonic() + 60)
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)
    truth = {"fault": fault, "rank": rank, "asked": asked}
    (directory / "fault.json").write_text(json.dumps(truth))


def _rank(rank, fault, directory, listener, begun):
    """One rank, as a script: what is uncaught reaches sys.excepthook and ends it."""
    log = os.open(directory / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
        hypergrid.record(directory)
        culprit, arm = FAULTS[fault]
        if rank == culprit:
            arm(_begins(begun))
        forked._start(rank, RANKS, listener, "gloo")
        train_gpt.main(MODEL.split())
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        if fault == "raised and stays" and rank == culprit:
            time.sleep(3600)  # as where a thread of the script does not end
        os._exit(1)
    os._exit(0)


def _begins(begun):
    """A function that says whether the step has come; the file then exists."""
    step = [0]
    original = train_gpt.micro_batches

    def micro_batches(args, state, text, number):
        step[0] = number
        return original(args, state, text, number)

    train_gpt.micro_batches = micro_batches

    def come():
        if step[0] >= STEP:
            begun.touch()
        return step[0] >= STEP

    return come


def _rest(children, begun, fault, end):
    """Wait until the fault was done and no rank uses its processor any more."""
    while not begun.exists():
        _check(end, "the fault did not happen")
    quiet, before = 0, None
    while quiet < 6:
        _check(end, "the ranks did not come to rest")
        found = {pid: _used(pid) for pid, rank in children.items()}
        if fault in RESTLESS:
            culprit = FAULTS[fault][0]
            found = {pid: used for pid, used in found.items() if children[pid] != culprit}
        idle = found == before and not any("R" in states for _, states in found.values())
        quiet, before = quiet + 1 if idle else 0, found


def _ask(children, directory, end):
    """Have every rank that still runs write at once; returns these."""
    asked = {pid: rank for pid, rank in children.items() if not set(_used(pid)[1]) & set("ZT")}
    start = time.time_ns()
    for pid in asked:
        os.kill(pid, signal.SIGUSR1)
    for rank in asked.values():
        stack = directory / f"stack_{rank}.json"
        while not stack.exists() or json.loads(stack.read_text())["written_ns"] < start:
            _check(end, f"rank {rank} did not write")
    return sorted(asked.values())


def _check(end, what):
    if time.monotonic() > end:
        raise TimeoutError(what)
    time.sleep(0.3)


def _used(pid):
    """Hundredths of seconds of processor time (of its main thread), and the state of each."""
    try:
        main = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, "Z"
    return int(main[11]) + int(main[12]), main[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    options = parser.parse_args()
    os.environ.setdefault("HYPERGRID_RECORD_P2P", "1")
    failed = 0
    for fault in options.faults or FAULTS:
        start = time.monotonic()
        try:
            hang(fault, options.directory / fault.replace(" ", "_"))
            print(f"{fault}: {time.monotonic() - start:.0f} s", flush=True)
        except Exception:
            failed += 1
            print(f"{fault}: {traceback.format_exc()}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
