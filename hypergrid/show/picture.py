"""A plan as a picture for a paper: one panel per dim, hosts by ranks, coloured by group."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypergrid.analysis.summary import sizes_in_words
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import install_command, shown
from hypergrid.plan import GroupPlan
from hypergrid.show.hosts import group_numbers, ranks_by_host
from hypergrid.topology import Hosts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "light" scheme: told apart by the colour-blind, and dark text stays legible on it.
HUES = ["#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#aaaa00", "#dddddd"]
INK, MUTED, CROSSING = "#16181c", "#5a606b", "#b3260a"
CELL, GAP, MARGIN, HEAD = 0.29, 0.05, 0.25, 0.46  # inches
PITCH = CELL + GAP
COLUMNS = 8  # ranks side by side; a larger host takes several lines
WHOLE = 256  # ranks up to which nothing is folded away
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hypergrid",
    "font.family": "DejaVu Sans",
}
LINKS: dict[str, dict[str, Any]] = {
    "link inside a host": {"edgecolor": INK, "linewidth": 1.4},
    "link across hosts": {"edgecolor": CROSSING, "linewidth": 1.6, "linestyle": (0, (3, 2))},
    "members not shown": {"edgecolor": MUTED, "linewidth": 1.2, "linestyle": (0, (1, 2))},
}


def picture(
    plan: GroupPlan,
    hosts: Hosts,
    path: str | Path,
    *,
    layout: str | None = None,
    by: str | None = None,
    within: Mapping[str, str] | None = None,
) -> None:
    """Write the ranks of ``plan`` on their hosts to ``path``. Needs the extra ``plot``.

    Each panel shows one dim: its groups by colour, the group of the first rank outlined, and the
    links of that group's ring.

    ``hosts`` is as for ``hypergrid.Topology``; the suffix of ``path`` gives the format: ``.png``,
    ``.svg`` or ``.pdf``. ``layout`` is one of the plan's, by default the first, and ``by`` the one
    dim to show, by default each that is larger than 1. ``within`` has for each host's name the
    units that it is in; they are headings.

    Raises
    ------
    LayoutError
        An unknown layout, dim or suffix, or invalid hosts.
    ImportError
        matplotlib is missing.
    """
    chosen = next(iter(plan.layouts)) if layout is None else layout
    if chosen not in plan.layouts:
        raise LayoutError(
            f"invalid layout {shown(chosen)}. Valid layouts are {list(plan.layouts)}."
        )
    drawn = plan.layouts[chosen]
    dims = [by] if by is not None else drawn.trimmed.dims or drawn.dims[:1]
    drawn.axes(dims)  # refuses an unknown one
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise LayoutError(
            f"a picture cannot be written to {shown(str(path))}: name a .png, .svg or .pdf file."
        )
    boxes = ranks_by_host(drawn, hosts)
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"drawing a picture needs matplotlib: {install_command('plot')}."
        ) from error

    figure = Figure(dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    with matplotlib.rc_context(STYLE):
        _compose(figure, [_Panel(drawn, boxes, dim, within or {}) for dim in dims])
        figure.savefig(path, metadata={"Date": None} if suffix == ".svg" else None)


def _compose(figure: Figure, panels: list[_Panel]) -> None:
    """The heading, the panels in lines of equal length, the key."""
    layout, hosts, each = panels[0].layout, len(panels[0].boxes), panels[0].width + MARGIN
    across = max(1, min(len(panels), int(12 / each)))
    across = -(-len(panels) // -(-len(panels) // across))
    lines = [panels[i : i + across] for i in range(0, len(panels), across)]
    heights = [max(panel.height for panel in line) + MARGIN for line in lines]
    width = max(across * each + MARGIN, 5.0)

    title = f"{layout.size:,} ranks on {hosts:,} host{'s' * (hosts != 1)}"
    if layout.size > 1:
        title += f": {sizes_in_words(layout)}"
    heading = textwrap.wrap(title, int((width - 2 * MARGIN) * 9.5), break_on_hyphens=False)
    note = f"Outlined: the group of rank {layout.offset}."
    if any(layout.size // len(panel.members) > len(HUES) for panel in panels):
        note += " Colours repeat."
    drawn = {kind for panel in panels for *_, kind in panel.links}
    kinds = [kind for kind in LINKS if kind in drawn]

    top = MARGIN + 0.22 * len(heading) + 0.12
    height = top + sum(heights) + 0.34 + 0.24 * bool(kinds)
    figure.set_size_inches(width, height)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))  # inches, from the top
    axes.set_axis_off()
    for i, text in enumerate(heading):
        _text(axes, MARGIN, MARGIN + 0.22 * i, text, 11, weight="bold")
    for line, tall in zip(lines, heights, strict=True):
        for i, panel in enumerate(line):
            panel.draw(axes, MARGIN + i * each, top)
        top += tall
    _text(axes, MARGIN, top, note, 8, color=MUTED)
    for i, kind in enumerate(kinds):
        left = MARGIN + i * 1.55
        _curve(axes, [(left, top + 0.3), (left + 0.3, top + 0.3)], LINKS[kind])
        _text(axes, left + 0.37, top + 0.24, kind, 8, color=MUTED)


class _Panel:
    """One dim: the lines of ranks that are shown, where each is, and the first group's ring."""

    def __init__(
        self, layout: RankLayout, boxes: dict[str, list[int]], dim: str, within: Mapping[str, str]
    ) -> None:
        self.layout, self.boxes, self.dim = layout, boxes, dim
        self.columns = min(COLUMNS, max(map(len, boxes.values())))
        self.labels = 0.075 * max(len(_short(name)) for name in boxes) + 0.12  # width of the names
        self.host = {rank: name for name, ranks in boxes.items() for rank in ranks}
        self.members = layout.group(layout.offset, dim)
        self.places: dict[int, tuple[float, float]] = {}
        self.texts: list[tuple[float, float, str]] = []
        y, before, around = HEAD, "", ""
        for hidden, lines in self._folded():
            if hidden:
                y += 0.06
                self.texts.append((self.labels + 1.25 * PITCH, y, self._more(lines)))
                y, before = y + 0.3, ""
                continue
            for line in lines:
                name = self.host[line[0]]
                if within.get(name, "") != around:
                    around = within[name]
                    y += 0.1
                    self.texts.append((0, y, around))
                    y, before = y + 0.2, ""
                if name != before:
                    y += 0.07 if before else 0
                    self.texts.append((0, y + CELL / 2 - 0.055, _short(name)))
                before = name
                for i, rank in enumerate(line):
                    self.places[rank] = (self.labels + i * PITCH, y)
                y += PITCH
        self.height, self.width = y, max(self.labels + self.columns * PITCH, 2.45)
        self.links = list(self._links())

    def _folded(self) -> Iterator[tuple[bool, list[list[int]]]]:
        """Runs of lines, shown or hidden: the first ones, those of the first group, the last."""
        lines = [
            ranks[i : i + self.columns]
            for ranks in self.boxes.values()
            for i in range(0, len(ranks), self.columns)
        ]
        wanted = {*self.members[:5], self.members[-1]}
        few = len(self.host) <= WHOLE
        last = len(lines) - 1
        seen = [few or i in (0, 1, 2, 3, last) or bool(wanted & {*x}) for i, x in enumerate(lines)]
        # A single line is not worth the words that would stand for it.
        seen = [s or (0 < i < last and seen[i - 1] and seen[i + 1]) for i, s in enumerate(seen)]
        for visible, run in groupby(zip(seen, lines, strict=True), key=lambda pair: pair[0]):
            yield not visible, [line for _, line in run]

    def _more(self, lines: list[list[int]]) -> str:
        ranks = {rank for line in lines for rank in line}
        names = {self.host[rank] for rank in ranks}
        whole = all(ranks.issuperset(self.boxes[name]) for name in names)
        return f"··· {len(names):,} more hosts" if whole else f"··· {len(ranks):,} more ranks"

    def _links(self) -> Iterator[tuple[int, int, str]]:
        visible = [rank for rank in self.members if rank in self.places]
        pairs = list(pairwise(visible)) + ([(visible[-1], visible[0])] if len(visible) > 2 else [])
        next_to = set(pairwise(self.members)) | {(self.members[-1], self.members[0])}
        for a, b in pairs:
            inside, across, hidden = LINKS
            where = inside if self.host[a] == self.host[b] else across
            yield a, b, where if (a, b) in next_to else hidden

    @property
    def reach(self) -> str:
        """Which of the dim's groups leave their host, in words."""
        groups = self.layout.groups(self.dim).tolist()
        touched = [len({self.host[rank] for rank in group}) for group in groups]
        counts = sorted({count for count in touched if count > 1})
        if not counts:
            return "each rank alone" if len(self.members) == 1 else "inside a host"
        on = f"{counts[0]} hosts" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} hosts"
        across = sum(count > 1 for count in touched)
        if across == len(groups):
            return f"every group crosses hosts ({on})"
        return f"{across:,} of {len(groups):,} groups cross ({on})"

    def draw(self, axes: Axes, left: float, top: float) -> None:
        from matplotlib.patches import FancyBboxPatch

        _text(axes, left, top, f"{self.dim} = {len(self.members)}", 10, weight="bold")
        _text(axes, left, top + 0.2, self.reach, 8, color=MUTED)
        for x, y, text in self.texts:
            _text(axes, left + x, top + y, text, 8, color=MUTED)
        numbers = group_numbers(self.layout, self.dim)
        digits = len(str(max(self.host)))
        size = 8.5 if digits < 3 else min(8.0, 26 / digits)
        for rank, (x, y) in self.places.items():
            member = rank in self.members
            hue = HUES[numbers[rank] % len(HUES)]
            outline = {"edgecolor": INK, "linewidth": 1.6} if member else {"linewidth": 0}
            box = FancyBboxPatch((left + x, top + y), CELL, CELL, facecolor=hue, **outline)
            box.set(boxstyle="round,pad=0,rounding_size=0.05", zorder=4 if member else 2)
            axes.add_patch(box)
            across, down = self._centre(rank)
            style: dict[str, Any] = {"weight": "bold" if member else "normal", "zorder": 5}
            style |= {"ha": "center", "va": "center_baseline"}
            # A line that passes behind a number leaves it legible.
            style |= {"bbox": {"boxstyle": "round,pad=0.08", "facecolor": hue, "linewidth": 0}}
            _text(axes, left + across, top + down, str(rank), size, **style)
        for a, b, kind in self.links:
            _curve(axes, [(left + x, top + y) for x, y in map(self._centre, (a, b))], LINKS[kind])

    def _centre(self, rank: int) -> tuple[float, float]:
        x, y = self.places[rank]
        return x + CELL / 2, y + CELL / 2


def _curve(axes: Axes, ends: list[tuple[float, float]], style: dict[str, Any]) -> None:
    """A line that leaves the straight way for the gutter beside it, behind the group's cells."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    (ax, ay), (bx, by) = ends
    dx, dy = bx - ax, by - ay
    long = (dx * dx + dy * dy) ** 0.5
    aside = 0.68 * PITCH / long if long > 1.3 * PITCH else 0.0
    points = [(ax + dx * t + dy * aside, ay + dy * t - dx * aside) for t in (0.12, 0.88)]
    curve = Curve([ends[0], *points, ends[1]], [Curve.MOVETO, *[Curve.CURVE4] * 3])
    halo = {"edgecolor": "white", "linewidth": style["linewidth"] + 1.2}
    for each in (halo, style):
        axes.add_patch(PathPatch(curve, facecolor="none", zorder=3, **each))


def _text(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    style = {"va": "top", "color": INK, **style}
    axes.text(x, y, text, fontsize=size, parse_math=False, **style)


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:6]}…{name[-7:]}"
