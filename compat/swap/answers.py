"""What the ranks of a shadow run tell each other and print; no rank waits for the others."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hypergrid.messages import few

VARIABLE = "HYPERGRID_SHADOW"
_PREFIX = "hypergrid (shadow): "
_LINES_OF_A_RANK = 8
_LINES_IN_ALL = 20
_END = "hypergrid/shadow/end"  # in the store; counts the ranks that have something to say
_WAIT = 9.0  # seconds for the answers of the other ranks; they wait one more for the verdict
_COMPARED = (
    "Compared: names, arguments and defaults of the replaced modules; of the groups the ranks, "
    "backend, description, timeout and options; private globals, the environment, and the results "
    "of all getters, also with flags and vp_stage, by value and type; with replaced functions, the "
    "order of their calls. docs/swap.md lists what is not compared."
)
_store: Any = None  # that the ranks share, kept for the end of the process
# Why nothing was compared; empty as soon as an initialisation was.
_reason = "the script did not call initialize_model_parallel"


def is_wanted() -> bool:
    """Whether the environment asks for a shadow run."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


@contextmanager
def failure_noted() -> Iterator[None]:
    """Note an error of stock's initialisation, for the line at the end of the process."""
    global _reason
    _keep_store()
    try:
        yield
    except BaseException as error:
        if _reason:
            _reason = f"initialize_model_parallel failed, {type(error).__name__}: {error}"
        raise


def _keep_store() -> None:
    """Keep the store that the ranks share: the default group may be gone at the end."""
    global _store
    from hypergrid.agreement import store as stores

    _store = stores.shared_store() or _store


def say_at_exit() -> None:
    """Say at the end of the process if nothing was compared: the lowest rank that is left. *Local*.

    Without a store rank 0 alone speaks, and not the processes that it starts for its data.
    """
    global _reason
    rank = int(os.environ.get("RANK", "0"))
    _keep_store()  # the script may have failed before its first initialisation
    is_silent = _store is None and (rank > 0 or multiprocessing.parent_process() is not None)
    if is_silent or not _reason:
        return
    # The lower ranks come first; one that was killed does not come.
    time.sleep(min(rank, 10) / 10)
    # The store is lost with the rank that served it, which spoke when it ended.
    with suppress(RuntimeError):
        if _store is None or _store.add(_END, 1) == 1:
            print(f"{_PREFIX}rank {rank}: nothing was compared: {_reason}.", flush=True)
    _reason = ""  # a module that was loaded twice asks twice


def report(call: int, ranks: Sequence[int], summary: str, differences: list[str]) -> None:
    """Print at the first rank what all ranks found, without waiting for them. *Collective*.

    If differences end the job, every rank waits for the others, ten seconds at most.
    """
    global _reason
    import torch.distributed as dist

    _reason = ""
    rank = dist.get_rank()
    key = f"hypergrid/shadow/{call}/{ranks[0]}"
    lines = [f"rank {rank}: {difference}." for difference in differences[:_LINES_OF_A_RANK]]
    with suppress(RuntimeError):  # the store is lost with the rank that served it
        if _store is not None:
            _store.set(f"{key}/{rank}", "\n".join(lines))
            _store.add(_END, 1)  # a rank that never initialises does not say that nothing was
    if rank == ranks[0]:
        # No daemon: a process that ends early still prints the line.
        arguments = (key, ranks, lines, summary)
        threading.Thread(target=_conclude, args=arguments, name="hypergrid shadow").start()
    if os.environ.get(VARIABLE) == "strict":
        verdict = f"undecided: rank {ranks[0]} did not answer"
        if _has([f"{key}/verdict"], _WAIT + 1):
            verdict = _store.get(f"{key}/verdict").decode()
        if verdict:
            raise RuntimeError(f"rank {rank} ends the job, as {VARIABLE}=strict asks: {verdict}")


def _conclude(key: str, ranks: Sequence[int], lines: list[str], summary: str) -> None:
    """Print what all ranks found, and tell them whether anything differs."""
    keys = {rank: f"{key}/{rank}" for rank in ranks}
    lines_of_rank = {ranks[0]: lines}
    _has([*keys.values()], _WAIT)
    for rank, key_of_rank in keys.items():
        if _has([key_of_rank]):
            lines_of_rank[rank] = _store.get(key_of_rank).decode().splitlines()
    missing = [rank for rank in ranks if rank not in lines_of_rank]
    answered = len(lines_of_rank)
    different = 0
    printed = []
    for rank_lines in lines_of_rank.values():
        if rank_lines:
            different += 1
            printed += rank_lines
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
    if _store is not None:
        # What ends a strict run on the other ranks, and nothing if all is well.
        refusal = ""
        if different or missing:
            refusal = ". ".join([verdict, *printed[:1]])
        _store.set(f"{key}/verdict", refusal)


def _has(keys: list[str], seconds: float = 0.0) -> bool:
    """Whether the store has all keys before so much time is over."""
    deadline = time.monotonic() + seconds
    while _store is not None:
        # By asking again and again: a wait in the store would keep other threads from it. A store
        # that is lost with its rank raises RuntimeError, and has no keys.
        with suppress(RuntimeError):
            if _store.check(keys):
                return True
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05 + len(keys) / 20_000)
    return False
