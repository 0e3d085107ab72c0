"""The files of a job as data: its ranks, their calls, and the groups of these. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """The part that many calls have in common."""

    group: str  # key of ``Recording.groups``
    label: str  # of the group, as torch's recorder has it
    p2p: bool
    backend: str  # "gloo", "nccl", "nccl2"
    what: What

    @property
    def is_on_gloo(self) -> bool:
        """Whether gloo makes the calls, also in a group that has NCCL for its devices."""
        return self.backend.startswith("gloo")


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


# A call in a row: the place of its title in the list of titles, and the fields of ``Call``.
ROW = np.dtype(
    [
        ("title", np.int64),
        ("seq", np.int64),
        ("created", np.int64),
        ("started", np.int64),
        ("completed", np.int64),
        ("done", np.bool_),
    ],
    align=True,
)
_NO_ROWS = np.empty(0, ROW)


class Calls(Sequence[Call]):
    """The calls of a rank, oldest first, as one array: a job has millions.

    ``titles`` are those of all ranks of a recording, and ``frames`` the stacks of the calls that
    have one, by their places.
    """

    def __init__(
        self,
        titles: Sequence[Title] = (),
        rows: Any = _NO_ROWS,
        frames: Mapping[int, Stack] | None = None,
    ) -> None:
        self.titles = titles
        self.rows = rows
        self.frames = frames or {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Call:  # type: ignore[override]
        place = range(len(self))[at]  # calls[-1] is the last
        title, *fields = self.rows[place].tolist()
        stack = self.frames.get(place, ())
        return Call._make((self.titles[title], *fields, stack))


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
    lists_groups: bool = False  # every live group of it is known
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
