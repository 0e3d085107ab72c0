"""The sentences of a verdict, and the words in them: ranks with their verbs, places, durations.

A sentence is a template, whose fields ``verdict`` fills in. A field of ranks has the verb for one
rank and that for several: ``{inside:waits|wait}`` is "rank 3 waits", or "ranks 2..3 wait".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hypergrid.hangs.recording import Call, Frame
from hypergrid.layout import span_of

_KEEPS = (
    "Torch keeps calls with TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before torch "
    "2.9) in the job's environment."
)
SENTENCES = {
    # What is wrong.
    "ok": "nobody is stuck: {recorded} made {calls:,} calls.",
    "ended": "nobody is stuck: {recorded} made {calls:,} calls, and the script of every rank "
    "ended, none by an exception.",
    "empty": "no rank has written what it was doing: no flight recorder, stack or error. Ranks "
    "that still run and record by hypergrid.record write on hypergrid diagnose --ask DIR. "
    + _KEEPS,
    "no calls": f"no collective is recorded. {_KEEPS}",
    "slow": "{inside:has|have} waited in {call}{lasting}, with equal calls.",
    "certainly slow": "{inside:has|have} waited in {call}{lasting}, with equal calls, so nobody "
    "is missing. It is slow, or the network under it does not answer.",
    "outside": "{inside:waits|wait} in {call}{lasting}, whose {outside:is|are} outside of this "
    "job.",
    "mismatch": "{named} called {different} as #{seq} of {group}, where {others} called {other}."
    "{evidence}",
    "departed": "{named} called {departed}, where {due} is next.{evidence}",
    "deadlock": "Deadlock: {circle:waits|wait} for each other in {calls}.",
    "missing": "{named} {missing}; {it} {where}",
    # What the rank did in earlier steps, and others that had done the same.
    "peers": " There {peers} that had done the same until then called {due}.",
    "peers and before": " There {peers} that had done the same until then called {due}, as rank "
    "{rank_departed} did in earlier steps.",
    "before": " There rank {rank_departed} called {due_name} in earlier steps.",
    # The call in which the rank is missed.
    "missed": "never entered {call}, in which {inside:has|have} waited{lasting}",
    "missed send": "never received what {inside:has|have} waited for in {call}{lasting}",
    "missed recv": "never sent what {inside:has|have} waited for in {call}{lasting}",
    "missed unrecorded": "did not take part in {function}, in which {guessing:waits|wait}",
    # Where the rank is.
    "rank raised": "raised {error}.",
    "rank no dump": "left no dump: ended, stopped or unreachable{process}.",
    "rank never entered": "{state}{last}.",
    # The lines that follow.
    "line": "{call}: {entered:is in it and waits|are in it and wait} for {missed}.",
    "call at": "rank {rank} made the call in {place}.",
    "stack": "rank {rank} is in {place}.",
}
NEXT = {
    "mismatch": "compare the lines of the script that make these two calls.",
    "order": "find the condition in the script that only some ranks meet before these calls.",
    "raised": "read the error in the output of {ranks}.",
    "no dump": "look for {ranks} in the kernel's log of the host, and in the scheduler's log.",
    "outside": "look at the process that is that member, such as an inference engine.",
    "never entered": "read the stack of {ranks}, and ask again: if the rank is only slow, the "
    "number of its last call grows.",
    "root": "compare the roots that the ranks name, then look at the network and the devices.",
    "slow": "look at the network and the devices of the ranks in that call.",
}
DOUBTS = {
    "unlisted": "that member may be a rank of this job that did not create the group",
    "sounds": "the error of {ranks} may come from another rank, whose clock is behind",
    "alone": "nobody is seen to wait for {ranks}",
    "partial": "a rank may be missing that these files do not show",
    "root": "torch does not record roots, and the ranks may have named different ones",
    "mixed": "{mixed}. The files seem to be of two jobs, or of two starts: use those of one",
    "old": "a dump of {ranks} was written before that call, or while the rank still worked, and "
    "the rank may have come since. Have all ranks write at the same time",
    "hidden": "ranks may wait for others in a call that is not recorded. HYPERGRID_RECORD_P2P=1 "
    "records the sends and receives of gloo",
    "blind": "the flight recorder of {blind} is missing or cut, and what was called there is not "
    "known",
    "either": "{ranks} may be right, and another rank made a call too many or too few",
    "which": "which of them did not do what was due cannot be seen",
}
# Torch, in whichever directory it is (a job's own may be called torch too), the standard library,
# which has no relative paths, and this package.
_FOREIGN = re.compile(
    r"/torch/(_\w+|amp|autograd|cuda|distributed|fx|multiprocessing|nn|optim|utils|functional\.py)\b"
    r"|/hypergrid/(groups|agreement|hangs)/|/lib/python[^/]*/(?!(site|dist)-packages)|^<frozen"
)


class Members:
    """Ranks in a sentence; formatted by a verb for one and one for several, these follow them."""

    def __init__(self, ranks: Iterable[int], noun: str = "rank") -> None:
        self.ranks = sorted(ranks)
        self.noun = noun

    def __format__(self, verbs: str) -> str:
        singular, _, plural = verbs.partition("|")
        text = f"{self.noun}s {shortened_span(self.ranks)} {plural}"
        if len(self.ranks) == 1:
            text = f"{self.noun} {self.ranks[0]} {singular}"
        return text.rstrip()


def shortened_span(ranks: Sequence[int]) -> str:
    """Ascending ranks, such as "0..3, 8"; of many the first and the last."""
    spaced = span_of(ranks).replace(",", ", ")
    if len(spaced) > 40:
        return f"{ranks[0]}..{ranks[-1]} ({len(ranks)} ranks)"
    return spaced


def counted(number: int, noun: str) -> str:
    """Such as "1 call" and "2 calls"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def lasting(ns: int) -> str:
    """A duration, in two units at most."""
    seconds = ns / 1e9
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def place_of(stack: Sequence[Frame]) -> str:
    """The innermost frame of the job's own code: neither torch's nor the standard library's."""
    own_frames = (frame for frame in stack if not _FOREIGN.search(frame.file))
    shown = next(own_frames, stack[0])
    return f"{shown.function} ({shown.file}:{shown.line})"


def difference(call: Call, other_call: Call) -> str:
    """A call by that in which it differs from another: "all_reduce of size [4]"."""
    operation = call.what
    other_operation = other_call.what
    if operation.name != other_operation.name:
        return operation.name
    if operation.detail != other_operation.detail:
        return f"{operation.name} with {operation.detail or 'no root'}"
    kind = "size"
    values = (operation.inputs, operation.outputs)
    if values == (other_operation.inputs, other_operation.outputs):
        kind = "dtype"
        values = (operation.input_dtypes, operation.output_dtypes)
    # Inputs and outputs are mostly the same. The text of a list of lists is "[[4]]".
    texts = [value[1:-1].replace("'", "") or "none" for value in dict.fromkeys(values)]
    return f"{operation.name} of {kind} {' -> '.join(texts)[:80]}"
