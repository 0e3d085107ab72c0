"""Measures stock megatron-core and this project in turn and prints their ratios as a table.

    python scripts/bench.py                        # all of it, at most twelve minutes
    python scripts/bench.py --only 'Init.*65,536'  # the cases whose names match
    python scripts/bench.py --out bench.md --plot bench.png

A time means little on a machine that others use too: both sides run in the same minutes, take
turns, and what counts is the ratio of their medians. A bench is no test: the exit status is 1 only
when a side fails or the two answer differently.
"""

from __future__ import annotations

import datetime
import operator
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import bench_sides as sides
import checkout
from bench_sides import in_turn, rounds
from checkout import in_fresh_process

SIZES = "tp=8 cp=2 pp=16 ep=8"
WORLDS = (1024, 8192, 65536, 1048576)
HUGE = 100_000  # ranks; here stock takes the better part of a minute
REAL_WORLDS = (8, 16, 32, 64)
# share, connect: the bar at 64 ranks.
REAL_BARS = {
    ("none", "eager"): 1.4,
    ("none", "lazy"): None,
    ("all", "eager"): 1.9,
    ("all", "lazy"): 3.0,
}
GETTER_BAR = 0.95  # as equal code differs by 5 % between processes
ABOUT = (
    "Medians; the ratio is the peer's median over ours, so larger is better, and the range is the "
    "95 % interval of the median ratio of repetitions, in which the two took turns."
)
ABOUT_FAKE = (
    f"- Initialisation: one rank from the middle of a world under torch's fake backend, {SIZES}, "
    f"no gloo twins; a fresh process each time, import excluded. `init_device_mesh` makes 4 groups "
    f"over the dims pp, dp, cp and tp, Megatron's state has more."
)
ABOUT_REAL = (
    "- gloo ranks: processes of one machine, tp=2 pp=2 ep=2, gloo twins on; from a barrier to the "
    "next on the slowest rank. With connect=lazy a group connects when it is first used, which is "
    "not in that time. Counted in a run of its own, until the getters are first asked; store "
    "operations include those of gloo's own rendezvous."
)


@dataclass(frozen=True)
class Row:
    """One comparison: the seconds that each side took, repetition by repetition."""

    title: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    peer_name: str = "stock"
    at_least: float = 0  # the bar: peer / ours
    at_most: float = 0  # the bar: ours

    def ratio(self) -> float:
        return median(self.peer) / median(self.ours)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        seconds = median(self.ours)
        bar = ""
        is_met = True
        compared = ("", "", in_unit(seconds), "", "")
        if self.at_most:
            bar = f"≤ {in_unit(self.at_most)}"
            is_met = seconds <= self.at_most
        if self.peer:
            compared = (
                self.peer_name,
                in_unit(median(self.peer)),
                in_unit(seconds),
                f"{self.ratio():.3g}x",
                self.spread(),
            )
        if self.at_least:
            bar = f"≥ {self.at_least:g}x"
            is_met = self.ratio() >= self.at_least
        verdict = ""
        if bar:
            verdict = "met" if is_met else "**NOT met**"
        return (self.title, *compared, bar, verdict)

    def spread(self) -> str:
        """The 95% interval of the median ratio: by order, whatever the distribution."""
        ratios = sorted(map(operator.truediv, self.peer, self.ours))
        if len(ratios) == 1:
            return "once"
        # By order, the interval's ends are at n / 2 -+ 1.96 sqrt(n) / 2.
        first = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
        return f"{ratios[first]:.3g}x to {ratios[-1 - first]:.3g}x"


def in_unit(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


@dataclass
class Bench:
    """The settings of one run, and what it has measured so far."""

    deadline: float
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, dict[int, float]] = field(default_factory=dict)  # side: ranks: seconds
    counts: list[tuple[str, ...]] = field(default_factory=list)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def seconds(self, most: float) -> float:
        """How long a case may go on repeating itself."""
        return max(0.0, min(most, self.deadline - time.monotonic()))


def enumeration(bench: Bench) -> list[Row]:
    times = in_fresh_process(sides.enumerate_groups, 65536, "dp-cp", 9, bench.seconds(20))
    title = "`RankGenerator.get_ranks('dp-cp')`, 65,536 ranks"
    return [Row(title, times["ours"], times["stock"], at_least=40)]


def initialisation(bench: Bench, world: int) -> list[Row]:
    """Both sides and torch's mesh in turn, each time in a fresh interpreter."""
    is_huge = world > HUGE
    seconds: dict[str, list[float]] = defaultdict(list)
    digests = set()
    repeats = 3 if is_huge else 7
    for name in in_turn(("stock", "ours", "mesh"), repeats, bench.seconds(100)):
        # Once is enough where a side takes most of a minute.
        if is_huge and name != "ours" and seconds[name]:
            continue
        measured = in_fresh_process(sides.initialise, name, world)
        seconds[name].append(measured["seconds"])
        # A mesh has other groups.
        if name != "mesh":
            digests.add(measured["digest"])
    if len(digests) != 1:
        raise RuntimeError(f"stock and ours built different groups of {world:,} ranks")
    for name, times in seconds.items():
        bench.curves.setdefault(name, {})[world] = median(times)
    title = f"Initialisation, {world:,} ranks"
    at_least = 100 if world == 65536 else 0
    at_most = 2 if world == 1048576 else 0
    beside = f"{title}, beside a mesh of 4 dims"
    return [
        Row(title, seconds["ours"], seconds["stock"], at_least=at_least, at_most=at_most),
        Row(beside, seconds["ours"], seconds["mesh"], peer_name="init_device_mesh"),
    ]


def real(bench: Bench, world: int) -> list[Row]:
    """Forked ranks that really connect: stock, and ours in each way of sharing and connecting."""
    stock_title = f"{world} gloo ranks, stock"
    variants: dict[str, dict[str, Any]] = {stock_title: {"side": "stock"}}
    bars = {}
    for (share, connect), bar in REAL_BARS.items():
        is_largest = world == REAL_WORLDS[-1]
        # Smaller worlds: torch's way and the leanest.
        if is_largest or (share, connect) in (("none", "eager"), ("all", "lazy")):
            title = f"{world} gloo ranks, share={share} connect={connect}"
            bars[title] = bar if is_largest else None
            environment = {"HYPERGRID_SHARE": share, "HYPERGRID_CONNECT": connect}
            variants[title] = {"side": "ours", "environment": environment}
    repeats = 9 if world < 32 else 5
    measured = compare(bench, world, variants, repeats, 40 + 2 * world)
    for title, outcome in measured.items():
        bench.counts.append((title, *(f"{count:,}" for count in outcome["counts"].values())))
    stock_seconds = measured[stock_title]["seconds"]
    rows = []
    for title, bar in bars.items():
        rows.append(Row(title, measured[title]["seconds"], stock_seconds, at_least=bar or 0))
    return rows


def bare(bench: Bench) -> list[Row]:
    """Ours, and named calls of ``new_group`` for the same groups."""
    rows = []
    variants = {"ours": {"side": "ours"}, "peer": {"side": "bare"}}
    for world in (8, 16):
        measured = compare(bench, world, variants, repeats=20, seconds=60)
        title = f"{world} gloo ranks, beside `new_group` calls without an agreement"
        peer = measured["peer"]["seconds"]
        rows.append(Row(title, measured["ours"]["seconds"], peer, "calls alone"))
    return rows


def compare(
    bench: Bench, world: int, variants: dict[str, dict[str, Any]], repeats: int, seconds: float
) -> dict[str, Any]:
    """Seconds and counts of variants on real ranks, which take turns."""
    import bench_real  # not above: a fresh process imports this file, and measures imports

    most = bench.seconds(seconds)
    return in_fresh_process(bench_real.compare, world, variants, repeats, most)


def calls(bench: Bench) -> list[Row]:
    """Stock's calls, and ours where each name is a split and where members create alone."""
    for world in (1024, 16_384, 65_536):
        row = [f"{world:,}"]
        for name, way in (("stock", "auto"), ("ours", "split"), ("ours", "members")):
            count = in_fresh_process(sides.creation_calls, name, way, world)
            row.append(f"{count:,}")
        bench.calls.append(tuple(row))
    return []


def getters(bench: Bench, release: str) -> list[Row]:
    """The fastest of many, in several processes; those that met the bar share a row."""
    fastest: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in rounds(9, bench.seconds(90)):
        times = in_fresh_process(sides.call_getters, release, 500, 40, bench.seconds(20))
        for getter_of_side, seconds in times.items():
            fastest[getter_of_side].append(min(seconds))
    rows = []
    ours_of_met = []
    stock_of_met = []
    # A page with all of them would hide those that are slower.
    for name in sides.TIMED:
        row = Row(
            f"`{name}()`, {release}",
            fastest["ours", name],
            fastest["stock", name],
            at_least=GETTER_BAR,
        )
        if row.ratio() < GETTER_BAR:
            rows.append(row)
        else:
            ours_of_met.append(median(row.ours))
            stock_of_met.append(median(row.peer))
    title = f"the median of {len(ours_of_met)} other getters, {release}"
    return [*rows, Row(title, ours_of_met, stock_of_met, at_least=GETTER_BAR)]


def audited(bench: Bench) -> list[Row]:
    seconds = in_fresh_process(sides.audited, 2000, 40, bench.seconds(20))
    title = "`get_tensor_model_parallel_rank()` while an audit records"
    return [Row(title, seconds, at_most=100e-6)]


def imports(bench: Bench) -> list[Row]:
    seconds: dict[str, list[float]] = defaultdict(list)
    most_collections = 0
    for name in in_turn(("stock", "ours"), 15, bench.seconds(90)):
        taken, collections = in_fresh_process(sides.import_side, name)
        seconds[name].append(taken)
        if name == "ours":
            most_collections = max(most_collections, collections)
    title = (
        f"Import of `compat.parallel_state` beyond torch {metadata.version('torch')}, "
        f"{most_collections} full garbage collections"
    )
    return [Row(title, seconds["ours"], seconds["stock"], at_most=0.04)]


def diagnosis(bench: Bench) -> list[Row]:
    """Each time in a fresh interpreter, as the command reads a recording once."""
    ranks = 1024
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        in_fresh_process(sides.recordings, directory, ranks, 2000)
        for name in in_turn(("ours", "alone"), 5, bench.seconds(120)):
            seconds = in_fresh_process(sides.diagnosis, name, directory, ranks)
            times[name].append(seconds)
    title = f"Reading and judging the recordings of {ranks:,} ranks, 2,000 calls each"
    return [Row(title, times["ours"], times["alone"], "`pickle` alone", at_least=0.5)]


def recording(bench: Bench) -> list[Row]:
    times = in_fresh_process(sides.recording, 400, 500)

    def row(title: str, name: str, at_least: float = 0) -> Row:
        without = times[f"{name}: without"]
        return Row(title, times[f"{name}: with"], without, "not recorded", at_least=at_least)

    return [
        row("CPU of an `all_reduce` of one gloo rank, recorded by `hypergrid.record`", "all", 0.99),
        row("The same, not recorded on both sides", "same"),
        row("CPU of a receive over gloo, recorded on request", "p2p"),
    ]


def cases() -> Iterator[tuple[str, Callable[[Bench], list[Row]]]]:
    """The name of each case, which --only matches, and what measures it."""
    yield "Enumeration", enumeration
    for world in WORLDS:
        yield f"Initialisation, {world:,} ranks", partial(initialisation, world=world)
    for world in REAL_WORLDS:
        yield f"{world} gloo ranks", partial(real, world=world)
    yield "beside `new_group` calls without an agreement", bare
    yield "Calls of a rank to torch", calls
    for release in sides.RELEASES:
        yield f"getters, {release}", partial(getters, release=release)
    yield "audit", audited
    yield "import", imports
    yield "diagnosis", diagnosis
    yield "recorded", recording


def document(bench: Bench) -> str:
    """What a run measured, as Markdown."""
    packages = [
        f"{name} {metadata.version(name)}" for name in ("hypergrid-comm", "megatron-core", "torch")
    ]
    parts = [
        f"{', '.join(packages)}, Python {platform.python_version()}; {os.cpu_count()} cores; "
        f"{datetime.date.today()}.",
        ABOUT,
    ]

    def add_table(header: str, rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
        if rows:
            cells = header.split(" | ")
            parts.append(checkout.table([cells, *rows], markdown=True, right=right))

    add_table(
        "Measured | Peer | Peer's | Ours | Peer / ours | Range | Bar | ",
        [row.cells() for row in bench.rows],
        range(2, 7),
    )
    add_table(
        "The busiest rank | new_group calls | Communicators | Store operations | Sockets and files",
        bench.counts,
        range(1, 5),
    )
    add_table(
        "NCCL groups: ranks | Stock: `new_group` | Ours: splits, one a name"
        " | Ours: `new_group` by members",
        bench.calls,
        range(4),
    )
    if bench.curves:
        parts.append(ABOUT_FAKE)
    if bench.counts:
        parts.append(ABOUT_REAL)
    # In the document too: a table with fewer rows would look complete.
    parts += [f"FAILED: {failure}" for failure in bench.failures]
    return "\n\n".join(parts)


def main() -> int:
    parser = checkout.parser(__doc__)
    add = parser.add_argument
    add("--only", metavar="PATTERN", default="", help="cases that match this regex")
    add("--out", type=Path, metavar="FILE", help="write it to a file too")
    add("--plot", type=Path, metavar="FILE", help="draw the picture (PNG)")
    options = parser.parse_args()
    chosen = {}
    for name, measure in cases():
        if re.search(options.only, name, re.IGNORECASE):
            chosen[name] = measure
    if not chosen:
        parser.error(f"--only matches no case. Cases: {', '.join(dict(cases()))}")
    if options.plot:
        import bench_plot  # before the measuring, as it needs the extra `plot`
    # No repetition starts after twelve minutes.
    bench = Bench(deadline=time.monotonic() + 12 * 60)
    for name, measure in chosen.items():
        print(f"measuring: {name} ...", file=sys.stderr, flush=True)
        try:
            bench.rows += measure(bench)
        except Exception:  # a side raised, or answered differently
            bench.failures.append(f"{name}: {traceback.format_exc()}")
    text = document(bench)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n", encoding="utf-8")
    if options.plot and bench.curves:
        about = f"{SIZES}, torch's fake backend, fresh processes; medians"
        bench_plot.draw(options.plot, bench.curves, about)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    checkout.forget_choices()  # a choice of the caller's shell is not what is measured
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles this project
    os.environ.update(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
    sys.exit(main())
