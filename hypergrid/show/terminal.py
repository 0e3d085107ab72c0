"""The ranks of each host as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from hypergrid.layout import LayoutError, RankLayout
from hypergrid.show.hosts import ranks_by_host
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
) -> Iterator[Text]:
    """Lines: for each host its ranks, their coordinates and their group over ``by``, coloured.

    ``hosts`` is as for ``hypergrid.Topology``; ``by`` one or several dims, joined by ``"-"``. By
    default all hosts are shown, or above 256 ranks the first and the last; ``only`` names others
    by number. A host with more ranks than fit into ``width`` columns goes on in further lines.
    """
    group = _group_numbers(layout, by)
    shown, left_out = _chosen(ranks_by_host(layout, hosts), only, layout.size)
    label = max(map(len, (*shown, *layout.trimmed.dims, f"{by} group"))) + 4
    cell = max(len(str(layout.ranks[-1])), len(str(group.max()))) + 2
    step = max(1, (width - label) // cell)
    for i, (name, ranks) in enumerate(shown.items()):
        if left_out and i == len(shown) - 1:
            yield Text(f"... {left_out} hosts between, --hosts shows them ...", style="dim")
            yield Text()
        for start in range(0, len(ranks), step):
            yield from _block(layout, name, ranks[start : start + step], group, by, label, cell)
        yield Text()


def _block(
    layout: RankLayout,
    name: str,
    ranks: list[int],
    group: np.ndarray,
    by: str,
    label: int,
    cell: int,
) -> Iterator[Text]:
    colours = [_STYLES[group[rank - layout.offset] % len(_STYLES)] for rank in ranks]
    line = Text(name.ljust(label), style="bold")
    for rank, colour in zip(ranks, colours, strict=True):
        line.append(str(rank).rjust(cell - 1) + " ", style=colour)
    yield line
    places = [layout.coordinate(rank) for rank in ranks]
    for dim in layout.trimmed.dims:
        cells = "".join(str(place[dim]).rjust(cell - 1) + " " for place in places)
        yield Text("  " + dim.ljust(label - 2) + cells.rstrip())
    numbers = "".join(f"{group[rank - layout.offset]}".rjust(cell - 1) + " " for rank in ranks)
    yield Text("  " + f"{by} group".ljust(label - 2) + numbers.rstrip(), style="bold")


def _group_numbers(layout: RankLayout, by: str) -> np.ndarray:
    """The number of each rank's group over ``by``, in Megatron's order of the groups."""
    groups = layout.groups(by)
    numbers = np.empty(layout.size, dtype=int)
    numbers[groups - layout.offset] = np.arange(len(groups))[:, None]
    return numbers


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
