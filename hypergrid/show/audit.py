"""Recorded reads of a global module: merged, counted, compared with a baseline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from hypergrid.files import FileError, bytes_of, decoded

SCHEMA = 1  # of a rank's file
_KEYS = ("module", "file", "line", "function", "outermost", "name", "writes")


class _Known(TypedDict):
    """The part of a line's record that a baseline keeps."""

    module: str
    function: str
    name: str
    line: int


class _Baseline(TypedDict):
    sites: list[_Known]


class _Use(_Known):
    """A line of a rank's file."""

    file: str
    outermost: str
    writes: bool
    phase: str
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
    outermost: str
    name: str
    writes: bool
    count: int
    ranks: int
    phases: Mapping[str, int]
    states: Mapping[str, int]
    groups: Mapping[str, int]

    @property
    def package(self) -> str:
        """The package of its module; a script is its own."""
        return self.module.rpartition(".")[0] or self.module

    @property
    def key(self) -> tuple[str, str, str]:
        """The key by which a baseline knows a site: lines move, module and function stay."""
        return self.module, self.function, self.name


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
        return _summed((site.name, site.count) for site in self.sites)

    def files(self) -> list[FileReads]:
        """The table: a row for each file, the most reads first within its package."""
        found: dict[tuple[str, str], FileReads] = {}
        for site in self.sites:
            row = found.setdefault(
                (site.package, site.file), FileReads(site.package, site.file, site.module)
            )
            row.reads += site.count
            row.sites += 1
            row.names.update({site.name: site.count})
        total = _summed((row.package, row.reads) for row in found.values())
        return sorted(found.values(), key=lambda r: (-total[r.package], r.package, -r.reads))

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON; also what ``--against`` takes as a baseline."""
        return {
            "ranks": [*self.ranks],
            "processes": self.processes,
            "releases": [*self.releases],
            "reads": self.reads,
            "names": self.names(),
            "files": [
                {**asdict(row), "names": dict(row.names.most_common())} for row in self.files()
            ],
            "sites": [asdict(site) for site in self.sites],
            "problems": [asdict(problem) for problem in self.problems],
            "unread": [*self.unread],
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
    unread, found = [], list[_Process]()
    for path in sorted(directory.iterdir()):
        if path.name.startswith("reads.") and path.suffix == ".json":
            try:
                data = decoded(bytes_of(path), _Process, path.name)
                if data["schema"] != SCHEMA:
                    raise FileError(
                        f"{path.name} has schema {data['schema']}, this reads {SCHEMA}."
                    )
                found.append(data)
            except (FileError, OSError) as error:
                unread.append(str(error))
    if not found:
        raise FileError(
            " ".join(
                (
                    f"{directory} has no recording of a rank (reads.RANK.*.json): run the job "
                    f"with HYPERGRID_AUDIT={directory}.",
                    *unread[:3],
                )
            )
        )
    return _merged(found, unread)


def _merged(found: list[_Process], unread: list[str]) -> Audit:
    lines: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
    told: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for data in found:
        site: Any
        for site in data["sites"]:
            lines.setdefault(tuple(site[each] for each in _KEYS), []).append((data["rank"], site))
        for problem in data["problems"]:
            key = problem["kind"], problem["text"]
            about = data["rank"], problem["count"], problem["example"]
            told.setdefault(key, []).append(about)
    sites = []
    for key, each in sorted(lines.items()):
        own: dict[str, Any] = dict(zip(_KEYS, key, strict=True))
        own |= {
            f"{what}s": _summed((site[what], site["count"]) for _, site in each)
            for what in ("phase", "state", "group")
        }
        count, ranks = sum(site["count"] for _, site in each), len({rank for rank, _ in each})
        sites.append(Site(**own, count=count, ranks=ranks))
    problems = sorted(
        Problem(
            *key,
            reads=sum(count for _, count, _ in each),
            ranks=tuple(sorted({rank for rank, *_ in each})),
            example="rank {0} {2}".format(*min(each)),
        )
        for key, each in told.items()
    )
    return Audit(
        sites,
        problems,
        tuple(sorted({data["rank"] for data in found})),
        tuple(sorted({data["release"] for data in found})),
        tuple(unread),
        len({(data["rank"], data["process"]) for data in found}),
    )


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for name, count in pairs:
        counted[name] += count
    return dict(counted.most_common())


@dataclass(frozen=True)
class Change:
    """Lines of one function that use one name: more, or fewer, than the baseline has."""

    module: str
    function: str
    name: str
    before: int
    after: int
    lines: tuple[int, ...]  # now


def baseline(path: Path) -> list[_Known]:
    """The sites of a baseline: what ``to_json`` gave, or a directory. FileError as ``read``."""
    if path.is_dir():
        text: str | bytes = json.dumps(read(path).to_json())
    else:
        text = bytes_of(path)
    return decoded(text, _Baseline, f"the baseline {path}")["sites"]


def against(audit: Audit, known: Iterable[_Known]) -> list[Change]:
    """The sites that are new in ``audit``, and those that are gone, beside a baseline's.

    A site of the baseline is a function that uses a name, with the number of lines that do:
    lines move, and a run may be longer.
    """
    before = _lines((s["module"], s["function"], s["name"], s["line"]) for s in known)
    after = _lines((*site.key, site.line) for site in audit.sites)
    changes = []
    for key in sorted({*before, *after}):
        was, now = len(before.get(key, ())), tuple(sorted(after.get(key, ())))
        if was != len(now):
            changes.append(Change(*key, was, len(now), now))
    return changes


def _lines(
    rows: Iterable[tuple[str, str, str, int]],
) -> dict[tuple[str, str, str], set[int]]:
    found: dict[tuple[str, str, str], set[int]] = {}
    for module, function, name, line in rows:
        found.setdefault((module, function, name), set()).add(line)
    return found
