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
    group = group_numbers(layout, by)
    shown, left_out = _chosen(ranks_by_host(layout, hosts), only, layout.size)
    label = max(map(len, (*shown, *layout.trimmed.dims, f"{by} group"))) + 4
    cell = max(len(str(layout.ranks[-1])), len(str(max(group)))) + 2
    step = max(1, (width - label) // cell)

    def line(name: str, values: Iterable[int], style: str = "") -> Text:
        cells = "".join(f"{value:>{cell - 1}} " for value in values)
        return Text(f"  {name:<{label - 2}}{cells.rstrip()}", style)

    before = ""
    for i, (name, ranks) in enumerate(shown.items()):
        if left_out and i == len(shown) - 1:
            yield Text(f"... {left_out} hosts between, --hosts shows them ...", style="dim")
            yield Text()
        domain = (within or {}).get(name, "")
        if domain != before:
            yield Text(domain, "bold underline")
        before = domain
        for start in range(0, len(ranks), step):
            part = ranks[start : start + step]
            coloured = Text(name.ljust(label), style="bold")
            for rank in part:
                coloured.append(f"{rank:>{cell - 1}} ", _STYLES[group[rank] % len(_STYLES)])
            yield coloured
            places = [layout.coordinate(rank) for rank in part]
            for dim in layout.trimmed.dims:
                yield line(dim, (place[dim] for place in places))
            yield line(f"{by} group", (group[rank] for rank in part), "bold")
        yield Text()


def _chosen(
    boxes: dict[str, list[int]], only: Sequence[int] | None, ranks: int
) -> tuple[dict[str, list[int]], int]:
    """The hosts to show with their ranks, and how many are left out before the last of them."""
    names = list(boxes)
    if only is not None:
        wrong = [number for number in only if number not in range(len(names))]
        if wrong:
            raise LayoutError(f"there is no host {wrong[0]}: they go from 0 to {len(names) - 1}.")
        return {names[number]: boxes[names[number]] for number in only}, 0
    if ranks <= FOLD_ABOVE or len(names) <= _FIRST + 1:
        return boxes, 0
    return {name: boxes[name] for name in (*names[:_FIRST], names[-1])}, len(names) - _FIRST - 1
