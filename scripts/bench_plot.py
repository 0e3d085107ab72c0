"""The benchmark's picture: cost of initialisation against world size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

COLOURS = {"stock": "#5f6368", "mesh": "#d98200", "ours": "#0b63c5"}

Curve = Mapping[int, list[float]]


def pyplot() -> ModuleType:
    """matplotlib's pyplot, without a display; SystemExit names the extra when it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(
            "--plot needs matplotlib, which the extra `plot` brings: pip install '.[plot]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(file: Path, curves: Mapping[str, Curve], names: Mapping[str, str], about: str) -> None:
    """Write a PNG with a line for each side; ``curves`` has seconds by world size."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=160, layout="constrained")
    for side, curve in curves.items():
        worlds = sorted(curve)
        middle = [median(curve[world]) for world in worlds]
        axes.plot(worlds, middle, linewidth=2, marker="o", markersize=5, color=COLOURS[side])
        several = [world for world in worlds if len(curve[world]) > 1]
        axes.vlines(
            several,
            [min(curve[world]) for world in several],
            [max(curve[world]) for world in several],
            linewidth=1.2,
            color=COLOURS[side],
        )
        axes.annotate(
            names[side],
            (worlds[-1], middle[-1]),
            xytext=(9, 0),
            textcoords="offset points",
            color=COLOURS[side],
            fontweight="bold" if side == "ours" else "normal",
            va="center",
        )
    _mark_ratios(axes, curves)
    worlds = sorted({world for curve in curves.values() for world in curve})
    lowest = min(min(times) for curve in curves.values() for times in curve.values())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(worlds[0] / 2, worlds[-1] * 1.6)
    axes.set_ylim(bottom=lowest / 2)
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
    axes.xaxis.set_minor_locator(plt.NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: _seconds(value))
    axes.grid(True, which="major", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("world size (ranks)")
    axes.set_ylabel("time of initialisation on one rank")
    figure.suptitle("What initialising the groups costs a rank", fontsize=13, fontweight="bold")
    axes.set_title(about, fontsize=8.5, color="#5f6368")
    figure.savefig(file)
    plt.close(figure)


def _mark_ratios(axes: Any, curves: Mapping[str, Curve]) -> None:
    stock, ours = curves.get("stock", {}), curves.get("ours", {})
    for world in sorted(stock.keys() & ours.keys()):
        high, low = median(stock[world]), median(ours[world])
        arrow = {"arrowstyle": "->", "color": "#9aa0a6", "linewidth": 1}
        axes.annotate("", (world, low * 1.2), xytext=(world, high / 1.2), arrowprops=arrow)
        axes.annotate(
            f"{high / low:.0f}x" if high >= 10 * low else f"{high / low:.1f}x",
            (world, low * (high / low) ** 0.25),  # below the mesh's line
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontweight="bold",
            color=COLOURS["ours"],
        )


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.999 * scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} s"
