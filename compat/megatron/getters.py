"""Every getter and setter of the module as a method of the state; most are a line of a table."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron.encoder import EncoderGetters
from compat.megatron.methods import (
    NUMBERS,
    First,
    Held,
    Number,
    Read,
    Written,
    missing,
    number_of,
    of_expert_tensor,
    of_group,
    of_stage,
    or_zero,
    or_zero_without,
)
from compat.megatron.releases import HAS

# The data-parallel groups, by (with cp, with gtp_remat, partial) ...
DATA_PARALLEL: dict[tuple[bool, ...], str] = {
    (False, False, False): "_DATA_PARALLEL_GROUP",
    (False, True, False): "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    (True, False, False): "_DATA_PARALLEL_GROUP_WITH_CP",
    (True, True, False): "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    (True, False, True): "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    (True, True, True): "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
}
# ... and the expert ones, by (with gtp_remat, partial).
EXPERT_DATA_PARALLEL: dict[tuple[bool, ...], str] = {
    (False, False): "_EXPERT_DATA_PARALLEL_GROUP",
    (True, False): "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    (False, True): "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    (True, True): "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
}


def _remat(asked: bool) -> dict[str, bool]:
    """The argument of a group getter: for releases that have it, and for callers that pass it."""
    return {"with_gtp_remat": asked} if HAS["gtp_remat"] or not asked else {}


def _partial(asked: bool) -> dict[str, bool]:
    """The argument of the expert-data-parallel getter, for releases that have it."""
    return {"partial_expert_data_parallel": asked} if HAS["instances_in_expert"] else {}


class Setters:
    """The setters: what the getters answer from then on."""

    __slots__ = ()

    set_tensor_model_parallel_rank = Written("_MPU_TENSOR_MODEL_PARALLEL_RANK")
    set_tensor_model_parallel_world_size = Written("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE")
    set_pipeline_model_parallel_rank = Written("_MPU_PIPELINE_MODEL_PARALLEL_RANK")
    set_pipeline_model_parallel_world_size = Written("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
    set_pipeline_model_parallel_split_rank = Written("_PIPELINE_MODEL_PARALLEL_SPLIT_RANK")
    set_virtual_pipeline_model_parallel_world_size = Written()
    set_data_parallel_rank = Written("_MPU_DATA_PARALLEL_RANK")
    set_expert_model_parallel_rank = Written("_MPU_EXPERT_MODEL_PARALLEL_RANK")
    set_expert_model_parallel_world_size = Written("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE")
    set_expert_tensor_parallel_rank = Written("_MPU_EXPERT_TENSOR_PARALLEL_RANK")
    set_expert_tensor_parallel_world_size = Written("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE")

    def set_virtual_pipeline_model_parallel_rank(self: Any, rank: int | None) -> None:
        if HAS["vp_stage"]:
            warnings.warn(
                "set_virtual_pipeline_model_parallel_rank is deprecated: pass vp_stage to "
                "is_pipeline_first_stage() and its like.",
                DeprecationWarning,
                stacklevel=3,
            )
        self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank


class Getters(EncoderGetters):
    """Every getter of the module, as a method that answers from the slots of the state.

    All are *local*: no communication. A method that is built from other getters asks them through
    ``_via``: the state itself, or the module while somebody has patched a getter there.
    """

    __slots__ = ()

    get_model_parallel_group = Held[ProcessGroup]()
    get_tensor_model_parallel_group = Held[ProcessGroup]()
    get_gtp_weight_remat_group = Held[ProcessGroup]()
    get_pipeline_model_parallel_group = Held[ProcessGroup]()
    get_context_parallel_group = Held[ProcessGroup]()
    get_hierarchical_context_parallel_groups = Held[list[ProcessGroup]]()
    get_embedding_group = Held[ProcessGroup]()
    get_position_embedding_group = Held[ProcessGroup]()
    get_tensor_and_context_parallel_group = Held[ProcessGroup]()
    get_expert_gtp_weight_remat_group = Held[ProcessGroup]()
    get_expert_model_parallel_group = Held[ProcessGroup]()
    get_expert_tensor_parallel_group = Held[ProcessGroup]()
    get_expert_tensor_and_model_parallel_group = Held[ProcessGroup]()
    get_intra_distributed_optimizer_instance_group = Held[ProcessGroup]()
    get_inter_distributed_optimizer_instance_group = Held[ProcessGroup](
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"
    )
    get_inter_partial_data_parallel_group = Held[ProcessGroup](
        "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"
    )

    get_gtp_weight_remat_global_ranks = Held[list[int]]()
    get_expert_gtp_weight_remat_global_ranks = Held[list[int]]()
    get_context_parallel_global_ranks = Held[list[int]]()
    get_tensor_model_parallel_src_rank = First("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")
    get_model_parallel_src_rank = First("_MODEL_PARALLEL_GLOBAL_RANKS")
    get_expert_model_parallel_src_rank = First("_EXPERT_MODEL_PARALLEL_RANKS")

    get_tensor_model_parallel_rank = Number(of_group, settable=True)
    get_tensor_model_parallel_world_size = Number(of_group, settable=True)
    get_pipeline_model_parallel_rank = Number(of_stage, settable=True)
    get_pipeline_model_parallel_world_size = Number(of_group, settable=True)
    get_context_parallel_rank = Number(or_zero)
    get_context_parallel_world_size = Number(or_zero)
    get_tensor_and_context_parallel_rank = Number(or_zero)
    get_tensor_and_context_parallel_world_size = Number(or_zero)
    get_gtp_weight_remat_rank = Number(or_zero_without)
    get_gtp_weight_remat_world_size = Number(or_zero_without)
    get_expert_gtp_weight_remat_rank = Number(or_zero_without)
    get_expert_gtp_weight_remat_world_size = Number(or_zero_without)
    get_expert_model_parallel_rank = Number(or_zero, settable=True)
    get_expert_model_parallel_world_size = Number(or_zero, settable=True)
    get_expert_tensor_parallel_rank = Number(of_expert_tensor, settable=True)
    get_expert_tensor_parallel_world_size = Number(of_expert_tensor, settable=True)
    get_expert_tensor_and_model_parallel_rank = Number(or_zero)
    get_expert_tensor_and_model_parallel_world_size = Number(or_zero)

    get_virtual_pipeline_model_parallel_rank = Read["int | None"]()
    get_virtual_pipeline_model_parallel_world_size = Read["int | None"]()
    get_moe_layer_wise_logging_tracker = Read[dict[str, Any]]()

    def _held(self, slot: str, check_initialized: bool = True) -> Any:
        value = getattr(self, slot)
        if value is None and check_initialized:
            raise missing(slot)
        return value

    # data parallelism. Releases without gtp_remat have one global where later ones have two, and
    # code for them writes that one: only a state with the axis has the other there.

    def _dp_slot(self, with_cp: bool, with_gtp: bool, partial: bool) -> str:
        if partial and not with_cp:
            raise AssertionError(
                "a partial data-parallel group includes context parallelism: pass "
                "with_context_parallel=True with partial_data_parallel=True."
            )
        known = HAS["gtp_remat"] or self._has_axis("gtp_remat_size")
        return DATA_PARALLEL[bool(with_cp), bool(with_gtp) and known, bool(partial)]

    def _edp_slot(self, with_gtp: bool, partial: bool) -> str:
        known = HAS["gtp_remat"] or self._has_axis("expert_gtp_remat_size")
        return EXPERT_DATA_PARALLEL[bool(with_gtp) and known, bool(partial)]

    def _has_axis(self, size: str) -> bool:
        return self.request is not None and getattr(self.request, size) > 1

    def get_data_parallel_group(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
        independent_all_gather: bool = False,
    ) -> ProcessGroup:
        if independent_all_gather and with_context_parallel and not partial_data_parallel:
            return self._held("_DATA_PARALLEL_GROUP_WITH_CP_AG")
        key = (with_context_parallel, with_gtp_remat, partial_data_parallel)
        group = self._dp_groups.get(key)
        return group if group is not None else self._held(self._dp_slot(*key))

    def get_data_parallel_group_gloo(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> ProcessGroup:
        slot = self._dp_slot(with_context_parallel, False, partial_data_parallel)
        return self._held(slot + "_GLOO")

    def has_separate_all_gather_group(self) -> bool:
        return self._DATA_PARALLEL_GROUP_WITH_CP_AG is not None

    def get_data_parallel_world_size(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        key = (with_context_parallel, with_gtp_remat, partial_data_parallel)
        number = self._dp_sizes.get(key)
        return number if number is not None else self._ask_data_parallel("size", *key)

    def get_data_parallel_rank(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        key = (with_context_parallel, with_gtp_remat, partial_data_parallel)
        number = self._dp_ranks.get(key)
        return number if number is not None else self._ask_data_parallel("rank", *key)

    def _ask_data_parallel(self, kind: str, with_cp: bool, with_gtp: bool, partial: bool) -> int:
        override = self._MPU_DATA_PARALLEL_RANK
        if kind == "size":
            override = self._MPU_DATA_PARALLEL_WORLD_SIZE
        if override is not None:
            return override
        if not dist.is_initialized():
            return 0
        group = self._via.get_data_parallel_group(
            with_context_parallel=with_cp, partial_data_parallel=partial, **_remat(with_gtp)
        )
        return number_of(group, kind)

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        slot = "_DATA_PARALLEL_GLOBAL_RANKS"
        return self._held(slot + "_WITH_CP" if with_context_parallel else slot)[0]

    def get_expert_data_parallel_group(
        self,
        check_initialized: bool = True,
        with_gtp_remat: bool = True,
        partial_expert_data_parallel: bool = False,
    ) -> ProcessGroup:
        slot = self._edp_slot(with_gtp_remat, partial_expert_data_parallel)
        return self._held(slot, check_initialized)

    def get_expert_data_parallel_group_gloo(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        return self._held(self._edp_slot(False, partial_expert_data_parallel) + "_GLOO")

    def get_data_modulo_expert_parallel_group(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        warnings.warn(
            "get_data_modulo_expert_parallel_group is deprecated: use "
            "get_expert_data_parallel_group.",
            DeprecationWarning,
            stacklevel=3,
        )
        return self._via.get_expert_data_parallel_group(**_partial(partial_expert_data_parallel))

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        key = (with_gtp_remat, partial_expert_data_parallel)
        number = self._edp_sizes.get(key)
        return number if number is not None else self._ask_expert_data_parallel("size", *key)

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        key = (with_gtp_remat, partial_expert_data_parallel)
        number = self._edp_ranks.get(key)
        return number if number is not None else self._ask_expert_data_parallel("rank", *key)

    def _ask_expert_data_parallel(self, kind: str, with_gtp: bool, partial: bool) -> int:
        if not dist.is_initialized():
            return 0
        arguments = {**_remat(with_gtp), **_partial(partial)}
        return number_of(self._via.get_expert_data_parallel_group(**arguments), kind)

    # groups that an argument chooses

    def get_hybrid_data_context_parallel_groups(
        self, check_initialized: bool = True, group_size: int | None = None
    ) -> ProcessGroup:
        if self._via.get_data_parallel_world_size(with_context_parallel=True) == group_size:
            return self._held("_DATA_PARALLEL_GROUP_WITH_CP", check_initialized)
        groups = self._held("_HYBRID_DP_CP_GROUPS", check_initialized)
        if group_size not in groups:
            raise KeyError(
                f"there is no hybrid data x context parallel group of size {group_size!r}; sizes "
                f"that exist: {sorted(groups) or 'none'}. Initialise with "
                f"hybrid_context_parallel=True."
            )
        return groups[group_size]

    def get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> ProcessGroup:
        if tp_only_amax_red:
            with_cp, without = "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP"
        else:
            with_cp = "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"
            without = "_TENSOR_AND_DATA_PARALLEL_GROUP"
        return self._held(with_cp if with_context_parallel else without)

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> ProcessGroup:
        slot = "_TENSOR_AND_DATA_PARALLEL_GROUP"
        return self._held(slot + "_WITH_CP" if with_context_parallel else slot, check_initialized)

    def get_expert_tensor_model_pipeline_parallel_group(
        self, check_initialized: bool = True, with_egtp_remat: bool = False
    ) -> ProcessGroup:
        slot = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
        return self._held(slot + "_WITH_EGTP" if with_egtp_remat else slot, check_initialized)

    # ranks of the pipeline

    def get_pipeline_model_parallel_first_rank(self) -> int:
        ranks = self._held("_PIPELINE_GLOBAL_RANKS")
        return ranks[0][0] if isinstance(ranks[0], list) else ranks[0]

    def get_pipeline_model_parallel_last_rank(self) -> int | list[int]:
        ranks = self._held("_PIPELINE_GLOBAL_RANKS")
        return _at(ranks, self._via.get_pipeline_model_parallel_world_size() - 1)

    def get_pipeline_model_parallel_next_rank(self) -> int | list[int]:
        return self._pipeline_neighbour(+1)

    def get_pipeline_model_parallel_prev_rank(self) -> int | list[int]:
        return self._pipeline_neighbour(-1)

    def _pipeline_neighbour(self, step: int) -> int | list[int]:
        ranks = self._held("_PIPELINE_GLOBAL_RANKS")
        stage = self._via.get_pipeline_model_parallel_rank()
        return _at(ranks, (stage + step) % self._via.get_pipeline_model_parallel_world_size())

    def get_all_ranks(self) -> str:
        ranks = [
            self._via.get_tensor_model_parallel_rank(),
            self._via.get_data_parallel_rank(),
            self._via.get_context_parallel_rank(),
            self._via.get_pipeline_model_parallel_rank(),
            self._via.get_expert_model_parallel_rank(),
        ]
        if HAS["gtp_remat"]:
            ranks.insert(1, self._via.get_gtp_weight_remat_rank())
        return "_".join(str(rank or 0) for rank in ranks)

    # predicates

    def is_initialized(self) -> bool:
        return self._DATA_PARALLEL_GROUP is not None

    def model_parallel_is_initialized(self) -> bool:
        return (
            self._TENSOR_MODEL_PARALLEL_GROUP is not None
            and self._PIPELINE_MODEL_PARALLEL_GROUP is not None
            and self._DATA_PARALLEL_GROUP is not None
        )

    def is_unitialized(self) -> bool:
        warnings.warn(
            "is_unitialized is deprecated: use is_initialized.", DeprecationWarning, stacklevel=3
        )
        return not self._via.is_initialized()

    def is_pipeline_first_stage(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        if ignore_virtual and self._is_first is not None:
            return self._is_first
        if not ignore_virtual:
            stages, virtual = self._virtual_stage(vp_stage)
            if stages is not None and virtual != 0:
                return False
        return self._via.get_pipeline_model_parallel_rank() == 0

    def is_pipeline_last_stage(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        if ignore_virtual and self._is_last is not None:
            return self._is_last
        if not ignore_virtual:
            stages, virtual = self._virtual_stage(vp_stage)
            if stages is not None and virtual != stages - 1:
                return False
        stage = self._via.get_pipeline_model_parallel_rank()
        return stage == self._via.get_pipeline_model_parallel_world_size() - 1

    def _virtual_stage(self, vp_stage: int | None) -> tuple[int | None, int | None]:
        """Virtual stages per rank, and the one that is asked about."""
        stages = self._via.get_virtual_pipeline_model_parallel_world_size()
        if stages is not None and vp_stage is None:
            if not HAS["vp_stage"]:
                return stages, self._via.get_virtual_pipeline_model_parallel_rank()
            raise AssertionError(
                f"virtual pipelines are on ({stages} stages per rank): pass vp_stage, or "
                f"ignore_virtual=True."
            )
        return stages, vp_stage

    def is_rank_in_embedding_group(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        ranks, rank = self._EMBEDDING_GLOBAL_RANKS, dist.get_rank()
        if ranks is None or rank not in ranks:
            return False
        staged = {"vp_stage": vp_stage} if HAS["vp_stage"] else {}
        if not ignore_virtual and rank == ranks[0]:
            return self._via.is_pipeline_first_stage(ignore_virtual=False, **staged)
        if not ignore_virtual and rank == ranks[-1]:
            return self._via.is_pipeline_last_stage(ignore_virtual=False, **staged)
        return True

    def is_rank_in_position_embedding_group(self) -> bool:
        ranks, rank = self._POSITION_EMBEDDING_GLOBAL_RANKS, dist.get_rank()
        return ranks is not None and rank in ranks

    # what is known without asking a group

    def _renumber(self) -> None:
        """Work out every rank and size that can be known without asking a group each time.

        Known are overrides, and the numbers of groups that this state made. Of a group that
        somebody else put into a slot only the group can tell, each time.
        """
        put = functools.partial(object.__setattr__, self)
        for each in NUMBERS:
            number = None if each.override is None else getattr(self, each.override)
            put(each.attribute, self._known(each.group, each.kind) if number is None else number)
        for kind, override in _DP_OVERRIDES.items():
            number = getattr(self, override)
            fixed = dict.fromkeys(DATA_PARALLEL, number)
            known = {key: self._known(self._dp_slot(*key), kind) for key in DATA_PARALLEL}
            put(f"_dp_{kind}s", known if number is None else fixed)
            experts = {key: self._edp_slot(*key) for key in EXPERT_DATA_PARALLEL}
            put(f"_edp_{kind}s", {key: self._known(slot, kind) for key, slot in experts.items()})
        put("_dp_groups", {key: getattr(self, self._dp_slot(*key)) for key in DATA_PARALLEL})
        stage = self._pipeline_model_parallel_rank
        stages = self._pipeline_model_parallel_world_size
        known_stage = self._via is self and stage is not None and stages is not None
        put("_is_first", stage == 0 if known_stage else None)
        put("_is_last", stage == stages - 1 if known_stage else None)

    def _known(self, slot: str, kind: str) -> int | None:
        group, rank, size = self._numbered.get(slot, (None, None, None))
        if group is None or group is not getattr(self, slot) or self._via is not self:
            return None
        return rank if kind == "rank" else size


_DP_OVERRIDES = {"rank": "_MPU_DATA_PARALLEL_RANK", "size": "_MPU_DATA_PARALLEL_WORLD_SIZE"}
# Private globals that setters write, and that answer then instead of a group.
OVERRIDE_SLOTS = (*(n.override for n in NUMBERS if n.override), *_DP_OVERRIDES.values())
# Attributes of the state: what is known without asking a group. ``_renumber`` writes them.
CACHED = (
    *(number.attribute for number in NUMBERS),
    *("_dp_groups", "_dp_ranks", "_dp_sizes", "_edp_ranks", "_edp_sizes", "_is_first", "_is_last"),
)


def _at(ranks: Any, stage: int) -> Any:
    """The rank at ``stage``; one for each pipeline where there are several."""
    return [each[stage] for each in ranks] if isinstance(ranks[0], list) else ranks[stage]
