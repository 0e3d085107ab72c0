"""The benchmark's picture: cost of initialisation against world size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

# Side: its colour and its name in the picture.
SIDES = {
    "stock": ("#5f6368", "megatron-core"),
    "mesh": ("#d98200", "torch's init_device_mesh (4 groups only)"),
    "ours": ("#0b63c5", "hypergrid"),
}


def draw(file: Path, curves: Mapping[str, Mapping[int, float]], about: str) -> None:
    """Write a PNG with a line for each side; ``curves`` has seconds by world size."""
    figure = Figure(figsize=(8, 4.8), dpi=160, layout="constrained")
    axes = figure.subplots()
    worlds: set[int] = set()
    for side, curve in curves.items():
        colour, name = SIDES[side]
        points = sorted(curve.items())
        axes.plot(*zip(*points, strict=True), color=colour)
        last_point = points[-1]
        axes.annotate(name, last_point, color=colour, ha="right", va="bottom")
        worlds.update(curve)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(worlds), [f"{world:,}" for world in sorted(worlds)])
    axes.grid(True, color="#e3e3e3")
    axes.set_xlabel("world size (ranks)")
    axes.set_ylabel("seconds of initialisation on one rank")
    axes.set_title(f"What initialising the groups costs a rank\n{about}", fontsize=9)
    figure.savefig(file)
