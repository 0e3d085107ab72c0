"""A real hang's calls as a program of the simulator: do both come to rest in the same place?"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
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


def program(recording: Recording, fallback: Recording, fault: str, guilty_rank: int) -> Program:
    """What the ranks of a recording called; of a rank without a dump, what the fallback has."""
    world = range(recording.world_size)
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for group in recording.groups.values():
        # The members are in the files of groups, and not of the default group.
        members = group.ranks
        if not members and group.label == DEFAULT:
            members = tuple(world)
        if members and members not in groups[group.label]:
            groups[group.label].append(members)
    ops = []
    for rank in world:
        calls = recording.ranks[rank].calls or fallback.ranks[rank].calls
        ops.append(_ops(calls))
    if fault in FAULTS:
        ops[guilty_rank].append(Op(FAULTS[fault]))
    return Program(ops, dict(groups), [], nccl=False, stacks=True, guilty={guilty_rank: fault})


def _ops(calls: Iterable[Call]) -> list[Op]:
    """Sends and receives without a collective between them are one batch."""
    ops: list[Op] = []
    for call in calls:
        sizes = json.loads(call.what.inputs)
        dtypes = re.findall(r"\w+", call.what.input_dtypes) or ["Float"]
        size = math.prod(sizes[0]) if sizes else 1
        op = Op(call.what.name, call.title.label, size, dtypes[0])
        if not call.p2p:
            ops.append(op)
            continue
        # The detail is "0->1" or "1<-0": the second number is the peer in both.
        _, peer = re.findall(r"\d+", call.what.detail)
        part = replace(op, peer=int(peer))
        if ops and ops[-1].parts:
            ops[-1] = replace(ops[-1], parts=(*ops[-1].parts, part))
        else:
            ops.append(Op("batch", op.group, parts=(part,)))
    return ops


def unfinished(recording: Recording) -> dict[int, Counter[tuple[str, str, int]]]:
    """The calls of each rank that have not ended: label, name and number."""
    unfinished_calls = {}
    for rank, rank_recording in recording.ranks.items():
        unfinished_calls[rank] = Counter(
            (call.title.label, call.what.name + call.what.detail, call.seq)
            for call in rank_recording.calls
            if not call.done
        )
    return unfinished_calls
