"""Fill the installed megatron-core's ``ProcessGroupCollection`` from a state or from grids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from compat.hyper_comm_grid import AnyGrid, core_of
from compat.megatron.table import ROWS
from hypergrid.views import BASE

if TYPE_CHECKING:
    from compat.state import ParallelState

# Field: the private global that holds its group. Newer releases have more fields.
SLOTS = {
    "tp": "_TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "_PIPELINE_MODEL_PARALLEL_GROUP",
    "mp": "_MODEL_PARALLEL_GROUP",
    "embd": "_EMBEDDING_GROUP",
    "pos_embd": "_POSITION_EMBEDDING_GROUP",
    "cp": "_CONTEXT_PARALLEL_GROUP",
    "tp_cp": "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "hcp": "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
    "ep": "_EXPERT_MODEL_PARALLEL_GROUP",
    "expt_tp": "_EXPERT_TENSOR_PARALLEL_GROUP",
    "tp_ep": "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "tp_ep_pp": "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "tp_ep_pp_with_egtp_remat": "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    "tp_dp_cp": "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "dp": "_DATA_PARALLEL_GROUP",
    "dp_cp": "_DATA_PARALLEL_GROUP_WITH_CP",
    "dp_cp_gtp_remat": "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "intra_dp_cp": "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "expt_dp": "_EXPERT_DATA_PARALLEL_GROUP",
    "expt_dp_gtp_remat": "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "intra_expt_dp": "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "inter_dist_opt": "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "intra_dist_opt": "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    "gtp_remat": "_GTP_WEIGHT_REMAT_GROUP",
    "expt_gtp_remat": "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
    "dp_cp_ag": None,  # the caller's: create_all_gather_groups() gives them
    "expt_dp_ag": None,
}
# Where a group is that of some dims, and no part of it, a grid has it too.
_ROWS = {
    row.slot: row
    for row in ROWS
    if row.dims and row.grid in ("decoder", "expert") and row.pick == "all" and not row.chunk
}


def from_state(state: ParallelState, required: Iterable[str] | None = None) -> Any:
    """The collection of ``state``'s groups: the objects that its getters give. *Local*.

    Parameters
    ----------
    state : ParallelState
        ``compat.parallel_state.current_state()``, or one of your own.
    required : iterable of str, optional
        Names of fields; by default all that the installed release has.

    Returns
    -------
    megatron.core.process_groups_config.ProcessGroupCollection

    Raises
    ------
    ValueError
        A field that the installed release does not have.
    """
    collection, names = _fields(required)
    slots = {name: SLOTS[name] for name in names}
    return collection(**{name: slot and getattr(state, slot) for name, slot in slots.items()})


def from_grid(grid: AnyGrid, required: Iterable[str] | None = None, *, view: str = "expert") -> Any:
    """The collection of the groups that ``grid`` has. *Local*: makes none.

    Parameters
    ----------
    grid : HyperCommGrid
        Of ``hypergrid`` or of ``compat.hyper_comm_grid``. Its dims are named as in Megatron (tp,
        cp, ep, dp, pp); a dim that it lacks has size 1.
    required : iterable of str, optional
        Names of fields that must be filled; by default those whose groups ``grid`` has created.
    view : str
        The view of expert layers; the grid itself where there is none of that name.

    Raises
    ------
    ValueError
        A field that the installed release does not have, or that dims do not describe.
    KeyError
        A required group has not been created.
    """
    grid = core_of(grid)
    collection, names = _fields(required)
    groups = {}
    for name in names:
        row = _ROWS.get(SLOTS[name] or "")
        if row is None:
            if required is not None:
                raise ValueError(
                    f"the group of {name!r} does not follow from dims: set it on the collection "
                    f"yourself."
                )
            continue
        where = view if row.grid == "expert" and view in grid.views else BASE
        dims = [dim for dim in row.dims.split("-") if dim in grid.views[where].dims]
        try:
            if not dims:
                raise KeyError(f"the grid has no dim of {row.dims!r}, which {name!r} is over.")
            groups[name] = grid.get_pg(dims, view=where)
        except KeyError:
            if required is not None:
                raise
    return collection(**groups)


def _fields(required: Iterable[str] | None) -> tuple[Any, list[str]]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    known = [field.name for field in fields(ProcessGroupCollection) if field.name in SLOTS]
    names = known if required is None else list(required)
    for name in names:
        if name not in known:
            raise ValueError(
                f"{name!r} is no field of this megatron-core's ProcessGroupCollection. Its "
                f"fields are {known}."
            )
    return ProcessGroupCollection, names
