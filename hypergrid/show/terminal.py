"""The ranks of each host as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.text import Text

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.show.hosts import group_numbers, ranks_by_host
from hypergrid.topology import Hosts

FOLD_ABOVE = 256  # ranks
_FIRST = 4  # hosts that a folded table shows, and the last one
# Told apart by people who see colours differently, on dark and on light.
_STYLES = (
    *("white on #0072b2", "black on #e69f00", "white on #007a5a", "black on #cc79a7"),
    *("black on #56b4e9", "white on #b34700", "black on #f0e442", "white on #555555"),
)


def table(
    layout: RankLayout,
    hosts: Hosts,
    by: str,
    *,
    only: Sequence[int] | None = None,
    width: int = 80,
    within: Mapping[str, str] | None = None,
) -> Iterator[Text]:
    """Lines: for each host its ranks, their coordinates and their group over ``by``, coloured.

    ``hosts`` is as for ``hypergrid.Topology``; ``by`` one or several dims, joined by ``"-"``. By
    default all hosts are shown, or above 256 ranks the first and the last; ``only`` names others
    by number. A host with more ranks than fit into ``width`` columns goes on in further lines.
    ``within`` has for each host's name its NVLink domain; domains are headings.
    """
    numbers = group_numbers(layout, by)
    ranks_of = ranks_by_host(layout, hosts)
    names = list(ranks_of)
    hidden = 0
    if only is not None:
        for number in only:
            if number not in range(len(names)):
                raise LayoutError(f"there is no host {number}: they go from 0 to {len(names) - 1}.")
        names = [names[number] for number in only]
    elif layout.size > FOLD_ABOVE and len(names) > _FIRST + 1:
        hidden = len(names) - _FIRST - 1
        names = [*names[:_FIRST], names[-1]]
    dims = layout.trimmed.dims
    label_width = max(map(len, (*names, *dims, f"{by} group"))) + 4
    cell_width = len(str(max(layout.stop - 1, *numbers))) + 2
    per_line = max(1, (width - label_width) // cell_width)
    last_domain = ""
    for name in names:
        if hidden and name == names[-1]:
            yield Text(f"... {hidden} hosts between, --hosts shows them ...", style="dim")
            yield Text()
        domain = (within or {}).get(name, "")
        if domain != last_domain:
            yield Text(domain, "bold underline")
        last_domain = domain
        for start in range(0, len(ranks_of[name]), per_line):
            ranks = ranks_of[name][start : start + per_line]
            coloured = Text(name.ljust(label_width), style="bold")
            for rank in ranks:
                style = _STYLES[numbers[rank] % len(_STYLES)]
                coloured.append(f"{rank:>{cell_width - 1}} ", style)
            yield coloured
            for dim in dims:
                coordinates = [layout.coordinate(rank)[dim] for rank in ranks]
                yield Text(_line(dim, coordinates, label_width, cell_width))
            group_line = _line(
                f"{by} group", map(numbers.__getitem__, ranks), label_width, cell_width
            )
            yield Text(group_line, "bold")
        yield Text()


def _line(label: str, values: Iterable[int], label_width: int, cell_width: int) -> str:
    cells = "".join(f"{value:>{cell_width - 1}} " for value in values)
    return f"  {label:<{label_width - 2}}{cells}".rstrip()
