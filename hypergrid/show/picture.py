"""A plan as a picture for a paper: one panel per dim, hosts by ranks, coloured by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import install_command, shortened, shown
from hypergrid.plan import GroupPlan
from hypergrid.show.hosts import Boundary, boundary_of, group_numbers, ranks_by_host
from hypergrid.show.page import MOST_RANKS as MOST_ON_PAGE
from hypergrid.summary import hosts_touched, sizes_in_words
from hypergrid.topology import Hosts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by the colour-blind, and dark text stays legible on them: Paul Tol's "light" scheme,
# with a violet in place of its coral, since red says that a group crosses hosts. The second line is
# the first one in pale. Further groups begin again with the first colour.
COLOURS = [
    *("#77aadd", "#a78bfa", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#aaaa00"),
    *("#c9ddf1", "#dcd1fd", "#f8f1cf", "#b4e4d6", "#ffdde4", "#d6f1ff", "#dddd99"),
]
INK = "#16181c"  # on a tile
# A picture has no background. These two keep a contrast of almost 4 on a white and on a dark page.
TEXT = "#797f8b"
CROSSING = "#dd4b39"
# Inches.
CELL = 0.29
GAP = 0.09
PITCH = CELL + GAP
MARGIN = 0.25
HEADING = 0.22  # the height of a line of the heading
HEAD = 0.5  # the height of a panel's own heading
LETTER = 0.075  # a little more than a letter of the small text needs
COLUMNS = 8  # ranks side by side; a larger host takes several lines
WHOLE = 256  # ranks up to which no line is left out
MOST_RANKS = 4096  # of a picture: 1,048,576 take over a minute
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hypergrid",
    "font.family": "DejaVu Sans",
}

Point: TypeAlias = tuple[float, float]


def picture(
    plan: GroupPlan,
    hosts: Hosts,
    path: str | Path,
    *,
    layouts: Sequence[str] = (),
    by: str | None = None,
    within: Mapping[str, str] | None = None,
) -> None:
    """Write the ranks of ``plan`` on their hosts to ``path``. Needs the extra ``plot``.

    Each panel shows one dim: its groups by colour, the group of the first rank framed, and above
    them in words, red, how many groups cross hosts. The picture has no background, for light and
    dark pages.

    ``hosts`` is as for ``hypergrid.Topology``; the suffix of ``path`` gives the format: ``.png``,
    ``.svg`` or ``.pdf``. ``layouts`` names some of the plan's, by default the first, and ``by``
    the one dim to show, by default each that is larger than 1; dims with the same groups share a
    panel. ``within`` has for each host's name its NVLink domain: domains are headings, and a group
    inside one does not count as crossing.

    Raises
    ------
    LayoutError
        An unknown layout, dim or suffix, invalid hosts, or more than 4,096 ranks.
    ImportError
        matplotlib is missing.
    """
    drawn_layouts = {}
    first_layout = list(plan.layouts)[:1]
    for name in layouts or first_layout:
        if name not in plan.layouts:
            raise LayoutError(
                f"invalid layout {shown(name)}. Valid layouts are {list(plan.layouts)}."
            )
        drawn_layouts[name] = plan.layouts[name]
    titles = _titles(drawn_layouts, by)
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise LayoutError(
            f"a picture cannot be written to {shown(str(path))}: name a .png, .svg or .pdf file."
        )
    for layout in drawn_layouts.values():
        if layout.size > MOST_RANKS:
            raise LayoutError(
                f"a picture of {layout.size:,} ranks cannot be read: at most {MOST_RANKS:,} are "
                f"drawn. `hypergrid show --html FILE` writes a page of up to {MOST_ON_PAGE:,}, and "
                f"`hypergrid show --hosts 0-3` prints the ranks of these hosts."
            )
    panels = []
    for (name, dim), title in titles.items():
        panels.append(_Panel(drawn_layouts[name], hosts, dim, within or {}, title))
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"drawing a picture needs matplotlib: {install_command('plot')}."
        ) from error

    figure = Figure(dpi=200, facecolor="none")
    FigureCanvasAgg(figure)
    # Without a date, equal plans have equal pictures.
    metadata = None
    if suffix == ".svg":
        metadata = {"Date": None}
    with matplotlib.rc_context(STYLE):
        _compose(figure, panels, drawn_layouts)
        figure.savefig(path, metadata=metadata)


def _titles(layouts: Mapping[str, RankLayout], by: str | None) -> dict[tuple[str, str], str]:
    """The title of each panel, by its layout and dim.

    ``{("dense", "dp"): "dp and sparse ep"}`` where the two have the same groups. A dim is
    preceded by its layout where a layout before it has a dim of that name.
    """
    titles: dict[tuple[str, str], str] = {}
    panel_of_groups: dict[object, tuple[str, str]] = {}
    known_dims: set[str] = set()
    for name, layout in layouts.items():
        dims = layout.trimmed.dims or layout.dims[:1]
        if by is not None:
            dims = (by,)
        for dim in dims:
            title = dim
            if dim in known_dims:
                title = f"{name} {dim}"
            # The ranks, the stride and the size decide all groups. An unknown dim is refused.
            stride = layout.stride(dim)
            groups = (layout.ranks, stride, layout.size_of(dim))
            first = panel_of_groups.setdefault(groups, (name, dim))
            if first == (name, dim):
                titles[first] = title
            elif first[1] != dim:
                titles[first] += f" and {title}"
        known_dims.update(layout.dims)
    return titles


def _compose(figure: Figure, panels: list[_Panel], layouts: Mapping[str, RankLayout]) -> None:
    """The heading, the panels in lines of equal length, a note below them."""
    panel_width = max(panel.width for panel in panels) + MARGIN
    # Five panels of which four fit side by side are lines of three and two.
    fitting = max(1, int(12 / panel_width))
    line_count = -(-len(panels) // fitting)
    per_line = -(-len(panels) // line_count)
    lines = []
    for start in range(0, len(panels), per_line):
        lines.append(panels[start : start + per_line])
    line_heights = []
    for line in lines:
        line_heights.append(max(panel.height for panel in line) + MARGIN)
    heading = _heading(panels[0], layouts)
    longest = max(map(len, heading))
    heading_width = 1.4 * LETTER * longest + MARGIN
    top = MARGIN + HEADING * len(heading) + 0.12
    width = max(per_line * panel_width, heading_width) + MARGIN
    height = top + sum(line_heights) + 0.32
    figure.set_size_inches(width, height)
    axes = _axes(figure, 0, 0)
    y = MARGIN
    for text in heading:
        _text(axes, (MARGIN, y), text, 11, weight="bold")
        y += HEADING
    y = top
    for line, line_height in zip(lines, line_heights, strict=True):
        x = MARGIN
        for panel in line:
            panel.draw(_axes(figure, x + panel.tiles_x, y))
            x += panel_width
        y += line_height
    note = f"Framed: the group of rank {panels[0].layout.offset}."
    if any(panel.groups > len(COLOURS) for panel in panels):
        note += f" Colours repeat after {len(COLOURS)} groups."
    _text(axes, (MARGIN, y), note, 8)


def _heading(panel: _Panel, layouts: Mapping[str, RankLayout]) -> list[str]:
    """How many ranks and hosts, and the sizes of each layout; a text of a file may be endless."""
    host_count = len(panel.boxes)
    hosts = f"{host_count:,} hosts"
    if host_count == 1:
        hosts = "1 host"
    first_line = f"{panel.layout.size:,} ranks on {hosts}"
    if panel.layout.size > 1:
        first_line += f": {sizes_in_words(panel.layout)}"
    lines = [shortened(first_line)]
    for name in list(layouts)[1:]:
        sizes = sizes_in_words(layouts[name])
        lines.append(shortened(f"{name}: {sizes}"))
    return lines


class _Panel:
    """One dim: the lines of ranks that are shown, where each is, and what its groups cross."""

    def __init__(
        self,
        layout: RankLayout,
        hosts: Hosts,
        dim: str,
        within: Mapping[str, str],
        title: str,
    ) -> None:
        self.layout = layout
        self.dim = dim
        self.title = title
        self.boxes = ranks_by_host(layout, hosts)
        self.members = layout.group(layout.offset, dim)
        self.groups = layout.size // len(self.members)
        boundary = boundary_of(layout, hosts, within)
        touched = hosts_touched(layout.groups(dim), boundary.topology)
        # Of each group that is on several hosts, or domains: on how many.
        self.crossing = touched[touched > 1]
        self.reach = self._reach(boundary)
        largest_host = max(map(len, self.boxes.values()))
        self.columns = min(COLUMNS, largest_host)
        self.places: dict[int, Point] = {}  # the upper left corner of each rank that is shown
        self.notes: list[tuple[float, str]] = []  # texts beside the ranks, and how far down
        self.height = self._place(within)
        longest_note = max(len(text) for _, text in self.notes)
        self.tiles_x = LETTER * longest_note + 0.12
        tiles_end = self.tiles_x + self.columns * PITCH
        self.width = max(tiles_end, LETTER * len(self.reach), 2.45)

    def _place(self, within: Mapping[str, str]) -> float:
        """Put each line of ranks below the one before it, from the left; returns the height."""
        y = HEAD
        hidden = 0
        last_domain = ""
        for host, ranks in self.boxes.items():
            domain = within.get(host, "")
            is_named = False
            for start in range(0, len(ranks), self.columns):
                line = ranks[start : start + self.columns]
                if not self._is_shown(line):
                    hidden += len(line)
                    continue
                if hidden:
                    self.notes.append((y + 0.06, f"+ {hidden:,} ranks"))
                    y += 0.36
                    hidden = 0
                if domain != last_domain:
                    self.notes.append((y + 0.1, _short(domain)))
                    y += 0.3
                    last_domain = domain
                if not is_named:
                    y += 0.07
                    self.notes.append((y + CELL / 2 - 0.055, _short(host)))
                    is_named = True
                for column, rank in enumerate(line):
                    self.places[rank] = (column * PITCH, y)
                y += PITCH
        return y

    def _is_shown(self, line: list[int]) -> bool:
        """Whether a line is drawn: of a large job the first ranks, the first group, the last."""
        if self.layout.size <= WHOLE:
            return True
        first_ranks = 4 * self.columns
        if line[0] < self.layout.offset + first_ranks:
            return True
        last_host = list(self.boxes)[-1]
        last_rank = self.boxes[last_host][-1]
        shown_ranks = {*self.members[:5], self.members[-1], last_rank}
        return not shown_ranks.isdisjoint(line)

    def _reach(self, boundary: Boundary) -> str:
        """The groups of the dim that leave their host, in words."""
        count = len(self.crossing)
        if count == 0:
            return f"inside {boundary.singular}"
        fewest = self.crossing.min()
        most = self.crossing.max()
        # Of "NVLink domains" the short name.
        *_, short_name = boundary.plural.split()
        span = f"{most} {short_name}"
        if fewest < most:
            span = f"{fewest} to {span}"
        if count == self.groups:
            return f"every group crosses {boundary.plural} ({span})"
        return f"{count:,} of {self.groups:,} groups cross ({span})"

    def draw(self, axes: Axes) -> None:
        """Draw it on axes whose zero is the upper left corner of the tiles, in inches."""
        text_x = -self.tiles_x
        _text(axes, (text_x, 0), f"{self.title} = {len(self.members)}", 10, weight="bold")
        reach_colour = TEXT
        if len(self.crossing):
            reach_colour = CROSSING
        _text(axes, (text_x, 0.2), self.reach, 8, color=reach_colour)
        for y, text in self.notes:
            _text(axes, (text_x, y), text, 8)
        numbers = group_numbers(self.layout, self.dim)
        colour_of: dict[int, str] = {}
        for rank, place in self.places.items():
            # A group takes the next colour, so that groups side by side differ.
            next_colour = COLOURS[len(colour_of) % len(COLOURS)]
            colour = colour_of.setdefault(numbers[rank], next_colour)
            self._draw_rank(axes, rank, place, colour)

    def _draw_rank(self, axes: Axes, rank: int, place: Point, colour: str) -> None:
        x, y = place
        _tile(axes, place, CELL, facecolor=colour, linewidth=0)
        if rank in self.members:
            # The frame is inside the tile: there it is seen on light and on dark pages.
            corner = (x + 0.03, y + 0.03)
            _tile(axes, corner, CELL - 0.06, facecolor="none", edgecolor=INK, linewidth=1.5)
        # Numbers of three and more digits are smaller.
        digits = len(str(self.layout.stop - 1))
        size = 8.5
        if digits > 2:
            size = min(8.0, 26 / digits)
        centre = (x + CELL / 2, y + CELL / 2)
        _text(axes, centre, str(rank), size, ha="center", va="center_baseline", color=INK)


def _axes(figure: Figure, x: float, y: float) -> Axes:
    """Axes over the whole figure, in inches to the right of and below this place."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-x, width - x)
    axes.set_ylim(height - y, -y)
    axes.set_axis_off()
    return axes


def _tile(axes: Axes, corner: Point, size: float, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch(corner, size, size, boxstyle="round,pad=0,rounding_size=0.04", **style)
    axes.add_patch(box)


def _text(axes: Axes, place: Point, text: str, size: float, **style: Any) -> None:
    style = {"va": "top", "color": TEXT, **style}
    axes.text(*place, text, fontsize=size, parse_math=False, **style)


def _short(name: str) -> str:
    if len(name) <= 18:
        return name
    return f"{name[:8]}…{name[-9:]}"
