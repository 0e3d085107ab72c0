"""Random programs of many ranks, one of which does something wrong, and the dumps they leave.

It knows nothing of how hangs are diagnosed: ``random_program`` writes what each rank calls, ``run``
lets them meet until nobody can move, and ``write`` saves what torch's flight recorder and
``hypergrid.record`` would have left. A collective ends when all members are in it with equal
arguments, a send when its receive is there. With NCCL a rank enqueues calls until it needs a
result, and its device makes them in order; with gloo it waits in each call.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

SECOND = 10**9
START = 1_790_000_000 * SECOND
NO_COMMUNICATION = ("raise", "die", "stop", "slow", "stuck")
OTHER_CALLS = ("skip", "extra", "swap", "group", "peer", "size", "dtype", "operation")
FAULTS = (*OTHER_CALLS, *NO_COMMUNICATION)
_TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
_BUFFERS = "/job/megatron/core/distributed/param_and_grad_buffer.py"
_RECORDED = {"_allgather_base": "_all_gather_base"}  # as recorders and their readers call it
_SHARED = ("all_reduce", "all_gather", "_allgather_base", "_reduce_scatter_base", "broadcast")


@dataclass(frozen=True)
class Op:
    """One line of a program: a call, or what is done between calls.

    ``do`` is a collective, "send", "recv", "batch" (of the sends and receives ``inside``), "wait"
    (for all calls with ``later``), "sync" (the host needs a result) or one of NO_COMMUNICATION.
    ``peer`` is a place in the group.
    """

    do: str
    group: str = ""
    size: int = 4
    dtype: str = "Float"
    peer: int = -1
    later: bool = False
    inside: tuple[Op, ...] = ()
    line: int = 0
    root: int = 0  # torch does not record it

    @property
    def calls(self) -> bool:
        return bool(self.group or self.inside)


@dataclass
class Program:
    """What each rank calls, and how it runs and is recorded."""

    ops: list[list[Op]]
    groups: dict[str, list[tuple[int, ...]]]  # by label
    steps: list[list[int]]  # where each step of a rank begins
    nccl: bool = True
    timing: bool = False  # NCCL's recorder has starts
    eager: bool = False  # small sends end without their receive
    lenient: bool = False  # NCCL ends calls of different sizes or dtypes
    stacks: bool = False  # hypergrid.record writes
    p2p: bool = True  # what gloo sends is recorded
    frames: bool = True
    buffer: int = 2000
    prefix: str = ""  # of the names of calls, where it is not "nccl" or "gloo"
    guilty: dict[int, str] = field(default_factory=dict)  # the fault of a rank

    @property
    def world(self) -> int:
        return len(self.ops)


def random_program(rng: random.Random, *, steps: int = 4, most: int = 16) -> Program:
    """One script for all ranks of a random grid, as training has: steps of equal calls."""
    while True:
        sizes = {"tp": rng.choice((1, 2, 2, 4)), "dp": rng.choice((1, 2, 2, 3, 4))}
        sizes |= {"pp": rng.choice((1, 1, 2, 3, 4))}
        world = sizes["tp"] * sizes["dp"] * sizes["pp"]
        if 2 <= world <= most:
            break
    dims = [dim for dim in rng.choice((("tp", "dp", "pp"), ("tp", "pp", "dp"))) if sizes[dim] > 1]
    places = [
        dict(zip(dims, reversed(place), strict=True))
        for place in product(*(range(sizes[dim]) for dim in reversed(dims)))
    ]
    over = {"default_pg": dims} | {dim.upper(): [dim] for dim in dims}
    if len(dims) == 3:
        over["MODEL"] = [dim for dim in dims if dim != "dp"]
    groups = {label: [*_lines(places, along)] for label, along in over.items()}
    if sizes["pp"] > 2:
        groups["EMBEDDING"] = [(line[0], line[-1]) for line in groups["PP"]]
    script = _Script(rng, [*groups], steps)
    ops, begins = [], []
    for place in places:
        mine: list[Op] = [Op("barrier", "default_pg", line=3), *script.start]
        begins.append([])
        for step in range(steps):
            begins[-1].append(len(mine))
            mine += script.step(step, place.get("pp", 0), sizes["pp"])
        ops.append([each for each in mine if each.group != "EMBEDDING" or _is_end(place, sizes)])
        begins[-1] = [
            sum(each.group != "EMBEDDING" or _is_end(place, sizes) for each in mine[:at])
            for at in begins[-1]
        ]
    nccl = rng.random() < 0.5
    stacks = rng.random() < (0.5 if nccl else 0.8)
    return Program(
        ops,
        groups,
        begins,
        nccl,
        timing=rng.random() < 0.3,
        eager=nccl and rng.random() < 0.2,
        lenient=rng.random() < 0.2,
        stacks=stacks,
        p2p=nccl or (stacks and rng.random() < 0.7),
        frames=rng.random() < 0.8,
        buffer=2000 if rng.random() < 0.8 else rng.randint(30, 100),
    )


def _is_end(place: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    return place["pp"] in (0, sizes["pp"] - 1)


def _lines(places: Sequence[Mapping[str, int]], along: Sequence[str]) -> Iterator[tuple[int, ...]]:
    lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        lines[tuple(at for dim, at in place.items() if dim not in along)].append(rank)
    yield from map(tuple, lines.values())


class _Script:
    """The lines that all ranks share; what is random is drawn once."""

    def __init__(self, rng: random.Random, labels: list[str], steps: int) -> None:
        self.labels = [label for label in labels if label not in ("PP", "EMBEDDING")]
        inner = [label for label in self.labels if label not in ("default_pg", "DP", "MODEL")]
        self.line = 10
        self.rng = rng
        self.start = self._calls(self.labels, rng.randint(0, 3))
        self.layers = self._calls(inner, rng.randint(1, 4)) if inner else []
        self.back = self._calls(inner, rng.randint(1, 4)) if inner else []
        self.micro = rng.choice((1, 2, 4))
        self.batched = rng.random() < 0.6
        self.grads: list[Op] = []
        if "DP" in labels:
            same, later = rng.random() < 0.5, rng.random() < 0.4
            one = self._call("DP")
            for _ in range(rng.randint(1, 4)):
                self.grads.append(replace(one if same else self._call("DP"), later=later))
            self.grads += [Op("wait", line=self._next())] * later
        self.ties = [self._call("EMBEDDING")] if "EMBEDDING" in labels else []
        self.tail = self._calls(self.labels, rng.randint(1, 3))
        self.rare = self._calls(self.labels, rng.randint(1, 3))
        self.every = rng.choice((2, 3, steps + 1, steps + 1))
        self.syncs = rng.random() < 0.8

    def _next(self) -> int:
        self.line += 1
        return self.line

    def _call(self, label: str) -> Op:
        name, size = self.rng.choice(_SHARED), self.rng.choice((4, 4, 16, 64))
        return Op(name, label, size, self.rng.choice(("Float", "Float", "Half")), line=self._next())

    def _calls(self, labels: Sequence[str], many: int) -> list[Op]:
        return [self._call(self.rng.choice(labels)) for _ in range(many)]

    def step(self, step: int, stage: int, stages: int) -> Iterator[Op]:
        """The calls of one stage of the pipeline in a step."""
        schedule = self._one_forward_one_back if self.batched else self._all_forward
        yield from schedule(stage, stages)
        yield from self.grads
        yield from self.ties
        yield from self.tail
        if step % self.every == self.every - 1:
            yield from self.rare
        if self.syncs:
            yield Op("sync", line=9)

    def _to(self, what: str, peer: int, stages: int) -> tuple[Op, ...]:
        line = 4 + ("send", "recv").index(what)
        return (Op(what, "PP", 32, peer=peer, line=line),) if 0 <= peer < stages else ()

    def _all_forward(self, stage: int, stages: int) -> Iterator[Op]:
        for layers, back in ((self.layers, 1), (self.back, -1)):
            for _ in range(self.micro):
                yield from self._to("recv", stage - back, stages)
                yield from layers
                yield from self._to("send", stage + back, stages)

    def _batch(self, *inside: tuple[Op, ...]) -> Iterator[Op]:
        found = tuple(op for some in inside for op in some)
        if found:
            yield Op("batch", "PP", inside=found, line=6)

    def _one_forward_one_back(self, stage: int, stages: int) -> Iterator[Op]:
        warm = min(stages - stage - 1, self.micro)
        before, after = stage - 1, stage + 1
        for _ in range(warm):
            yield from self._batch(self._to("recv", before, stages))
            yield from self.layers
            yield from self._batch(self._to("send", after, stages))
        left = self.micro - warm
        if left:
            yield from self._batch(self._to("recv", before, stages))
        for i in range(left):
            yield from self.layers
            sent = self._to("send", after, stages), self._to("recv", after, stages)
            yield from self._batch(*sent)
            yield from self.back
            more = self._to("recv", before, stages) if i + 1 < left else ()
            yield from self._batch(self._to("send", before, stages), more)
        for _ in range(warm):
            yield from self._batch(self._to("recv", after, stages))
            yield from self.back
            yield from self._batch(self._to("send", before, stages))


# Faults.


def injected(program: Program, fault: str, rank: int, rng: random.Random) -> Program | None:
    """The program with a fault in one call of a rank, after the first step; None if it has none.

    One time in ten the call is of the first step, of which nobody can know how it should be.
    """
    ops = program.ops[rank]
    begin = program.steps[rank][0 if rng.random() < 0.1 else 1]
    found = [at for at in range(begin, len(ops)) if _fits(program, ops, at, fault)]
    if not found:
        return None
    at = rng.choice(found)
    changed = _changed(program, rank, at, fault, rng)
    mine = [*ops[:at], *changed, *ops[at + (2 if fault == "swap" else 1) :]]
    every = [mine if i == rank else each for i, each in enumerate(program.ops)]
    return replace(program, ops=every, guilty={**program.guilty, rank: fault})


def _fits(program: Program, ops: Sequence[Op], at: int, fault: str) -> bool:
    op = ops[at]
    if fault in NO_COMMUNICATION:
        return op.calls
    collective = bool(op.group) and not op.inside and op.peer < 0
    if fault == "root":
        return op.do == "broadcast"
    if fault == "swap":
        return at + 1 < len(ops) and op.calls and ops[at + 1].calls and _other(op, ops[at + 1])
    if fault == "group":
        return collective and len(program.groups) > 1
    if fault == "peer":
        return op.group == "PP" and len(program.groups["PP"][0]) > 2
    return collective or (fault in ("skip", "extra") and op.calls)


def _other(one: Op, other: Op) -> bool:
    return replace(one, line=0) != replace(other, line=0)


def _changed(program: Program, rank: int, at: int, fault: str, rng: random.Random) -> list[Op]:
    op = program.ops[rank][at]
    if fault in NO_COMMUNICATION:
        return [Op(fault, line=8), op]
    if fault == "skip" and len(op.inside) > 1:
        left = [*op.inside]
        del left[rng.randrange(len(left))]
        return [replace(op, inside=tuple(left))]
    if fault == "extra":
        own = [each for each in program.ops[rank] if each.calls]
        return [replace(rng.choice(own), line=8), op] if rng.random() < 0.5 else [op, op]
    if fault == "swap":
        return [program.ops[rank][at + 1], op]
    if fault == "group":
        labels = {label for label, of in program.groups.items() if any(rank in g for g in of)}
        return [replace(op, group=rng.choice(sorted(labels - {op.group})))]
    if fault == "peer":
        if op.inside:
            some = [*op.inside]
            i = rng.randrange(len(some))
            some[i] = _elsewhere(program, rank, some[i], rng)
            return [replace(op, inside=tuple(some))]
        return [_elsewhere(program, rank, op, rng)]
    if fault == "size":
        return [replace(op, size=op.size + rng.choice((-1, 1)))]
    if fault == "root":
        return [replace(op, root=1)]
    if fault == "dtype":
        return [replace(op, dtype="Double")]
    if fault == "operation":
        return [replace(op, do=rng.choice([name for name in _SHARED if name != op.do]))]
    return []


def _elsewhere(program: Program, rank: int, op: Op, rng: random.Random) -> Op:
    members = next(each for each in program.groups["PP"] if rank in each)
    others = set(range(len(members))) - {op.peer, members.index(rank)}
    return replace(op, peer=rng.choice(sorted(others)))


def with_sends_in_the_world(program: Program) -> Program:
    """The same program with ``dist.send(tensor, rank)``: in the default group, to a global rank."""
    ops = []
    for rank, rank_ops in enumerate(program.ops):
        stages = next((ranks for ranks in program.groups.get("PP", ()) if rank in ranks), ())
        ops.append([_in_the_world(op, stages) for op in rank_ops])
    return replace(program, ops=ops)


def _in_the_world(op: Op, stages: Sequence[int]) -> Op:
    if op.inside:
        inside = tuple(_in_the_world(part, stages) for part in op.inside)
        return replace(op, group="default_pg", inside=inside)
    if op.peer < 0:
        return op
    return replace(op, group="default_pg", peer=stages[op.peer])


# How they run.


@dataclass
class Call:
    """An entry of a rank's recorder."""

    op: Op
    group: str  # torch's name
    seq: int
    created: int
    started: int = 0
    completed: int = 0
    left: int = 1  # how much of a batch has not ended
    of: Call | None = None  # the batch
    failed: bool = False


class _Host:
    """One rank: its program, what its device has yet to do, and what was recorded."""

    def __init__(self, rank: int, ops: list[Op]) -> None:
        self.rank, self.ops, self.at = rank, ops, 0
        self.clock = self.device = START
        self.queue: deque[Call | Op] = deque()
        self.open: list[Call] = []  # calls that go on in the background
        self.now: Call | None = None  # the call that the device is in
        self.calls: list[Call] = []
        self.seq: dict[tuple[str, bool], int] = defaultdict(int)
        self.state = ""  # one of NO_COMMUNICATION, "killed" or "lost"

    @property
    def finished(self) -> bool:
        idle = not self.queue and self.now is None and not self.open
        return not self.state and self.at == len(self.ops) and idle


class Run:
    """A program that has come to rest."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program, self.rng = program, rng
        self.names: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.mine: list[dict[str, str]] = [{} for _ in program.ops]
        for label, of in program.groups.items():
            for ranks in of:
                name = str(len(self.names))
                self.names[name] = (label, ranks)
                for rank in ranks:
                    self.mine[rank][label] = name
        self.hosts = [_Host(rank, ops) for rank, ops in enumerate(program.ops)]
        self.meets: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
        self.pairs: dict[tuple[str, int, int], tuple[deque[Any], deque[Any]]] = {}
        self.todo = deque(self.hosts)
        while self.todo:
            self._advance(self.todo.popleft())
        if not program.nccl:
            self._lose_connections()
        end = max(max(host.clock, host.device) for host in self.hosts)
        self.end = end + int(rng.uniform(3, 700) * SECOND)
        self.moments: dict[int, int] = {}  # when a rank wrote, where it was before the end

    @property
    def finished(self) -> bool:
        return all(host.finished for host in self.hosts)

    def _advance(self, host: _Host) -> None:
        moved = True
        while moved:
            moved = host.state not in ("die", "killed") and self._device(host)
            moved |= not host.state and self._host(host)

    def _host(self, host: _Host) -> bool:
        moved = False
        while host.at < len(host.ops):
            op = host.ops[host.at]
            idle = not host.queue and host.now is None
            if op.do in NO_COMMUNICATION:
                if idle or self.program.nccl:
                    host.state = op.do
                return moved
            if (op.do == "sync" or not self.program.nccl) and not idle:
                return moved
            if idle:
                host.clock = max(host.clock, host.device)
            host.at += 1
            moved = True
            if op.do == "wait":
                host.queue.append(op)
            elif op.calls:
                host.clock += self.rng.randint(10_000, 2_000_000)
                host.queue += self._recorded(host, op)
            if not self.program.nccl:
                return moved
        return moved

    def _recorded(self, host: _Host, op: Op) -> list[Call]:
        name = self.mine[host.rank][op.group]
        p2p = op.peer >= 0 or bool(op.inside)
        host.seq[name, p2p] += 1
        call = Call(op, name, host.seq[name, p2p], host.clock, left=max(1, len(op.inside)))
        for place, each in enumerate(op.inside):
            if not self.program.nccl and place:  # NCCL's have one number, gloo's one each
                host.seq[name, p2p] += 1
            host.calls.append(Call(each, name, host.seq[name, p2p], host.clock, of=call))
        host.calls.append(call)
        return [call]

    def _device(self, host: _Host) -> bool:
        moved = False
        while host.now is None and host.queue:
            call = host.queue[0]
            if isinstance(call, Op):  # waits
                if host.open:
                    return moved
                host.queue.popleft()
                moved = True
                continue
            collective = call.op.peer < 0 and not call.op.inside and not call.op.later
            if collective and any(each.group == call.group for each in host.open):
                return moved  # calls of a group follow each other
            host.queue.popleft()
            moved = True
            host.device = max(host.device + self.rng.randint(1000, 900_000), call.created)
            call.started = host.device
            if call.op.later:
                first = not any(each.group == call.group for each in host.open)
                host.open.append(call)
                if first:
                    self._arrive(host, call)
                continue
            host.now = call
            self._arrive(host, call)
        return moved

    def _arrive(self, host: _Host, call: Call) -> None:
        members = self.names[call.group][1]
        if call.op.inside:
            at = host.calls.index(call)
            for each in host.calls[at - len(call.op.inside) : at]:
                each.started = call.started
                self._send_or_receive(host, each, members)
        elif call.op.peer >= 0:
            self._send_or_receive(host, call, members)
        else:
            there = self.meets[call.group, call.seq]
            there[host.rank] = call
            if len(there) == len(members) and self._agree(there):
                end = max(each.started for each in there.values())
                end += self.rng.randint(5_000, 500_000)
                for rank, each in there.items():
                    self._end(self.hosts[rank], each, end)

    def _agree(self, there: Mapping[int, Call]) -> bool:
        """Whether the calls of all members fit; gloo ends a rank that receives too much."""
        calls = [each.op for each in there.values()]
        if len({(op.do, op.root) for op in calls}) > 1:
            return False
        bytes_ = {r: c.op.size * (8 if c.op.dtype == "Double" else 4) for r, c in there.items()}
        kinds = {(op.size, op.dtype) for op in calls}
        if len(kinds) == 1:
            return True
        if self.program.nccl:
            return self.program.lenient
        small = [rank for rank, size in bytes_.items() if size < max(bytes_.values())]
        if small:
            self.hosts[self.rng.choice(small)].state = "killed"
        return not small

    def _send_or_receive(self, host: _Host, call: Call, members: Sequence[int]) -> None:
        mine, sends = members.index(host.rank), call.op.do == "send"
        ends = (mine, call.op.peer) if sends else (call.op.peer, mine)
        both = self.pairs.setdefault((call.group, *ends), (deque(), deque()))
        if sends and self.program.eager:
            self._end(host, call, call.started + 1000)
        both[0 if sends else 1].append((host, call))
        while both[0] and both[1]:
            pair = both[0].popleft(), both[1].popleft()
            end = max(each.started for _, each in pair) + self.rng.randint(5_000, 200_000)
            for other, each in pair:
                if not each.completed:
                    self._end(other, each, end)

    def _end(self, host: _Host, call: Call, at: int) -> None:
        call.completed = at
        if call.of is not None:
            call = call.of
            call.left -= 1
            if call.left:
                return
            call.completed = at
        if call is host.now:
            host.now, host.device = None, max(host.device, at)
        elif call in host.open:
            host.open.remove(call)
            host.device = max(host.device, at)
            after = next((each for each in host.open if each.group == call.group), None)
            if after is not None:
                after.started = at
                self._arrive(host, after)
        self.todo.append(host)

    def _lose_connections(self) -> None:
        """Of gloo's ranks, those that wait for one whose process has ended raise."""
        ends = {"die", "killed", "lost", *["raise"] * (self.rng.random() < 0.5)}
        moved = True
        while moved:
            moved = False
            for host in self.hosts:
                waits = not host.state and [*filter(None, [host.now]), *host.open]
                for call in waits or ():
                    if any(self.hosts[rank].state in ends for rank in self._needed(host, call)):
                        host.state, moved = "lost", True
                        # What ended with an error is retired too, except sends and receives.
                        call.failed = call.op.peer < 0 and self.rng.random() < 0.9

    def _needed(self, host: _Host, call: Call) -> set[int]:
        members = self.names[call.group][1]
        if call.op.peer >= 0:
            return {members[call.op.peer]}
        if call.op.inside:
            return {members[op.peer] for op in call.op.inside}
        return {*members} - {host.rank}


# What they leave.


def write(run: Run, directory: Path, moments: Mapping[int, int] | None = None) -> None:
    """The dumps of all ranks that can write; of some at an earlier moment, in nanoseconds."""
    run.moments = dict(moments or {})
    exits = run.rng.random() < 0.7  # a rank whose script is done ends
    for host in run.hosts:
        if run.program.stacks:
            (directory / f"groups_{host.rank}.json").write_text(json.dumps(_groups(run, host)))
        if host.state in ("die", "stop", "killed") or (host.finished and exits):
            continue
        if host.rank in run.moments and host.state in ("raise", "lost"):
            del run.moments[host.rank]  # it writes when it raises
        entries = _entries(run, host)
        trace = {"version": "2.10", "pg_config": _config(run, host), "entries": entries}
        trace["pg_status"] = _status(run, host)
        path = directory / f"trace_{host.rank}"
        path.write_bytes(pickle.dumps(trace, 2))
        written = run.moments.get(host.rank, run.end)
        os.utime(path, ns=(written, written))
        if run.program.stacks:
            (directory / f"stack_{host.rank}.json").write_text(json.dumps(_stack(run, host)))


def _groups(run: Run, host: _Host) -> dict[str, Any]:
    groups = [
        {"label": label, "description": label, "dims": _dims(label), "name": name}
        | {"ranks": list(run.names[name][1])}
        for label, name in run.mine[host.rank].items()
    ]
    where = {"host": f"host{host.rank // 4}", "pid": 1000 + host.rank}
    return {"schema": 1, "rank": host.rank, "world_size": run.program.world, **where} | {
        "groups": groups
    }


def _dims(label: str) -> list[str]:
    return [label.lower()] if label in ("TP", "PP", "DP") else []


def _config(run: Run, host: _Host) -> dict[str, Any]:
    """NCCL's recorder knows the members of groups, gloo's does not."""
    if not run.program.nccl:
        return {"": {"name": "", "desc": "", "ranks": "[]"}}
    return {
        name: {"name": name, "desc": label, "ranks": json.dumps(run.names[name][1])}
        for label, name in run.mine[host.rank].items()
    }


def _status(run: Run, host: _Host) -> dict[str, dict[str, int]]:
    """The last numbers of each group, as recorders have them."""
    found: dict[str, dict[str, int]] = {}
    for place, name in enumerate(sorted(run.mine[host.rank].values())):
        calls = [c for c in host.calls if c.group == name and c.op.peer < 0 and not c.op.inside]
        found[str(place)] = {
            f"last_{what}_collective": max((c.seq for c in calls if getattr(c, at)), default=-1)
            for what, at in (
                ("enqueued", "created"),
                ("started", "started"),
                ("completed", "completed"),
            )
        }
    return found


def _entries(run: Run, host: _Host, p2p: bool | None = None) -> list[dict[str, Any]]:
    """Of gloo, either only sends and receives or only collectives."""
    nccl = run.program.nccl
    found: list[dict[str, Any]] = []
    for call in host.calls:
        if call.created > run.moments.get(host.rank, call.created):
            continue
        is_p2p = call.op.peer >= 0 or bool(call.op.inside)
        if not nccl and (is_p2p != bool(p2p) or call.op.inside):
            continue
        found.append(_entry(run, host, call, len(found), is_p2p))
    return found[-run.program.buffer :]


def _entry(run: Run, host: _Host, call: Call, number: int, p2p: bool) -> dict[str, Any]:
    op, nccl = call.op, run.program.nccl
    label, members = run.names[call.group]
    mine = members.index(host.rank)
    detail = {"send": f" {mine}->{op.peer}", "recv": f" {mine}<-{op.peer}"}.get(op.do, "")
    name = "coalesced" if op.inside else _RECORDED.get(op.do, op.do)
    name = "all_reduce_barrier" if nccl and op.do == "barrier" else name
    times = nccl and not call.of
    moment = run.moments.get(host.rank, run.end)
    done = 0 < call.completed <= moment and (times or not nccl)
    started = (times and run.program.timing and call.started) or None
    started = None if started and started > moment else started
    prefix = run.program.prefix or ("nccl" if nccl else "gloo")
    sizes = [] if op.inside or op.do == "barrier" else [[op.size]]
    out, all_of_them = sizes, [[op.size * len(members)]]
    if op.do in ("all_gather", "_allgather_base"):
        out = all_of_them
    elif op.do == "_reduce_scatter_base":
        sizes = all_of_them
    state = "completed" if nccl and done else "started" if started else "scheduled"
    return {
        "frames": _frames(op, label) if run.program.frames else [],
        "record_id": number,
        "pg_id": sorted(run.mine[host.rank].values()).index(call.group),
        "process_group": (call.group, label),
        "collective_seq_id": 0 if p2p else call.seq,
        "p2p_seq_id": call.seq if p2p else 0,
        "op_id": number + 1,
        "profiling_name": f"{prefix}:{name}{detail}",
        "time_created_ns": call.created,
        "input_sizes": sizes,
        "input_dtypes": [op.dtype] * len(sizes),
        "output_sizes": out,
        "output_dtypes": [op.dtype] * len(out),
        "state": state,
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": call.completed if nccl and done else None,
        "retired": done or (call.failed and host.rank not in run.moments),
        "timeout_ms": 600000,
        "is_p2p": p2p,
    }


def _frames(op: Op, label: str) -> list[dict[str, Any]]:
    rows = [(_TORCH, 3000, op.do), ("/job/train.py", op.line, f"step_{label.lower()}")]
    return [{"filename": file, "line": line, "name": name} for file, line, name in rows]


def _stack(run: Run, host: _Host) -> dict[str, Any]:
    errors = {
        "raise": "ValueError: the batch holds a token that is not in the vocabulary",
        "lost": "RuntimeError: [/gloo/pair.cc:598] Connection closed by peer [10.0.0.7]:2047",
    }
    written = run.moments.get(host.rank, run.end)
    if host.state == "raise":
        written = max(host.clock, host.device) + SECOND // 10
    elif host.state == "lost":
        written = run.end - SECOND
    p2p = _entries(run, host, True) if run.program.p2p and not run.program.nccl else []
    for entry in p2p:
        entry["process_group"] = list(entry["process_group"])
    return {
        "schema": 1,
        "rank": host.rank,
        "host": f"host{host.rank // 4}",
        "pid": 1000 + host.rank,
        "written_ns": written,
        "reason": "exception" if host.state in errors else "SIGUSR1",
        "error": errors.get(host.state),
        "threads": [{"name": "MainThread", "main": True, "frames": _main_thread(run, host)}],
        "p2p": p2p,
    }


def _main_thread(run: Run, host: _Host) -> list[tuple[str, int, str]]:
    script = [("/job/train.py", 2, "train"), ("/job/train.py", 1, "<module>")]
    if host.rank in run.moments:
        return [*_frame_at(run, host, run.moments[host.rank]), *script]
    if host.state in ("stuck", "slow"):
        return [("/job/data.py", 30, "load"), *script]
    if host.state in ("raise", "lost") or host.finished:
        return [("/job/finish.py", 8, "save"), *script]
    if run.program.nccl:  # it waits for its device in a line of the script
        return [("/job/train.py", host.ops[min(host.at, len(host.ops) - 1)].line, "step"), *script]
    if host.now is None:  # for calls in the background
        return [(_BUFFERS, 40, "finish_grad_sync"), *script]
    op = host.now.op
    if op.inside:
        where = [("/job/megatron/core/pipeline_parallel/p2p_communication.py", 70, "_communicate")]
        return [*where, *script]
    return [(_TORCH, 3000, op.do), ("/job/train.py", op.line, f"step_{op.group.lower()}"), *script]


def _frame_at(run: Run, host: _Host, moment: int) -> list[tuple[str, int, str]]:
    """The line of gloo's call that a rank was in at an earlier moment."""
    for call in host.calls:
        goes_on = call.created <= moment < (call.completed or run.end)
        if goes_on and not run.program.nccl and not call.op.later and not call.op.inside:
            return [(_TORCH, 3000, call.op.do)]
    return []
