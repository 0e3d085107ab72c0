"""Reader of a job's directory: flight recorders, live groups and stacks, read without torch."""

from __future__ import annotations

import gc
import json
import marshal
import os
import re
import resource
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice, repeat
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from hypergrid.hangs import pickles
from hypergrid.messages import one_line

_NUMBERED = re.compile(r"^(.*?)(\d+)(\.json)?$")
_MOST_RANKS = 1 << 20
_MOST_BYTES, _MOST_CALLS = 256 << 20, 64 << 20  # of a file, of all files
_MOST_FILES = 100_000  # of a directory
_SMALL, _MOST_FRAMES = 1 << 20, 100
_FAR = 10 * 10**9  # ns; more than clocks of hosts differ
_NAMES = (
    *("process_group", "is_p2p", "profiling_name"),
    *("input_sizes", "output_sizes", "input_dtypes", "output_dtypes"),
    *("collective_seq_id", "p2p_seq_id", "retired", "state"),
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"),
)
_FIELDS, _SHARED = itemgetter(*_NAMES), 7  # so many of them are the same for many calls
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
        self.titles, self.frames = titles if titles is not None else [], dict(frames or {})
        self.columns = np.stack([np.asarray(each, np.int64) for each in columns])
        self.title, self.seq, self.created, self.started, self.completed, _ = self.columns

    @property
    def done(self) -> Any:
        """A mask of the calls that have ended."""
        return self.columns[5] != 0

    def __len__(self) -> int:
        return len(self.seq)

    @overload
    def __getitem__(self, at: int) -> Call: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Call]: ...
    def __getitem__(self, at: int | slice) -> Call | Sequence[Call]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        title, seq, created, started, completed, done = self.columns[:, at].tolist()
        frames = self.frames.get(range(len(self))[at], ())
        return Call(self.titles[title], seq, created, started, completed, bool(done), frames)

    def at(self, places: Any) -> Calls:
        """The calls at some places, or where a mask is true, in that order."""
        places = np.arange(len(self))[places]
        moved = {new: self.frames[old] for new, old in enumerate(places) if old in self.frames}
        return Calls(self.titles, self.columns[:, places], moved)

    def joined(self, others: Calls) -> Calls:
        """Both, by the time at which they were made."""
        frames = {**self.frames, **{len(self) + at: f for at, f in others.frames.items()}}
        both = Calls(self.titles, np.hstack((self.columns, others.columns)), frames)
        return both.at(np.argsort(both.created, kind="stable"))


@lru_cache(maxsize=4096)
def _what(text: str) -> What:
    title, *shapes = text.split("|")
    name, _, detail = title.rpartition(":")[2].partition(" ")
    inputs, outputs, *dtypes = shapes
    return What(name.lstrip("_") or "an operation", detail, inputs, outputs, dtypes[0], dtypes[1])


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
        return "the default group" if self.label == DEFAULT else self.label or f"group {self.name}"


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
    files: list[str] = field(default_factory=list)

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
    bytes each): what comes after them is left out. Reading takes at most 64 times the largest file
    beside that. ``progress`` is called after each file, with the number of files that were read and
    that of all.

    Many files are loaded by so many forked ``processes``, each of which holds one file: give more
    than one only where no other thread runs.
    """
    paths = [
        path
        for path in sorted(Path(directory).iterdir(), key=_by_rank)
        if path.is_file() and not path.name.endswith((".part", ".tmp"))
    ]
    reader, many = _Reader(), min(processes, len(paths) // 16)
    if len(paths) > _MOST_FILES:
        left_out = f"{len(paths) - _MOST_FILES:,} files, from {paths[_MOST_FILES].name} on"
        reader.problems.append(f"{left_out}, are not read: the limit is {_MOST_FILES:,} files.")
        del paths[_MOST_FILES:]
    was_on = gc.isenabled()
    gc.disable()  # there are no cycles to find among millions of new objects
    try:
        with ExitStack() as stack:
            load: Any = map
            if many > 1:
                fork = ProcessPoolExecutor(many, get_context("fork"))
                load = partial(stack.enter_context(fork).map, chunksize=4)
            for number, (path, loaded) in enumerate(zip(paths, load(_load, paths), strict=True), 1):
                reader.file(path, loaded)
                if progress is not None:
                    progress(number, len(paths))
    finally:
        if was_on:
            gc.enable()
    return reader.finish()


def _by_rank(path: Path) -> tuple[str, int, str]:
    parts = _NUMBERED.match(path.name)
    number = int(parts[2]) if parts and len(parts[2]) < 10 else -1
    return (parts[1] if parts else path.name, number, path.name)


def _prefix(name: str) -> str:
    return name.rstrip("0123456789") if not name.endswith(".json") else _prefix(name[:-5])


@contextmanager
def _bounded(size: int) -> Iterator[None]:
    """A few damaged bytes can make the unpickler ask for gigabytes: bound what it gets."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + 64 * size + (256 << 20)
        if limits[0] == resource.RLIM_INFINITY or most < limits[0]:
            resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


class _Loaded(NamedTuple):
    """A file as it was loaded; its calls in columns, in place of "entries" or "p2p"."""

    data: Any = None
    size: int = 0  # bytes
    problem: str = ""
    unknown: str = ""  # why it may be a file of somebody else


class _Columns(NamedTuple):
    """Entries of a flight recorder, before their titles are known."""

    rows: list[list[Any]]  # what several entries share, each once
    places: list[int]  # in ``rows``
    numbers: list[Any]  # sequence number, times and whether it is done
    frames: dict[int, tuple[Frame, ...]]
    whole: bool  # from the first call on


def _content(path: Path, size: int) -> bytes:
    """So many bytes of a regular file. A file of the kernel, whose size is 0, may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        return file.read(size)


def _load(path: Path) -> _Loaded:
    """Load a file; what is wrong with it is told and not raised."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            return _Loaded(problem=f"is larger than {_MOST_BYTES >> 20} MiB, and is not read")
        data = _content(path, size)
        if data[:1] != b"\x80" and data.lstrip()[:1] != b"{":
            return _Loaded(unknown="it is neither a pickle nor JSON" if data else "it is empty")
        with _bounded(size):
            loaded = pickles.load(data) if data[0] == 0x80 else json.loads(data)
            if not isinstance(loaded, dict):
                raise ValueError("it holds no table")
            if data[0] == 0x80 and "entries" not in loaded:
                return _Loaded()
            for name in {"entries", "p2p"} & loaded.keys():
                loaded[name] = _columns(loaded[name] or [], _Budget(size))
        return _Loaded(loaded, size)
    except pickles.Refused as error:
        return _Loaded(problem=f"was refused: {error}")
    except Exception as error:  # a damaged file can raise nearly anything
        return _Loaded(problem=_cut(error))


def _cut(error: Exception) -> str:
    why = str(error).partition("\n")[0][:200].rstrip(".") or type(error).__name__
    return f"cannot be read, it may be cut: {why}"


class _Budget:
    """A list may be in a file once and in its entries a million times: stop in time."""

    def __init__(self, size: int) -> None:
        self.left = 16 * size + _SMALL

    def spend(self, what: int) -> None:
        self.left -= what
        if self.left < 0:
            raise ValueError("it says the same again and again, which no recorder does")


def _columns(entries: list[dict[str, Any]], budget: _Budget) -> _Columns:
    # Millions of entries: the bytes of what one shares with others stand for it.
    fields = [*zip(*map(_FIELDS, entries), strict=True)] or [()] * len(_NAMES)
    shared, (collective, p2p, retired, state, *times) = fields[:_SHARED], fields[_SHARED:]
    found: dict[bytes, int] = {}
    rows, places = list[list[Any]](), list[int]()
    keys = map(marshal.dumps, zip(*shared, strict=True), repeat(4))
    while some := [*islice(keys, 100)]:
        budget.spend(sum(map(len, some)))
        for key in dict.fromkeys(some):
            if key not in found:
                found[key] = len(rows)
                rows.append([each[len(places) + some.index(key)] for each in shared])
        places += map(found.__getitem__, some)
    is_p2p = np.array([row[1] is True for row in rows], bool)[places]
    seq = np.where(is_p2p, _whole(p2p), _whole(collective))
    done = np.array([r is True or s == "completed" for r, s in zip(retired, state, strict=True)])
    shown = {*np.flatnonzero(~done.astype(bool)).tolist(), len(entries) - 1} - {-1}
    frames = {at: _frames(entries[at].get("frames")) for at in shown}
    whole = not entries or int(entries[0].get("record_id") or 0) == 0
    return _Columns(rows, places, [seq, *map(_whole, times), done], frames, whole)


class _Reader:
    def __init__(self) -> None:
        self.ranks: dict[int, RankRecording] = {}
        self.problems: list[str] = []
        self.named: dict[str, dict[tuple[int, ...] | None, Group]] = {}
        self.keys: dict[tuple[int, str], tuple[int, ...] | None] = {}  # of which members
        self.titles: list[Title] = []
        self.title_at: dict[Title, int] = {}
        self.left = _MOST_CALLS
        self.members: dict[Any, tuple[int, ...]] = {}
        self.worlds: dict[int, str] = {}  # sizes, and files that say so
        self.unread: set[int] = set()
        self.mixed = ""
        self.traces: dict[int, str] = {}
        self.unknown: list[tuple[Path, str]] = []  # a file, and what is wrong with it
        self.prefixes: set[str] = set()  # of the dumps' names

    def file(self, path: Path, loaded: _Loaded) -> None:
        numbered = _NUMBERED.match(path.name)
        if loaded.problem:
            self._failed(path, loaded.problem)
        elif loaded.unknown:
            self.unknown += [(path, loaded.unknown)] if numbered else []
        elif loaded.data:
            self._budget = _Budget(loaded.size)
            try:
                name = one_line(path.name)
                number = self._take(name, loaded.data, int(numbered[2]) if numbered else None)
                if "entries" in loaded.data and number is not None:
                    self._rank(number).latest = path.stat().st_mtime_ns
            except Exception as error:  # a damaged file can raise nearly anything
                self._failed(path, _cut(error))

    def _failed(self, path: Path, what: str) -> None:
        self.problems.append(one_line(f"{path.name} {what}."))
        numbered = _NUMBERED.match(path.name)
        if numbered and len(numbered[2]) < 10:
            self.unread.add(int(numbered[2]))

    def _take(self, name: str, data: dict[str, Any], number: int | None) -> int | None:
        if "entries" in data:
            if number is None or number > _MOST_RANKS:
                raise ValueError("its name does not end in a rank")
            if number in self.traces:
                raise ValueError(f"{self.traces[number]} is already the dump of rank {number}")
            self._trace(number, data)
            self.traces[number] = name
        elif "threads" in data:
            number = self._stack(data)
        elif "groups" in data and "pid" in data:
            number = self._groups(data)
        else:
            return None
        if number is not None:
            self._rank(number).files.append(name)
            self.prefixes.add(_prefix(name))
        return number

    def _rank(self, rank: int) -> RankRecording:
        return self.ranks.setdefault(rank, RankRecording(rank))

    def _trace(self, rank: int, data: dict[str, Any]) -> None:
        calls = self._calls(data["entries"])
        for name, group in (data.get("pg_config") or {}).items():
            if group["ranks"] not in ("", "[]", []):
                self._group(rank, _text(name), _text(group["desc"]), self._members(group["ranks"]))
        self._take_calls(rank, calls, data["entries"].whole)
        self._rank(rank).has_calls = True

    def _take_calls(self, rank: int, calls: Calls, whole: bool) -> None:
        for place in np.unique(calls.title):
            title = self.titles[place]
            self._group(rank, title.group, title.label, None)
        mine = self._rank(rank)
        # NCCL's sends are in its recorder, those of gloo in the file of stacks.
        mine.calls = mine.calls.joined(calls) if mine.calls else calls
        mine.whole = mine.whole and whole

    def _calls(self, given: _Columns) -> Calls:
        self.left -= len(given.places)
        if self.left < 0:
            raise ValueError(f"it comes after {_MOST_CALLS:,} calls, which is the limit")
        titles = np.array([self._title(row) for row in given.rows], np.int64)[given.places]
        return self._without_batches(Calls(self.titles, (titles, *given.numbers), given.frames))

    def _without_batches(self, calls: Calls) -> Calls:
        """The operations of each batch with its state, as NCCL's recorder has that apart."""
        batches = [at for at, title in enumerate(self.titles) if title.what.name == "coalesced"]
        ends = np.flatnonzero(np.isin(calls.title, batches)) if batches else ()
        of = [(title.group, title.p2p) for title in self.titles]
        kept = np.ones(len(calls), bool)
        for end in ends:
            at, title, seq = end - 1, of[calls.title[end]], calls.seq[end]
            while at >= 0 and calls.seq[at] == seq and of[calls.title[at]] == title:
                calls.columns[3:, at] = calls.columns[3:, end]
                kept[end] = False
                at -= 1
        return calls if kept.all() else calls.at(kept)

    def _title(self, row: list[Any]) -> int:
        (group, label), p2p, name, *shapes = row
        text = "|".join([_text(name), *map(self._shape, shapes)])
        title = Title(_text(group), _text(label), p2p is True, text)
        if title.text.count("|") != 4:
            raise ValueError("a call has no valid name")
        place = self.title_at.setdefault(title, len(self.titles))
        self.titles += [title] * (place == len(self.titles))
        return place

    def _shape(self, given: list[Any]) -> str:
        """Sizes or dtypes as text."""
        self._budget.spend(sum(len(each) if isinstance(each, list | str) else 1 for each in given))
        flat = [one for each in given for one in (each if isinstance(each, list) else (each,))]
        if not all(type(each) in (int, str) for each in flat):
            raise ValueError("a call has no valid sizes")
        return str(given)

    def _members(self, ranks: Any) -> tuple[int, ...]:
        self._budget.spend(len(ranks))
        if isinstance(ranks, str) and ranks in self.members:
            return self.members[ranks]
        given = json.loads(ranks) if isinstance(ranks, str) else ranks
        if not all(type(rank) is int and 0 <= rank <= _MOST_RANKS for rank in given):
            raise ValueError("the members of a group are not ranks")
        members = self.members.setdefault(tuple(given), tuple(given))
        return self.members.setdefault(ranks, members) if isinstance(ranks, str) else members

    def _group(
        self,
        rank: int,
        name: str,
        label: str,
        ranks: tuple[int, ...] | None,
        dims: Iterable[Any] = (),
    ) -> None:
        ranks = ranks or self.keys.get((rank, name))
        group = self.named.setdefault(name, {}).setdefault(ranks, Group(name, label, ranks))
        group.dims = group.dims or tuple(map(str, dims))
        self.keys[rank, name] = ranks

    def _groups(self, data: dict[str, Any]) -> int | None:
        rank = data["rank"]
        if type(rank) is not int or not 0 <= rank <= _MOST_RANKS:
            return None  # written before there was a default group
        mine = self._rank(rank)
        self._process(mine, one_line(str(data["host"])), int(data["pid"]))
        self._life(mine, data.get("life"))
        if 0 < int(data["world_size"]) <= _MOST_RANKS:
            self.worlds.setdefault(int(data["world_size"]), f"the groups of rank {rank}")
        # A communicator that several labels share carries the name of the one that created it.
        for group in sorted(data["groups"], key=lambda each: each.get("shared_with") is not None):
            label = one_line(str(group["label"] or group["description"]))
            ranks = self._members(group["ranks"])
            dims = [one_line(str(dim)) for dim in group["dims"] or ()]
            self._group(rank, one_line(str(group["name"])), label, ranks, dims)
        return rank

    def _process(self, mine: RankRecording, host: str, pid: int) -> None:
        if mine.pid and pid and (mine.host, mine.pid) != (host, pid):
            self.mixed = f"the files of rank {mine.rank} are of two processes, {mine.pid} and {pid}"
        mine.host, mine.pid = host, pid or None

    def _life(self, mine: RankRecording, life: Any) -> None:
        """Take down when the process of a rank started, and in which job."""
        if isinstance(life, dict):
            mine.started = max(mine.started, int(life["started_ns"]))
            mine.job = _text(life["job"])

    def _drop_other_lives(self) -> None:
        """Leave out what a rank wrote before another rank of the directory had started.

        A job is restarted into the same directory, and rank 3 never starts: the files that rank 3
        left in its previous life say nothing about this hang.
        """
        newest = max(self.ranks.values(), key=lambda mine: mine.started, default=None)
        if newest is None:
            return
        for rank, mine in self.ranks.items():
            # The groups of a rank are written at its start, everything else has a time.
            ended_before = 0 < mine.written < newest.started
            is_other_job = bool(mine.job and newest.job) and mine.job != newest.job
            if ended_before or is_other_job:
                self.problems.append(
                    f"the files of rank {rank} are of another start of the job than those of rank "
                    f"{newest.rank}, or of another job: they are not used."
                )
                self.ranks[rank] = RankRecording(rank)

    def _stack(self, data: dict[str, Any]) -> int:
        rank = data["rank"]
        if type(rank) is not int or not 0 <= rank <= _MOST_RANKS:
            raise ValueError("it names no rank")
        mine = self._rank(rank)
        self._process(mine, one_line(str(data.get("host") or mine.host)), int(data.get("pid") or 0))
        self._life(mine, data.get("life"))
        mine.written, mine.reason = int(data["written_ns"]), one_line(str(data.get("reason") or ""))
        mine.error = one_line(str(data.get("error") or ""))
        threads = data["threads"]
        main = next((each for each in threads if each.get("main")), None)
        mine.stack = _frames(main["frames"]) if main else ()
        p2p = data.get("p2p") or _columns([], self._budget)
        calls = self._calls(p2p)
        if not any(
            title.p2p for title in map(self.titles.__getitem__, np.unique(mine.calls.title))
        ):
            self._take_calls(rank, calls, p2p.whole)
        return rank

    def finish(self) -> Recording:
        """Give every group one key, also where torch used one name for several."""
        for path, why in self.unknown:  # other files of the job are numbered too: logs, events
            if _prefix(path.name) in self.prefixes or not self.traces:
                self._failed(path, f"cannot be read, it may be cut: {why}")
        self._drop_other_lives()
        groups: dict[str, Group] = {}
        keys: dict[tuple[str, tuple[int, ...] | None], str] = {}
        for name, by_members in self.named.items():
            if len(by_members) > 1:
                unknown = by_members.pop(None, None)
                if unknown and len(by_members) == 1:
                    keys[name, None] = name
            for ranks, group in by_members.items():
                key = name if len(by_members) == 1 or not ranks else f"{name}@{ranks[0]}"
                if key in groups:
                    key = f"{name}@{ranks}"
                groups[key], keys[name, ranks] = group, key
        several = {name for name, by_members in self.named.items() if len(by_members) > 1}
        for mine in self.ranks.values() if several else ():
            for place in np.unique(mine.calls.title):
                title = self.titles[place]
                if title.group in several:
                    title = title._replace(group=self._key(mine.rank, title.group, keys))
                    other = self.title_at.setdefault(title, len(self.titles))
                    self.titles += [title] * (other == len(self.titles))
                    mine.calls.title[mine.calls.title == place] = other
        for (rank, name), ranks in self.keys.items():
            if ranks and self.named[name][ranks].label == DEFAULT:
                self.worlds.setdefault(len(ranks), f"the flight recorder of rank {rank}")
        world = max([*self.worlds, *(rank + 1 for rank in self.ranks)], default=0)
        found = dict(sorted(self.ranks.items()))
        mixed = self._sizes() or self.mixed or _gap(found)
        return Recording(found, groups, world, self.problems, self.titles, self.unread, mixed)

    def _sizes(self) -> str:
        """The sizes of the job that files name, if they differ, with the files."""
        said = [f"{size} ranks in {where}" for size, where in sorted(self.worlds.items())]
        return f"the job has {' and '.join(said[:2])}" if len(said) > 1 else ""

    def _key(
        self, rank: int, name: str, keys: dict[tuple[str, tuple[int, ...] | None], str]
    ) -> str:
        members = self.keys.get((rank, name))
        return keys.get((name, members)) or next(
            key for (other, _), key in keys.items() if other == name
        )


def _gap(ranks: dict[int, RankRecording]) -> str:
    """Whether the calls of one rank end long before those of another begin."""
    begin = {rank: mine.calls[0].created for rank, mine in ranks.items() if mine.calls}
    if not begin:
        return ""
    last = {rank: ranks[rank].calls[-1] for rank in begin}
    end = {r: max(ranks[r].written, call.created, call.completed) for r, call in last.items()}
    early, late = min(end, key=end.__getitem__), max(begin, key=begin.__getitem__)
    # A recorder that has wrapped around begins late; then only the time of the dump says enough.
    known = ranks[early].written or ranks[late].whole
    if begin[late] - end[early] < _FAR or not known:
        return ""
    return f"the calls of rank {early} ended before those of rank {late} began"


def _frames(given: Any) -> tuple[Frame, ...]:
    frames = []
    for each in list(given or ())[:_MOST_FRAMES]:
        if isinstance(each, dict):
            each = (each["filename"], each["line"], each["name"])
        file, line, function = each
        frames.append(Frame(_text(file), int(line), _text(function)))
    return tuple(frames)


def _whole(given: Sequence[Any]) -> Any:
    """Whole numbers; 0 for those that are not known."""
    try:
        return np.array(given, np.int64)
    except TypeError:
        return np.array([int(each or 0) for each in given], np.int64)


def _text(given: Any) -> str:
    """A name that is text, or a number; nothing else, as its text could be endless."""
    if type(given) not in (str, int):
        raise ValueError("a name is not text")
    return one_line(str(given))  # in a sentence it must not begin a line of its own
