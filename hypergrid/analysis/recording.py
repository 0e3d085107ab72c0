"""What a job left in a directory: flight recorders, live groups and stacks, read without torch."""

from __future__ import annotations

import gc
import io
import json
import marshal
import pickle
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_NUMBERED = re.compile(r"^(.*?)(\d+)(\.json)?$")
_MOST_RANKS = 1 << 20
_FAR = 60 * 10**9  # ns; more than clocks of hosts differ
DEFAULT = "default_pg"  # torch's description of the default group


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


class What(NamedTuple):
    """What a call does. Sizes and dtypes as text."""

    name: str  # "all_reduce", "send"
    detail: str  # what follows the name: a root, or "0->1", in ranks of the group
    inputs: str
    outputs: str
    input_dtypes: str
    output_dtypes: str


class Call(NamedTuple):
    """One entry of a flight recorder. Times are nanoseconds since 1970, 0 where not recorded."""

    group: str  # key of ``Recording.groups``
    seq: int  # the how many-th collective of its group, or point-to-point operation
    p2p: bool
    text: str  # equal for calls of the same name, sizes and dtypes; ``what`` takes it apart
    created: int
    started: int
    completed: int
    done: bool
    frames: tuple[Frame, ...]  # innermost first; only of a call that is not done, or the last

    @property
    def what(self) -> What:
        """Name, sizes and dtypes."""
        return _what(self.text)


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
    """What one rank left."""

    rank: int
    host: str = ""
    pid: int | None = None
    written: int = 0  # when its flight recorder was written, ns since 1970; 0 if not known
    reason: str = ""
    error: str = ""
    stack: tuple[Frame, ...] = ()  # of the main thread, innermost first
    calls: list[Call] = field(default_factory=list)
    whole: bool = True  # the recorder reaches back to the first call
    has_calls: bool = False  # a flight recorder was read
    files: list[str] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether it wrote anything after the hang: its groups are written at the start."""
        return self.has_calls or bool(self.stack or self.error)


@dataclass
class Recording:
    """What all ranks left."""

    ranks: dict[int, RankRecording]
    groups: dict[str, Group]
    world_size: int
    problems: list[str]
    unread: set[int] = field(default_factory=set)  # ranks with a file that could not be read
    mixed: str = ""  # why the files seem to be of two jobs or runs


def read(directory: str | Path) -> Recording:
    """Read every dump in a directory; other files are left alone.

    Flight recorders of torch, pickled or JSON, whose names end in the rank, such as those of
    ``TORCH_FR_DUMP_TEMP_FILE``; what ``hypergrid.dump`` and ``hypergrid.record`` wrote. A file that
    is cut or damaged is named in ``problems`` and left out; a pickle that holds more than lists,
    tuples, dicts, numbers and text is refused. Raises OSError if there is no such directory.
    """
    reader = _Reader()
    was_on = gc.isenabled()
    gc.disable()  # there are no cycles to find among millions of new objects
    try:
        for path in sorted(Path(directory).iterdir(), key=_by_rank):
            if path.is_file() and not path.name.endswith((".part", ".tmp")):
                reader.file(path)
    finally:
        if was_on:
            gc.enable()
    return reader.finish()


def _by_rank(path: Path) -> tuple[str, int, str]:
    parts = _NUMBERED.match(path.name)
    number = int(parts[2]) if parts and len(parts[2]) < 10 else -1
    return (parts[1] if parts else path.name, number, path.name)


def _from_the_first(entries: list[dict[str, Any]]) -> bool:
    return not entries or int(entries[0].get("record_id") or 0) == 0


def _prefix(name: str) -> str:
    return name.rstrip("0123456789") if not name.endswith(".json") else _prefix(name[:-5])


class _Refused(pickle.UnpicklingError):
    """The pickle names something that is not plain data."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise _Refused(f"it holds {module}.{name}, and only plain data is read")

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("it refers to objects outside of it, and only plain data is read")


def _unpickled(data: bytes) -> Any:
    # From a file that cannot peek, the unpickler reads byte by byte.
    return _Plain(io.BufferedReader(io.BytesIO(data), len(data))).load()


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


class _Reader:
    def __init__(self) -> None:
        self.ranks: dict[int, RankRecording] = {}
        self.problems: list[str] = []
        self.named: dict[str, dict[tuple[int, ...] | None, Group]] = {}
        self.keys: dict[tuple[int, str], tuple[int, ...] | None] = {}  # of which members
        self.texts: dict[bytes, str] = {}
        self.names: dict[str, str] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.worlds: dict[int, str] = {}  # sizes, and files that say so
        self.unread: set[int] = set()
        self.mixed = ""
        self.traces: dict[int, str] = {}
        self.unknown: list[tuple[Path, str]] = []  # a file, and what is wrong with it
        self.prefixes: set[str] = set()  # of the dumps' names

    def file(self, path: Path) -> None:
        numbered = _NUMBERED.match(path.name)
        try:
            data = path.read_bytes()
            if data[:1] != b"\x80" and data.lstrip()[:1] != b"{":
                why = "it is neither a pickle nor JSON" if data else "it is empty"
                self.unknown += [(path, why)] if numbered else []
                return
            with _bounded(len(data)):
                loaded = _unpickled(data) if data[0] == 0x80 else json.loads(data)
                self._take(path.name, loaded, int(numbered[2]) if numbered else None)
        except _Refused as error:
            self._failed(path, f"was refused: {error}")
        except Exception as error:  # a damaged file can raise nearly anything
            why = str(error).partition("\n")[0][:200].rstrip(".") or type(error).__name__
            self._failed(path, f"cannot be read, it may be cut: {why}")

    def _failed(self, path: Path, what: str) -> None:
        self.problems.append(f"{path.name} {what}.")
        numbered = _NUMBERED.match(path.name)
        if numbered and len(numbered[2]) < 10:
            self.unread.add(int(numbered[2]))

    def _take(self, name: str, data: Any, number: int | None) -> None:
        if not isinstance(data, dict):
            raise ValueError("it holds no table")
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
            return
        if number is not None:
            self._rank(number).files.append(name)
            self.prefixes.add(_prefix(name))

    def _rank(self, rank: int) -> RankRecording:
        return self.ranks.setdefault(rank, RankRecording(rank))

    def _trace(self, rank: int, data: dict[str, Any]) -> None:
        entries = data["entries"]
        calls = self._calls(entries)
        for name, group in (data.get("pg_config") or {}).items():
            if group["ranks"] not in ("", "[]", []):
                self._group(rank, str(name), str(group["desc"]), self._members(group["ranks"]))
        for name, label in {tuple(entry["process_group"]) for entry in entries}:
            self._group(rank, str(name), str(label), None)
        mine = self._rank(rank)
        if mine.calls:  # point-to-point operations, of its file of stacks
            calls = sorted([*calls, *mine.calls], key=lambda call: call.created)
        mine.calls, mine.has_calls = calls, True
        mine.whole = mine.whole and _from_the_first(entries)

    def _calls(self, entries: list[dict[str, Any]]) -> list[Call]:
        texts, names, new = self.texts, self.names, tuple.__new__  # millions of turns
        calls: list[Call] = []
        last = len(entries) - 1
        for i, entry in enumerate(entries):
            p2p = entry["is_p2p"] is True
            shape = (
                entry["profiling_name"],
                entry["input_sizes"],
                entry["output_sizes"],
                entry["input_dtypes"],
                entry["output_dtypes"],
            )
            shown = marshal.dumps(shape, 2)  # the same bytes for the same values
            text = texts.get(shown)
            if text is None:
                text = texts[shown] = "|".join(map(str, shape))
                if text.count("|") != 4:
                    raise ValueError(f"entry {i} has no valid name")
            group = entry["process_group"][0]
            done = entry["retired"] is True or entry["state"] == "completed"
            call = (
                names.setdefault(group, group) if type(group) is str else str(group),
                int(entry["p2p_seq_id" if p2p else "collective_seq_id"]),
                p2p,
                text,
                int(entry["time_created_ns"] or 0),
                int(entry["time_discovered_started_ns"] or 0),
                int(entry["time_discovered_completed_ns"] or 0),
                done,
                () if done and i != last else _frames(entry.get("frames")),
            )
            calls.append(new(Call, call))
        return calls

    def _members(self, ranks: Any) -> tuple[int, ...]:
        text = ranks if isinstance(ranks, str) else repr(ranks)
        if text not in self.members:
            given = json.loads(ranks) if isinstance(ranks, str) else ranks
            if not all(type(rank) is int and 0 <= rank <= _MOST_RANKS for rank in given):
                raise ValueError("the members of a group are not ranks")
            self.members[text] = tuple(given)
        return self.members[text]

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
        self._process(mine, str(data["host"]), int(data["pid"]))
        if 0 < int(data["world_size"]) <= _MOST_RANKS:
            self.worlds.setdefault(int(data["world_size"]), f"the groups of rank {rank}")
        # A communicator that several labels share carries the name of the one that created it.
        for group in sorted(data["groups"], key=lambda each: each.get("shared_with") is not None):
            label = str(group["label"] or group["description"])
            ranks = self._members(group["ranks"])
            self._group(rank, str(group["name"]), label, ranks, group["dims"] or ())
        return rank

    def _process(self, mine: RankRecording, host: str, pid: int) -> None:
        if mine.pid and pid and (mine.host, mine.pid) != (host, pid):
            self.mixed = f"the files of rank {mine.rank} are of two processes, {mine.pid} and {pid}"
        mine.host, mine.pid = host, pid or None

    def _stack(self, data: dict[str, Any]) -> int:
        rank = data["rank"]
        if type(rank) is not int or not 0 <= rank <= _MOST_RANKS:
            raise ValueError("it names no rank")
        mine = self._rank(rank)
        self._process(mine, str(data.get("host") or mine.host), int(data.get("pid") or 0))
        mine.written, mine.reason = int(data["written_ns"]), str(data.get("reason") or "")
        mine.error = str(data.get("error") or "")
        threads = data["threads"]
        main = next((each for each in threads if each.get("main")), None)
        mine.stack = _frames(main["frames"]) if main else ()
        p2p = data.get("p2p") or []
        calls = self._calls(p2p)
        for name, label in {tuple(entry["process_group"]) for entry in p2p}:
            self._group(rank, str(name), str(label), None)
        known = {(call.group, call.seq) for call in mine.calls if call.p2p}
        mine.calls += [call for call in calls if (call.group, call.seq) not in known]
        mine.whole = mine.whole and _from_the_first(p2p)
        if p2p:
            mine.calls.sort(key=lambda call: call.created)
        return rank

    def finish(self) -> Recording:
        """Give every group one key, also where torch used one name for several."""
        for path, why in self.unknown:  # other files of the job are numbered too: logs, events
            if _prefix(path.name) in self.prefixes or not self.traces:
                self._failed(path, f"cannot be read, it may be cut: {why}")
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
            mine.calls = [
                call._replace(group=self._key(mine.rank, call.group, keys))
                if call.group in several
                else call
                for call in mine.calls
            ]
        for (rank, name), ranks in self.keys.items():
            if ranks and self.named[name][ranks].label == DEFAULT:
                self.worlds.setdefault(len(ranks), f"the flight recorder of rank {rank}")
        world = max([*self.worlds, *(rank + 1 for rank in self.ranks)], default=0)
        found = dict(sorted(self.ranks.items()))
        mixed = self._sizes() or self.mixed or _gap(found)
        return Recording(found, groups, world, self.problems, self.unread, mixed)

    def _sizes(self) -> str:
        """Which files name which size of the job, if they differ."""
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
    for each in given or ():
        if isinstance(each, dict):
            each = (each["filename"], each["line"], each["name"])
        file, line, function = each
        frames.append(Frame(str(file), int(line), str(function)))
    return tuple(frames)
