"""Reader of a job's directory: flight recorders, live groups and stacks, read without torch.

Each file is loaded and checked on its own, in whichever process. Then the files of all ranks become
one recording: which groups have the same name, which files are of another run of the job.
"""

from __future__ import annotations

import json
import marshal
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hypergrid.hangs.loading import Refused, load_all, unpickled
from hypergrid.hangs.recording import (
    DEFAULT,
    ROW,
    Calls,
    Frame,
    Group,
    RankRecording,
    Ranks,
    Recording,
    Stack,
    Title,
    What,
    has_ended,
)
from hypergrid.messages import one_line

# Torch's own names of groups: a running number, or a digest of the members.
_NAMED_BY_TORCH = re.compile(r"\d*|[0-9a-f]{40}")
_UNDEFINED = "undefined"  # torch's description of a group that was given none
_NUMBERED = re.compile(r"^(.*?)(\d{1,9})(\.json)?$")
_MOST_RANKS = 1 << 20
_MOST_BYTES = 256 << 20  # of a file
_MOST_CALLS = 64 << 20  # of all files
_MOST_FRAMES = 100
_Table: TypeAlias = dict[str, Any]
_SKEW = 10**9  # ns; clocks of hosts differ by less
# The fields of a call that are equal for many calls of a recorder, and the others.
_SHARED_FIELDS = itemgetter(
    "process_group",
    "is_p2p",
    "profiling_name",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "output_dtypes",
)
_OWN_FIELDS = itemgetter(
    "collective_seq_id",
    "p2p_seq_id",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
)
_FRAME_FIELDS = itemgetter("filename", "line", "name")
_BATCH = "coalesced"  # the name of its entry


def read(
    directory: str | Path,
    processes: int = 1,
    progress: Callable[[int, int], object] | None = None,
) -> Recording:
    """Read every dump in a directory; other files are left alone.

    Flight recorders of torch, pickled or JSON, whose names end in the rank, such as those of
    ``TORCH_FR_DUMP_TEMP_FILE``; what ``hypergrid.dump`` and ``hypergrid.record`` wrote. A file that
    is cut, damaged or too large is named in ``problems`` and left out; a pickle that holds more
    than a flight recorder writes is refused. Raises OSError if there is no such
    directory.

    A file has at most 256 MiB, and all together 64 million calls (of 48 bytes each): what comes
    after them is left out. ``progress`` is called after each file, with the number of files that
    were read and that of all.

    Files are loaded by so many forked ``processes``, each of which holds one at a time. A file that
    takes more memory than 64 times its size and 128 MiB, or more time of the processor than a
    quarter of a second for each MiB and one second, is refused.
    """
    reader = _Reader()
    paths = _paths(Path(directory))
    answers = load_all(_load, paths, processes)
    loaded_files = zip(paths, answers, strict=True)
    for number, (path, loaded) in enumerate(loaded_files, start=1):
        if isinstance(loaded, Refused):
            loaded = _Loaded(problem=f"was refused: {loaded}")
        reader.add(path, loaded)
        if progress is not None:
            progress(number, len(paths))
    return reader.finish()


def _paths(directory: Path) -> list[Path]:
    """The files of a directory, by their prefixes and ranks."""
    paths = []
    for path in directory.iterdir():
        # A rank may be writing now: it renames its file when that is whole.
        if path.suffix in (".part", ".tmp"):
            continue
        if path.is_file():
            paths.append(path)
    return sorted(paths, key=_by_rank)


def _by_rank(path: Path) -> tuple[str, int, str]:
    numbered = _NUMBERED.match(path.name)
    if numbered is None:
        return (path.name, -1, path.name)
    return (numbered[1], int(numbered[2]), path.name)


# One file.


class _Loaded(NamedTuple):
    """The content of one file, checked; or why it cannot be used."""

    rank: int = 0
    facts: _Table | None = None  # fields of its ``RankRecording``; None: it says nothing of a rank
    groups: Sequence[Group] = ()
    problem: str = ""


def _load(path: Path) -> _Loaded:
    """Load a file; a fault is in the result, and only Refused and MemoryError are raised."""
    try:
        status = path.stat()
        if status.st_size > _MOST_BYTES:
            return _Loaded(problem=f"is larger than {_MOST_BYTES >> 20} MiB, and is not read")
        with open(path, "rb", opener=_opener) as file:
            # A file of the kernel, whose size is 0, may never end.
            content = file.read(status.st_size)
        # The name does not tell which of the two torch wrote: the first byte of a pickle does.
        if content[:1] == b"\x80":
            data = unpickled(content)
        elif content.lstrip()[:1] == b"{":
            data = json.loads(content)
        elif not content and _by_rank(path)[1] >= 0:
            # Its name ends in a rank: a full disk leaves such a recorder.
            raise ValueError("it is empty")
        else:
            return _Loaded()  # a file of somebody else
        if not isinstance(data, dict):
            raise ValueError("it holds no table")
        if "entries" in data:
            return _trace(path, data, status.st_mtime_ns)
        if "threads" in data:
            return _stack(data)
        if "groups" in data and "pid" in data:
            return _groups(data)
        return _Loaded()
    except (Refused, MemoryError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        why = str(error) or type(error).__name__
        return _Loaded(problem=_unreadable(why))


def _opener(path: str, flags: int) -> int:
    """Open a file that a pipe may have replaced: opening that waits for one who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unreadable(why: str) -> str:
    first_line = why.partition("\n")[0]
    return f"cannot be read, it may be cut: {first_line[:200].rstrip('.')}"


def _trace(path: Path, data: _Table, latest: int) -> _Loaded:
    """A flight recorder of torch, whose file has the rank in its name."""
    _, rank, _ = _by_rank(path)
    calls, is_whole = _calls(data["entries"] or [])
    facts = {"latest": latest, "calls": calls, "whole": is_whole, "has_calls": True}
    groups = []
    configs = data.get("pg_config") or {}
    for torch_name, config in configs.items():
        name = _text(torch_name)
        label = _label(name, config["desc"])
        members = _members(config["ranks"])
        # ``_Reader.finish`` makes a group for every call that names none of the listed ones.
        if members:
            groups.append(Group(name, label, members))
            if label == DEFAULT:
                facts["world_size"] = len(members)
    return _Loaded(_rank(rank), facts, groups)


def _groups(data: _Table) -> _Loaded:
    """The live groups, as ``hypergrid.dump`` writes them."""
    if data["rank"] is None:
        return _Loaded()  # written before there was a default group
    groups = []
    # A communicator that several labels share carries the name of the one that created it.
    rows = sorted(data["groups"], key=lambda row: row.get("shared_with") is not None)
    for row in rows:
        name = _text(row["name"])
        label = _label(name, row["label"] or row["description"])
        dims = tuple(map(_text, row["dims"] or ()))
        members = _members(row["ranks"])
        groups.append(Group(name, label, members, dims))
    facts = _process(data) | {
        "world_size": _rank(int(data["world_size"])),
        "lists_groups": True,
    }
    return _Loaded(_rank(data["rank"]), facts, groups)


def _stack(data: _Table) -> _Loaded:
    """The stacks, the error and gloo's sends and receives, as ``hypergrid.record`` writes them."""
    sends, is_whole = _calls(data.get("p2p") or [])
    facts = _process(data) | {
        "written": int(data["written_ns"]),
        "reason": _text(data.get("reason") or ""),
        "error": _text(data.get("error") or ""),
        "sends": sends,
        "whole": is_whole,
    }
    for thread in data["threads"]:
        if thread.get("main"):
            facts["stack"] = _frames(thread["frames"])
    return _Loaded(_rank(data["rank"]), facts)


def _process(data: _Table) -> _Table:
    """The process that wrote a file."""
    facts: _Table = {
        "host": _text(data.get("host") or ""),
        "pid": int(data.get("pid") or 0),
    }
    life = data.get("life")
    if life:
        facts["started"] = int(life["started_ns"])
        facts["job"] = _text(life["job"])
    return facts


def _calls(entries: Sequence[_Table]) -> tuple[Calls, bool]:
    """Entries of a flight recorder, and whether they reach back to the first call.

    What the fields of an entry mean is a table of docs/hangs.md. There are millions of entries: no
    step is done for each that can be done for a column.
    """
    if not entries:
        return Calls(), True
    titles: list[Title] = []
    place_of: dict[bytes, int] = {}
    places = []
    for shared_fields in map(_SHARED_FIELDS, entries):
        # The bytes of these fields find the title in one step.
        key = marshal.dumps(shared_fields, 2)
        place = place_of.get(key)
        if place is None:
            place = len(titles)
            place_of[key] = place
            titles.append(_title(*shared_fields))
        places.append(place)
    own_fields = zip(*map(_OWN_FIELDS, entries), strict=True)
    collective_seqs, p2p_seqs, created, started, completed = map(_numbers, own_fields)
    # Torch counts sends and receives apart from collectives, in a field of their own.
    is_p2p = np.array([title.p2p for title in titles])[places]
    rows = np.empty(len(entries), ROW)
    rows["title"] = places
    rows["seq"] = np.where(is_p2p, p2p_seqs, collective_seqs)
    rows["created"] = created
    rows["started"] = started
    rows["completed"] = completed
    rows["done"] = [*map(has_ended, entries)]
    # The first call of a process is record 0: before a higher one, calls were overwritten.
    is_whole = not entries[0].get("record_id")
    if any(title.what.name == _BATCH for title in titles):
        is_shown = _end_batches(titles, rows, collective_seqs, p2p_seqs)
        rows = rows[is_shown]
        entries = [*compress(entries, is_shown)]
    # The stack of a call is shown if it has not ended, or is the last one.
    has_stack = ~rows["done"]
    has_stack[-1:] = True
    frames = {}
    for at in np.flatnonzero(has_stack).tolist():
        frames[at] = _frames(entries[at].get("frames"))
    return Calls(titles, rows, frames), is_whole


def _end_batches(titles: Sequence[Title], rows: Any, *seqs: Any) -> list[bool]:
    """Give the operations of each batch the state of its entry; which calls are to be shown.

    NCCL's recorder has the state of a batch in an entry behind its operations, which has their
    numbers; they stay "scheduled" for ever.
    """
    called = [titles[place] for place in rows["title"].tolist()]
    # Gloo numbers the calls of a group on its own: one with the numbers of a batch is not of it.
    groups = [(title.group, title.is_on_gloo) for title in called]
    numbers = [column.tolist() for column in seqs]
    keys = zip(groups, *numbers, strict=True)
    state = rows[["started", "completed", "done"]]
    # Another thread may have called gloo between the operations of a batch.
    operations_of: dict[Any, list[int]] = defaultdict(list)
    is_shown = []
    for at, key in enumerate(keys):
        if called[at].what.name != _BATCH:
            operations_of[key].append(at)
            is_shown.append(True)
            continue
        operations = operations_of.pop(key, [])
        state[operations] = state[at]
        # Of a batch at the start of a recorder, the operations may have been overwritten.
        is_shown.append(not operations and at > 0)
    return is_shown


def _title(group: Sequence[Any], is_p2p: Any, name: Any, *shapes: Any) -> Title:
    torch_name, description = group
    group_name = _text(torch_name)
    label = _label(group_name, description)
    # "gloo:send 0->1", "nccl:_all_gather_base"
    backend, _, call = _text(name).rpartition(":")
    call_name, _, detail = call.partition(" ")
    texts = [call_name.lstrip("_") or "an operation", detail]
    for values in shapes:
        texts.append(one_line(str(values)))
    # Calls of many sizes have as many titles, which share what is equal.
    operation = What(*map(sys.intern, texts))
    return Title(group_name, label, is_p2p is True, sys.intern(backend), operation)


def _label(name: str, description: Any) -> str:
    """The name by which people call a group: its description, or the name from a script."""
    label = _text(description)
    if label != _UNDEFINED:
        return label
    # Such as "3" or a digest of 40 digits, which nobody recognises.
    if _NAMED_BY_TORCH.fullmatch(name):
        return ""
    return name


def _rank(number: Any) -> int:
    # True is an instance of int, too. A huge rank would make the world, a range of all ranks, huge.
    if type(number) is not int or not 0 <= number <= _MOST_RANKS:
        raise ValueError("it names no rank")
    return number


def _members(ranks: Any) -> Ranks:
    if isinstance(ranks, str):  # torch writes them as text
        ranks = json.loads(ranks or "[]")
    return tuple(map(_rank, ranks))


def _frames(rows: Any) -> Stack:
    frames = []
    for row in list(rows or ())[:_MOST_FRAMES]:
        if isinstance(row, dict):  # torch's
            row = _FRAME_FIELDS(row)
        file, line, function = row
        frames.append(Frame(_text(file), int(line), _text(function)))
    return tuple(frames)


def _numbers(values: Sequence[Any]) -> Any:
    """Whole numbers; 0 for those that are not known."""
    numbers = [value or 0 for value in values]
    return np.array(numbers, np.int64)


def _text(value: Any) -> str:
    """A name that is text, or a number; nothing else, as its text could be endless."""
    if type(value) not in (str, int):
        raise ValueError("a name is not text")
    return one_line(str(value))  # in a sentence it must not begin a line of its own


# All files.


class _Reader:
    """Puts the files of all ranks together."""

    def __init__(self) -> None:
        self.recording = Recording({}, {}, 0, [])
        self.ranks = self.recording.ranks
        self.groups = self.recording.groups
        self.titles = self.recording.titles
        self.problems = self.recording.problems
        self.calls_left = _MOST_CALLS
        # Of each name, the groups by their members.
        self.named: dict[str, dict[Ranks, Group]] = defaultdict(dict)
        # The members of the group to which a rank gives a name.
        self.members_of: dict[tuple[int, str], Ranks] = {}
        # Of each title, its place among those of all ranks.
        self.place_of: dict[Title, int] = {}

    def add(self, path: Path, loaded: _Loaded) -> None:
        """Take one file in."""
        problem = loaded.problem
        if loaded.facts is not None:
            problem = self._merge(loaded.rank, loaded.facts, loaded.groups)
        if problem:
            self.problems.append(one_line(f"{path.name} {problem}."))

    def _merge(self, rank: int, facts: _Table, groups: Sequence[Group]) -> str:
        """Add what one file says to what is known of its rank; or say why not."""
        recording = self.ranks.setdefault(rank, RankRecording(rank))
        if "calls" in facts and recording.has_calls:
            return _unreadable(f"there is already a flight recorder of rank {rank}")
        for name in ("calls", "sends"):
            self.calls_left -= len(facts.get(name, ()))
        if self.calls_left < 0:
            return _unreadable(f"it comes after {_MOST_CALLS:,} calls, which is the limit")
        # The calls of a rank are in two files, both of which must reach back to the first one.
        is_whole = recording.whole and facts.get("whole", True)
        vars(recording).update(facts, whole=is_whole)
        for group in groups:
            first = self.named[group.name].setdefault(group.ranks, group)
            first.dims = first.dims or group.dims  # torch's recorder has no dims
            # All ranks share one list: each has a copy of it in its file.
            self.members_of[rank, group.name] = first.ranks
        return ""

    def finish(self) -> Recording:
        """The files of all ranks as one recording."""
        for name, by_members in self.named.items():
            for members, group in by_members.items():
                self.groups[self._key(name, members)] = group
        for rank, recording in self.ranks.items():
            calls = self._with_keys(rank, recording.calls)
            # NCCL's sends are in its recorder, those of gloo in the file of stacks.
            has_sends = any(title.p2p and title.is_on_gloo for title in recording.calls.titles)
            if recording.sends and not has_sends:
                sends = self._with_keys(rank, recording.sends)
                calls = _joined(calls, sends)
            recording.calls = calls
        self.recording.world_size = self._world_size()
        for group in self.groups.values():
            group.outside = self._outside(group)
        self.recording.ranks = dict(sorted(self.ranks.items()))
        self.recording.mixed = _mixture(self.recording.ranks.values())
        return self.recording

    def _world_size(self) -> int:
        """How many ranks the job has, by those files that say so, else those that are named."""
        stated_sizes = [recording.world_size for recording in self.ranks.values()]
        stated = max(stated_sizes, default=0)
        named_ranks = {*self.ranks}
        if not stated:
            for group in self.groups.values():
                named_ranks.update(group.ranks)
        last_rank = max(named_ranks, default=-1)
        # A rank that left a file is in the world, even beyond the stated size.
        return max(stated, last_rank + 1)

    def _outside(self, group: Group) -> frozenset[int]:
        """The members that are no ranks of this job.

        A trainer and an inference engine make a group over a store of their own, whose members are
        numbered anew: its rank 1 is not the job's. A name that torch gave is of ``new_group``,
        whose members are ranks of the job.
        """
        outside = {rank for rank in group.ranks if rank >= self.recording.world_size}
        if _NAMED_BY_TORCH.fullmatch(group.name):
            return frozenset(outside)
        for rank in self.ranks.keys() & group.ranks:
            is_of_rank = (rank, group.name) in self.members_of
            # A rank that lists its groups, and not this one, only shares a number with the member.
            if self.ranks[rank].lists_groups and not is_of_rank:
                outside.add(rank)
        return frozenset(outside)

    def _key(self, name: str, members: Ranks) -> str:
        """A key that only one group has: torch can use one name for several groups."""
        if len(self.named[name]) < 2:
            return name
        # Which of them it is cannot be known: a rank whose file lists no groups called it.
        if not members:
            return name
        return f"{name}@{','.join(map(str, members))}"

    def _with_keys(self, rank: int, calls: Calls) -> Calls:
        """The calls with titles of the whole recording, which name groups by their keys."""
        places = []
        for title in calls.titles:
            members = self.members_of.get((rank, title.group), ())
            key = self._key(title.group, members)
            group = self.groups.setdefault(key, Group(title.group, title.label))
            if title.is_on_gloo:
                # Beside NCCL, gloo numbers the calls of a group on its own.
                key += " on gloo"
                self.groups[key] = group
            title = title._replace(group=key)
            if title not in self.place_of:
                self.place_of[title] = len(self.titles)
                self.titles.append(title)
            places.append(self.place_of[title])
        rows = calls.rows.copy()
        new_places = np.array(places, np.int64)
        rows["title"] = new_places[rows["title"]]
        return Calls(self.titles, rows, calls.frames)


def _joined(calls: Calls, sends: Calls) -> Calls:
    """Both, by the time at which they were made; ``hypergrid.record`` has no stacks of sends."""
    rows = np.concatenate((calls.rows, sends.rows))
    order = np.argsort(rows["created"], kind="stable")
    new_places = np.argsort(order)
    frames = {}
    for place, stack in calls.frames.items():
        new_place = int(new_places[place])
        frames[new_place] = stack
    return Calls(calls.titles, rows[order], frames)


def _mixture(recordings: Iterable[RankRecording]) -> str:
    """Why the files seem to be of two jobs, or of two starts of a job; empty if they do not.

    A job is restarted into the same directory, and rank 3 never starts: the files that rank 3 left
    in its previous life say nothing about this hang.
    """
    recordings = list(recordings)
    # Compared with the newest alone: two recordings of one run are both equal to it.
    newest = max(recordings, key=_begin, default=RankRecording(0))
    for recording in recordings:
        ranks = f"those of rank {recording.rank} and of rank {newest.rank}"
        if recording.world_size and newest.world_size not in (0, recording.world_size):
            return f"the files name jobs of two sizes, {ranks}"
        if recording.job and newest.job not in ("", recording.job):
            return f"the files name two jobs, {ranks}"
        if 0 < _end(recording) < _begin(newest) - _SKEW:
            return f"the files are of two times, {ranks}"
    return ""


def _begin(recording: RankRecording) -> int:
    """When a rank began to record or made its first call; 0 if that is not known."""
    if recording.started:
        return recording.started
    # Of a recorder that has lost calls, the first one is not the first that was made.
    if recording.whole and recording.calls:
        return recording.calls[0].created
    return 0


def _end(recording: RankRecording) -> int:
    """When a rank wrote, or called something last; 0 if that is not known."""
    if recording.written:
        return recording.written
    if not recording.calls:
        return 0
    last = recording.calls[-1]
    return max(last.created, last.completed)
