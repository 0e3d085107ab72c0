"""A plan as a picture for a paper: one panel per dim, hosts by ranks, coloured by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import install_command, shortened, shown
from hypergrid.plan import GroupPlan
from hypergrid.show.hosts import group_numbers, ranks_by_host
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
    larger than 1; a dim with the same groups in two layouts is shown once. A group inside one of
    the NVLink ``domains`` does not count as crossing.

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
    panels = _panels(drawn_layouts, by, hosts)
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"drawing a picture needs matplotlib: {install_command('plot')}."
        ) from error
    # Without a date, equal plans have equal pictures.
    metadata = {"Date": None} if suffix == ".svg" else None
    with matplotlib.rc_context(STYLE):
        heading = _heading(drawn_layouts, hosts, domains)
        figure = _drawn(panels, heading, hosts, domains)
        figure.savefig(path, metadata=metadata)


@dataclass(frozen=True)
class _Panel:
    """One dim of a layout, and the lines of ranks that are shown."""

    title: str
    layout: RankLayout
    dim: str
    framed: list[int]  # the group of the first rank
    lines: list[tuple[str, list[int]]]  # from top to bottom: a label, ranks from left to right


def _panels(layouts: Mapping[str, RankLayout], by: str | None, hosts: Topology) -> list[_Panel]:
    """A panel for each dim of the layouts, whose names the titles have if there are several."""
    panels: dict[tuple[str, int, int], _Panel] = {}
    for name, layout in layouts.items():
        dims = layout.trimmed.dims or layout.dims[:1]
        if by is not None:
            dims = (by,)
        for dim in dims:
            size = layout.size_of(dim)
            # The stride and the size decide all groups. An unknown dim is refused.
            key = (dim, layout.stride(dim), size)
            if key in panels:
                continue
            title = f"{dim} = {size}"
            if len(layouts) > 1:
                title = f"{name} {title}"
            framed = layout.group(layout.offset, dim)
            lines = list(_lines(layout, framed, hosts))
            panels[key] = _Panel(title, layout, dim, framed, lines)
    return list(panels.values())


def _lines(
    layout: RankLayout, framed: Sequence[int], hosts: Topology
) -> Iterator[tuple[str, list[int]]]:
    """The lines of a panel; ranks that are left out have a line of their own.

    Of a large job the first ranks, some of the framed ones and the last one are shown.
    """
    first_ranks = layout.ranks[: 4 * COLUMNS]
    always_shown = {*first_ranks, *framed[:5], framed[-1], layout.ranks[-1]}
    hidden = 0
    for host, ranks in ranks_by_host(layout, hosts).items():
        label = shortened(host, 18)
        for start in range(0, len(ranks), COLUMNS):
            line = ranks[start : start + COLUMNS]
            if layout.size > WHOLE and always_shown.isdisjoint(line):
                hidden += len(line)
                continue
            if hidden:
                yield f"+ {hidden:,} ranks", []
                hidden = 0
            yield label, line
            label = ""


def _heading(layouts: Mapping[str, RankLayout], hosts: Topology, domains: Topology | None) -> str:
    """How many ranks and hosts, and the sizes of each layout; a text of a file may be endless."""
    lines: list[str] = []
    for name, layout in layouts.items():
        subject = name
        if not lines:
            host_count = len(ranks_by_host(layout, hosts))
            subject = f"{layout.size:,} ranks, {host_count:,} hosts"
            if domains is not None:
                subject += f", {len(domains.names):,} NVLink domains"
        sizes = sizes_in_words(layout)
        lines.append(shortened(f"{subject}: {sizes}"))
    return "\n".join(lines)


def _drawn(
    panels: Sequence[_Panel], heading: str, hosts: Topology, domains: Topology | None
) -> Figure:
    """The heading, the panels in lines of equal length, a note below them."""
    from matplotlib.figure import Figure

    # Five panels are lines of three and two, and four are two lines of two.
    line_count = -(-len(panels) // ACROSS)
    per_line = -(-len(panels) // line_count)
    height = max(len(panel.lines) for panel in panels)
    columns = max(MIN_COLUMNS, *[len(ranks) for _, ranks in panels[0].lines])
    # An inch for the labels of hosts; the words above a panel, and those of the whole picture.
    panel_width = CELL * columns + 1
    panel_height = CELL * height + 0.75
    figure = Figure(
        figsize=(panel_width * per_line, panel_height * line_count + 0.5),
        dpi=200,
        facecolor="none",
        layout="constrained",
    )
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(line_count, per_line, place)
        _draw(axes, panel, columns, height, hosts, domains)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, weight="bold")
    note = (
        f"Framed: the group of rank {panels[0].framed[0]}. Colours repeat after {len(COLOURS)} "
        f"groups."
    )
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8)
    return figure


def _draw(
    axes: Axes,
    panel: _Panel,
    columns: int,
    height: int,
    hosts: Topology,
    domains: Topology | None,
) -> None:
    """Draw a panel on axes of that width and height, on which a rank is a unit wide and high."""
    labels = [label for label, _ in panel.lines]
    axes.set(
        xlim=(-0.5, columns - 0.5),
        ylim=(height - 0.5, -0.5),
        xticks=[],
        yticks=range(len(labels)),
        yticklabels=labels,
    )
    axes.set_aspect("equal", anchor="NW")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(panel.title, loc="left", pad=18)
    # On how many hosts, or domains, each group is.
    touched = (domains or hosts).touched(panel.layout.groups(panel.dim))
    crossing = int((touched > 1).sum())
    places = "hosts" if domains is None else "NVLink domains"
    reach = f"no group crosses {places}"
    if crossing:
        reach = f"{crossing:,} of {len(touched):,} groups cross {places} (up to {touched.max()})"
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(reach, loc="left", color=CROSSING if crossing else TEXT)
    group_of_rank = group_numbers(panel.layout, panel.dim)
    for y, (_, ranks) in enumerate(panel.lines):
        colours = [COLOURS[number % len(COLOURS)] for number in group_of_rank[ranks]]
        frames = [INK if rank in panel.framed else "none" for rank in ranks]
        bottom = y - TILE / 2
        tiles = axes.bar(
            range(len(ranks)), TILE, TILE, bottom, color=colours, edgecolor=frames, linewidth=1.5
        )
        axes.bar_label(tiles, ranks, label_type="center", color=INK)
