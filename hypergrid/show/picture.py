"""A plan as a picture for a paper: one panel per dim, hosts by ranks, coloured by group."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import install_command, shown
from hypergrid.plan import GroupPlan
from hypergrid.show.hosts import group_numbers, ranks_by_host
from hypergrid.summary import sizes_in_words
from hypergrid.topology import Hosts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "light" scheme: told apart by the colour-blind, and dark text stays legible on it.
HUES = ["#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#aaaa00"]
OTHER = "#e4e4e4"  # groups beyond these: no two groups have one colour
INK, MUTED, CROSSING = "#16181c", "#5a606b", "#b3260a"
CELL, GAP, MARGIN, HEAD = 0.29, 0.09, 0.25, 0.5  # inches
PITCH = CELL + GAP
COLUMNS = 8  # ranks side by side; a larger host takes several lines
WHOLE = 256  # ranks up to which nothing is folded away
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hypergrid",
    "font.family": "DejaVu Sans",
}
LINKS: dict[str, dict[str, Any]] = {
    "link inside a host": {"color": INK, "linewidth": 1.6},
    "link across hosts": {"color": CROSSING, "linewidth": 1.8, "linestyle": (0, (2.5, 1))},
    "members not shown": {"color": MUTED, "linewidth": 1.4, "linestyle": (0, (1, 1.5))},
}


def picture(
    plan: GroupPlan,
    hosts: Hosts,
    path: str | Path,
    *,
    layout: str | Sequence[str] | None = None,
    by: str | None = None,
    within: Mapping[str, str] | None = None,
) -> None:
    """Write the ranks of ``plan`` on their hosts to ``path``. Needs the extra ``plot``.

    Each panel shows one dim: its first groups by colour, and the group of the first rank outlined
    and joined by a line, which runs between the ranks and shows where it leaves a host.

    ``hosts`` is as for ``hypergrid.Topology``; the suffix of ``path`` gives the format: ``.png``,
    ``.svg`` or ``.pdf``. ``layout`` names one or several of the plan's, by default the first, and
    ``by`` the one dim to show, by default each that is larger than 1 and has groups that no layout
    before it has. ``within`` has for each host's name its
    NVLink domain; domains are headings.

    Raises
    ------
    LayoutError
        An unknown layout, dim or suffix, or invalid hosts.
    ImportError
        matplotlib is missing.
    """
    names = [layout] if isinstance(layout, str) else list(layout or [*plan.layouts][:1])
    for name in names:
        if name not in plan.layouts:
            raise LayoutError(
                f"invalid layout {shown(name)}. Valid layouts are {list(plan.layouts)}."
            )
    drawn = {name: plan.layouts[name] for name in names}
    chosen = [*_chosen(drawn, by)]
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise LayoutError(
            f"a picture cannot be written to {shown(str(path))}: name a .png, .svg or .pdf file."
        )
    boxes = {name: ranks_by_host(each, hosts) for name, each in drawn.items()}
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
        panels = [_Panel(drawn[n], boxes[n], dim, within or {}, title) for n, dim, title in chosen]
        _compose(figure, panels, drawn)
        figure.savefig(path, metadata={"Date": None} if suffix == ".svg" else None)


def _chosen(layouts: Mapping[str, RankLayout], by: str | None) -> Iterator[tuple[str, str, str]]:
    """The layout, the dim and the title of each panel."""
    seen: list[Any] = []
    for place, (name, layout) in enumerate(layouts.items()):
        for dim in [by] if by is not None else layout.trimmed.dims or layout.dims[:1]:
            groups = layout.groups(dim).tolist()  # refuses an unknown dim
            if groups not in seen:
                seen.append(groups)
                yield name, dim, f"{name} {dim}" if place else dim


def _compose(figure: Figure, panels: list[_Panel], layouts: Mapping[str, RankLayout]) -> None:
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
    others = [f"{name}: {sizes_in_words(each)}" for name, each in [*layouts.items()][1:]]
    most = int((width - 2 * MARGIN) * 9.5)
    heading = [
        part
        for text in (title, *others)
        for part in textwrap.wrap(text, most, break_on_hyphens=False)
    ]
    note = f"Outlined and joined: the group of rank {layout.offset}."
    if any(panel.layout.size // len(panel.members) > len(HUES) for panel in panels):
        note += " Grey: further groups."
    drawn = {kind for panel in panels for _, kind in panel.links}
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
        _line(axes, [(left, top + 0.3), (left + 0.3, top + 0.3)], LINKS[kind])
        _text(axes, left + 0.37, top + 0.24, kind, 8, color=MUTED)


class _Panel:
    """One dim: the lines of ranks that are shown, where each is, and what joins the first group."""

    def __init__(
        self,
        layout: RankLayout,
        boxes: dict[str, list[int]],
        dim: str,
        within: Mapping[str, str],
        title: str,
    ) -> None:
        self.layout, self.boxes, self.dim, self.title = layout, boxes, dim, title
        self.columns = min(COLUMNS, max(map(len, boxes.values())))
        self.labels = 0.075 * max(len(_short(name)) for name in boxes) + 0.12  # width of the names
        self.host = {rank: name for name, ranks in boxes.items() for rank in ranks}
        self.members = layout.group(layout.offset, dim)
        self.places: dict[int, tuple[float, float]] = {}
        self.texts: list[tuple[float, float, str]] = []
        y, before, domain = HEAD, "", ""
        for hidden, lines in self._folded():
            if hidden:
                y += 0.06
                self.texts.append((self.labels + 1.25 * PITCH, y, self._more(lines)))
                y, before = y + 0.3, ""
                continue
            for line in lines:
                name = self.host[line[0]]
                if within.get(name, "") != domain:
                    domain = within[name]
                    y += 0.1
                    self.texts.append((0, y, domain))
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

    def _links(self) -> Iterator[tuple[list[tuple[float, float]], str]]:
        """From each member that is shown to the next one: a way between the tiles, and its kind."""
        visible = [rank for rank in self.members if rank in self.places]
        next_to = {*pairwise(self.members)}
        for a, b in pairwise(visible):
            inside, across, hidden = LINKS
            where = inside if self.host[a] == self.host[b] else across
            yield self._way(self.places[a], self.places[b]), where if (a, b) in next_to else hidden

    def _way(self, a: tuple[float, float], b: tuple[float, float]) -> list[tuple[float, float]]:
        (ax, ay), (bx, by), half = a, b, CELL / 2
        if ay == by and bx - ax < 1.5 * PITCH:
            return [(ax + CELL, ay + half), (bx, by + half)]
        if ay == by:  # above the tiles between them
            above = ay - GAP / 2
            return [(ax + half, ay), (ax + half, above), (bx + half, above), (bx + half, by)]
        if ax == bx and by - ay < 1.5 * PITCH:
            return [(ax + half, ay + CELL), (bx + half, by)]
        # Down between the lines, and beside the column of b.
        below, beside = ay + CELL + GAP / 2, bx - GAP / 2
        start = [(ax + half, ay + CELL), (ax + half, below)]
        return [*start, (beside, below), (beside, by + half), (bx, by + half)]

    @property
    def reach(self) -> str:
        """The groups of the dim that leave their host, in words."""
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

        _text(axes, left, top, f"{self.title} = {len(self.members)}", 10, weight="bold")
        _text(axes, left, top + 0.2, self.reach, 8, color=MUTED)
        for x, y, text in self.texts:
            _text(axes, left + x, top + y, text, 8, color=MUTED)
        numbers = group_numbers(self.layout, self.dim)
        coloured = dict(
            zip(dict.fromkeys(numbers[rank] for rank in self.places), HUES, strict=False)
        )
        digits = len(str(max(self.host)))
        size = 8.5 if digits < 3 else min(8.0, 26 / digits)
        for rank, (x, y) in self.places.items():
            member = rank in self.members
            hue = coloured.get(numbers[rank], OTHER)
            outline = {"edgecolor": INK, "linewidth": 1.6} if member else {"linewidth": 0}
            box = FancyBboxPatch((left + x, top + y), CELL, CELL, facecolor=hue, **outline)
            box.set(boxstyle="round,pad=0,rounding_size=0.05", zorder=4 if member else 2)
            axes.add_patch(box)
            style: dict[str, Any] = {"weight": "bold" if member else "normal", "zorder": 5}
            style |= {"ha": "center", "va": "center_baseline"}
            _text(axes, left + x + CELL / 2, top + y + CELL / 2, str(rank), size, **style)
        for way, kind in self.links:
            _line(axes, [(left + x, top + y) for x, y in way], LINKS[kind])


def _line(axes: Axes, points: list[tuple[float, float]], style: Mapping[str, Any]) -> None:
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, zorder=3, solid_capstyle="butt", solid_joinstyle="round", **style)


def _text(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    style = {"va": "top", "color": INK, **style}
    axes.text(x, y, text, fontsize=size, parse_math=False, **style)


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:6]}…{name[-7:]}"
