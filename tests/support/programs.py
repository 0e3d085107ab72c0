"""Programs of many ranks, one of which does something wrong: written as rows, or random.

``written_program`` reads the lines of a case in a text file. ``random_program`` draws what each
rank calls, as one training script has it, and ``injected`` puts a fault into one rank's calls.
``simulation`` runs a program, and ``hanging`` has real ranks make its calls. What a seed draws
never changes: rows of tests name seeds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypergrid.layout import RankLayout

NO_COMMUNICATION = ("raise", "die", "stop", "slow", "stuck")
WRONG_CALLS = ("skip", "extra", "swap", "group", "peer", "size", "dtype", "operation")
FAULTS = (*WRONG_CALLS, *NO_COMMUNICATION)
COLLECTIVES = ("all_reduce", "all_gather", "_allgather_base", "_reduce_scatter_base", "broadcast")
MOST_RANKS = 16
# The labels of which a script draws no calls at random.
PIPELINE = ("PP", "EMBEDDING")


@dataclass(frozen=True)
class Op:
    """One line of a program: a call, or what is done between calls.

    ``do`` is a collective, "send", "recv", "batch" (of sends and receives: ``parts``), "wait" (for
    all calls with ``later``), "sync" (the host needs a result) or one of NO_COMMUNICATION.
    """

    do: str
    group: str = ""  # the label
    size: int = 4
    dtype: str = "Float"
    peer: int = -1  # the place in the group of who receives or sends
    later: bool = False  # it goes on in the background
    parts: tuple[Op, ...] = ()
    line: int = 0

    @property
    def is_call(self) -> bool:
        return bool(self.group or self.parts)

    @property
    def is_p2p(self) -> bool:
        return self.peer >= 0 or bool(self.parts)


@dataclass
class Program:
    """What each rank calls, and how it runs and is recorded."""

    ops: list[list[Op]]  # by rank
    groups: dict[str, list[tuple[int, ...]]]  # by label
    steps: list[list[int]]  # where each step of a rank begins in its ops
    nccl: bool = True
    timing: bool = False  # NCCL's recorder has starts
    eager: bool = False  # small sends end without their receive
    lenient: bool = False  # NCCL ends calls of different sizes or dtypes
    stacks: bool = False  # hypergrid.record writes
    p2p: bool = True  # what gloo sends is recorded
    frames: bool = True
    buffer: int = 2000
    prefix: str = ""  # of the names of calls, where it is not "nccl" or "gloo"
    error: str = ""  # of a rank that raises
    guilty: dict[int, str] = field(default_factory=dict)  # the fault of a rank

    @property
    def world(self) -> int:
        return len(self.ops)

    def group_of(self, rank: int, label: str) -> tuple[int, ...]:
        """The members of the rank's group with this label; none where it has no such group."""
        for members in self.groups.get(label, ()):
            if rank in members:
                return members
        return ()

    def with_ops_of(self, rank: int, rank_ops: list[Op]) -> Program:
        """The program in which one rank does this."""
        ops = [*self.ops]
        ops[rank] = rank_ops
        return replace(self, ops=ops)


# Programs and recordings that are written as lines of text.

# "tp", "tp=broadcast...", "tp=all_reduce[5]/Half", "tp=send_0->1": of the rank's group "tp".
_CALL = re.compile(
    r"(?P<group>\w+)(=(?P<name>[\w<>=-]+))?(\[(?P<size>\d+)\])?(/(?P<dtype>\w+))?(?P<end>.*)"
)


@dataclass(frozen=True)
class WrittenCall:
    """One word of a line of calls; ``end`` says whether the call ended."""

    group: str
    name: str
    size: int
    dtype: str
    end: str


def cases(file: Path) -> dict[str, list[tuple[str, str]]]:
    """The cases of a text file by name: lines of (subject, text), such as ("calls 0 1", "tp")."""
    lines_of: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in file.read_text().splitlines():
        if line.startswith("  "):
            subject, _, text = line.strip().partition("  ")
            lines_of[name].append((subject, text.strip()))
        elif line and not line.startswith("#"):
            name = line
            lines_of[name] = []
    return lines_of


def written_calls(text: str) -> Iterator[WrittenCall]:
    """Such as "tp (dp=broadcast)*2 dp..."."""
    text = re.sub(r"\((.*?)\)\*(\d+)", lambda part: f"{part[1]} " * int(part[2]), text)
    for word in text.split():
        part = _CALL.fullmatch(word)
        assert part, word
        name = part["name"] or "all_reduce"
        yield WrittenCall(
            part["group"], name, int(part["size"] or 4), part["dtype"] or "Float", part["end"]
        )


def written_program(lines: Iterable[tuple[str, str]]) -> Program:
    """The program that these lines of a case say; others are not for it.

    ranks N             how many ranks there are
    group NAME  0 1, 2  the members of the groups of this name
    calls [RANKS]       what these ranks then call, or all
    raise RANKS         they raise this error
    do RANKS            they are "stuck", "stop" or "die"
    """
    program = Program([], {}, [], nccl=False, stacks=True)
    for subject, text in lines:
        word, *words = subject.split()
        if word == "ranks":
            program.ops = [[] for _ in range(int(text))]
            program.groups["default_pg"] = [tuple(range(int(text)))]
        elif word == "group":
            members = [tuple(map(int, ranks.split())) for ranks in text.split(",")]
            program.groups[words[0]] = members
        elif word in ("calls", "raise", "do"):
            ops = [Op("raise" if word == "raise" else text)]
            if word == "calls":
                ops = written_ops(text)
            elif word == "raise":
                program.error = text
            for rank in map(int, words or range(program.world)):
                program.ops[rank] += ops
    return program


def written_ops(text: str) -> list[Op]:
    """The calls of a text; the peer of "send_0->1" and of "recv_1<-0" is the second number."""
    ops = []
    for call in written_calls(text):
        label = "default_pg" if call.group == "world" else call.group
        transfer = re.fullmatch(r"(send|recv)_\d+(?:->|<-)(\d+)", call.name)
        if transfer:
            ops.append(Op(transfer[1], label, call.size, peer=int(transfer[2])))
        else:
            ops.append(Op(call.name, label, call.size, call.dtype))
    return ops


# Random programs.


def random_program(rng: random.Random, *, steps: int = 4) -> Program:
    """One script for all ranks of a random layout, as training has: steps of equal calls."""
    layout = _random_layout(rng)
    groups = groups_of(layout)
    stages = layout.size_of("pp") if "pp" in layout.dims else 1
    script = _Script(rng, [*groups], steps)
    ops = []
    starts = []
    for rank in layout.ranks:
        stage = layout.coordinate(rank).get("pp", 0)
        rank_ops = [Op("barrier", "default_pg", line=3), *script.start]
        rank_starts = []
        for step in range(steps):
            rank_starts.append(len(rank_ops))
            rank_ops += script.step(step, stage, stages)
        ops.append(rank_ops)
        starts.append(rank_starts)
    nccl = rng.random() < 0.5
    stacks = rng.random() < (0.5 if nccl else 0.8)
    return Program(
        ops,
        groups,
        starts,
        nccl,
        timing=rng.random() < 0.3,
        eager=nccl and rng.random() < 0.2,
        lenient=rng.random() < 0.2,
        stacks=stacks,
        p2p=nccl or (stacks and rng.random() < 0.7),
        frames=rng.random() < 0.8,
        buffer=2000 if rng.random() < 0.8 else rng.randint(30, 100),
    )


def _random_layout(rng: random.Random) -> RankLayout:
    """Two to MOST_RANKS ranks over those of tp, dp and pp that have more than one."""
    world = 0
    while not 2 <= world <= MOST_RANKS:
        tp = rng.choice((1, 2, 2, 4))
        dp = rng.choice((1, 2, 2, 3, 4))
        pp = rng.choice((1, 1, 2, 3, 4))
        world = tp * dp * pp
    order = rng.choice(("tp-dp-pp", "tp-pp-dp"))
    return RankLayout.from_order(order, {"tp": tp, "dp": dp, "pp": pp}).trimmed


def groups_of(layout: RankLayout) -> dict[str, list[tuple[int, ...]]]:
    """The members of all groups by label."""
    dims_of = {"default_pg": list(layout.dims)}
    for dim in layout.dims:
        dims_of[dim.upper()] = [dim]
    if len(layout.dims) == 3:
        dims_of["MODEL"] = [dim for dim in layout.dims if dim != "dp"]
    groups = {}
    for label, dims in dims_of.items():
        groups[label] = [tuple(members) for members in layout.groups(dims).tolist()]
    if "PP" in groups and len(groups["PP"][0]) > 2:
        groups["EMBEDDING"] = [(stages[0], stages[-1]) for stages in groups["PP"]]
    return groups


@dataclass
class _Neighbours:
    """What a stage of the pipeline receives and sends; each is one call, or none at an end."""

    from_previous: list[Op]
    to_next: list[Op]
    from_next: list[Op]
    to_previous: list[Op]


class _Script:
    """The lines that all ranks share; what is random in them is drawn once."""

    def __init__(self, rng: random.Random, labels: list[str], steps: int) -> None:
        self.labels = [label for label in labels if label not in PIPELINE]
        layer_labels = [
            label for label in self.labels if label not in ("default_pg", "DP", "MODEL")
        ]
        self.line = 10
        self.rng = rng
        self.start = self._calls(self.labels, rng.randint(0, 3))
        self.forward: list[Op] = []
        self.backward: list[Op] = []
        if layer_labels:
            self.forward = self._calls(layer_labels, rng.randint(1, 4))
            self.backward = self._calls(layer_labels, rng.randint(1, 4))
        self.micro_batches = rng.choice((1, 2, 4))
        self.is_interleaved = rng.random() < 0.6
        self.gradients = self._gradients() if "DP" in labels else []
        self.ties = [self._call("EMBEDDING")] if "EMBEDDING" in labels else []
        self.tail = self._calls(self.labels, rng.randint(1, 3))
        self.rare = self._calls(self.labels, rng.randint(1, 3))
        self.rare_every = rng.choice((2, 3, steps + 1, steps + 1))
        self.syncs = rng.random() < 0.8

    def _next_line(self) -> int:
        self.line += 1
        return self.line

    def _call(self, label: str) -> Op:
        name = self.rng.choice(COLLECTIVES)
        size = self.rng.choice((4, 4, 16, 64))
        dtype = self.rng.choice(("Float", "Float", "Half"))
        return Op(name, label, size, dtype, line=self._next_line())

    def _calls(self, labels: Sequence[str], count: int) -> list[Op]:
        return [self._call(self.rng.choice(labels)) for _ in range(count)]

    def _gradients(self) -> list[Op]:
        """One to four buckets, all in one line or each in its own, perhaps in the background."""
        in_one_line = self.rng.random() < 0.5
        later = self.rng.random() < 0.4
        first = self._call("DP")
        gradients = []
        for _ in range(self.rng.randint(1, 4)):
            call = first if in_one_line else self._call("DP")
            gradients.append(replace(call, later=later))
        wait = Op("wait", line=self._next_line())
        return [*gradients, wait] if later else gradients

    def step(self, step: int, stage: int, stages: int) -> Iterator[Op]:
        """The calls of one stage of the pipeline in a step."""
        neighbours = _Neighbours(
            from_previous=_transfer("recv", stage - 1, stages),
            to_next=_transfer("send", stage + 1, stages),
            from_next=_transfer("recv", stage + 1, stages),
            to_previous=_transfer("send", stage - 1, stages),
        )
        if self.is_interleaved:
            yield from self._one_forward_one_backward(neighbours, stages - stage - 1)
        else:
            for _ in range(self.micro_batches):
                yield from [*neighbours.from_previous, *self.forward, *neighbours.to_next]
            for _ in range(self.micro_batches):
                yield from [*neighbours.from_next, *self.backward, *neighbours.to_previous]
        yield from self.gradients
        if stage in (0, stages - 1):
            yield from self.ties
        yield from self.tail
        if step % self.rare_every == self.rare_every - 1:
            yield from self.rare
        if self.syncs:
            yield Op("sync", line=9)

    def _one_forward_one_backward(self, neighbours: _Neighbours, stages_after: int) -> Iterator[Op]:
        """Megatron's schedule without interleaved stages; what goes at the same time is a batch."""
        warm_up = min(stages_after, self.micro_batches)
        steady = self.micro_batches - warm_up
        for _ in range(warm_up):
            yield from _batch(neighbours.from_previous)
            yield from self.forward
            yield from _batch(neighbours.to_next)
        if steady:
            yield from _batch(neighbours.from_previous)
        for number in range(steady):
            yield from self.forward
            yield from _batch(neighbours.to_next + neighbours.from_next)
            yield from self.backward
            is_last = number == steady - 1
            received = [] if is_last else neighbours.from_previous
            yield from _batch(neighbours.to_previous + received)
        for _ in range(warm_up):
            yield from _batch(neighbours.from_next)
            yield from self.backward
            yield from _batch(neighbours.to_previous)


def _transfer(do: str, peer: int, stages: int) -> list[Op]:
    if not 0 <= peer < stages:
        return []
    return [Op(do, "PP", 32, peer=peer, line=4 if do == "send" else 5)]


def _batch(parts: list[Op]) -> list[Op]:
    return [Op("batch", "PP", parts=tuple(parts), line=6)] if parts else []


# Faults.


def injected(program: Program, fault: str, rank: int, rng: random.Random) -> Program | None:
    """The program with a fault in one call of a rank, after the first step; None if it has none.

    One time in ten the call is of the first step, of which nobody can know how it should be.
    """
    ops = program.ops[rank]
    begin = program.steps[rank][0 if rng.random() < 0.1 else 1]
    places = [place for place in range(begin, len(ops)) if _fits(program, ops, place, fault)]
    if not places:
        return None
    place = rng.choice(places)
    replacement = _replacement(program, rank, place, fault, rng)
    replaced = 2 if fault == "swap" else 1
    faulty_ops = [*ops[:place], *replacement, *ops[place + replaced :]]
    faulty = program.with_ops_of(rank, faulty_ops)
    return replace(faulty, guilty={**program.guilty, rank: fault})


def _fits(program: Program, ops: Sequence[Op], place: int, fault: str) -> bool:
    """Whether the fault can be in the call at this place."""
    op = ops[place]
    if fault in (*NO_COMMUNICATION, "skip", "extra"):
        return op.is_call
    if fault == "swap":
        following = ops[place + 1] if place + 1 < len(ops) else Op("sync")
        is_same = replace(op, line=0) == replace(following, line=0)
        return op.is_call and following.is_call and not is_same
    if fault == "peer":
        return op.group == "PP" and len(program.groups["PP"][0]) > 2
    is_collective = op.is_call and not op.is_p2p
    if fault == "group":
        return is_collective and len(program.groups) > 1
    return is_collective


def _replacement(
    program: Program, rank: int, place: int, fault: str, rng: random.Random
) -> list[Op]:
    """What the rank does in place of the call."""
    op = program.ops[rank][place]
    if fault in NO_COMMUNICATION:
        return [Op(fault, line=8), op]
    match fault:
        case "skip":
            if len(op.parts) < 2:
                return []
            parts = [*op.parts]
            del parts[rng.randrange(len(parts))]
            return [replace(op, parts=tuple(parts))]
        case "extra":
            if rng.random() < 0.5:
                calls = [call for call in program.ops[rank] if call.is_call]
                return [replace(rng.choice(calls), line=8), op]
            return [op, op]
        case "swap":
            return [program.ops[rank][place + 1], op]
        case "group":
            labels = [label for label in program.groups if program.group_of(rank, label)]
            labels.remove(op.group)
            return [replace(op, group=rng.choice(sorted(labels)))]
        case "peer":
            return [_to_a_wrong_peer(program, rank, op, rng)]
        case "size":
            return [replace(op, size=op.size + rng.choice((-1, 1)))]
        case "dtype":
            return [replace(op, dtype="Double")]
        case "operation":
            names = [name for name in COLLECTIVES if name != op.do]
            return [replace(op, do=rng.choice(names))]
    raise ValueError(f"invalid fault: {fault}; allowed: {FAULTS}")


def _to_a_wrong_peer(program: Program, rank: int, op: Op, rng: random.Random) -> Op:
    """The send or receive with another stage; of a batch, one part."""
    if op.parts:
        parts = [*op.parts]
        place = rng.randrange(len(parts))
        parts[place] = _to_a_wrong_peer(program, rank, parts[place], rng)
        return replace(op, parts=tuple(parts))
    stages = program.group_of(rank, "PP")
    wrong_peers = set(range(len(stages))) - {op.peer, stages.index(rank)}
    return replace(op, peer=rng.choice(sorted(wrong_peers)))


def with_sends_in_the_world(program: Program) -> Program:
    """The same program with ``dist.send(tensor, rank)``: in the default group, to a global rank."""
    ops = []
    for rank, rank_ops in enumerate(program.ops):
        stages = program.group_of(rank, "PP")
        ops.append([_in_the_world(op, stages) for op in rank_ops])
    return replace(program, ops=ops)


def _in_the_world(op: Op, stages: Sequence[int]) -> Op:
    if not op.is_p2p:
        return op
    if op.parts:
        parts = tuple(_in_the_world(part, stages) for part in op.parts)
        return replace(op, group="default_pg", parts=parts)
    return replace(op, group="default_pg", peer=stages[op.peer])
