"""Recorded reads of a global module: merged and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from hypergrid.files import FileError, bytes_of, decoded

SCHEMA = 1  # of a rank's file
_KEYS = ("module", "file", "line", "function", "name", "writes")


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

    schema: int
    rank: int
    process: int
    release: str
    sites: list[_Use]
    problems: list[_Wrong]


@dataclass(frozen=True)
class Site:
    """One line that reads or writes one name of the module, on all ranks."""

    module: str
    file: str
    line: int
    function: str
    name: str
    writes: bool
    count: int
    ranks: int
    states: Mapping[str, int]
    groups: Mapping[str, int]

    @property
    def package(self) -> str:
        """The package of its module; a script is its own."""
        return self.module.rpartition(".")[0] or self.module


@dataclass(frozen=True, order=True)
class Problem:
    """Reads of a wrong state, at one line."""

    kind: str
    text: str
    reads: int
    ranks: tuple[int, ...]
    example: str  # what the first of these ranks got


@dataclass
class Audit:
    """The recording of all ranks."""

    sites: list[Site]
    problems: list[Problem]
    ranks: tuple[int, ...]
    releases: tuple[str, ...]
    unread: tuple[str, ...] = ()
    processes: int = 0

    @property
    def reads(self) -> int:
        """All reads and writes."""
        return sum(site.count for site in self.sites)

    def names(self) -> dict[str, int]:
        """How often each getter, setter and private global was used."""
        counts: Counter[str] = Counter()
        for site in self.sites:
            counts[site.name] += site.count
        return dict(counts.most_common())

    def files(self) -> list[FileReads]:
        """The table: a row for each file, the most reads first."""
        row_of_file: dict[tuple[str, str], FileReads] = {}
        for site in self.sites:
            key = (site.package, site.file)
            new_row = FileReads(site.package, site.file, site.module)
            row = row_of_file.setdefault(key, new_row)
            row.reads += site.count
            row.sites += 1
            row.names[site.name] += site.count
        return sorted(row_of_file.values(), key=lambda row: row.reads, reverse=True)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        rows = []
        for row in self.files():
            names = dict(row.names.most_common())
            rows.append({**asdict(row), "names": names})
        return {
            "ranks": list(self.ranks),
            "processes": self.processes,
            "releases": list(self.releases),
            "reads": self.reads,
            "names": self.names(),
            "files": rows,
            "sites": list(map(asdict, self.sites)),
            "problems": list(map(asdict, self.problems)),
            "unread": list(self.unread),
        }


@dataclass
class FileReads:
    """One file's row."""

    package: str
    file: str
    module: str
    reads: int = 0
    sites: int = 0
    names: Counter[str] = field(default_factory=Counter)


def read(directory: Path) -> Audit:
    """Merge the files of all ranks in ``directory``. *Local*; loads no torch.

    Raises FileError if there is none, OSError if the directory cannot be read. A file that is
    broken is named in ``unread``.
    """
    unread: list[str] = []
    processes: list[_Process] = []
    for path in sorted(directory.iterdir()):
        # A file that is being written has another suffix.
        if not path.name.startswith("reads.") or path.suffix != ".json":
            continue
        try:
            process = decoded(bytes_of(path), _Process, path.name)
        except (FileError, OSError) as error:
            unread.append(str(error))
            continue
        if process["schema"] == SCHEMA:
            processes.append(process)
        else:
            unread.append(f"{path.name} has schema {process['schema']}, this reads {SCHEMA}.")
    if not processes:
        message = (
            f"{directory} has no recording of a rank (reads.RANK.*.json): run the job with "
            f"HYPERGRID_AUDIT={directory}."
        )
        raise FileError(" ".join([message, *unread[:3]]))
    return _merged(processes, unread)


def _merged(processes: Sequence[_Process], unread: Sequence[str]) -> Audit:
    uses_of_site: dict[tuple[Any, ...], list[tuple[int, _Use]]] = {}
    reports_of_problem: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    ranks: set[int] = set()
    releases: set[str] = set()
    process_ids: set[tuple[int, int]] = set()
    for process in processes:
        rank = process["rank"]
        ranks.add(rank)
        releases.add(process["release"])
        # A rank that started again has left a file for each of its processes.
        process_ids.add((rank, process["process"]))
        for use in process["sites"]:
            fields: Mapping[str, Any] = use
            site = tuple(fields[name] for name in _KEYS)
            uses_of_site.setdefault(site, []).append((rank, use))
        for problem in process["problems"]:
            kind_and_text = (problem["kind"], problem["text"])
            report = (rank, problem["count"], problem["example"])
            reports_of_problem.setdefault(kind_and_text, []).append(report)
    sites = []
    for key, uses in sorted(uses_of_site.items()):
        sites.append(_site(key, uses))
    problems = []
    for (kind, text), reports in reports_of_problem.items():
        problems.append(_problem(kind, text, reports))
    return Audit(
        sites=sites,
        problems=sorted(problems),
        ranks=tuple(sorted(ranks)),
        releases=tuple(sorted(releases)),
        unread=tuple(unread),
        processes=len(process_ids),
    )


def _site(key: tuple[Any, ...], uses: Sequence[tuple[int, _Use]]) -> Site:
    """One line of code, from what each rank recorded of it."""
    ranks = set()
    states: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    for rank, use in uses:
        ranks.add(rank)
        states[use["state"]] += use["count"]
        groups[use["group"]] += use["count"]
    fields: dict[str, Any] = dict(zip(_KEYS, key, strict=True))
    return Site(
        **fields,
        count=states.total(),
        ranks=len(ranks),
        states=dict(states.most_common()),
        groups=dict(groups.most_common()),
    )


def _problem(kind: str, text: str, reports: Sequence[tuple[int, int, str]]) -> Problem:
    """One kind of wrong read, from the rank, the count and the example of each report."""
    ranks = set()
    reads = 0
    for rank, count, _ in reports:
        ranks.add(rank)
        reads += count
    first_rank, _, example = min(reports)
    return Problem(kind, text, reads, tuple(sorted(ranks)), f"rank {first_rank} {example}")
