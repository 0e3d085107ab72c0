"""The files of a job as data: its ranks, their calls, and the groups of these. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

DEFAULT = "default_pg"  # torch's description of the default group
ENDED = "ended"  # the reason that ``hypergrid.record`` gives where no exception ended the script


def has_ended(entry: Mapping[str, Any]) -> bool:
    """Whether the call of a recorder's entry has ended, or its rank gave it up."""
    return entry["retired"] is True or entry["state"] == "completed"


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


Stack: TypeAlias = tuple[Frame, ...]  # the innermost frame first
Ranks: TypeAlias = tuple[int, ...]


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
        return _operation_of(self.text)

    @property
    def is_on_gloo(self) -> bool:
        """Whether gloo makes the calls, also in a group that has NCCL for its devices."""
        return self.text.startswith("gloo")


class Call(NamedTuple):
    """One entry of a flight recorder. Times are nanoseconds since 1970, 0 where not recorded."""

    title: Title
    seq: int  # the how many-th collective of its group, or point-to-point operation
    created: int
    started: int
    completed: int
    done: bool
    frames: Stack  # innermost first; only of a call that is not done, or the last

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
        return self.title.what


class Calls(Sequence[Call]):
    """The calls of a rank, oldest first, in columns: a job has millions.

    ``title`` are places in the list of titles, which all ranks of a recording share; the other
    columns are those of ``Call``.
    """

    def __init__(
        self,
        titles: Sequence[Title] = (),
        columns: Any = ((),) * 6,
        frames: Mapping[int, Stack] | None = None,
    ) -> None:
        self.titles = titles
        self.frames = frames or {}
        self.columns = np.array(columns, np.int64)
        self.title, self.seq, self.created, self.started, self.completed, _ = self.columns

    def __reduce__(self) -> Any:
        return Calls, (self.titles, self.columns, self.frames)

    @property
    def done(self) -> Any:
        """A mask of the calls that have ended."""
        return self.columns[5] != 0

    def __len__(self) -> int:
        return len(self.seq)

    def __getitem__(self, at: int) -> Call:  # type: ignore[override]
        place = range(len(self))[at]  # calls[-1] is the last
        title, seq, created, started, completed, done = self.columns[:, place].tolist()
        return Call(
            self.titles[title],
            seq,
            created,
            started,
            completed,
            done=bool(done),
            frames=self.frames.get(place, ()),
        )

    def at(self, places: Any) -> Calls:
        """The calls at some places, or where a mask is true, in that order."""
        places = np.arange(len(self))[places]
        frames = {}
        for new_place in np.flatnonzero(np.isin(places, [*self.frames])).tolist():
            frames[new_place] = self.frames[int(places[new_place])]
        return Calls(self.titles, self.columns[:, places], frames)

    def joined(self, later: Calls) -> Calls:
        """Both, by the time at which they were made."""
        later_frames = {len(self) + place: stack for place, stack in later.frames.items()}
        columns = np.hstack((self.columns, later.columns))
        joined = Calls(self.titles, columns, {**self.frames, **later_frames})
        return joined.at(np.argsort(joined.created, kind="stable"))


@lru_cache(maxsize=4096)
def _operation_of(text: str) -> What:
    # "gloo:send 0->1|[[4]]|[[4]]|['Float']|['Float']": name, sizes and dtypes of both sides
    title, *shapes = text.split("|")
    name, _, detail = title.rpartition(":")[2].partition(" ")
    return What(name.lstrip("_") or "an operation", detail, *shapes)


@dataclass
class Group:
    """A process group: its members in order, where they are known."""

    name: str  # torch's
    label: str = ""
    ranks: Ranks = ()
    dims: tuple[str, ...] = ()
    outside: frozenset[int] = frozenset()  # members that are processes of another job

    @property
    def shown(self) -> str:
        """How a sentence calls it."""
        if self.label == DEFAULT:
            return "the default group"
        if self.label or not self.ranks:
            return self.label or f"group {self.name}"
        return f"a group of {len(self.ranks)} ranks"  # its number means nothing to anybody


@dataclass
class RankRecording:
    """The files of one rank."""

    rank: int
    host: str = ""
    pid: int = 0
    written: int = 0  # when its flight recorder was written, ns since 1970; 0 if not known
    latest: int = 0  # its file was not written after this, ns since 1970; 0 if not known
    started: int = 0  # when the process began to record, ns since 1970; 0 if not known
    job: str = ""  # the launcher's name of the job
    world_size: int = 0  # of the job, by its files; 0 if they do not say
    reason: str = ""
    error: str = ""
    stack: Stack = ()  # of the main thread, innermost first
    calls: Calls = field(default_factory=Calls)
    sends: Calls = field(default_factory=Calls)  # and receives of gloo, which its recorder lacks
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
    mixed: str = ""  # why the files seem to be of two jobs or runs
