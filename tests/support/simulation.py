"""Runs the programs of ``programs`` until no rank can move, and writes what the ranks recorded.

It knows nothing of how hangs are diagnosed. A collective ends when all members are in it with equal
arguments, a send when its receive is there. With NCCL a rank enqueues calls until it needs a
result, and its device makes them in order; with gloo it waits in each call.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import recorded
from tests.support.programs import NO_COMMUNICATION, Op, Program
from tests.support.recorded import SECOND, START, Frames

TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
MEGATRON = "/job/megatron/core"
RECORDED_NAMES = {"_allgather_base": "_all_gather_base"}  # as recorders and their readers call it
_PAIR = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
# What gloo of torch 2.13.0 raises; a rank sees the one or the other.
LOST = (
    f"{_PAIR}:553] Connection closed by peer [127.0.0.1]:43665. This is typically caused by a "
    "remote worker crashing. Check the logs of the remote worker before reporting an error.",
    f"{_PAIR}:537] Read error [127.0.0.1]:6311: Connection reset by peer. This is typically caused "
    "by a remote worker hanging or bugs in the application. Check the logs of the remote worker "
    "before reporting an error.",
)
RAISED = "ValueError: the batch holds a token that is not in the vocabulary"
RAISING = ("raise", "lost")  # states


@dataclass(eq=False)
class Call:
    """An entry of a rank's recorder."""

    op: Op
    group: str  # torch's name
    # Of the collectives of its group until then, and of its sends.
    numbers: tuple[int, int]
    created: int
    started: int = 0
    completed: int = 0
    failed: bool = False
    parts: list[Call] = field(default_factory=list)  # of a batch
    batch: Call | None = None  # whose part it is

    @property
    def seq(self) -> int:
        return self.numbers[self.op.is_p2p]


class Process:
    """One rank: its script, what its device has yet to do, and what was recorded."""

    def __init__(self, rank: int, ops: list[Op], error: str) -> None:
        self.rank = rank
        self.error = error  # that it raises
        self.ops = ops
        self.place = 0  # in ops
        self.script_clock = START
        self.device_clock = START
        self.queue: deque[Call | None] = deque()  # None: wait for the calls in the background
        self.current: Call | None = None  # the call that the device is in
        self.background: list[Call] = []
        self.calls: list[Call] = []
        self.seq = Counter[tuple[str, bool]]()
        self.state = ""  # one of NO_COMMUNICATION, "killed" or "lost"

    @property
    def broken(self) -> bool:
        """Whether its device fails in a call."""
        return self.state == "raise" and "NCCL" in self.error

    @property
    def clock(self) -> int:
        """When it did something last."""
        return max(self.script_clock, self.device_clock)

    def numbers(self, group: str) -> tuple[int, int]:
        """How many collectives, and sends and receives, it has called in a group."""
        return self.seq[group, False], self.seq[group, True]

    @property
    def is_idle(self) -> bool:
        return not self.queue and self.current is None

    @property
    def waiting_in(self) -> list[Call]:
        current = [] if self.current is None else [self.current]
        return current + self.background

    @property
    def finished(self) -> bool:
        is_at_the_end = self.place == len(self.ops) and not self.state
        return is_at_the_end and self.is_idle and not self.background


class Run:
    """A program that has come to rest."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program = program
        self.rng = rng
        self.groups: dict[
            str, tuple[str, tuple[int, ...]]
        ] = {}  # label and members by torch's name
        self.names: list[dict[str, str]] = [{} for _ in program.ops]  # by rank and label
        for label, groups in program.groups.items():
            for members in groups:
                name = str(len(self.groups))
                self.groups[name] = (label, members)
                for rank in members:
                    self.names[rank][label] = name
        self.processes = [Process(rank, ops, program.error) for rank, ops in enumerate(program.ops)]
        # The calls that have begun, by rank: of a collective, and in order of a pair of ranks.
        self.collectives: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
        self.sends: dict[tuple[str, int, int], deque[Call]] = defaultdict(deque)
        self.receives: dict[tuple[str, int, int], deque[Call]] = defaultdict(deque)
        self.can_move = deque(self.processes)
        while self.can_move:
            self._advance(self.can_move.popleft())
        if not program.nccl:
            self._lose_connections()
        last_clock = max(process.clock for process in self.processes)
        self.end = last_clock + int(rng.uniform(3, 700) * SECOND)

    @property
    def finished(self) -> bool:
        return all(process.finished for process in self.processes)

    def members(self, call: Call) -> tuple[int, ...]:
        _, members = self.groups[call.group]
        return members

    # One rank.

    def _advance(self, process: Process) -> None:
        moved = True
        while moved:
            moved = False
            if process.state not in ("die", "killed"):
                moved = self._run_device(process)
            if not process.state:
                moved |= self._run_script(process)

    def _run_script(self, process: Process) -> bool:
        """Go on in the script: with gloo by a line, with NCCL until a result is needed."""
        moved = False
        while process.place < len(process.ops) and self._run_line(process):
            moved = True
            if not self.program.nccl:
                break
        return moved

    def _run_line(self, process: Process) -> bool:
        op = process.ops[process.place]
        needs_results = op.do == "sync" or not self.program.nccl
        if op.do in NO_COMMUNICATION:
            if self.program.nccl or process.is_idle:
                process.state = op.do
            return False
        if needs_results and not process.is_idle:
            return False
        if process.is_idle:
            process.script_clock = process.clock
        process.place += 1
        if op.do == "wait":
            process.queue.append(None)
        elif op.is_call:
            process.script_clock += self.rng.randint(10_000, 2_000_000)
            process.queue.append(self._recorded_call(process, op))
        return True

    def _recorded_call(self, process: Process, op: Op) -> Call:
        """The call as it is recorded when the script makes it; the parts of a batch before it."""
        name = self.names[process.rank][op.group]
        key = (name, op.is_p2p)
        process.seq[key] += 1
        call = Call(op, name, process.numbers(name), process.script_clock)
        for part in op.parts:
            # All parts of a batch have one number with NCCL, and with gloo one each.
            if call.parts and not self.program.nccl:
                process.seq[key] += 1
            numbers = process.numbers(name)
            part_call = Call(part, name, numbers, process.script_clock, batch=call)
            call.parts.append(part_call)
        process.calls += [*call.parts, call]
        return call

    def _run_device(self, process: Process) -> bool:
        moved = False
        while process.queue and process.current is None and self._start_next(process):
            moved = True
        return moved

    def _start_next(self, process: Process) -> bool:
        call = process.queue[0]
        if call is None:
            if not process.background:
                process.queue.popleft()
            return not process.background
        is_behind = any(running.group == call.group for running in process.background)
        if is_behind and not call.op.is_p2p and not call.op.later:
            return False  # The collectives of a group follow each other.
        process.queue.popleft()
        idle_time = self.rng.randint(1000, 900_000)
        process.device_clock = max(process.device_clock + idle_time, call.created)
        call.started = process.device_clock
        if call.op.later:
            process.background.append(call)
        else:
            process.current = call
        if not (call.op.later and is_behind):
            self._arrive(process.rank, call)
        return True

    # All ranks.

    def _arrive(self, rank: int, call: Call) -> None:
        for part in call.parts:
            part.started = call.started
            self._send_or_receive(rank, part)
        if call.op.is_p2p:
            if not call.parts:
                self._send_or_receive(rank, call)
            return
        calls = self.collectives[call.group, call.seq]
        calls[rank] = call
        if len(calls) == len(self.members(call)) and self._agree(calls):
            end = max(member_call.started for member_call in calls.values())
            end += self.rng.randint(5_000, 500_000)
            for member, member_call in calls.items():
                self._end(member, member_call, end)

    def _agree(self, calls: Mapping[int, Call]) -> bool:
        """Whether the calls of all members fit; gloo ends a rank that receives too much."""
        ops = [call.op for call in calls.values()]
        if len({op.do for op in ops}) > 1:
            return False
        if len({(op.size, op.dtype) for op in ops}) == 1:
            return True
        if self.program.nccl:
            return self.program.lenient
        bytes_of = {}
        for rank, call in calls.items():
            bytes_of[rank] = call.op.size * (8 if call.op.dtype == "Double" else 4)
        largest = max(bytes_of.values())
        expecting_less = [rank for rank, size in bytes_of.items() if size < largest]
        if expecting_less:
            self.processes[self.rng.choice(expecting_less)].state = "killed"
        return not expecting_less

    def _send_or_receive(self, rank: int, call: Call) -> None:
        members = self.members(call)
        is_send = call.op.do == "send"
        pair = (rank, members[call.op.peer])
        if is_send and self.program.eager:
            self._end(rank, call, call.started + 1000)
        sender, receiver = pair if is_send else reversed(pair)
        sends = self.sends[call.group, sender, receiver]
        receives = self.receives[call.group, sender, receiver]
        if is_send:
            sends.append(call)
        else:
            receives.append(call)
        while sends and receives:
            send = sends.popleft()
            receive = receives.popleft()
            end = max(send.started, receive.started) + self.rng.randint(5_000, 200_000)
            if not send.completed:
                self._end(sender, send, end)
            if not receive.completed:
                self._end(receiver, receive, end)

    def _end(self, rank: int, call: Call, moment: int) -> None:
        call.completed = moment
        if call.batch is not None:
            call = call.batch
            if not all(part.completed for part in call.parts):
                return
            call.completed = moment
        process = self.processes[rank]
        process.device_clock = max(process.device_clock, moment)
        if call is process.current:
            process.current = None
        else:
            process.background.remove(call)
            for running in process.background:
                # The next collective of the group begins.
                if running.group == call.group:
                    running.started = moment
                    self._arrive(rank, running)
                    break
        self.can_move.append(process)

    def _lose_connections(self) -> None:
        """Of gloo's ranks, those that wait for one whose process has ended raise."""
        ended = {"die", "killed", "lost"}
        if self.rng.random() < 0.5:
            ended.add("raise")
        moved = True
        while moved:
            moved = False
            for process in self.processes:
                for call in [] if process.state else process.waiting_in:
                    needed = self._needed(process.rank, call)
                    if not any(self.processes[rank].state in ended for rank in needed):
                        continue
                    process.state = "lost"
                    moved = True
                    # What ended with an error is retired too, except sends and receives.
                    call.failed = call.op.peer < 0 and self.rng.random() < 0.9

    def _needed(self, rank: int, call: Call) -> set[int]:
        """The ranks without which the call does not end."""
        members = self.members(call)
        if not call.op.is_p2p:
            return {*members} - {rank}
        return {members[op.peer] for op in call.op.parts or [call.op]}


# What they leave.


def write(
    run: Run,
    directory: Path,
    moments: Mapping[int, int] | None = None,
    buffer: int | None = None,
) -> None:
    """The dumps of all ranks that can write.

    ``moments``: when a rank wrote, in nanoseconds, where it was before the end. ``buffer``: how
    many calls a recorder keeps, where it is not as the program has it.
    """
    leaves_at_its_end = run.rng.random() < 0.7
    for process in run.processes:
        moment = (moments or {}).get(process.rank)
        if process.state in RAISING:
            moment = None  # It writes when it raises.
        recording = _Recording(run, process, moment, buffer or run.program.buffer)
        if run.program.stacks:
            recording.write_groups(directory)
        has_ended = process.state in ("die", "stop", "killed")
        if has_ended or (process.finished and leaves_at_its_end):
            continue
        recording.write_trace(directory)
        if run.program.stacks:
            recording.write_stack(directory)


class _Recording:
    """The files of a rank that writes at the end, or at an earlier ``moment``."""

    def __init__(self, run: Run, process: Process, moment: int | None, buffer: int) -> None:
        self.run = run
        self.program = run.program
        self.process = process
        self.rank = process.rank
        self.moment = moment
        self.written = moment or run.end
        self.buffer = buffer
        self.groups = {name: run.groups[name] for name in run.names[self.rank].values()}

    def write_groups(self, directory: Path) -> None:
        content = recorded.dumped(self.rank, self.program.world, self.groups)
        for group in content["groups"]:
            label = group["description"]
            is_dim = label in ("TP", "PP", "DP")
            group |= {"label": label, "dims": [label.lower()] if is_dim else []}
        (directory / f"groups_{self.rank}.json").write_text(json.dumps(content))

    def write_trace(self, directory: Path) -> None:
        nccl = self.program.nccl
        dump = {
            "version": "2.10",
            "pg_config": recorded.config(self.groups) if nccl else recorded.NO_MEMBERS,
            "entries": self._entries(self._is_of_torch),
        }
        recorded.trace(directory / f"trace_{self.rank}", dump, self.written)

    def write_stack(self, directory: Path) -> None:
        written = self.written
        if self.process.state == "raise":
            written = self.process.clock + SECOND // 10
        elif self.process.state == "lost":
            written = self.run.end - SECOND
        p2p = self._entries(self._is_of_hypergrid) if self.program.p2p else []
        error = None
        if self.process.state == "raise":
            error = self.program.error or RAISED
        elif self.process.state == "lost":
            error = LOST[self.rank % 2]
        recorded.stack(
            directory, self.rank, self._main_thread(), error=error, written=written, p2p=p2p
        )

    def _is_of_torch(self, op: Op) -> bool:
        """Whether torch records a call: of gloo's, collectives alone."""
        return self.program.nccl or not op.is_p2p

    def _is_of_hypergrid(self, op: Op) -> bool:
        """Whether ``hypergrid.record`` writes it beside the stacks."""
        return op.is_p2p and not self.program.nccl

    def _entries(self, is_recorded: Callable[[Op], bool]) -> list[dict[str, Any]]:
        """The calls that a recorder keeps."""
        entries: list[dict[str, Any]] = []
        for call in self.process.calls:
            is_later = self.moment is not None and call.created > self.moment
            # Gloo has no entry of a batch, but of its parts.
            is_no_entry = call.parts and not self.program.nccl
            if is_recorded(call.op) and not is_later and not is_no_entry:
                entries.append(self._entry(len(entries), call))
        return entries[-self.buffer :]

    def _entry(self, number: int, call: Call) -> dict[str, Any]:
        op = call.op
        nccl = self.program.nccl
        label, members = self.groups[call.group]
        # NCCL's recorder has the times of a batch, and not of its parts.
        has_times = nccl and call.batch is None
        is_done = 0 < call.completed <= self.written and (has_times or not nccl)
        started = None
        if has_times and self.program.timing and 0 < call.started <= self.written:
            started = call.started
        sizes = [] if op.parts or op.do == "barrier" else [[op.size]]
        all_sizes = [[op.size * len(members)]]
        gathers = op.do in ("all_gather", "_allgather_base")
        return recorded.entry(
            number,
            self.groups,
            call.group,
            self._name(op, members.index(self.rank)),
            call.numbers,
            # The entry of a batch is none of a send, as seen with torch 2.11 and NCCL 2.28.9.
            is_p2p=op.is_p2p and not call.parts,
            created=call.created,
            started=started,
            completed=call.completed if nccl and is_done else None,
            retired=is_done or (call.failed and self.moment is None),
            sizes=all_sizes if op.do == "_reduce_scatter_base" else sizes,
            output_sizes=all_sizes if gathers else sizes,
            dtype=op.dtype,
            frames=_frames_of_call(op, label) if self.program.frames else [],
        )

    def _name(self, op: Op, own_place: int) -> str:
        """The call as recorders name it, such as "gloo:send 0->1"."""
        prefix = self.program.prefix or ("nccl" if self.program.nccl else "gloo")
        name = RECORDED_NAMES.get(op.do, op.do)
        if op.do == "send":
            name = f"send {own_place}->{op.peer}"
        elif op.do == "recv":
            name = f"recv {own_place}<-{op.peer}"
        elif op.parts:
            name = "coalesced"
        elif op.do == "barrier" and self.program.nccl:
            name = "all_reduce_barrier"
        return f"{prefix}:{name}"

    def _main_thread(self) -> Frames:
        """The stack of the main thread, the innermost frame first."""
        script = [("/job/train.py", 2, "train"), ("/job/train.py", 1, "<module>")]
        if self.moment is not None:
            return [*self._torch_frame(), *script]
        return [*self._frames_at_the_end(), *script]

    def _torch_frame(self) -> Frames:
        """The line of gloo's call that the rank was in at an earlier moment."""
        for call in self.process.calls:
            is_running = call.created <= self.written < (call.completed or self.run.end)
            is_blocking = not (self.program.nccl or call.op.later or call.op.parts)
            if is_running and is_blocking:
                return [(TORCH, 3000, call.op.do)]
        return []

    def _frames_at_the_end(self) -> Frames:
        process = self.process
        if process.state in ("stuck", "slow"):
            return [("/job/data.py", 30, "load")]
        if process.state == "lost" or process.broken:
            return [(TORCH, 3000, "all_reduce"), ("/job/train.py", 7, "step")]
        if process.state in RAISING or process.finished:
            return [("/job/finish.py", 8, "save")]
        if self.program.nccl:  # it waits for its device in a line of the script
            last = min(process.place, len(process.ops) - 1)
            return [("/job/train.py", process.ops[last].line, "step")]
        if process.current is None:  # for calls in the background
            return [(f"{MEGATRON}/distributed/param_and_grad_buffer.py", 40, "finish_grad_sync")]
        op = process.current.op
        if op.parts:
            return [(f"{MEGATRON}/pipeline_parallel/p2p_communication.py", 70, "_communicate")]
        return _frames_of_call(op, op.group)


def _frames_of_call(op: Op, label: str) -> Sequence[tuple[str, int, str]]:
    return [(TORCH, 3000, op.do), ("/job/train.py", op.line, f"step_{label.lower()}")]
