"""Measures stock megatron-core and this project in turn and prints their ratios as a table.

    python scripts/bench.py                                # all of it, at most twelve minutes
    python scripts/bench.py --quick --only 'Init.*65,536'  # less than a minute; some rows
    python scripts/bench.py --agreement                    # two-phase commit, a quarter of an hour
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import bench_plot
import checkout
from bench_sides import RELEASES, TIMED, rounds
from checkout import table

HERE = Path(__file__).resolve().parent
STOCK, MESH = "stock", "init_device_mesh"
SIZES = "tp=8 cp=2 pp=16 ep=8"
MIB = 2**20
WORLDS = (1024, 8192, 65536, 1048576)
REAL_WORLDS = (8, 16, 32, 64)
QUICK_WORLDS, QUICK_REAL_WORLDS = (1024, 65536, 1048576), (8,)
VARIANTS = [(share, connect) for share in ("none", "all") for connect in ("eager", "lazy")]
BARS = {("none", "eager"): 1.4, ("all", "eager"): 1.9, ("all", "lazy"): 3.0}  # of 64 ranks


@dataclass(frozen=True)
class Row:
    """One comparison: what each side took, repetition by repetition."""

    title: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    peer_name: str = STOCK
    kind: str = "time"  # or "memory", "count"
    at_least: float | None = None  # the bar: peer / ours
    at_most: float | None = None  # the bar: ours
    noise: float = 0  # by which the same code differs from itself
    paired: bool = False  # ours and peer were measured in pairs: the median of their ratios counts
    family: str = ""  # a page has one row for all of a family that met the bar

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        ours = median(self.ours)
        name = peer = ratio = spread = bar = verdict = ""
        if self.at_most is not None:
            bar = f"≤ {show(self.at_most, self.kind)}"
            verdict = "met" if ours <= self.at_most else "**NOT met**"
        if self.peer:
            name, peer = self.peer_name, show(median(self.peer), self.kind)
        if self.peer and ours > 0:
            each = [peer / mine for peer, mine in zip(self.peer, self.ours, strict=False) if mine]
            least, middle, most = min(each), median(self.peer) / ours, max(each)
            if self.paired:
                least, middle, most = interval(each)
            ratio, *ends = (times(x, exactly=self.paired) for x in (middle, least, most))
            spread = " to ".join(ends) if len(each) > 1 else "once"
            if self.at_least is not None and self.at_most is None:
                bar = f"≥ {times(self.at_least)}" + (f" ± {self.noise:.0%}" if self.noise else "")
                met = (least if self.paired else middle) >= (1 - self.noise) * self.at_least
                unclear = self.paired and not met and most >= self.at_least
                verdict = "met" if met else "not resolved" if unclear else "**NOT met**"
        return (self.title, name, peer, show(ours, self.kind), ratio, spread, bar, verdict)


@dataclass
class Bench:
    """The settings of one run, and what it has found so far."""

    quick: bool
    wanted: Callable[[str], bool]
    deadline: float
    agreement: bool = False
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    counts: list[tuple[str, ...]] = field(default_factory=list)
    simulated: list[tuple[str, ...]] = field(default_factory=list)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def repeats(self, full: int, quick: int = 1) -> int:
        return quick if self.quick else full

    def seconds(self, most: float) -> float:
        """How long a case may go on repeating itself."""
        return max(0.0, min(most, self.deadline - time.monotonic()))


@dataclass(frozen=True)
class Case:
    """Rows that are measured together."""

    titles: tuple[str, ...]
    measure: Callable[[Bench], list[Row]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agreement", action="store_true", help="the two-phase commit, alone")
    parser.add_argument("--only", metavar="PATTERN", help="rows whose title matches this regex")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller worlds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it as Markdown too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture (PNG)")
    options = parser.parse_args()
    pattern = re.compile(options.only or "", re.IGNORECASE)
    bench = Bench(
        quick=options.quick,
        agreement=options.agreement,
        wanted=lambda title: bool(pattern.search(title)),
        deadline=time.monotonic() + 12 * 60,  # no repetition starts after that
    )
    cases = [case for case in all_cases(bench) if any(map(bench.wanted, case.titles))]
    if not cases:
        every = [title for case in all_cases(bench) for title in case.titles]
        print("--only matches no row. Rows:", *every, sep="\n")
        return 0
    if options.plot:
        bench_plot.pyplot()  # its absence should be told before the measuring
    for case in cases:
        print(f"measuring: {case.titles[0]} ...", file=sys.stderr, flush=True)
        try:
            bench.rows += [row for row in case.measure(bench) if bench.wanted(row.title)]
        except ChildError as error:
            bench.failures.append(f"{case.titles[0]}: {error}")
    print(document(bench))
    if options.out:
        options.out.write_text(document(bench, markdown=True) + "\n", encoding="utf-8")
    if options.plot:
        plot(bench, options.plot)
    return 1 if bench.failures else 0


def all_cases(bench: Bench) -> list[Case]:
    if bench.agreement:
        return [
            *(
                Case(agreement_titles(world), lambda bench, world=world: agreement(bench, world))
                for world in ((64,) if bench.quick else AGREEING)
            ),
            Case(tuple(SIMULATED.values()), simulation),
        ]
    return [
        Case((ENUMERATION,), enumeration),
        *(
            Case(init_titles(world), lambda bench, world=world: initialisation(bench, world))
            for world in (QUICK_WORLDS if bench.quick else WORLDS)
        ),
        *(
            Case(real_titles(world), lambda bench, world=world: real(bench, world))
            for world in (QUICK_REAL_WORLDS if bench.quick else REAL_WORLDS)
        ),
        Case(tuple(map(BARE.format, BARE_WORLDS)), bare),
        Case((CALLS,), calls),
        *(
            Case(getter_titles(release), lambda bench, release=release: getters(bench, release))
            for release in RELEASES
        ),
        Case(AUDITED, audited),
        Case(IMPORT, imports),
        Case((SHADOW,), shadow),
        Case((RECORDED.format(recorded(bench)),), diagnosis),
        Case(RECORDING, recording),
    ]


ENUMERATION = "`RankGenerator.get_ranks('dp-cp')`, 65,536 ranks"
BARRIER = "torch's store barrier"
AGREEING, VIRTUAL = (64, 512), (64, 1024, 16_384, 131_072)
CASES = {
    "success": "success",
    "different": "one rank differs",
    "missing": "one rank is missing",
}
SIMULATED = {
    "cost": "One operation of a TCPStore with 64 busy clients, CPU of its process",
    "success": "CPU of the store's process for 131,072 virtual ranks",
}
AUDITED = (
    "`get_tensor_model_parallel_rank()` after an audit, beside never audited",
    "`get_tensor_model_parallel_rank()` while an audit records",
)
IMPORT = (
    "Import of `compat.parallel_state`",
    "Megatron modules that the import brings",
    "CUDA contexts that the import makes",
    "What the swap compares before it replaces megatron's modules",
)
BARE = "{} gloo ranks, beside `new_group` calls without an agreement"
BARE_WORLDS = (8, 16)
CALLS = "Calls of a rank to torch"
CALLING = (1024, 16_384, 65_536)
SHADOW = "Initialisation of 8 gloo ranks with `--shadow`, without its imports"
RECORDING = (
    "CPU of an `all_reduce` of one gloo rank, recorded by `hypergrid.record`",
    "The same, not recorded on both sides",
    "CPU of the recorder's thread in a second of that, with `after=600`",
    "The longest that this thread held up a call",
    "CPU of a receive over gloo, recorded on request",
)
RECORDED = "Reading and judging the recordings of {:,} ranks, 2,000 calls each"


def enumeration(bench: Bench) -> list[Row]:
    job = {"job": "enumerate_groups", "world": 65536, "token": "dp-cp"}
    found = child("bench_sides.py", repeats=bench.repeats(9, 3), seconds=bench.seconds(20), **job)
    return [Row(ENUMERATION, found["ours"], found["stock"], at_least=40)]


def init_titles(world: int) -> tuple[str, ...]:
    where = f"{world:,} ranks"
    return (
        f"Initialisation, {where}",
        f"Initialisation, {where}, once more in the same process",
        f"Initialisation, {where}, beside a mesh of 4 dims",
        f"Peak memory of initialisation, {where}",
    )


def initialisation(bench: Bench, world: int) -> list[Row]:
    """Both sides and torch's mesh in turn, each time in a fresh interpreter."""
    titles = init_titles(world)
    huge = world > 100_000
    sides = ["stock", "ours", "mesh"]
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    job = {"job": "initialise", "world": world, "seconds": 8 if not bench.quick else 2}
    for i in rounds(bench.repeats(3 if huge else 7, 1 if huge else 2), bench.seconds(100)):
        for side in reversed(sides) if i % 2 else sides:
            # At a million ranks stock takes the better part of a minute: once, in a full run.
            if side != "ours" and huge and (i or bench.quick):
                continue
            if side == "mesh" and bench.quick and i:
                continue
            repeats = 1 if huge and side != "ours" else 4
            results[side].append(child("bench_sides.py", side=side, repeats=repeats, **job))
    if len({r["digest"] for side in ("stock", "ours") for r in results[side]}) != 1:
        raise ChildError(f"stock and ours built different groups of {world:,} ranks")
    first = {side: [r["seconds"][0] for r in results[side]] for side in sides}
    again = {s: [median(r["seconds"][1:]) for r in results[s] if r["seconds"][1:]] for s in sides}
    memory = {side: [r["bytes"] for r in results[side]] for side in sides}
    for side in sides:
        if first[side]:
            bench.curves.setdefault(side, {})[world] = first[side]
    rows = [
        Row(
            titles[0],
            first["ours"],
            first["stock"],
            at_least=100 if world == 65536 else None,
            at_most=2 if world == 1048576 else None,
        )
    ]
    if again["ours"] and again["stock"]:
        rows.append(Row(titles[1], again["ours"], again["stock"]))
    if first["mesh"]:
        rows.append(Row(titles[2], first["ours"], first["mesh"], peer_name=MESH))
    if world >= 65536:  # below, both are lost in what the interpreter holds anyway
        rows.append(Row(titles[3], memory["ours"], memory["stock"], kind="memory"))
    return rows


def real_titles(world: int) -> tuple[str, ...]:
    titles = [f"{world} gloo ranks, share={s} connect={c}" for s, c in VARIANTS]
    return (*titles, f"{world} gloo ranks, without the agreement")


def real(bench: Bench, world: int) -> list[Row]:
    """Forked ranks that really connect: stock, and ours in each way of sharing and connecting."""
    titles = real_titles(world)
    variants: dict[str, dict[str, Any]] = {"stock": {"side": "stock", "environment": {}}}
    for title, (share, connect) in zip(titles, VARIANTS, strict=False):
        environment = {"HYPERGRID_SHARE": share, "HYPERGRID_CONNECT": connect}
        variants[title] = {"side": "ours", "environment": environment}
    # The cheapest variant: there the agreement is the largest part.
    cheap, bare = titles[-2], titles[-1]
    if world == REAL_WORLDS[-1]:
        environment = {**variants[cheap]["environment"], "HYPERGRID_AGREEMENT": "0"}
        variants[bare] = {"side": "ours", "environment": environment, "fewer_than": cheap}
    budget = bench.seconds(20 if bench.quick else 40 + 2 * world)
    found = child(
        "bench_real.py",
        job="compare",
        timeout=600,
        world=world,
        variants=variants,
        repeats=bench.repeats(9 if world < 32 else 5, 2),
        seconds=budget,
    )
    rows = []
    for title in variants:
        if title == bare:
            if title in found:
                seconds = [found[each]["seconds"] for each in (bare, cheap)]
                rows.append(Row(title, *seconds, peer_name="with it"))
            continue
        name = f"{world} gloo ranks, stock" if title == "stock" else title
        bench.counts.append((name, *(f"{n:,}" for n in found[title]["counts"].values())))
        if title != "stock":
            bar = BARS.get(VARIANTS[titles.index(title)]) if world == REAL_WORLDS[-1] else None
            seconds = found[title]["seconds"], found["stock"]["seconds"]
            rows.append(Row(title, *seconds, at_least=bar))
    return rows


def bare(bench: Bench) -> list[Row]:
    """Ours, and named calls of ``new_group`` for the same groups, in pairs."""
    rows = []
    for world in BARE_WORLDS[: 1 if bench.quick else None]:
        found = child(
            "bench_real.py",
            job="compare",
            timeout=600,
            world=world,
            variants={
                "ours": {"side": "ours", "environment": {}},
                "bare": {"side": "bare", "environment": {}},
            },
            repeats=bench.repeats(20, 2),
            seconds=bench.seconds(60),
        )
        seconds = found["ours"]["seconds"], found["bare"]["seconds"]
        rows.append(Row(BARE.format(world), *seconds, "calls alone", paired=True))
    return rows


def calls(bench: Bench) -> list[Row]:
    """Stock's calls, and ours where each name is a split and where members create alone."""
    for world in CALLING[: 2 if bench.quick else None]:
        counts = [
            child("bench_creation.py", job="creation_calls", side=side, way=way, world=world)
            for side, way in (("stock", "auto"), ("ours", "split"), ("ours", "members"))
        ]
        bench.calls.append((f"{world:,}", *(f"{count:,}" for count in counts)))
    return []


def getter_titles(release: str) -> tuple[str, ...]:
    return tuple(f"`{name}()`, {release}" for name in TIMED)


def getters(bench: Bench, release: str) -> list[Row]:
    """The fastest of many, in several processes: equal code differs by 5 % between processes."""
    job = {
        "job": "call_getters",
        "release": release,
        "calls": 500,
        "repeats": bench.repeats(40, 20),
    }
    sides: dict[str, dict[str, list[float]]] = {}
    for _ in rounds(bench.repeats(9, 3), bench.seconds(90)):
        found = child("bench_sides.py", seconds=bench.seconds(20), **job)
        for name, times in found.items():
            for side, each in times.items():
                sides.setdefault(name, {}).setdefault(side, []).append(min(each))
    titles = dict(zip(TIMED, getter_titles(release), strict=True))
    return [
        Row(
            titles[name],
            found["ours"],
            found["stock"],
            at_least=1,
            noise=0.05,
            family=f"getters, {release}",
        )
        for name, found in sides.items()
    ]


def audited(bench: Bench) -> list[Row]:
    job = {"job": "audited", "calls": 2000, "repeats": bench.repeats(40, 20)}
    found = child("bench_sides.py", seconds=bench.seconds(20), **job)
    # As getters: the fastest of many.
    never, after = ([min(found[side])] for side in ("never", "off"))
    return [
        Row(AUDITED[0], after, never, "never audited", at_least=1, noise=0.05),
        Row(AUDITED[1], found["on"], at_most=100e-6),
    ]


def imports(bench: Bench) -> list[Row]:
    results: dict[str, list[dict[str, Any]]] = {"stock": [], "ours": []}
    for i in rounds(bench.repeats(5, 2), bench.seconds(60)):
        for side in sorted(results, reverse=bool(i % 2)):
            results[side].append(child("bench_sides.py", job="import_side", side=side))

    def of(side: str, key: str) -> list[float]:
        return [float(result[key]) for result in results[side]]

    return [
        Row(IMPORT[0], of("ours", "seconds"), of("stock", "seconds"), at_most=0.05),
        Row(IMPORT[1], of("ours", "megatron"), of("stock", "megatron"), kind="count", at_most=0),
        Row(IMPORT[2], of("ours", "cuda"), of("stock", "cuda"), kind="count", at_most=0),
        Row(IMPORT[3], of("ours", "compared"), at_most=0.03),
    ]


def shadow(bench: Bench) -> list[Row]:
    """Stock, and stock with a plan of ours beside it, in pairs."""
    stock = {"side": "stock", "environment": {}}
    found = child(
        "bench_real.py",
        job="compare",
        timeout=600,
        world=8,
        variants={"stock": stock, "shadow": {**stock, "shadow": True}},
        repeats=bench.repeats(9, 2),
        seconds=bench.seconds(40),
    )
    seconds = found["shadow"]["seconds"], found["stock"]["seconds"]
    return [Row(SHADOW, *seconds, paired=True)]


def diagnosis(bench: Bench) -> list[Row]:
    """Each time in a fresh interpreter, as the command reads a recording once."""
    ranks, times = recorded(bench), {"ours": list[float](), "alone": list[float]()}
    with tempfile.TemporaryDirectory() as directory:
        job = {"directory": directory, "ranks": ranks}
        child("bench_sides.py", timeout=600, job="recordings", calls=2000, **job)
        for i in rounds(bench.repeats(5, 3), bench.seconds(120)):
            for side in sorted(times, reverse=bool(i % 2)):
                times[side].append(child("bench_sides.py", job="diagnosis", side=side, **job))
    peer, title = "`pickle` and `json` alone", RECORDED.format(ranks)
    return [Row(title, times["ours"], times["alone"], peer_name=peer, at_least=1 / 2)]


def recorded(bench: Bench) -> int:
    return 128 if bench.quick else 1024


def agreement_titles(world: int) -> tuple[str, ...]:
    return tuple(
        f"{world} processes: {what}"
        for what in (
            "last arrival to last verdict",
            "the same, beside `dist.barrier`",
            "CPU of the store's process, for each rank",
            "store operations of each rank, a process's first",
            "bytes of each rank on the wire, a process's first",
        )
    )


def agreement(bench: Bench, world: int) -> list[Row]:
    """Both phases beside torch's store barrier, and gloo's where so many ranks can connect."""
    turns, gloo = bench.repeats(7, 3), world <= 64
    job = {"job": "processes", "world": world, "turns": turns, "gloo": gloo}
    found = child("bench_agreement.py", **job)
    ours, barrier, titles = found["phases"], found["barrier"], iter(agreement_titles(world))
    rows = [Row(next(titles), ours["seconds"], barrier["seconds"], BARRIER)]
    title = next(titles)
    if gloo:
        rows.append(Row(title, ours["seconds"], found["gloo"]["seconds"], "dist.barrier"))
    rows.append(Row(next(titles), ours["cpu"], barrier["cpu"], BARRIER))
    for name, most in (("operations", 9), ("bytes", None)):
        each, theirs = ours[f"first {name}"], barrier[f"first {name}"]
        rows.append(Row(next(titles), each, theirs, BARRIER, "count", at_most=most))
    return rows


def simulation(bench: Bench) -> list[Row]:
    """Virtual ranks on a store that counts; a round trip costs what it does at a real one."""
    cost = child("bench_agreement.py", job="operations", clients=64, calls=bench.repeats(2000, 300))
    rows = [Row(SIMULATED["cost"], [*cost.values()])]
    worlds = VIRTUAL[: 3 if bench.quick else None]
    for world, case in itertools.product(worlds, ("success", "missing", "different")):
        if bench.seconds(1):
            found = child(
                "bench_agreement.py", job="simulated", world=world, case=case, timeout=600
            )
            seconds = found["trips"] * world * median(cost.values())
            each = [f"{found[name]:.2f}" for name in ("operations", "trips", "bytes")]
            bench.simulated.append((f"{world:,}", CASES[case], *each, show(seconds, "time")))
            if world == 131_072 and case in SIMULATED:
                rows.append(Row(SIMULATED[case], [seconds]))
    return rows


def recording(bench: Bench) -> list[Row]:
    found = child("bench_sides.py", job="recording", pairs=bench.repeats(400, 100), calls=500)

    def row(title: str, side: str, at_least: float | None = None) -> Row:
        sides = found[f"{side}: with"], found[f"{side}: without"]
        return Row(title, *sides, "not recorded", at_least=at_least, paired=True)

    return [
        row(RECORDING[0], "recorded", 0.99),
        row(RECORDING[1], "same"),
        Row(RECORDING[2], found["thread"], at_most=0.001),
        Row(RECORDING[3], found["stall"], at_most=0.001),
        row(RECORDING[4], "p2p"),
    ]


class ChildError(RuntimeError):
    """A side raised, hung, or answered differently."""


def child(script: str, *, timeout: float = 280, **job: Any) -> Any:
    """Run a job in a fresh interpreter and give its result."""
    command = (sys.executable, HERE / script, json.dumps(job))
    try:
        done = checkout.child(*command, timeout=timeout, PYTHONWARNINGS="ignore")
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"{script} {job} took longer than {timeout:.0f} s") from error
    if done.returncode:
        raise ChildError(f"{script} {job} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shortened(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows' cells, with one row for all of a family that met the bar."""
    cells = []
    for family, members in itertools.groupby(rows, key=lambda row: row.family):
        each = [row.cells() for row in members]
        met = [row for row in each if family and row[-1] == "met"]
        cells += [row for row in each if row not in met]
        if met:
            ratios = sorted((row[4] for row in met), key=lambda ratio: float(ratio[:-1]))
            title = f"{len(met)} {'other ' * (len(met) < len(each))}{family}"
            between = f"{ratios[0]} to {ratios[-1]}"
            cells.append((title, met[0][1], "", "", "", between, *met[0][6:]))
    return cells


def document(bench: Bench, markdown: bool = False) -> str:
    """The findings of a run, as text or as Markdown."""
    packages = [f"{name} {version(name)}" for name in ("hypergrid-comm", "megatron-core", "torch")]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    text = [
        f"{', '.join(packages)}, Python {platform.python_version()}; {os.cpu_count()} cores; "
        f"{today}{'; a quick run' if bench.quick else ''}.",
        "",
        "Medians; the ratio is the peer's median over ours, so larger is better, and the range is "
        "that of the single repetitions, in which the two took turns.",
    ]
    if bench.rows:
        head = ("Measured", "Peer", "Peer's", "Ours", "Peer / ours", "Range", "Bar", "")
        rows = [head, *(shortened(bench.rows) if markdown else (r.cells() for r in bench.rows))]
        text += ["", table(rows, markdown, right=range(2, 7))]
    if bench.counts:
        head = ("The busiest rank", "new_group calls", "Communicators", "Store operations")
        rows = [(*head, "Sockets and files"), *bench.counts]
        text += ["", table(rows, markdown, right=range(1, 5))]
    if bench.calls:
        head = ("NCCL groups: ranks", "Stock: `new_group`", "Ours: splits, one a name")
        rows = [(*head, "Ours: `new_group` by members"), *bench.calls]
        text += ["", table(rows, markdown, right=range(4))]
    if bench.simulated:
        head = ("Virtual ranks", "Case", "Operations a rank", "Round trips a rank")
        head = (*head, "Characters a rank", "CPU of the store's process")
        text += ["", table([head, *bench.simulated], markdown, right=(0, 2, 3, 4, 5))]
    titles = " ".join(row.title for row in bench.rows)
    if "nitialisation" in titles:
        text += [
            "",
            f"- Initialisation: one rank from the middle of a world under torch's fake backend, "
            f"{SIZES}, no gloo twins; a fresh process each time, import excluded. "
            f"`{MESH}` makes 4 groups over the dims pp, dp, cp and tp, Megatron's state has more.",
        ]
    if "gloo ranks" in titles:
        text += [
            "- gloo ranks: processes of one machine, tp=2 pp=2 ep=2, gloo twins on; from a barrier "
            "to the next on the slowest rank. With connect=lazy a group connects when it is first "
            "used, which is not in that time. Counted in a run of its own, until the getters are "
            "first asked; store operations include those of gloo's own rendezvous.",
        ]
    text += [f"\nFAILED: {failure}" for failure in bench.failures]
    return "\n".join(text)


def plot(bench: Bench, file: Path) -> None:
    if not bench.curves:
        print("no picture: it is drawn from the rows of Initialisation, none ran", file=sys.stderr)
        return
    names = {
        "stock": f"megatron-core\n{version('megatron-core')}",
        "mesh": "torch's\ninit_device_mesh\n(4 groups only)",
        "ours": "hypergrid",
    }
    about = f"{SIZES}, torch's fake backend, fresh processes; median, least and most"
    bench_plot.draw(file, bench.curves, names, about)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def show(value: float, kind: str) -> str:
    if kind == "count":
        return f"{value:g}"
    if kind == "memory":
        return f"{value / MIB:.1f} MiB"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.9995 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, between the ends of its 95% interval: by order, whatever the distribution."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    first = max(0, int(len(values) / 2 - half))
    return ordered[first], median(ordered), ordered[-1 - first]


def times(ratio: float, exactly: bool = False) -> str:
    if exactly:
        return f"{ratio:.4f}x"
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith("HYPERGRID_")]:
        del os.environ[name]  # a choice of the caller's shell is not what is measured
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles this project
    sys.exit(main())
