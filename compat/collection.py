"""Fill the installed megatron-core's ``ProcessGroupCollection`` from a state or from grids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from compat.hyper_comm_grid import AnyGrid, core_of
from compat.megatron.table import EXTRA_ALL_GATHER, ROWS
from compat.state import ParallelState
from hypergrid.groups.grid import BASE

# Field: the private global that holds its group. Newer releases have more fields. The second
# all-gather groups are in none: create_all_gather_groups() returns them to its caller.
SLOTS: dict[str, str | None] = {row.field: row.slot for row in ROWS if row.field}
for _row in EXTRA_ALL_GATHER:
    SLOTS[_row.field] = None
# A grid has the groups that are all ranks of some dims.
_ROWS = {}
for _row in ROWS:
    if _row.grid in ("decoder", "expert") and _row.pick == "all" and not _row.chunk:
        _ROWS[_row.field] = _row


def build(*, name: str = "", **arguments: Any) -> Any:
    """Create the groups of one model, and return them as a complete ``ProcessGroupCollection``.

    No global is read or written. *Collective*; arguments and errors as for
    ``ParallelState.create``, and ValueError if the class has fields that hypergrid does not know.

    Returns
    -------
    ProcessGroupCollection
        With all fields that the installed release has, and besides: the gloo twin of a field as
        ``dp_gloo``, ``intra_dp_cp_gloo`` and so on, None without one; ``hybrid_dp_cp``, a dict of
        groups by their size; ``virtual_pipeline_stages``, None without any; and
        ``parallel_state``, which owns the groups: ``collection.parallel_state.destroy()``.
    """
    _check_fields(_fields(None)[0])  # before a group exists
    state = ParallelState.create(name=name, **arguments)
    collection = from_state(state)
    for row in ROWS:
        if row.gloo and row.twin_kept:
            setattr(collection, f"{row.field}_gloo", getattr(state, f"{row.slot}_GLOO"))
    collection.hybrid_dp_cp = dict(state._HYBRID_DP_CP_GROUPS)
    collection.virtual_pipeline_stages = state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    collection.parallel_state = state
    return collection


def from_state(state: ParallelState, required: Iterable[str] | None = None) -> Any:
    """The ``ProcessGroupCollection`` of ``state``'s groups, those that its getters give. *Local*.

    ``state`` is ``compat.parallel_state.current_state()``, or one of your own; ``required`` are
    names of fields, by default all that the installed release has. Raises ValueError on others,
    and by default if the release has fields that hypergrid does not know.
    """
    collection, names = _fields(required)
    if required is None:
        _check_fields(collection)
    groups: dict[str, Any] = {}
    for name in names:
        slot = SLOTS[name]
        groups[name] = None
        if slot:
            groups[name] = getattr(state, slot)
    return collection(**groups)


def from_grid(grid: AnyGrid, required: Iterable[str] | None = None, *, view: str = "expert") -> Any:
    """The ``ProcessGroupCollection`` of the groups that ``grid`` has. *Local*: creates none.

    Raises ValueError on a required field that the installed release does not have or that dims do
    not describe, KeyError on one whose group has not been created.

    Parameters
    ----------
    grid : HyperCommGrid
        Of ``hypergrid`` or of ``compat.hyper_comm_grid``. Its dims are named as in Megatron (tp,
        cp, ep, dp, pp); a dim that it lacks has size 1.
    required : iterable of str, optional
        Names of fields that must be filled; by default those whose groups ``grid`` has created.
    view : str
        The view of expert layers; if ``grid`` has none of that name, the grid itself.
    """
    grid = core_of(grid)
    collection, names = _fields(required)
    groups = {}
    for name in names:
        try:
            row = _ROWS.get(name)
            if row is None:
                raise ValueError(
                    f"the group of {name!r} is not one over dims: set it on the collection "
                    f"yourself."
                )
            row_view = BASE
            if row.grid == "expert" and view in grid.views:
                row_view = view
            grid_dims = grid.views[row_view].dims
            dims = [dim for dim in row.dims.split("-") if dim in grid_dims]
            if not dims:
                raise KeyError(f"the grid has no dim of {row.dims!r}, which {name!r} is over.")
            groups[name] = grid.get_pg(dims, view=row_view)
        except (KeyError, ValueError):
            if required is not None:
                raise
    return collection(**groups)


def _fields(required: Iterable[str] | None) -> tuple[Any, list[str]]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    allowed = [field.name for field in fields(ProcessGroupCollection) if field.name in SLOTS]
    if required is None:
        return ProcessGroupCollection, allowed
    names = list(required)
    for name in names:
        if name not in allowed:
            raise ValueError(
                f"invalid field {name!r} of this megatron-core's ProcessGroupCollection; allowed: "
                f"{allowed}."
            )
    return ProcessGroupCollection, names


def _check_fields(collection: Any) -> None:
    """Refuse to fill all fields of a class that has others than hypergrid knows: ValueError."""
    unknown = [field.name for field in fields(collection) if field.name not in SLOTS]
    if unknown:
        raise ValueError(
            f"this megatron-core's ProcessGroupCollection has fields that hypergrid cannot fill: "
            f"{', '.join(unknown)}. Name the fields that your code needs: "
            f"from_state(state, required=[...])."
        )
