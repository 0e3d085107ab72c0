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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hypergrid.hangs import pickles
from hypergrid.messages import one_line

_NUMBERED = re.compile(r"^(.*?)(\d{1,9})(\.json)?$")
_MOST_RANKS = 1 << 20
_MOST_BYTES = 256 << 20  # of a file
_MOST_CALLS = 64 << 20  # of all files
_MOST_FILES = 100_000  # of a directory
_MOST_FRAMES = 100
_FAR = 10 * 10**9  # ns; more than clocks of hosts differ
_NAMES = (
    *("process_group", "is_p2p", "profiling_name"),
    *("input_sizes", "output_sizes", "input_dtypes", "output_dtypes"),
    *("collective_seq_id", "p2p_seq_id", "retired", "state"),
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"),
)
_FIELDS = itemgetter(*_NAMES)
_SHARED = 7  # so many of them are the same for many calls
DEFAULT = "default_pg"  # torch's description of the default group
ENDED = "ended"  # the reason that ``hypergrid.record`` gives where no exception ended the script


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


class What(NamedTuple):
    """The operation of a call. Sizes and dtypes are text."""

    name: str  # "all_reduce", "send"
    detail: str  # what follows the name: a root, or "0->1", in ranks of the group
    inputs: str
    outputs: str
    input_dtypes: str
    output_dtypes: str


class Title(NamedTuple):
    """The part that many calls have in common: group, name, sizes and dtypes."""

    group: str  # key of ``Recording.groups``
    label: str  # of the group, as torch's recorder has it
    p2p: bool
    text: str  # equal for calls of the same name, sizes and dtypes; ``what`` takes it apart

    @property
    def what(self) -> What:
        """Name, sizes and dtypes."""
        return _what(self.text)

    @property
    def backend(self) -> str:
        """Such as "gloo"; "nccl" for each of NCCL's backends, as torch 2.15 has several."""
        prefix = self.text.partition("|")[0].partition(":")[0]
        return "nccl" if prefix.startswith("nccl") else prefix


class Call(NamedTuple):
    """One entry of a flight recorder. Times are nanoseconds since 1970, 0 where not recorded."""

    title: Title
    seq: int  # the how many-th collective of its group, or point-to-point operation
    created: int
    started: int
    completed: int
    done: bool
    frames: tuple[Frame, ...]  # innermost first; only of a call that is not done, or the last

    @property
    def group(self) -> str:
        """Key of ``Recording.groups``."""
        return self.title.group

    @property
    def p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.title.p2p

    @property
    def what(self) -> What:
        """Name, sizes and dtypes."""
        return _what(self.title.text)


class Calls(Sequence[Call]):
    """The calls of a rank, oldest first, in columns: a job has millions.

    ``title`` are places in the list of titles, which all ranks of a recording share; the other
    columns are those of ``Call``.
    """

    def __init__(
        self,
        titles: list[Title] | None = None,
        columns: Any = ((),) * 6,
        frames: Mapping[int, tuple[Frame, ...]] | None = None,
    ) -> None:
        self.titles = [] if titles is None else titles
        self.frames = dict(frames or {})
        self.columns = np.stack([np.asarray(column, np.int64) for column in columns])
        self.title, self.seq, self.created, self.started, self.completed, _ = self.columns

    @property
    def done(self) -> Any:
        """A mask of the calls that have ended."""
        return self.columns[5] != 0

    def __len__(self) -> int:
        return len(self.seq)

    def __getitem__(self, at: int) -> Call:  # type: ignore[override]
        title, seq, created, started, completed, done = self.columns[:, at].tolist()
        place = range(len(self))[at]  # calls[-1] is the last
        frames = self.frames.get(place, ())
        return Call(self.titles[title], seq, created, started, completed, bool(done), frames)

    def at(self, places: Any) -> Calls:
        """The calls at some places, or where a mask is true, in that order."""
        places = np.arange(len(self))[places]
        frames = {}
        for new, old in enumerate(places.tolist()):
            if old in self.frames:
                frames[new] = self.frames[old]
        return Calls(self.titles, self.columns[:, places], frames)

    def joined(self, others: Calls) -> Calls:
        """Both, by the time at which they were made."""
        frames = dict(self.frames)
        for place, stack in others.frames.items():
            frames[len(self) + place] = stack
        joined = Calls(self.titles, np.hstack((self.columns, others.columns)), frames)
        return joined.at(np.argsort(joined.created, kind="stable"))


@lru_cache(maxsize=4096)
def _what(text: str) -> What:
    # "gloo:send 0->1|[[4]]|[[4]]|['Float']|['Float']": name, sizes and dtypes of both sides
    title, *shapes = text.split("|")
    name, _, detail = title.rpartition(":")[2].partition(" ")
    return What(name.lstrip("_") or "an operation", detail, *shapes)


@dataclass
class Group:
    """A process group: its members in order, where they are known."""

    name: str  # torch's
    label: str = ""
    ranks: tuple[int, ...] | None = None
    dims: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """How a sentence calls it."""
        if self.label == DEFAULT:
            return "the default group"
        return self.label or f"group {self.name}"


@dataclass
class RankRecording:
    """The files of one rank."""

    rank: int
    host: str = ""
    pid: int | None = None
    written: int = 0  # when its flight recorder was written, ns since 1970; 0 if not known
    latest: int = 0  # its file was not written after this, ns since 1970; 0 if not known
    started: int = 0  # when the process began to record, ns since 1970; 0 if not known
    job: str = ""  # the launcher's name of the job
    reason: str = ""
    error: str = ""
    stack: tuple[Frame, ...] = ()  # of the main thread, innermost first
    calls: Calls = field(default_factory=Calls)
    whole: bool = True  # the recorder reaches back to the first call
    has_calls: bool = False  # a flight recorder was read

    @property
    def ended(self) -> bool:
        """Whether its script has ended, and not by an exception."""
        return self.reason == ENDED

    @property
    def answered(self) -> bool:
        """Whether it wrote anything after the hang: its groups are written at the start."""
        return self.has_calls or bool(self.stack or self.error)


@dataclass
class Recording:
    """The files of all ranks."""

    ranks: dict[int, RankRecording]
    groups: dict[str, Group]
    world_size: int
    problems: list[str]
    titles: list[Title] = field(default_factory=list)  # of all calls
    unread: set[int] = field(default_factory=set)  # ranks with a file that could not be read
    mixed: str = ""  # why the files seem to be of two jobs or runs


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
        pid=int(data.get("pid") or 0) or None,
        started=int(life["started_ns"]),
        job=_text(life["job"]),
    )


def _calls(entries: list[dict[str, Any]]) -> tuple[Calls, bool]:
    """Entries of a flight recorder, and whether they reach back to the first call."""
    # Millions of entries: the bytes of the fields that many of them share stand for these.
    if not entries:
        return Calls(), True
    fields = [*zip(*map(_FIELDS, entries), strict=True)]
    collective_seq, p2p_seq, retired, state, *times = fields[_SHARED:]
    place_of: dict[bytes, int] = {}
    titles: list[Title] = []
    places: list[int] = []
    for values in zip(*fields[:_SHARED], strict=True):
        key = marshal.dumps(values)
        if key not in place_of:
            place_of[key] = len(titles)
            titles.append(_title(*values))
        places.append(place_of[key])
    is_p2p = np.array([title.p2p for title in titles], bool)[places]
    seq = np.where(is_p2p, _numbers(p2p_seq), _numbers(collective_seq))
    done: list[bool] = []
    frames: dict[int, tuple[Frame, ...]] = {}
    for at, entry in enumerate(entries):
        done.append(retired[at] is True or state[at] == "completed")
        # The stack of a call is shown if it has not ended, or is the last one.
        if not done[at] or at == len(entries) - 1:
            frames[at] = _frames(entry.get("frames"))
    is_whole = int(entries[0].get("record_id") or 0) == 0
    calls = Calls(titles, (places, seq, *map(_numbers, times), done), frames)
    return _without_batches(calls), is_whole


def _title(group: Sequence[Any], is_p2p: Any, name: Any, *shapes: Any) -> Title:
    torch_name, label = group
    text = "|".join([_text(name), *map(_shape, shapes)])
    if text.count("|") != 4:
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
    batches = [at for at, title in enumerate(calls.titles) if title.what.name == "coalesced"]
    group_of = [(title.group, title.p2p) for title in calls.titles]
    is_kept = np.ones(len(calls), bool)
    for end in np.flatnonzero(np.isin(calls.title, batches)):
        group = group_of[calls.title[end]]
        at = end - 1
        while at >= 0 and calls.seq[at] == calls.seq[end] and group_of[calls.title[at]] == group:
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
            first = self.named[group.name].setdefault(group.ranks or (), group)
            first.dims = first.dims or group.dims  # torch's recorder has no dims
            self.members_of[rank, group.name] = first.ranks or ()

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
        sizes = [*self.sizes]
        for known_ranks in (ranks, *(group.ranks or () for group in self.groups.values())):
            sizes.append(max(known_ranks, default=-1) + 1)
        world_size = max(sizes)
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
