"""A plan as a picture for a paper: one panel per dim, hosts by ranks, coloured by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
CELL = 0.38  # inches of a rank
TILE = 0.8  # of a cell
COLUMNS = 8  # ranks side by side; a larger host takes several lines
WHOLE = 256  # ranks up to which no line is left out
MOST_RANKS = 4096  # of a picture: 1,048,576 take over a minute
WIDEST = 12  # inches
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hypergrid",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "text.parse_math": False,
}


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
    except ImportError as error:
        raise ImportError(
            f"drawing a picture needs matplotlib: {install_command('plot')}."
        ) from error
    # Without a date, equal plans have equal pictures.
    metadata = None
    if suffix == ".svg":
        metadata = {"Date": None}
    with matplotlib.rc_context(STYLE):
        figure = _drawn(panels, _heading(panels[0], drawn_layouts))
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


def _drawn(panels: Sequence[_Panel], heading: Sequence[str]) -> Figure:
    """The heading, the panels in lines of equal length, a note below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest_label = max(len(label) for panel in panels for label, _ in panel.lines)
    width = CELL * panels[0].columns + 0.08 * longest_label + 1
    # Five panels of which four fit side by side are lines of three and two.
    fitting = max(1, int(WIDEST / width))
    line_count = -(-len(panels) // fitting)
    per_line = -(-len(panels) // line_count)
    longest = max(len(panel.lines) for panel in panels)
    height = CELL * longest + 0.9
    longest_text = max(map(len, heading))
    size = (max(width * per_line, 0.1 * longest_text), height * line_count + 0.25 * len(heading))
    figure = Figure(figsize=size, dpi=200, facecolor="none", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(line_count, per_line, squeeze=False)
    for axes, panel in zip_longest(grid.flat, panels):
        axes.set_axis_off()
        if panel is not None:
            axes.set_axis_on()
            panel.draw(axes, longest)
    figure.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=11, weight="bold")
    note = f"Framed: the group of rank {panels[0].layout.offset}."
    if any(panel.groups > len(COLOURS) for panel in panels):
        note += f" Colours repeat after {len(COLOURS)} groups."
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8)
    return figure


def _heading(panel: _Panel, layouts: Mapping[str, RankLayout]) -> list[str]:
    """How many ranks and hosts, and the sizes of each layout; a text of a file may be endless."""
    host_count = panel.hosts
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
    """One dim: the lines of ranks that are shown, each with its label, and what groups cross."""

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
        self.members = layout.group(layout.offset, dim)
        self.groups = layout.size // len(self.members)
        boundary = boundary_of(layout, hosts, within)
        touched = hosts_touched(layout.groups(dim), boundary.topology)
        # Of each group that is on several hosts, or domains: on how many.
        self.crossing = touched[touched > 1]
        self.reach = self._reach(boundary)
        ranks_of = ranks_by_host(layout, hosts)
        self.hosts = len(ranks_of)
        self.columns = min(COLUMNS, max(map(len, ranks_of.values())))
        self.lines = list(self._lines(ranks_of, within))

    def _lines(
        self, ranks_of: Mapping[str, list[int]], within: Mapping[str, str]
    ) -> Iterator[tuple[str, list[int]]]:
        """The lines from top to bottom; domains, and ranks left out, are lines without ranks."""
        hidden = 0
        last_domain = ""
        for host, ranks in ranks_of.items():
            domain = within.get(host, "")
            label = _short(host)
            for start in range(0, len(ranks), self.columns):
                line = ranks[start : start + self.columns]
                if not self._is_shown(line):
                    hidden += len(line)
                    continue
                if hidden:
                    yield f"+ {hidden:,} ranks", []
                    hidden = 0
                if domain != last_domain:
                    yield _short(domain), []
                    last_domain = domain
                yield label, line
                label = ""

    def _is_shown(self, line: list[int]) -> bool:
        """Whether a line is drawn: of a large job the first ranks, the first group, the last."""
        if self.layout.size <= WHOLE:
            return True
        first_ranks = 4 * self.columns
        if line[0] < self.layout.offset + first_ranks:
            return True
        shown_ranks = {*self.members[:5], self.members[-1], self.layout.stop - 1}
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

    def draw(self, axes: Axes, height: int) -> None:
        """Draw it on axes on which a rank is a unit wide and high, and which have that height."""
        from matplotlib.patches import Rectangle

        axes.set(xlim=(-0.5, COLUMNS - 0.5), ylim=(height - 0.5, -0.5), aspect="equal")
        axes.set_anchor("NW")
        axes.spines[:].set_visible(False)
        axes.set_title(f"{self.title} = {len(self.members)}", loc="left", pad=18)
        axes.set_xticks([])
        axes.xaxis.set_label_position("top")
        axes.set_xlabel(self.reach, loc="left")
        if len(self.crossing):
            axes.xaxis.label.set_color(CROSSING)
        axes.set_yticks(range(len(self.lines)), [label for label, _ in self.lines])
        axes.tick_params(length=0)
        numbers = group_numbers(self.layout, self.dim)
        colour_of: dict[int, str] = {}
        for y, (_, ranks) in enumerate(self.lines):
            for x, rank in enumerate(ranks):
                # A group takes the next colour, so that groups side by side differ.
                next_colour = COLOURS[len(colour_of) % len(COLOURS)]
                colour = colour_of.setdefault(numbers[rank], next_colour)
                corner = (x - TILE / 2, y - TILE / 2)
                tile = Rectangle(corner, TILE, TILE, facecolor=colour, edgecolor=colour)
                if rank in self.members:
                    tile.set(edgecolor=INK, linewidth=1.5)
                axes.add_patch(tile)
                size = 8.5 if rank < 1000 else 6.5
                axes.text(x, y, str(rank), fontsize=size, ha="center", va="center", color=INK)


def _short(name: str) -> str:
    if len(name) <= 18:
        return name
    return f"{name[:8]}…{name[-9:]}"
