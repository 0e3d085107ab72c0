"""A real hang's calls as a program of the simulator: do both come to rest in the same place?"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hypergrid.hangs.recording import DEFAULT, Call, Recording
from tests.support.programs import Op, Program

# What a rank does that calls nothing any more.
FAULTS = {
    "stopped": "stop",
    "killed": "die",
    "ended": "die",
    "sleeping": "stuck",
    "spinning": "stuck",
    "slow": "slow",
    "raised": "raise",
    "raised and stays": "raise",
}


def program(recording: Recording, other: Recording, fault: str, rank: int) -> Program:
    """What the ranks of a recording called. Of one without a dump it is in the other recording."""
    calls = {
        each: (recording if recording.ranks[each].calls else other).ranks[each].calls
        for each in range(recording.world_size)
    }
    # The members are in the files of groups, and not of the default group.
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for group in recording.groups.values():
        whole = tuple(range(recording.world_size))
        ranks = group.ranks or (whole if group.label == DEFAULT else ())
        groups[group.label] += [ranks] * (bool(ranks) and ranks not in groups[group.label])
    ops = [[*_ops(calls[each])] for each in range(recording.world_size)]
    ops[rank] += [Op(FAULTS[fault])] if fault in FAULTS else []
    guilty = {rank: fault}
    return Program(ops, dict(groups), [], nccl=False, stacks=True, guilty=guilty)


def _ops(calls: Sequence[Call]) -> list[Op]:
    """Sends and receives without a collective between them are one batch."""
    found: list[Op] = []
    for call in calls:
        name, _, detail = call.title.text.partition("|")[0].partition(":")[2].partition(" ")
        sizes, dtypes = json.loads(call.what.inputs), re.findall(r"\w+", call.what.input_dtypes)
        size = 1
        for each in sizes[0] if sizes else ():
            size *= each
        op = Op(name, call.title.label, size, (dtypes or ["Float"])[0])
        if not call.p2p:
            found.append(op)
            continue
        op = replace(op, peer=int(re.findall(r"\d+", detail)[1]))
        before = found.pop().inside if found and found[-1].inside else ()
        found.append(Op("batch", op.group, inside=(*before, op)))
    return found


def unfinished(recording: Recording) -> dict[int, Counter[tuple[str, str, int]]]:
    """The calls of each rank that have not ended: label, name and number."""
    return {
        rank: Counter(
            (call.title.label, call.what.name + call.what.detail, call.seq)
            for call in mine.calls
            if not call.done
        )
        for rank, mine in recording.ranks.items()
    }
