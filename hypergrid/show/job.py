"""A job's recording for the page: a plan, its hosts, and what is wrong."""

from __future__ import annotations

from itertools import islice
from math import prod
from typing import Any

from hypergrid.hangs.reading import Call, RankRecording, Recording
from hypergrid.hangs.verdict import Diagnosis, lasting
from hypergrid.layout import RankLayout
from hypergrid.plan import GroupPlan, GroupRow

_LAST = 10  # calls shown of each rank


def plan_of(recording: Recording) -> GroupPlan:
    """A plan with the groups that were recorded, for a job whose own plan is not known."""
    by_label: dict[str, list[tuple[int, ...]]] = {}
    world = range(recording.world_size)
    for group in recording.groups.values():
        if group.ranks and all(rank in world for rank in group.ranks):
            by_label.setdefault(group.label, []).append(group.ranks)
    rows = (GroupRow(label, "ranks", (), explicit=tuple(some)) for label, some in by_label.items())
    return GroupPlan({"ranks": _layout_of(recording)}, tuple(rows))


def _layout_of(recording: Recording) -> RankLayout:
    """The dims that recorded groups over one dim show, if together they are all ranks."""
    steps: dict[int, tuple[str, int]] = {}  # how far apart the ranks of a dim are
    for group in recording.groups.values():
        if group.ranks and len(group.ranks) > 1 and len(group.dims) == 1:
            ranks, size = group.ranks, len(group.ranks)
            apart = ranks[1] - ranks[0]
            if ranks == tuple(range(ranks[0], ranks[0] + size * apart, apart or 1)):
                steps.setdefault(apart, (group.dims[0], size))
    found: dict[str, int] = {}
    while (many := prod(found.values())) in steps and steps[many][0] not in found:
        found[steps[many][0]] = steps[many][1]
    if not found or many != recording.world_size:
        found = {"rank": recording.world_size}
    return RankLayout(tuple(found), tuple(found.values()))


def hosts_of(recording: Recording, plan: GroupPlan) -> list[str]:
    """The host of each rank of the plan."""
    none = RankRecording(-1)
    return [recording.ranks.get(rank, none).host or "host not known" for rank in plan.window]


def page_data(recording: Recording, diagnosis: Diagnosis) -> dict[str, Any]:
    """The data that ``page`` takes as ``job``."""
    return {
        **{name: getattr(diagnosis, name) for name in ("sentence", "chain", "problems", "ranks")},
        "states": diagnosis.states,
        "told": {rank: _told(mine, diagnosis) for rank, mine in recording.ranks.items()},
        "calls": {
            rank: [_line(recording, call) for call in islice(reversed(mine.calls), _LAST)]
            for rank, mine in recording.ranks.items()
        },
    }


def _told(mine: RankRecording, diagnosis: Diagnosis) -> list[str]:
    told = [mine.error] if mine.error else []
    others = diagnosis.waiting.get(mine.rank)
    if others:
        told.append(f"waits for {', '.join(map(str, others[:8]))}{', ...' * (len(others) > 8)}")
    return told + [f"{f.function} ({f.file}:{f.line})" for f in mine.stack[:6]]


def _line(recording: Recording, call: Call) -> str:
    what = call.what
    lasts = f", {lasting(call.completed - call.started)}" * bool(call.started and call.completed)
    state = f"done{lasts}" if call.done else "not done"
    label = recording.groups[call.group].label
    return f"{what.name} {what.detail} #{call.seq} of {label}: {state}; {what.inputs}"
