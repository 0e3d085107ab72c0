"""Recorded reads of a global module: merged and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypedDict

from hypergrid.files import FileError, bytes_of, decoded

SCHEMA = 1  # of a rank's file


class _Use(TypedDict):
    """A line of a rank's file."""

    module: str
    file: str
    line: int
    function: str
    name: str
    writes: bool
    state: str
    group: str
    count: int


class _Wrong(TypedDict):
    kind: str
    text: str
    count: int
    example: str


class _Process(TypedDict):
    """A rank's file."""

    schema: Literal[1]  # SCHEMA
    rank: int
    release: str
    sites: list[_Use]
    problems: list[_Wrong]


@dataclass
class Site:
    """One line that reads or writes one name of the module, on all ranks."""

    module: str
    file: str
    line: int
    function: str
    name: str
    writes: bool
    ranks: set[int] = field(default_factory=set)
    states: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """How often it did."""
        return self.states.total()


@dataclass
class Problem:
    """Reads of a wrong state, at one line."""

    kind: str
    text: str
    reads: int = 0
    ranks: set[int] = field(default_factory=set)
    example: str = ""  # what one of these ranks got


@dataclass
class Audit:
    """The recording of all ranks."""

    sites: list[Site]
    problems: list[Problem]
    ranks: list[int]
    releases: list[str]
    unread: list[str]

    @property
    def reads(self) -> int:
        """All reads and writes."""
        return sum(site.count for site in self.sites)

    def names_by_file(self) -> list[tuple[str, Counter[str]]]:
        """How often each file used which name, the file with the most reads first."""
        names_of_file: dict[str, Counter[str]] = {}
        for site in self.sites:
            names = names_of_file.setdefault(site.file, Counter())
            names[site.name] += site.count
        return sorted(names_of_file.items(), key=lambda item: item[1].total(), reverse=True)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        sites = []
        for site in self.sites:
            sites.append({**vars(site), "count": site.count, "ranks": len(site.ranks)})
        problems = []
        for problem in self.problems:
            problems.append({**vars(problem), "ranks": sorted(problem.ranks)})
        return {**vars(self), "reads": self.reads, "sites": sites, "problems": problems}


def read(directory: Path) -> Audit:
    """Merge the files of all ranks in ``directory``. *Local*; loads no torch.

    Raises FileError if none can be read, OSError if the directory cannot. A file that is broken is
    named in ``unread``.
    """
    # A file that is being written has another suffix.
    paths = [path for path in directory.iterdir() if path.match("reads.*.json")]
    processes: list[_Process] = []
    unread: list[str] = []
    for path in sorted(paths):
        # The host of one rank may have lost its file: the report is on the others.
        try:
            process = decoded(bytes_of(path), _Process, path.name)
        except (FileError, OSError) as error:
            unread.append(str(error))
        else:
            processes.append(process)
    if not processes:
        message = (
            f"{directory} has no recording of a rank (reads.RANK.*.json): run the job with "
            f"HYPERGRID_AUDIT={directory}."
        )
        raise FileError(" ".join([message, *unread[:3]]))
    return Audit(
        sites=_merged_sites(processes),
        problems=_merged_problems(processes),
        ranks=sorted({process["rank"] for process in processes}),
        releases=sorted({process["release"] for process in processes}),
        unread=unread,
    )


_place_of = itemgetter("module", "file", "line", "function", "name", "writes")


def _merged_sites(processes: Iterable[_Process]) -> list[Site]:
    """The lines of code, by file; each with what every rank recorded of it."""
    site_of_place: dict[tuple[Any, ...], Site] = {}
    for process in processes:
        for use in process["sites"]:
            place = _place_of(use)
            site = site_of_place.setdefault(place, Site(*place))
            site.ranks.add(process["rank"])
            site.states[use["state"]] += use["count"]
            site.groups[use["group"]] += use["count"]
    return [site_of_place[place] for place in sorted(site_of_place)]


def _merged_problems(processes: Iterable[_Process]) -> list[Problem]:
    """The wrong reads, each with all ranks that reported it."""
    problem_of_text: dict[tuple[str, str], Problem] = {}
    for process in sorted(processes, key=itemgetter("rank")):
        rank = process["rank"]
        for wrong in process["problems"]:
            text = wrong["kind"], wrong["text"]
            example = f"rank {rank} {wrong['example']}"
            problem = problem_of_text.setdefault(text, Problem(*text, example=example))
            problem.reads += wrong["count"]
            problem.ranks.add(rank)
    return [problem_of_text[text] for text in sorted(problem_of_text)]
