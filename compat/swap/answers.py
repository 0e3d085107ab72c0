"""What the ranks of a shadow run tell each other and print; no rank waits for the others."""

from __future__ import annotations

import atexit
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
_WAIT = 10.0  # seconds for the answers of the other ranks
_COMPARED = (
    "Compared: names, arguments and defaults of the replaced modules; of the groups the ranks, "
    "backend, description, timeout and options; aliases; the results of all getters, also with "
    "flags and vp_stage; with replaced functions, the order of their calls. Not compared: groups "
    "of HyperCommGrid and groups that are created later."
)
_store: Any = None  # that the ranks share, kept for the end of the process
_failure = ""  # of the last initialisation, in words
_compared = False  # whether an initialisation was compared


def is_wanted() -> bool:
    """Whether the environment asks for a shadow run."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


@contextmanager
def failure_noted() -> Iterator[None]:
    """Note an error of stock's initialisation, for the line at the end of the process."""
    global _failure, _store
    from hypergrid.agreement import store as stores

    _store = stores.shared_store()
    try:
        yield
    except BaseException as error:
        _failure = f"initialize_model_parallel failed, {type(error).__name__}: {error}"
        raise


def report_at_exit() -> None:
    """Let this process say at its end if nothing was compared. *Local*; idempotent."""
    atexit.unregister(_say_at_exit)
    atexit.register(_say_at_exit)


def _say_at_exit() -> None:
    """One line of the lowest rank that is left, if none of its initialisations was compared."""
    rank = int(os.environ.get("RANK", "0"))
    is_helper = multiprocessing.parent_process() is not None and _store is None
    if _compared or is_helper or (_store is None and rank):
        return
    # The lower ranks come first; one that was killed does not come.
    time.sleep(min(rank, 10) / 10)
    is_first = True
    with suppress(RuntimeError):  # the store is lost with the rank that served it
        is_first = _store is None or _store.add("hypergrid/shadow/end", 1) == 1
    if is_first:
        why = _failure or "the script did not call initialize_model_parallel"
        print(f"{_PREFIX}rank {rank}: nothing was compared: {why}.", flush=True)


def report(call: int, ranks: Sequence[int], summary: str, differences: list[str]) -> None:
    """Print at the first rank what all ranks found, without waiting for them. *Collective*.

    If differences end the job, every rank waits for the others, ten seconds at most.
    """
    global _compared
    import torch.distributed as dist

    _compared = True
    rank = dist.get_rank()
    answer = _Answers(f"hypergrid/shadow/{call}/{ranks[0]}", ranks, rank, summary)
    answer.give(differences)
    if os.environ.get(VARIABLE) == "strict":
        lines, is_same = answer.collected()
        if rank == ranks[0]:
            print("\n".join(lines), flush=True)
        if not is_same:
            raise RuntimeError(
                f"rank {rank} ends the job, as {VARIABLE}=strict asks: {' '.join(lines[:2])}"
            )
    elif rank == ranks[0]:
        # No daemon: a process that ends early still prints the line.
        threading.Thread(target=answer.say, name="hypergrid shadow").start()


class _Answers:
    """The answers of all ranks to one comparison, in the store that they share."""

    def __init__(self, key: str, ranks: Sequence[int], rank: int, summary: str) -> None:
        self._key = key
        self._ranks = ranks
        self._rank = rank
        self._summary = summary
        self._own: list[str] = []

    def give(self, differences: list[str]) -> None:
        """Tell the others what this rank found."""
        from hypergrid.agreement import store as stores

        self._own = [f"rank {self._rank}: {row}." for row in differences[:_LINES_OF_A_RANK]]
        if _store is None:
            return
        for line in self._own:
            stores.append(_store, f"{self._key}/lines", line)
        if differences:
            _store.add(f"{self._key}/different", 1)
        _store.set(f"{self._key}/{self._rank}", "")
        _store.add(f"{self._key}/ranks", 1)

    def say(self) -> None:
        """Print the lines, when all ranks have answered or after ten seconds."""
        lines, _ = self.collected()
        print("\n".join(lines), flush=True)

    def collected(self) -> tuple[list[str], bool]:
        """What all ranks found, in lines; and whether all have answered that nothing differs."""
        answered = 1
        different = int(bool(self._own))
        lines = self._own
        missing = [rank for rank in self._ranks if rank != self._rank]
        with suppress(RuntimeError):  # the store is lost: what is known counts
            if _store is not None:
                answered, different, lines, missing = self._from_store()
        total = len(self._ranks)
        heard = f"{total} ranks" if answered == total else f"{answered} ranks that answered"
        if different:
            verdict = f"would differ from stock on {different} of {heard}. Stock's groups are used."
        elif missing:
            verdict = f"undecided: the same groups on {heard}."
        else:
            verdict = f"would have created the same groups on all {heard}: {self._summary}."
        if missing:
            verdict += f" {len(missing)} of {total} ranks did not answer: {few(missing)}."
        more = len(lines) - _LINES_IN_ALL
        rest = [f"and {more} more."] if more > 0 else []
        compared = [] if different else [_COMPARED]
        text = " ".join([f"{_PREFIX}{verdict}", *compared])
        return [text, *lines[:_LINES_IN_ALL], *rest], not different and not missing

    def _from_store(self) -> tuple[int, int, list[str], list[int]]:
        from hypergrid.agreement import store as stores

        deadline = time.monotonic() + _WAIT
        # By looking: a wait in the store would keep other threads from it.
        while (answered := _store.add(f"{self._key}/ranks", 0)) < len(self._ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05 if len(self._ranks) < 1000 else 0.5)
        missing = []
        if answered < len(self._ranks):
            missing = [r for r in self._ranks if not _store.check([f"{self._key}/{r}"])]
        different = _store.add(f"{self._key}/different", 0)
        lines = stores.lines(_store, f"{self._key}/lines") if different else []
        return answered, different, lines, missing
