"""A plan as a picture for a paper: one panel per dim, hosts by ranks, coloured by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import install_command, shortened, shown
from hypergrid.plan import GroupPlan
from hypergrid.show.hosts import domain_of, group_numbers, ranks_by_host
from hypergrid.show.page import MOST_RANKS as MOST_ON_PAGE
from hypergrid.summary import sizes_in_words
from hypergrid.topology import Topology

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
MIN_COLUMNS = 6  # the words above a panel need as much
WHOLE = 256  # ranks up to which no line is left out
MOST_RANKS = 4096  # of a picture: 1,048,576 take over a minute
ACROSS = 3  # panels side by side, at most
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
    hosts: Topology,
    path: str | Path,
    *,
    layouts: Sequence[str] = (),
    by: str | None = None,
    domains: Topology | None = None,
) -> None:
    """Write the ranks of ``plan`` on their hosts to ``path``. Needs the extra ``plot``.

    Each panel shows one dim: its groups by colour, the group of the first rank framed, and above
    them in words, red, how many groups cross hosts. The picture has no background, for light and
    dark pages.

    The suffix of ``path`` gives the format: ``.png``, ``.svg`` or ``.pdf``. ``layouts`` names some
    of the plan's, by default the first, and ``by`` the one dim to show, by default each that is
    larger than 1; a dim with the same groups in two layouts is shown once. NVLink ``domains`` are
    headings, and a group inside one does not count as crossing.

    Raises
    ------
    LayoutError
        An unknown dim or suffix, or more than 4,096 ranks.
    ImportError
        matplotlib is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise LayoutError(
            f"a picture cannot be written to {shown(str(path))}: name a .png, .svg or .pdf file."
        )
    drawn_layouts = {}
    for name in layouts or list(plan.layouts)[:1]:
        layout = plan.layouts[name]
        if layout.size > MOST_RANKS:
            raise LayoutError(
                f"a picture of {layout.size:,} ranks cannot be read: at most {MOST_RANKS:,} are "
                f"drawn. `hypergrid show --html FILE` writes a page of up to {MOST_ON_PAGE:,}, and "
                f"`hypergrid show --hosts 0-3` prints the ranks of these hosts."
            )
        drawn_layouts[name] = layout
    panels = []
    for title, layout, dim in _dims(drawn_layouts, by):
        panels.append(_panel(title, layout, dim, hosts, domains))
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
        figure = _drawn(panels, _heading(drawn_layouts, hosts))
        figure.savefig(path, metadata=metadata)


def _dims(
    layouts: Mapping[str, RankLayout], by: str | None
) -> Iterator[tuple[str, RankLayout, str]]:
    """The title, the layout and the dim of each panel.

    The title names the layout where one before has other groups over a dim of that name.
    """
    drawn_groups = set()
    known_dims: set[str] = set()
    for name, layout in layouts.items():
        dims = layout.trimmed.dims or layout.dims[:1]
        if by is not None:
            dims = (by,)
        for dim in dims:
            # The stride and the size decide all groups. An unknown dim is refused.
            stride = layout.stride(dim)
            size = layout.size_of(dim)
            if (dim, stride, size) in drawn_groups:
                continue
            drawn_groups.add((dim, stride, size))
            title = f"{dim} = {size}"
            if dim in known_dims:
                title = f"{name} {title}"
            yield title, layout, dim
        known_dims.update(layout.dims)


def _heading(layouts: Mapping[str, RankLayout], hosts: Topology) -> str:
    """How many ranks and hosts, and the sizes of each layout; a text of a file may be endless."""
    lines: list[str] = []
    for name, layout in layouts.items():
        subject = name
        if not lines:
            host_count = len(ranks_by_host(layout, hosts))
            subject = f"{layout.size:,} ranks, {host_count:,} hosts"
        sizes = sizes_in_words(layout)
        lines.append(shortened(f"{subject}: {sizes}"))
    return "\n".join(lines)


@dataclass
class _Panel:
    """One dim: its groups, how far they reach, and the lines of ranks that are shown."""

    title: str
    group_of_rank: list[int]
    framed: list[int]  # the group of the first rank
    reach: str
    is_crossing: bool
    lines: list[tuple[str, list[int]]]  # from top to bottom: a label, ranks from left to right


def _panel(
    title: str,
    layout: RankLayout,
    dim: str,
    hosts: Topology,
    domains: Topology | None,
) -> _Panel:
    kind = "hosts" if domains is None else "domains"
    places = domains or hosts
    # On how many hosts, or domains, each group is.
    touched = places.touched(layout.groups(dim))
    count = int((touched > 1).sum())
    reach = f"no group crosses {kind}"
    if count:
        group_count = len(touched)
        most = touched.max()
        reach = f"{count:,} of {group_count:,} groups cross {kind} (up to {most})"
    framed = layout.group(layout.offset, dim)
    ranks_of = ranks_by_host(layout, hosts)
    return _Panel(
        title=title,
        group_of_rank=group_numbers(layout, dim),
        framed=framed,
        reach=reach,
        is_crossing=count > 0,
        lines=list(_lines(layout, framed, ranks_of, domains)),
    )


def _lines(
    layout: RankLayout,
    framed: Sequence[int],
    ranks_of: Mapping[str, list[int]],
    domains: Topology | None,
) -> Iterator[tuple[str, list[int]]]:
    """The lines of a panel; NVLink domains, and ranks that are left out, have lines of their own.

    Of a large job the first ranks, some of the framed ones and the last one are shown.
    """
    first_ranks = layout.ranks[: 4 * COLUMNS]
    last_rank = layout.stop - 1
    always_shown = {*first_ranks, *framed[:5], framed[-1], last_rank}
    hidden = 0
    last_domain = ""
    for host, ranks in ranks_of.items():
        label = shortened(host, 18)
        for start in range(0, len(ranks), COLUMNS):
            line = ranks[start : start + COLUMNS]
            if layout.size > WHOLE and always_shown.isdisjoint(line):
                hidden += len(line)
                continue
            if hidden:
                yield f"+ {hidden:,} ranks", []
                hidden = 0
            domain = domain_of(domains, ranks)
            if domain != last_domain:
                yield shortened(domain, 18), []
                last_domain = domain
            yield label, line
            label = ""


def _drawn(panels: Sequence[_Panel], heading: str) -> Figure:
    """The heading, the panels in lines of equal length, a note below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Five panels are lines of three and two, and four are two lines of two.
    line_count = -(-len(panels) // ACROSS)
    per_line = -(-len(panels) // line_count)
    height = max(len(panel.lines) for panel in panels)
    lengths = [len(ranks) for _, ranks in panels[0].lines]
    columns = max(MIN_COLUMNS, *lengths)
    # An inch for the labels of hosts; the words above a panel, and those of the whole picture.
    panel_width = CELL * columns + 1
    panel_height = CELL * height + 0.75
    figure = Figure(
        figsize=(panel_width * per_line, panel_height * line_count + 0.5),
        dpi=200,
        facecolor="none",
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(line_count, per_line, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel, columns, height)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, weight="bold")
    note = f"Framed: the group of rank {panels[0].framed[0]}."
    if any(max(panel.group_of_rank) >= len(COLOURS) for panel in panels):
        note += f" Colours repeat after {len(COLOURS)} groups."
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8)
    return figure


def _draw(
    axes: Axes,
    panel: _Panel,
    columns: int,
    height: int,
) -> None:
    """Draw a panel on axes of that width and height, on which a rank is a unit wide and high."""
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
    axes.set_aspect("equal", anchor="NW")
    axes.spines[:].set_visible(False)
    axes.set_title(panel.title, loc="left", pad=18)
    axes.set_xticks([])
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(panel.reach, loc="left")
    if panel.is_crossing:
        axes.xaxis.label.set_color(CROSSING)
    labels = [label for label, _ in panel.lines]
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)
    for y, (_, ranks) in enumerate(panel.lines):
        if not ranks:
            continue
        numbers = [panel.group_of_rank[rank] for rank in ranks]
        colours = [COLOURS[number % len(COLOURS)] for number in numbers]
        places = range(len(ranks))
        bottom = y - TILE / 2
        tiles = axes.bar(places, TILE, TILE, bottom, color=colours)
        for tile, rank in zip(tiles, ranks, strict=True):
            if rank in panel.framed:
                tile.set(edgecolor=INK, linewidth=1.5)
        size = 8.5 if ranks[-1] < 1000 else 6.5
        axes.bar_label(tiles, ranks, label_type="center", color=INK, fontsize=size)
