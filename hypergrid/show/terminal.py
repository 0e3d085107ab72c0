"""The ranks of each host as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.show.hosts import group_numbers, ranks_by_host
from hypergrid.topology import Topology

FOLD_ABOVE = 256  # ranks
_FIRST = 4  # hosts that a folded table shows, and the last one
# Told apart by people who see colours differently, on dark and on light.
_STYLES = (
    *("white on #0072b2", "black on #e69f00", "white on #007a5a", "black on #cc79a7"),
    *("black on #56b4e9", "white on #b34700", "black on #f0e442", "white on #555555"),
)


def table(
    layout: RankLayout,
    hosts: Topology,
    by: str,
    *,
    only: range | None = None,
    width: int = 80,
) -> Iterator[Text]:
    """Lines: for each host its ranks, their coordinates and their group over ``by``, coloured.

    ``by`` is one or several dims, joined by ``"-"``. By default all hosts are shown, or above 256
    ranks the first and the last; ``only`` names others by number. A host with more ranks than fit
    into ``width`` columns goes on in further lines.
    """
    ranks_of = ranks_by_host(layout, hosts)
    names = list(ranks_of)
    last = len(names) - 1
    # Of up to five hosts, none would be left out.
    is_folded = only is None and layout.size > FOLD_ABOVE and last > _FIRST
    numbers: Sequence[int] = range(len(names))
    if only is not None:
        numbers = only
    elif is_folded:
        numbers = [*range(_FIRST), last]
    group_title = f"{by} group"
    dims = layout.trimmed.dims
    group_of_rank = group_numbers(layout, by)
    labels = [*names, *dims, group_title]
    label_width = max(map(len, labels)) + 4
    # No number is larger than that of the last rank.
    cell_width = len(str(layout.stop - 1)) + 2
    per_line = max(1, (width - label_width) // cell_width)

    def line(label: str, values: Iterable[int], style: str = "") -> Text:
        text = f"  {label}".ljust(label_width)
        for value in values:
            text += f"{value} ".rjust(cell_width)
        return Text(text.rstrip(), style)

    for number in numbers:
        if number > last:
            raise LayoutError(f"there is no host {number}: they go from 0 to {last}.")
        if is_folded and number == last:
            hidden_count = last - _FIRST
            yield Text(f"... {hidden_count} hosts between, --hosts shows them ...", style="dim")
            yield Text()
        name = names[number]
        host_ranks = ranks_of[name]
        for start in range(0, len(host_ranks), per_line):
            ranks = host_ranks[start : start + per_line]
            groups = group_of_rank[ranks]
            coloured = Text(name.ljust(label_width), style="bold")
            for rank, group in zip(ranks, groups, strict=True):
                cell = f"{rank} ".rjust(cell_width)
                # More groups than colours: neighbours still differ.
                style = _STYLES[group % len(_STYLES)]
                coloured.append(cell, style)
            yield coloured
            for dim in dims:
                coordinates = [layout.coordinate(rank)[dim] for rank in ranks]
                yield line(dim, coordinates)
            yield line(group_title, groups, "bold")
        yield Text()
