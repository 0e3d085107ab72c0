"""The recorded calls of all ranks in Chrome's trace format, for Perfetto and chrome://tracing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypergrid.hangs.reading import Call, Recording
from hypergrid.hangs.verdict import coordinate
from hypergrid.plan import GroupPlan


def trace_events(recording: Recording, plan: GroupPlan | None = None) -> dict[str, Any]:
    """One process a rank, named by its host and coordinates; a thread more where calls overlap.

    Times are whole microseconds since the first call. Where the end of a call is not recorded, it
    lasts to the rank's next call, and ``args`` say so; one that is not done lasts to the end.
    """
    calls_of_all = [call for mine in recording.ranks.values() for call in mine.calls]
    begin = min((call.created for call in calls_of_all), default=0)
    latest = max((max(call.created, call.completed) for call in calls_of_all), default=0)
    latest = max([latest, *(mine.written for mine in recording.ranks.values())])
    events: list[dict[str, Any]] = []
    for rank, mine in recording.ranks.items():
        place = " ".join(f"{dim}={at}" for dim, at in coordinate(recording, plan, rank).items())
        name = f"rank {rank} {place}".strip() + (f" on {mine.host}" if mine.host else "")
        for kind, args in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": rank}),
        ):
            events.append({"ph": "M", "pid": rank, "tid": 0, "name": kind, "args": args})
        lanes: list[int] = []  # when the last call of each thread ends
        calls = sorted(mine.calls, key=lambda call: call.created)
        for call, following in pairwise([*calls, None]):
            assert call is not None
            after = following.created if following else latest
            end = call.completed or (after if call.done else latest)
            start, end = ((ns - begin) // 1000 for ns in (call.started or call.created, end))
            end = max(end, start + 1)
            lane = next((i for i, free in enumerate(lanes) if free <= start), len(lanes))
            lanes[lane : lane + 1] = [end]
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": lane + 1,  # 0 is the thread with the number of its process, in Perfetto
                    "ts": start,
                    "dur": end - start,
                    "name": f"{call.what.name} {recording.groups[call.group].label}",
                    "cat": "p2p" if call.p2p else "collective",
                    "args": _args(recording, call),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _args(recording: Recording, call: Call) -> dict[str, Any]:
    what, group = call.what, recording.groups[call.group]
    end = "recorded" if call.completed else "not recorded" if call.done else "not done"
    args = {"number": call.seq, "group": group.name, "end": end, "detail": what.detail}
    sizes = {"inputs": f"{what.inputs} {what.input_dtypes}", "outputs": what.outputs}
    return {**args, "ranks": list(group.ranks or ())[:64], **sizes}
