"""Measures stock megatron-core and this project in turn and prints their ratios as a table.

    python scripts/bench.py                        # all of it, at most twelve minutes
    python scripts/bench.py --only 'Init.*65,536'  # the cases whose names match
    python scripts/bench.py --out bench.md --plot bench.png

A time means little on a machine that others use too: both sides run in the same minutes, take
turns, and what counts is the ratio of their medians. A bench is no test: the exit status is 1 only
when a side fails or the two answer differently.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import bench_plot
import checkout
from bench_sides import RELEASES, TIMED, rounds
from checkout import table

HERE = Path(__file__).resolve().parent
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


class SideError(RuntimeError):
    """A side raised, hung, or answered differently."""


@dataclass(frozen=True)
class Row:
    """One comparison: what each side took, repetition by repetition."""

    title: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    peer_name: str = "stock"
    is_count: bool = False  # not seconds
    at_least: float | None = None  # the bar: peer / ours
    at_most: float | None = None  # the bar: ours
    noise: float = 0.0  # by which the same code differs from itself
    is_paired: bool = False  # measured in pairs: the median of the pairs' ratios counts
    family: str = ""  # a page has one row for all of a family that met the bar

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        median_ours = median(self.ours)
        ours = self._shown(median_ours)
        bar, verdict = self._bar_of_ours(median_ours)
        if not self.peer:
            return (self.title, "", "", ours, "", "", bar, verdict)
        median_peer = median(self.peer)
        peer = self._shown(median_peer)
        if not median_ours:  # a count of none, which has no ratio
            return (self.title, self.peer_name, peer, ours, "", "", bar, verdict)
        ratios = []
        for peer_value, our_value in zip(self.peer, self.ours, strict=False):
            ratios.append(peer_value / our_value)
        least = min(ratios)
        ratio = median_peer / median_ours
        most = max(ratios)
        if self.is_paired:
            least, ratio, most = interval(ratios)
        if self.at_least is not None:
            bar, verdict = self._bar_of_ratio(self.at_least, least, ratio, most)
        spread = "once"
        if len(ratios) > 1:
            spread = f"{self._times(least)} to {self._times(most)}"
        return (self.title, self.peer_name, peer, ours, self._times(ratio), spread, bar, verdict)

    def _bar_of_ours(self, ours: float) -> tuple[str, str]:
        if self.at_most is None:
            return "", ""
        verdict = "met" if ours <= self.at_most else "**NOT met**"
        return f"≤ {self._shown(self.at_most)}", verdict

    def _bar_of_ratio(
        self, at_least: float, least: float, ratio: float, most: float
    ) -> tuple[str, str]:
        """The bar, and whether the ratio (of pairs, the whole interval) is above it."""
        bar = f"≥ {ratio_text(at_least)}"
        if self.noise:
            bar += f" ± {self.noise:.0%}"
        decisive = least if self.is_paired else ratio
        if decisive >= (1 - self.noise) * at_least:
            return bar, "met"
        if self.is_paired and most >= at_least:
            return bar, "not resolved"
        return bar, "**NOT met**"

    def _shown(self, value: float) -> str:
        if self.is_count:
            return f"{value:g}"
        for unit, seconds in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if value >= 0.9995 * seconds:
                return f"{value / seconds:.3g} {unit}"
        return f"{value * 1e9:.3g} ns"

    def _times(self, ratio: float) -> str:
        if self.is_paired:
            return f"{ratio:.4f}x"
        return ratio_text(ratio)


def ratio_text(ratio: float) -> str:
    if ratio >= 10:
        return f"{ratio:.0f}x"
    return f"{ratio:.2g}x"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, between the ends of its 95% interval: by order, whatever the distribution."""
    ordered = sorted(values)
    first = max(0, int(len(values) / 2 - 0.98 * len(values) ** 0.5))
    return ordered[first], median(ordered), ordered[-1 - first]


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
    times = side(
        "enumerate_groups",
        world=65536,
        token="dp-cp",
        repeats=9,
        seconds=bench.seconds(20),
    )
    title = "`RankGenerator.get_ranks('dp-cp')`, 65,536 ranks"
    return [Row(title, times["ours"], times["stock"], at_least=40)]


def initialisation(bench: Bench, world: int) -> list[Row]:
    """Both sides and torch's mesh in turn, each time in a fresh interpreter."""
    is_huge = world > HUGE
    first: dict[str, list[float]] = {"stock": [], "ours": [], "mesh": []}
    later: dict[str, list[float]] = {"stock": [], "ours": [], "mesh": []}
    digests = set()
    repeats = 3 if is_huge else 7
    for turn in rounds(repeats, bench.seconds(100)):
        for name in in_turns(first, turn):
            if name != "ours" and is_huge and turn:
                continue
            measured = side(
                "initialise",
                side=name,
                world=world,
                repeats=1 if is_huge and name != "ours" else 4,
                seconds=8,
            )
            first[name].append(measured["seconds"][0])
            if measured["seconds"][1:]:
                later[name].append(median(measured["seconds"][1:]))
            if name != "mesh":
                digests.add(measured["digest"])
    if len(digests) != 1:
        raise SideError(f"stock and ours built different groups of {world:,} ranks")
    for name, seconds in first.items():
        if seconds:
            bench.curves.setdefault(name, {})[world] = median(seconds)
    title = f"Initialisation, {world:,} ranks"
    at_least = 100 if world == 65536 else None
    at_most = 2 if world == 1048576 else None
    rows = [Row(title, first["ours"], first["stock"], at_least=at_least, at_most=at_most)]
    if later["ours"] and later["stock"]:
        again = f"{title}, once more in the same process"
        rows.append(Row(again, later["ours"], later["stock"]))
    if first["mesh"]:
        beside = f"{title}, beside a mesh of 4 dims"
        rows.append(Row(beside, first["ours"], first["mesh"], peer_name="init_device_mesh"))
    return rows


def in_turns(sides: dict[str, Any], turn: int) -> list[str]:
    """The sides, in the other order every second time."""
    return sorted(sides, reverse=bool(turn % 2))


def real(bench: Bench, world: int) -> list[Row]:
    """Forked ranks that really connect: stock, and ours in each way of sharing and connecting."""
    stock_title = f"{world} gloo ranks, stock"
    bars: dict[str, float | None] = {}
    variants: dict[str, dict[str, Any]] = {stock_title: {"side": "stock"}}
    choices = list(REAL_BARS)
    if world != REAL_WORLDS[-1]:
        choices = [choices[0], choices[-1]]  # torch's way and the leanest
    for share, connect in choices:
        title = f"{world} gloo ranks, share={share} connect={connect}"
        bars[title] = REAL_BARS[share, connect] if world == REAL_WORLDS[-1] else None
        environment = {"HYPERGRID_SHARE": share, "HYPERGRID_CONNECT": connect}
        variants[title] = {"side": "ours", "environment": environment}
    measured = side(
        "compare",
        script="bench_real.py",
        timeout=600,
        world=world,
        variants=variants,
        repeats=9 if world < 32 else 5,
        seconds=bench.seconds(40 + 2 * world),
    )
    for title, outcome in measured.items():
        bench.counts.append((title, *(f"{count:,}" for count in outcome["counts"].values())))
    stock_seconds = measured[stock_title]["seconds"]
    rows = []
    for title, bar in bars.items():
        rows.append(Row(title, measured[title]["seconds"], stock_seconds, at_least=bar))
    return rows


def shadow(bench: Bench) -> list[Row]:
    """Stock with a plan of ours beside it, and stock."""
    shadowed = {"side": "stock", "shadow": True}
    seconds = in_pairs(bench, 8, shadowed, {"side": "stock"}, repeats=9)
    title = "Initialisation of 8 gloo ranks with `--shadow`, without its imports"
    return [Row(title, *seconds, is_paired=True)]


def bare(bench: Bench) -> list[Row]:
    """Ours, and named calls of ``new_group`` for the same groups."""
    rows = []
    for world in (8, 16):
        seconds = in_pairs(bench, world, {"side": "ours"}, {"side": "bare"}, repeats=20)
        title = f"{world} gloo ranks, beside `new_group` calls without an agreement"
        rows.append(Row(title, *seconds, "calls alone", is_paired=True))
    return rows


def in_pairs(
    bench: Bench, world: int, ours: dict[str, Any], peer: dict[str, Any], repeats: int
) -> list[list[float]]:
    """Seconds of two variants on real ranks, which take turns."""
    measured = side(
        "compare",
        script="bench_real.py",
        timeout=600,
        world=world,
        variants={"ours": ours, "peer": peer},
        repeats=repeats,
        seconds=bench.seconds(60),
    )
    return [measured[name]["seconds"] for name in ("ours", "peer")]


def calls(bench: Bench) -> list[Row]:
    """Stock's calls, and ours where each name is a split and where members create alone."""
    for world in (1024, 16_384, 65_536):
        row = [f"{world:,}"]
        for name, way in (("stock", "auto"), ("ours", "split"), ("ours", "members")):
            count = side("creation_calls", "bench_creation.py", side=name, way=way, world=world)
            row.append(f"{count:,}")
        bench.calls.append(tuple(row))
    return []


def getters(bench: Bench, release: str) -> list[Row]:
    """The fastest of many, in several processes: equal code differs by 5 % between processes."""
    fastest: dict[str, dict[str, list[float]]] = {}
    for name in TIMED:
        fastest[name] = {"ours": [], "stock": []}
    for _ in rounds(9, bench.seconds(90)):
        measured = side(
            "call_getters",
            release=release,
            calls=500,
            repeats=40,
            seconds=bench.seconds(20),
        )
        for name, times in measured.items():
            for one_side, seconds in times.items():
                fastest[name][one_side].append(min(seconds))
    rows = []
    for name, times in fastest.items():
        row = Row(
            f"`{name}()`, {release}",
            times["ours"],
            times["stock"],
            at_least=1,
            noise=0.05,
            family=f"getters, {release}",
        )
        rows.append(row)
    return rows


def audited(bench: Bench) -> list[Row]:
    times = side("audited", calls=2000, repeats=40, seconds=bench.seconds(20))
    getter = "`get_tensor_model_parallel_rank()`"
    after = Row(
        f"{getter} after an audit, beside never audited",
        [min(times["off"])],  # as getters: the fastest of many
        [min(times["never"])],
        "never audited",
        at_least=1,
        noise=0.05,
    )
    return [after, Row(f"{getter} while an audit records", times["on"], at_most=100e-6)]


def imports(bench: Bench) -> list[Row]:
    measured: dict[str, dict[str, list[float]]] = {"stock": {}, "ours": {}}
    for turn in rounds(5, bench.seconds(60)):
        for name in in_turns(measured, turn):
            for key, value in side("import_side", side=name).items():
                measured[name].setdefault(key, []).append(float(value))
    swapped = measured["ours"]
    stock = measured["stock"]
    title = "Import of `compat.parallel_state`"
    rows = [Row(title, swapped["seconds"], stock["seconds"], at_most=0.05)]
    counted = {
        "megatron": "Megatron modules that the import brings",
        "cuda": "CUDA contexts that the import makes",
    }
    for key, title in counted.items():
        rows.append(Row(title, swapped[key], stock[key], is_count=True, at_most=0))
    title = "What the swap compares before it replaces megatron's modules"
    rows.append(Row(title, swapped["compared"], at_most=0.03))
    return rows


def diagnosis(bench: Bench) -> list[Row]:
    """Each time in a fresh interpreter, as the command reads a recording once."""
    ranks = 1024
    times: dict[str, list[float]] = {"ours": [], "alone": []}
    with tempfile.TemporaryDirectory() as directory:
        side("recordings", directory=directory, ranks=ranks, calls=2000, timeout=600)
        for turn in rounds(5, bench.seconds(120)):
            for name in in_turns(times, turn):
                times[name].append(side("diagnosis", side=name, directory=directory, ranks=ranks))
    title = f"Reading and judging the recordings of {ranks:,} ranks, 2,000 calls each"
    return [Row(title, times["ours"], times["alone"], "`pickle` and `json` alone", at_least=1 / 2)]


def recording(bench: Bench) -> list[Row]:
    times = side("recording", pairs=400, calls=500)

    def row(title: str, name: str, at_least: float | None = None) -> Row:
        with_and_without = times[f"{name}: with"], times[f"{name}: without"]
        return Row(title, *with_and_without, "not recorded", at_least=at_least, is_paired=True)

    thread = "CPU of the recorder's thread in a second of that, with `after=600`"
    return [
        row("CPU of an `all_reduce` of one gloo rank, recorded by `hypergrid.record`", "all", 0.99),
        row("The same, not recorded on both sides", "same"),
        Row(thread, times["thread"], at_most=0.001),
        Row("The longest that this thread held up a call", times["stall"], at_most=0.001),
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
    for release in RELEASES:
        yield f"getters, {release}", partial(getters, release=release)
    yield "audit", audited
    yield "import", imports
    yield "shadow run", shadow
    yield "diagnosis", diagnosis
    yield "recorded", recording


def side(job: str, script: str = "bench_sides.py", timeout: float = 280, **arguments: Any) -> Any:
    """Run a job of a script in a fresh interpreter and give its result."""
    text = json.dumps({"job": job, **arguments})
    try:
        done = checkout.child(
            sys.executable, HERE / script, text, timeout=timeout, PYTHONWARNINGS="ignore"
        )
    except subprocess.TimeoutExpired as error:
        raise SideError(f"{script} {text} took longer than {timeout:.0f} s") from error
    if done.returncode:
        raise SideError(f"{script} {text} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shortened(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows' cells, with one row for all of a family that met the bar."""
    shown = []
    for family, members in itertools.groupby(rows, key=lambda row: row.family):
        met = []
        is_whole_family = True
        for row in members:
            cells = row.cells()
            if family and cells[-1] == "met":
                met.append(cells)
            else:
                is_whole_family = False
                shown.append(cells)
        if met:
            title = f"{len(met)} {family}"
            if not is_whole_family:
                title = f"{len(met)} other {family}"
            ratios = [cells[4] for cells in met]
            ratios.sort(key=lambda text: float(text.removesuffix("x")))
            spread = f"{ratios[0]} to {ratios[-1]}"
            peer_name = met[0][1]
            bar, verdict = met[0][6:]
            shown.append((title, peer_name, "", "", "", spread, bar, verdict))
    return shown


def document(bench: Bench, markdown: bool = False) -> str:
    """What a run measured, as text or as Markdown."""
    packages = [f"{name} {version(name)}" for name in ("hypergrid-comm", "megatron-core", "torch")]
    parts = [
        f"{', '.join(packages)}, Python {platform.python_version()}; {os.cpu_count()} cores; "
        f"{datetime.date.today()}.",
        "Medians; the ratio is the peer's median over ours, so larger is better, and the range is "
        "that of the single repetitions, in which the two took turns.",
    ]
    if bench.rows:
        head = ("Measured", "Peer", "Peer's", "Ours", "Peer / ours", "Range", "Bar", "")
        rows = [row.cells() for row in bench.rows]
        if markdown:
            rows = shortened(bench.rows)
        parts.append(table([head, *rows], markdown, right=range(2, 7)))
    if bench.counts:
        head = ("The busiest rank", "new_group calls", "Communicators", "Store operations")
        rows = [(*head, "Sockets and files"), *bench.counts]
        parts.append(table(rows, markdown, right=range(1, 5)))
    if bench.calls:
        head = ("NCCL groups: ranks", "Stock: `new_group`", "Ours: splits, one a name")
        rows = [(*head, "Ours: `new_group` by members"), *bench.calls]
        parts.append(table(rows, markdown, right=range(4)))
    if bench.curves:
        parts.append(
            f"- Initialisation: one rank from the middle of a world under torch's fake backend, "
            f"{SIZES}, no gloo twins; a fresh process each time, import excluded. "
            f"`init_device_mesh` makes 4 groups over the dims pp, dp, cp and tp, Megatron's state "
            f"has more."
        )
    if bench.counts:
        parts.append(
            "- gloo ranks: processes of one machine, tp=2 pp=2 ep=2, gloo twins on; from a barrier "
            "to the next on the slowest rank. With connect=lazy a group connects when it is first "
            "used, which is not in that time. Counted in a run of its own, until the getters are "
            "first asked; store operations include those of gloo's own rendezvous."
        )
    parts += [f"FAILED: {failure}" for failure in bench.failures]
    return "\n\n".join(parts)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PATTERN", default="", help="cases that match this regex")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it as Markdown too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture (PNG)")
    options = parser.parse_args()
    chosen = {}
    for name, measure in cases():
        if re.search(options.only, name, re.IGNORECASE):
            chosen[name] = measure
    if not chosen:
        print("--only matches no case. Cases:", *dict(cases()), sep="\n")
        return 0
    if options.plot:
        bench_plot.pyplot()  # refuses before the measuring if it is missing
    # No repetition starts after twelve minutes.
    bench = Bench(deadline=time.monotonic() + 12 * 60)
    for name, measure in chosen.items():
        print(f"measuring: {name} ...", file=sys.stderr, flush=True)
        try:
            bench.rows += measure(bench)
        except SideError as error:
            bench.failures.append(f"{name}: {error}")
    print(document(bench))
    if options.out:
        options.out.write_text(document(bench, markdown=True) + "\n", encoding="utf-8")
    if options.plot and bench.curves:
        about = f"{SIZES}, torch's fake backend, fresh processes; medians"
        bench_plot.draw(options.plot, bench.curves, about)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    for variable in list(os.environ):
        if variable.startswith("HYPERGRID_"):
            del os.environ[variable]  # a choice of the caller's shell is not what is measured
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles this project
    sys.exit(main())
