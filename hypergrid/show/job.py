"""A job's recording for the page: a plan, its hosts, and what is wrong."""

from __future__ import annotations

from itertools import islice
from typing import Any

from hypergrid.hangs.recording import Call, RankRecording, Recording
from hypergrid.hangs.sentences import lasting
from hypergrid.hangs.verdict import Diagnosis
from hypergrid.layout import RankLayout
from hypergrid.messages import few
from hypergrid.plan import GroupPlan, GroupRow, Ranks
from hypergrid.topology import Topology

_LAST = 10  # calls shown of each rank


def plan_of(recording: Recording) -> GroupPlan:
    """A plan with the groups that were recorded, for a job whose own plan is not known."""
    layout = RankLayout(("rank",), (recording.world_size,))
    # A group on two backends is there for each of them.
    groups_of_label: dict[str, dict[Ranks, None]] = {}
    for group in recording.groups.values():
        # A group of a damaged recording may name ranks that the job does not have.
        if group.ranks and all(rank in layout for rank in group.ranks):
            groups_of_label.setdefault(group.shown, {})[group.ranks] = None
    rows = []
    for label, groups in groups_of_label.items():
        rows.append(GroupRow(label, "ranks", (), explicit=tuple(groups)))
    return GroupPlan({"ranks": layout}, tuple(rows))


def hosts_of(recording: Recording, plan: GroupPlan) -> Topology:
    """The hosts of the plan's ranks."""
    hosts = []
    for rank in plan.window:
        rank_recording = recording.ranks.get(rank, RankRecording(rank))
        hosts.append(rank_recording.host or "host not known")
    return Topology(plan.layout, hosts)


def page_data(recording: Recording, diagnosis: Diagnosis) -> dict[str, Any]:
    """The data that ``page`` takes as ``job``."""
    findings = {}
    calls: dict[int, list[str]] = {}
    for rank, rank_recording in recording.ranks.items():
        findings[rank] = _findings(rank_recording, diagnosis)
        # The newest call comes first.
        calls[rank] = []
        for call in islice(reversed(rank_recording.calls), _LAST):
            calls[rank].append(_in_words(recording, call))
    return {
        "sentence": diagnosis.sentence,
        "chain": diagnosis.chain,
        "problems": diagnosis.problems,
        "ranks": diagnosis.ranks,
        "states": diagnosis.states,
        "told": findings,
        "calls": calls,
    }


def _findings(rank_recording: RankRecording, diagnosis: Diagnosis) -> list[str]:
    """Why a rank does not go on: its error, the ranks that it waits for, the top of its stack."""
    lines = []
    if rank_recording.error:
        lines.append(rank_recording.error)
    waits_for = diagnosis.waiting.get(rank_recording.rank)
    if waits_for:
        lines.append(f"waits for {few(waits_for)}")  # of thousands, perhaps
    for frame in rank_recording.stack[:6]:
        place = f"{frame.file}:{frame.line}"
        lines.append(f"{frame.function} ({place})")
    return lines


def _in_words(recording: Recording, call: Call) -> str:
    operation = call.what
    state = "done" if call.done else "not done"
    if call.done and call.started and call.completed:
        duration = lasting(call.completed - call.started)
        state += f", {duration}"
    group = recording.groups[call.group].shown
    text = f"{operation.name} {operation.detail} #{call.seq} of {group}"
    return f"{text}: {state}; {operation.inputs}"
