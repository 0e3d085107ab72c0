"""The encoder of megatron-core 0.12 and 0.13: ranks of its own, in front of the decoder's."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from compat.refusals import SizeError
from compat.release import HAS
from hypergrid.layout import RankLayout
from hypergrid.plan import GroupRow
from hypergrid.words import shown

if TYPE_CHECKING:
    from compat.megatron_plan import Planned
    from compat.request import Request

TENSOR = "encoder_tensor_model_parallel_size"
STAGES = "encoder_pipeline_model_parallel_size"


def warn_of_its_end(what: str, stacklevel: int = 2) -> None:
    """Say, where upstream does, that this goes away: a DeprecationWarning."""
    if HAS["encoder_deprecated"]:
        warnings.warn(
            f"{what} deprecated, as encoders with sizes of their own: lay out encoder and decoder "
            f"as two grids.",
            DeprecationWarning,
            stacklevel=stacklevel + 1,
        )


def sizes(request: Request) -> tuple[int, int]:
    """The encoder's tensor-parallel size and its stages; without stages there is no encoder."""
    stages = 0 if getattr(request, STAGES) is None else request.whole(STAGES)
    tensor = request.whole(TENSOR)
    for name, size in ((TENSOR, tensor), (STAGES, stages)):
        if size < 0:
            raise SizeError(
                f"{name} must be at least 0, which means no encoder, got {shown(size)}."
            )
    if tensor == 0 and stages > 0:
        tensor = request.whole("tensor_model_parallel_size")
    return tensor, stages


def check(request: Request) -> None:
    """Refuse more tensor parallelism than the decoder has: AssertionError, as upstream."""
    asked, most = sizes(request), request.whole("tensor_model_parallel_size")
    tensor = asked[0]
    if any(asked):
        warn_of_its_end(f"{TENSOR} and {STAGES} are")
    if tensor > max(most, 0):
        raise AssertionError(
            f"{TENSOR}={shown(tensor)} is more than tensor_model_parallel_size={shown(most)}: each "
            f"rank of the encoder feeds one or more of the decoder. Make it smaller."
        )


def pipelines(request: Request) -> list[list[int]]:
    """All pipelines; through the encoder first, where there is one."""
    decoder: list[list[int]] = request.decoder.groups("pp").tolist()
    if request.encoder is None:
        return decoder
    encoder: list[list[int]] = request.encoder.groups("pp").tolist()
    # Neighbours share an encoder's pipeline; where they do not come out even, the first ones
    # have one more.
    share, more = divmod(len(decoder), len(encoder))
    feeds = [pipe for i, pipe in enumerate(encoder) for _ in range(share + (i < more))]
    return [first + second for first, second in zip(feeds, decoder, strict=True)]


def listed(request: Request, planned: Planned) -> GroupRow:
    """A row with its groups listed, where no one layout describes them.

    Over encoder and decoder, and between 0.12's optimizer instances.
    """
    row, between = planned.group, planned.row.chunk == "between instances"
    if row.explicit is not None or not (between or request.encoder):
        return row
    whole = _whole(request, row, planned.slot)
    groups = row.cuts(whole)
    if between:
        places = range(len(whole[0]) // request.instances)
        groups = [tuple(members[at :: len(places)]) for members in whole for at in places]
    return replace(row, explicit=tuple(groups), chunk=None, pick="all")


def _whole(request: Request, row: GroupRow, slot: str) -> list[list[int]]:
    decoder: list[list[int]] = request.layouts[row.layout].groups(row.dims).tolist()
    if request.encoder is None:
        return decoder
    if slot == "_PIPELINE_MODEL_PARALLEL_GROUP" or row.pick != "all":
        return pipelines(request)
    if slot == "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP":
        grids = (request.encoder, request.expert)
        models = [model for grid in grids for model in grid.groups("tp-ep-pp").tolist()]
        many = request.expert.dim_size("dp") // request.instances
        starts = range(0, len(models) - many + 1, many)
        return [list(chain.from_iterable(models[at : at + many])) for at in starts]
    encoder: list[list[int]] = _layout(request, request.encoder, row).groups(row.dims).tolist()
    if slot == "_MODEL_PARALLEL_GROUP":
        return [first + second for first, second in zip(encoder, decoder, strict=True)]
    return encoder + decoder


def _layout(request: Request, encoder: RankLayout, row: GroupRow) -> RankLayout:
    """The encoder's counterpart of the layout that ``row`` is over."""
    if row.layout == "decoder_cp_levels":
        levels = request.hierarchical_context_parallel_sizes or []
        return encoder.split("cp", {f"cp{i}": size for i, size in enumerate(levels)})
    if row.layout == "expert_instances":
        layout = request.layouts[row.layout]
        inner, outer = layout.dim_size("dp_intra"), layout.dim_size("dp_inter")
        if inner * outer != encoder.dim_size("dp"):
            raise RuntimeError(
                f"num_distributed_optimizer_instances={outer} with an encoder needs equal data "
                f"parallel sizes of encoder and experts, they are {encoder.dim_size('dp')} and "
                f"{inner * outer}. Change the expert sizes, or have one instance."
            )
        return encoder.split("dp", {"dp_intra": inner, "dp_inter": outer})
    return encoder
