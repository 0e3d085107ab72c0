"""Hangs the demo's GPT on eight gloo ranks, in one way after the other, and records each.

    python -m tests.support.hanging DIRECTORY [FAULT...]    # by default every fault

A hang's recording is in DIRECTORY/FAULT, with ``fault.json``, which says what was done to whom, and
the ranks' output in ``rank_N.log``. One process imports megatron and forks the ranks. Sends and
receives are recorded, except with HYPERGRID_RECORD_P2P=0. With HANGING_ON=cuda over NCCL: ranks
share the GPUs that are there.
"""

import json
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import compat

compat.install()
from tests.support import ROOT, forked, hung  # noqa: E402

sys.path[:0] = [str(ROOT / "scripts")]
import train_gpt  # noqa: E402

import hypergrid  # noqa: E402
from hypergrid.hangs import record  # noqa: E402

RANKS = 8
RANK = 5  # who does it: tp=1 dp=0 pp=1
STEP = 3  # in which it does it
MODEL = "--tp 2 --pp 2 --steps 6 --global-batch-size 8 --layers 2 --hidden-size 32 --seq-length 32"
torch_all_reduce = dist.all_reduce
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
        def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, **options):
            if begun() and group is None and tensor.numel() == 1 and op == dist.ReduceOp.MAX:
                return act(tensor)
            return torch_all_reduce(tensor, op, group, **options)

        dist.all_reduce = all_reduce

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
    isend = dist.isend
    batch_isend_irecv = dist.batch_isend_irecv
    sent_twice = []

    def twice(tensor, dst=None, group=None, tag=0, **options):
        if begun() and not sent_twice:
            sent_twice.append(isend(tensor, dst, group, tag, **options))
        return isend(tensor, dst, group, tag, **options)

    dist.isend = dist.distributed_c10d.isend = twice

    def batch_twice(operations):
        if begun() and not sent_twice:
            sends = [operation for operation in operations if operation.op is not dist.irecv]
            sent_twice.extend(sends)
            operations = [*sends, *operations]
        return batch_isend_irecv(operations)

    dist.batch_isend_irecv = batch_twice


def end_by(number):
    return lambda: os.kill(os.getpid(), number)


def fail():
    raise ValueError("the batch holds a token that is not in the vocabulary")


def spin():
    while True:
        pass


def twice(tensor):
    torch_all_reduce(tensor, dist.ReduceOp.MAX)
    torch_all_reduce(tensor, dist.ReduceOp.MAX)


def other_dtype(tensor):
    torch_all_reduce(tensor.double())


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
    "size": (RANK, in_the_losses(lambda tensor: torch_all_reduce(tensor.repeat(3)))),
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
    culprit, _ = FAULTS[fault]
    begun = directory / "begun"
    with socket.create_server(("127.0.0.1", 0), backlog=RANKS) as listener:
        run = partial(_rank, fault=fault, directory=directory, listener=listener, begun=begun)
        with hung.forked(RANKS, run) as rank_of:
            hung.wait_for(begun.exists, seconds, "the fault did not happen")
            is_busy = fault in RESTLESS
            resting = [pid for pid, rank in rank_of.items() if rank != culprit or not is_busy]
            hung.wait_for_rest(resting, seconds)
            hung.ask(rank_of, directory, seconds)
    (directory / "fault.json").write_text(json.dumps({"fault": fault, "rank": culprit}))


def _rank(rank, fault, directory, listener, begun):
    """One rank, as a script: what is uncaught reaches sys.excepthook and ends it."""
    log = os.open(directory / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
        record._LOOK = hung._LOOK
        hypergrid.record(directory)
        culprit, arm = FAULTS[fault]
        if rank == culprit:
            arm(_begins(begun))
        if os.environ.get("HANGING_ON") == "cuda":
            forked._start(rank, RANKS, listener, "")
            torch.cuda.set_device(forked.device_of(rank))
            store = dist.FileStore(str(directory / "store"), RANKS)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS)
        else:
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
    spy = mock.Mock(wraps=train_gpt.micro_batches)
    train_gpt.micro_batches = spy

    def has_come():
        *_, step = spy.call_args.args if spy.called else (0,)
        if step >= STEP:
            begun.touch()
        return step >= STEP

    return has_come


def main(directory, *faults):
    os.environ.setdefault("HYPERGRID_RECORD_P2P", "1")
    for fault in faults or FAULTS:
        start = time.monotonic()
        hang(fault, Path(directory, fault.replace(" ", "_")))
        print(f"{fault}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
