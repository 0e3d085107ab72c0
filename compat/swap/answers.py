"""What the ranks of a shadow run tell each other and print; no rank waits for the others."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from hypergrid.messages import few

VARIABLE = "HYPERGRID_SHADOW"
_PREFIX = "hypergrid (shadow): "
_LINES_OF_A_RANK = 8
_LINES_IN_ALL = 20
_WAIT = 9.0  # seconds for the answers of the other ranks
_COMPARED = (
    "Compared: names, arguments and defaults of the replaced modules; of the groups the ranks, "
    "backend, description, timeout and options; private globals, the environment, and the results "
    "of all getters, also with flags and vp_stage, by value and type. docs/swap.md lists what is "
    "not compared."
)
# Why nothing was compared; empty as soon as an initialisation was.
_reason = "the script did not call initialize_model_parallel"


def is_wanted() -> bool:
    """Whether the environment asks for a shadow run."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


@contextmanager
def failure_noted() -> Iterator[None]:
    """Note an error of stock's initialisation, for the line at the end of the process."""
    global _reason
    try:
        yield
    except BaseException as error:
        if _reason:
            _reason = f"initialize_model_parallel failed, {type(error).__name__}: {error}"
        raise


def say_at_exit() -> None:
    """Say at the end of rank 0 if nothing was compared. *Local*.

    The processes that it starts for its data are silent.
    """
    global _reason
    is_rank_0 = os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None
    if is_rank_0 and _reason:
        print(f"{_PREFIX}rank 0: nothing was compared: {_reason}.", flush=True)
    _reason = ""  # a module that was loaded twice asks twice


def report(call: int, ranks: Sequence[int], summary: str, differences: list[str]) -> None:
    """Print at the first rank what all ranks found, without waiting for them. *Collective*."""
    global _reason
    import torch.distributed as dist

    from hypergrid.agreement import store as stores

    _reason = ""
    store = stores.shared_store()
    rank = dist.get_rank()
    key = f"hypergrid/shadow/{call}/{ranks[0]}"
    lines = [f"rank {rank}: {difference}." for difference in differences[:_LINES_OF_A_RANK]]
    with suppress(RuntimeError):  # the store is lost with the rank that served it
        if store is not None:
            store.set(f"{key}/{rank}", "\n".join(lines))
    if rank == ranks[0]:
        # No daemon: a process that ends early still prints the line.
        arguments = (store, key, ranks, lines, summary)
        threading.Thread(target=_conclude, args=arguments, name="hypergrid shadow").start()


def _conclude(store: Any, key: str, ranks: Sequence[int], lines: list[str], summary: str) -> None:
    """Print what all ranks found."""
    keys = {rank: f"{key}/{rank}" for rank in ranks}
    lines_of_rank = {ranks[0]: lines}
    deadline = time.monotonic() + _WAIT
    with suppress(RuntimeError):  # the store is lost with the rank that served it
        if store is not None:
            # By asking again and again: a wait in the store would keep other threads from it.
            while not store.check([*keys.values()]) and time.monotonic() < deadline:
                time.sleep(0.2)
            for rank, key_of_rank in keys.items():
                if store.check([key_of_rank]):
                    lines_of_rank[rank] = store.get(key_of_rank).decode().splitlines()
    missing = [rank for rank in ranks if rank not in lines_of_rank]
    answered = len(lines_of_rank)
    different = sum(map(bool, lines_of_rank.values()))
    printed = [*chain.from_iterable(lines_of_rank.values())]
    if len(printed) > _LINES_IN_ALL:
        printed[_LINES_IN_ALL:] = ["..."]
    note = _COMPARED
    if different:
        verdict = f"would differ from stock on {different} of {answered} ranks"
        note = "Stock's groups are used."
    elif missing:
        verdict = f"undecided: the same groups on {answered} of {len(ranks)} ranks"
    else:
        verdict = f"would have created the same groups on all {len(ranks)} ranks: {summary}"
    if missing:
        verdict += f"; not answered: {few(missing)}"
    print("\n".join([f"{_PREFIX}{verdict}. {note}", *printed]), flush=True)
