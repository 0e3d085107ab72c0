"""Reader of a job's directory: flight recorders, live groups and stacks, read without torch.

Each file is loaded and checked on its own, in whichever process. Then the files of all ranks become
one recording: which groups have the same name, which files are of another run of the job.
"""

from __future__ import annotations

import gc
import json
import marshal
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hypergrid.hangs import pickles
from hypergrid.hangs.recording import (
    DEFAULT,
    Calls,
    Frame,
    Group,
    RankRecording,
    Recording,
    Title,
)
from hypergrid.messages import one_line

_NUMBERED = re.compile(r"^(.*?)(\d{1,9})(\.json)?$")
_MOST_RANKS = 1 << 20
_MOST_BYTES = 256 << 20  # of a file
_MOST_CALLS = 64 << 20  # of all files
_MOST_FILES = 100_000  # of a directory
_MOST_FRAMES = 100
_FAR = 10 * 10**9  # ns; more than clocks of hosts differ
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
    "retired",
    "state",
)


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

    A directory has at most 100,000 files, a file 256 MiB, and all together 64 million calls (of 48
    bytes each): what comes after them is left out. Reading takes at most 100 times the largest file
    beside that. ``progress`` is called after each file, with the number of files that were read and
    that of all.

    Many files are loaded by so many forked ``processes``, each of which holds one file: give more
    than one only where no other thread runs.
    """
    paths = []
    for path in sorted(Path(directory).iterdir(), key=_by_rank):
        # A rank may be writing now: it renames its file when that is whole.
        if path.is_file() and not path.name.endswith((".part", ".tmp")):
            paths.append(path)
    reader = _Reader()
    if len(paths) > _MOST_FILES:
        first = one_line(paths[_MOST_FILES].name)
        left_out = f"{len(paths) - _MOST_FILES:,} files, from {first} on"
        reader.problems.append(f"{left_out}, are not read: the limit is {_MOST_FILES:,} files.")
        del paths[_MOST_FILES:]
    workers = min(processes, len(paths) // 16)
    was_on = gc.isenabled()
    gc.disable()  # there are no cycles to find among millions of new objects
    try:
        with ExitStack() as stack:
            load: Any = map
            if workers > 1:
                pool = ProcessPoolExecutor(workers, get_context("fork"))
                load = partial(stack.enter_context(pool).map, chunksize=4)
            for number, loaded in enumerate(load(_load, paths)):
                reader.add(paths[number], loaded)
                if progress is not None:
                    progress(number + 1, len(paths))
    finally:
        if was_on:
            gc.enable()
    return reader.recording()


def _by_rank(path: Path) -> tuple[str, int, str]:
    numbered = _NUMBERED.match(path.name)
    if numbered is None:
        return (path.name, -1, path.name)
    return (numbered[1], int(numbered[2]), path.name)


# One file.


class _Loaded(NamedTuple):
    """The content of one file, checked; or why it cannot be used."""

    recording: RankRecording | None = None  # the part that is in this file
    groups: Sequence[Group] = ()
    world_size: int = 0
    problem: str = ""
    is_foreign: bool = False  # it may be a file of somebody else


def _load(path: Path) -> _Loaded:
    """Load a file; a fault is in the result, and is not raised."""
    try:
        status = path.stat()
        if status.st_size > _MOST_BYTES:
            return _Loaded(problem=f"is larger than {_MOST_BYTES >> 20} MiB, and is not read")
        content = _content(path, status.st_size)
        is_pickle = content[:1] == b"\x80"
        if not is_pickle and content.lstrip()[:1] != b"{":
            why = "it is neither a pickle nor JSON" if content else "it is empty"
            return _Loaded(problem=_unreadable(why), is_foreign=True)
        data = pickles.load(content) if is_pickle else json.loads(content)
        if not isinstance(data, dict):
            raise ValueError("it holds no table")
        if "entries" in data:
            return _trace(path.name, data, status.st_mtime_ns)
        if "threads" in data:
            return _stack(data)
        if "groups" in data and "pid" in data:
            return _groups(data)
        return _Loaded()
    except pickles.Refused as error:
        return _Loaded(problem=f"was refused: {error}")
    except Exception as error:  # a damaged file can raise nearly anything
        return _Loaded(problem=_unreadable(str(error) or type(error).__name__))


def _unreadable(why: str) -> str:
    return f"cannot be read, it may be cut: {why.partition(chr(10))[0][:200].rstrip('.')}"


def _content(path: Path, size: int) -> bytes:
    """So many bytes of a regular file. A file of the kernel, whose size is 0, may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        return file.read(size)


def _trace(file_name: str, data: dict[str, Any], latest: int) -> _Loaded:
    """A flight recorder of torch."""
    numbered = _NUMBERED.match(file_name)
    if numbered is None:
        raise ValueError("its name does not end in a rank")
    rank = _rank(int(numbered[2]))
    calls, is_whole = _calls(data["entries"] or [])
    groups = []
    world_size = 0
    for name, config in (data.get("pg_config") or {}).items():
        members = _members(config["ranks"])
        if members:
            groups.append(Group(_text(name), _text(config["desc"]), members))
            if config["desc"] == DEFAULT:
                world_size = len(members)
    recording = RankRecording(rank, latest=latest, calls=calls, whole=is_whole, has_calls=True)
    return _Loaded(recording, groups, world_size)


def _groups(data: dict[str, Any]) -> _Loaded:
    """The live groups, as ``hypergrid.dump`` writes them."""
    if data["rank"] is None:
        return _Loaded()  # written before there was a default group
    recording = _process(data)
    groups = []
    # A communicator that several labels share carries the name of the one that created it.
    for group in sorted(data["groups"], key=lambda group: group.get("shared_with") is not None):
        label = _text(group["label"] or group["description"])
        dims = tuple(map(_text, group["dims"] or ()))
        groups.append(Group(_text(group["name"]), label, _members(group["ranks"]), dims))
    return _Loaded(recording, groups, _rank(int(data["world_size"])))


def _stack(data: dict[str, Any]) -> _Loaded:
    """The stacks, the error and gloo's sends and receives, as ``hypergrid.record`` writes them."""
    recording = _process(data)
    recording.written = int(data["written_ns"])
    recording.reason = _text(data.get("reason") or "")
    recording.error = _text(data.get("error") or "")
    for thread in data["threads"]:
        if thread.get("main"):
            recording.stack = _frames(thread["frames"])
    recording.calls, recording.whole = _calls(data.get("p2p") or [])
    return _Loaded(recording)


def _process(data: dict[str, Any]) -> RankRecording:
    """A rank, and the process that wrote a file."""
    life = data.get("life") or {"started_ns": 0, "job": ""}
    return RankRecording(
        _rank(data["rank"]),
        host=_text(data.get("host") or ""),
        pid=int(data.get("pid") or 0),
        started=int(life["started_ns"]),
        job=_text(life["job"]),
    )


def _calls(entries: list[dict[str, Any]]) -> tuple[Calls, bool]:
    """Entries of a flight recorder, and whether they reach back to the first call."""
    if not entries:
        return Calls(), True
    titles: list[Title] = []
    place_of: dict[bytes, int] = {}
    rows: list[tuple[Any, ...]] = []
    frames: dict[int, tuple[Frame, ...]] = {}
    for at, entry in enumerate(entries):
        # There are millions of entries: the bytes of these fields find the title in one step.
        shared_fields = _SHARED_FIELDS(entry)
        key = marshal.dumps(shared_fields)
        if key not in place_of:
            place_of[key] = len(titles)
            titles.append(_title(*shared_fields))
        place = place_of[key]
        collective_seq, p2p_seq, *times, retired, state = _OWN_FIELDS(entry)
        seq = p2p_seq if titles[place].p2p else collective_seq
        is_done = retired is True or state == "completed"
        rows.append((place, seq, *times, is_done))
        # The stack of a call is shown if it has not ended, or is the last one.
        if not is_done or at == len(entries) - 1:
            frames[at] = _frames(entry.get("frames"))
    columns = [_numbers(column) for column in zip(*rows, strict=True)]
    is_whole = int(entries[0].get("record_id") or 0) == 0
    return _without_batches(Calls(titles, columns, frames)), is_whole


def _title(group: Sequence[Any], is_p2p: Any, name: Any, *shapes: Any) -> Title:
    torch_name, label = group
    parts = [_text(name)]
    for values in shapes:
        parts.append(_shape(values))
    text = "|".join(parts)
    # A "|" in the name would be taken for the end of it.
    if text.count("|") != len(shapes):
        raise ValueError("a call has no valid name")
    return Title(_text(torch_name), _text(label), is_p2p is True, text)


def _shape(values: Any) -> str:
    """Sizes or dtypes as text."""
    flat = []
    for value in values:
        flat += value if isinstance(value, list) else [value]
    # The text of anything else could be endless.
    is_plain = all(type(value) in (int, str) for value in flat)
    if not isinstance(values, list) or not is_plain:
        raise ValueError("a call has no valid sizes")
    return str(values)


def _without_batches(calls: Calls) -> Calls:
    """The operations of each batch with its state, as NCCL's recorder has that apart."""
    batch_titles = []
    group_of_title = []
    for place, title in enumerate(calls.titles):
        group_of_title.append((title.group, title.p2p))
        if title.what.name == "coalesced":
            batch_titles.append(place)
    is_kept = np.ones(len(calls), bool)
    for end in np.flatnonzero(np.isin(calls.title, batch_titles)):
        group = group_of_title[calls.title[end]]
        # The operations of a batch come before it, and have its number.
        at = end - 1
        while at >= 0 and calls.seq[at] == calls.seq[end]:
            if group_of_title[calls.title[at]] != group:
                break
            calls.columns[3:, at] = calls.columns[3:, end]
            is_kept[end] = False
            at -= 1
    return calls.at(is_kept)


def _rank(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= _MOST_RANKS:
        raise ValueError("it names no rank")
    return number


def _members(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, str):  # torch writes them as text
        ranks = json.loads(ranks or "[]")
    return tuple(map(_rank, ranks))


def _frames(rows: Any) -> tuple[Frame, ...]:
    frames = []
    for row in list(rows or ())[:_MOST_FRAMES]:
        if isinstance(row, dict):
            row = (row["filename"], row["line"], row["name"])
        file, line, function = row
        frames.append(Frame(_text(file), int(line), _text(function)))
    return tuple(frames)


def _numbers(values: Sequence[Any]) -> Any:
    """Whole numbers; 0 for those that are not known."""
    try:
        return np.array(values, np.int64)
    except TypeError:
        return np.array([int(value or 0) for value in values], np.int64)


def _text(value: Any) -> str:
    """A name that is text, or a number; nothing else, as its text could be endless."""
    if type(value) not in (str, int):
        raise ValueError("a name is not text")
    return one_line(str(value))  # in a sentence it must not begin a line of its own


# All files.


class _Reader:
    """Puts the files of all ranks together."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.unread: set[int] = set()
        self.foreign: list[tuple[Path, str]] = []  # files, and why they cannot be read
        self.prefixes: set[str] = set()  # of the names of dumps
        self.ranks: dict[int, RankRecording] = {}
        self.sends: dict[int, Calls] = {}  # of gloo
        self.sizes: dict[int, int] = {}  # of the job, and a rank whose files say so
        self.calls_left = _MOST_CALLS
        self.named: dict[str, dict[tuple[int, ...], Group]] = defaultdict(dict)
        self.members_of: dict[tuple[int, str], tuple[int, ...]] = {}
        self.groups: dict[str, Group] = {}
        self.titles: list[Title] = []
        self.number_of: dict[Title, int] = {}

    def add(self, path: Path, loaded: _Loaded) -> None:
        """Take one file in."""
        if loaded.is_foreign:
            self.foreign.append((path, loaded.problem))
            return
        if loaded.problem:
            self._failed(path, loaded.problem)
            return
        if loaded.recording is None:
            return
        try:
            self._merge(loaded.recording)
        except ValueError as error:
            self._failed(path, _unreadable(str(error)))
            return
        self.prefixes.add(_by_rank(path)[0])
        rank = loaded.recording.rank
        if loaded.world_size:
            self.sizes.setdefault(loaded.world_size, rank)
        for group in loaded.groups:
            first = self.named[group.name].setdefault(group.ranks, group)
            first.dims = first.dims or group.dims  # torch's recorder has no dims
            self.members_of[rank, group.name] = first.ranks

    def _failed(self, path: Path, problem: str) -> None:
        self.problems.append(one_line(f"{path.name} {problem}."))
        rank = _by_rank(path)[1]
        if rank >= 0:
            self.unread.add(rank)

    def _merge(self, part: RankRecording) -> None:
        """Add the facts of one file to those of its rank."""
        recording = self.ranks.setdefault(part.rank, RankRecording(part.rank))
        if part.has_calls and recording.has_calls:
            raise ValueError(f"there is already a flight recorder of rank {part.rank}")
        self.calls_left -= len(part.calls)
        if self.calls_left < 0:
            raise ValueError(f"it comes after {_MOST_CALLS:,} calls, which is the limit")
        is_whole = recording.whole and part.whole
        if not part.has_calls and part.calls:
            self.sends[part.rank] = part.calls
            part.calls = Calls()
        for name, value in vars(part).items():
            if value:
                setattr(recording, name, value)
        recording.whole = is_whole

    def recording(self) -> Recording:
        """The files of all ranks as one recording."""
        has_calls = any(recording.has_calls for recording in self.ranks.values())
        for path, problem in self.foreign:  # other files of the job are numbered too: logs, events
            prefix, rank, _ = _by_rank(path)
            is_dump = prefix in self.prefixes or not has_calls
            if rank >= 0 and is_dump:
                self._failed(path, problem)
        self._drop_other_lives()
        for name, by_members in self.named.items():
            for members, group in by_members.items():
                self.groups[self._key(name, members)] = group
        ranks = dict(sorted(self.ranks.items()))
        for rank, recording in ranks.items():
            # NCCL's sends are in its recorder, those of gloo in the file of stacks.
            has_sends = any(title.p2p for title in recording.calls.titles)
            recording.calls = self._with_keys(rank, recording.calls)
            if rank in self.sends and not has_sends:
                recording.calls = recording.calls.joined(self._with_keys(rank, self.sends[rank]))
        # No file may say how many ranks the job has: then it has at least those that are named.
        highest_rank = max(ranks, default=-1)
        for group in self.groups.values():
            highest_rank = max(highest_rank, *group.ranks, -1)
        world_size = max(highest_rank + 1, *self.sizes, 0)
        mixed = self._several_sizes() or _gap(ranks)
        return Recording(
            ranks, self.groups, world_size, self.problems, self.titles, self.unread, mixed
        )

    def _key(self, name: str, members: tuple[int, ...]) -> str:
        """A key that only one group has: torch can use one name for several groups."""
        if len(self.named[name]) < 2 or not members:
            return name
        return f"{name}@{','.join(map(str, members))}"

    def _with_keys(self, rank: int, calls: Calls) -> Calls:
        """The calls with titles of the whole recording, which name groups by their keys."""
        numbers = []
        for title in calls.titles:
            key = self._key(title.group, self.members_of.get((rank, title.group), ()))
            self.groups.setdefault(key, Group(title.group, title.label))
            title = title._replace(group=key)
            number = self.number_of.setdefault(title, len(self.titles))
            if number == len(self.titles):
                self.titles.append(title)
            numbers.append(number)
        places = np.array(numbers, np.int64)[calls.title]
        return Calls(self.titles, (places, *calls.columns[1:]), calls.frames)

    def _drop_other_lives(self) -> None:
        """Leave out what a rank wrote before another rank of the directory had started.

        A job is restarted into the same directory, and rank 3 never starts: the files that rank 3
        left in its previous life say nothing about this hang.
        """
        newest = max(self.ranks.values(), key=lambda recording: recording.started, default=None)
        if newest is None:
            return
        for rank, recording in self.ranks.items():
            # The groups of a rank are written at its start, everything else has a time.
            ended_before = 0 < recording.written < newest.started
            is_other_job = bool(recording.job and newest.job) and recording.job != newest.job
            if ended_before or is_other_job:
                self.problems.append(
                    f"the files of rank {rank} are of another start of the job than those of rank "
                    f"{newest.rank}, or of another job: they are not used."
                )
                self.ranks[rank] = RankRecording(rank)
                self.sends.pop(rank, None)

    def _several_sizes(self) -> str:
        """The sizes of the job that files name, if they differ."""
        sizes = sorted(self.sizes.items())[:2]
        if len(sizes) < 2:
            return ""
        texts = [f"{size} ranks by the files of rank {rank}" for size, rank in sizes]
        return f"the job has {' and '.join(texts)}"


def _gap(ranks: dict[int, RankRecording]) -> str:
    """Whether the calls of one rank end long before those of another begin."""
    begin = {}
    end = {}
    for rank, recording in ranks.items():
        if recording.calls:
            begin[rank] = recording.calls[0].created
            last = recording.calls[-1]
            end[rank] = max(recording.written, last.created, last.completed)
    if not begin:
        return ""
    early = min(end, key=end.__getitem__)
    late = max(begin, key=begin.__getitem__)
    # A recorder that has wrapped around begins late; then only the time of the dump says enough.
    is_known = ranks[early].written or ranks[late].whole
    if begin[late] - end[early] < _FAR or not is_known:
        return ""
    return f"the calls of rank {early} ended before those of rank {late} began"
