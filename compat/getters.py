"""The getters of one parallel state: every answer that upstream's module gives, as a method."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.release import HAS_GTP_REMAT


class Number(NamedTuple):
    """A rank or a size: the global that overrides it, the group it is of, which of the two."""

    override: str | None
    group: str
    kind: str  # "rank" or "size", the group's own methods


def _pair(name: str, group: str, override: str | None = None) -> dict[str, Number]:
    rank = size = None
    if override is not None:
        rank, size = f"_MPU_{override}_RANK", f"_MPU_{override}_WORLD_SIZE"
    return {
        f"{name}_rank": Number(rank, group, "rank"),
        f"{name}_size": Number(size, group, "size"),
    }


# Each of these is an attribute of the state: the number, or None where only the group can tell.
NUMBERS: dict[str, Number] = {
    **_pair("_tp", "_TENSOR_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL"),
    **_pair("_pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL"),
    **_pair("_cp", "_CONTEXT_PARALLEL_GROUP"),
    **_pair("_tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    **_pair("_gtp", "_GTP_WEIGHT_REMAT_GROUP"),
    **_pair("_egtp", "_EXPERT_GTP_WEIGHT_REMAT_GROUP"),
    **_pair("_ep", "_EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL"),
    **_pair("_etp", "_EXPERT_TENSOR_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL"),
    **_pair("_etp_ep", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    # (with cp, with gtp_remat, partial) of the data-parallel getters, as t or f
    **_pair("_dp_fff", "_DATA_PARALLEL_GROUP", "DATA_PARALLEL"),
    **_pair("_dp_ftf", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "DATA_PARALLEL"),
    **_pair("_dp_tff", "_DATA_PARALLEL_GROUP_WITH_CP", "DATA_PARALLEL"),
    **_pair("_dp_ttf", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "DATA_PARALLEL"),
    **_pair("_dp_tft", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "DATA_PARALLEL"),
    **_pair(
        "_dp_ttt", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "DATA_PARALLEL"
    ),
    # (with gtp_remat, partial) of the expert-data-parallel getters
    **_pair("_edp_ff", "_EXPERT_DATA_PARALLEL_GROUP"),
    **_pair("_edp_tf", "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    **_pair("_edp_ft", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"),
    **_pair("_edp_tt", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
}

_DATA_PARALLEL: dict[tuple[bool, bool, bool], str] = {
    (False, False, False): "_dp_fff",
    (False, True, False): "_dp_ftf",
    (True, False, False): "_dp_tff",
    (True, True, False): "_dp_ttf",
    (True, False, True): "_dp_tft",
    (True, True, True): "_dp_ttt",
}
_EXPERT_DATA_PARALLEL: dict[tuple[bool, bool], str] = {
    (False, False): "_edp_ff",
    (True, False): "_edp_tf",
    (False, True): "_edp_ft",
    (True, True): "_edp_tt",
}


def missing(slot: str) -> AssertionError:
    """The refusal of a group that does not exist, in words."""
    name = slot.strip("_").replace("_", " ").lower()
    return AssertionError(
        f"{name} is not initialized: no model parallel state with such a group is current. Call "
        f"initialize_model_parallel() first, with the sizes that make this group."
    )


class Getters:
    """Answers from the slots of ``self``, which are named as upstream's private globals.

    All are *local*: no communication. A method that is built from other getters asks them through
    ``self``; the module hands itself in as ``self``, so that getters patched there are seen.
    """

    if TYPE_CHECKING:  # the slots

        def __getattr__(self, name: str) -> Any: ...

    def _group(self, slot: str, check_initialized: bool = True) -> Any:
        group = getattr(self, slot)
        if group is None and check_initialized:
            raise missing(slot)
        return group

    def _ask(self, name: str, *, zero: bool = True) -> Any:
        override, slot, kind = NUMBERS[name]
        if override is not None and getattr(self, override) is not None:
            return getattr(self, override)
        if zero and not dist.is_initialized():
            return 0
        return getattr(self._group(slot), kind)()

    # groups

    def get_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_MODEL_PARALLEL_GROUP", check_initialized)

    def get_tensor_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_TENSOR_MODEL_PARALLEL_GROUP", check_initialized)

    def get_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_GTP_WEIGHT_REMAT_GROUP", check_initialized)

    def get_pipeline_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_PIPELINE_MODEL_PARALLEL_GROUP", check_initialized)

    def get_data_parallel_group(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
        independent_all_gather: bool = False,
    ) -> ProcessGroup:
        if independent_all_gather and with_context_parallel and not partial_data_parallel:
            return self._group("_DATA_PARALLEL_GROUP_WITH_CP_AG")
        name = _data_parallel(with_context_parallel, with_gtp_remat, partial_data_parallel)
        return self._group(NUMBERS[name + "_rank"].group)

    def get_data_parallel_group_gloo(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> ProcessGroup:
        name = _data_parallel(with_context_parallel, False, partial_data_parallel)
        return self._group(NUMBERS[name + "_rank"].group + "_GLOO")

    def has_separate_all_gather_group(self) -> bool:
        return self._DATA_PARALLEL_GROUP_WITH_CP_AG is not None

    def get_context_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_CONTEXT_PARALLEL_GROUP", check_initialized)

    def get_hierarchical_context_parallel_groups(
        self, check_initialized: bool = True
    ) -> list[ProcessGroup]:
        return self._group("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", check_initialized)

    def get_hybrid_data_context_parallel_groups(
        self, check_initialized: bool = True, group_size: int | None = None
    ) -> ProcessGroup:
        if self.get_data_parallel_world_size(with_context_parallel=True) == group_size:
            return self._group("_DATA_PARALLEL_GROUP_WITH_CP", check_initialized)
        groups = self._group("_HYBRID_DP_CP_GROUPS", check_initialized)
        if group_size not in groups:
            raise KeyError(
                f"there is no hybrid data x context parallel group of size {group_size!r}; sizes "
                f"that exist: {sorted(groups) or 'none'}. Initialise with "
                f"hybrid_context_parallel=True."
            )
        return groups[group_size]

    def get_embedding_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_EMBEDDING_GROUP", check_initialized)

    def get_position_embedding_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_POSITION_EMBEDDING_GROUP", check_initialized)

    def get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> ProcessGroup:
        if tp_only_amax_red:
            with_cp, without = "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP"
        else:
            with_cp = "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"
            without = "_TENSOR_AND_DATA_PARALLEL_GROUP"
        return self._group(with_cp if with_context_parallel else without)

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> ProcessGroup:
        slot = "_TENSOR_AND_DATA_PARALLEL_GROUP"
        return self._group(slot + "_WITH_CP" if with_context_parallel else slot, check_initialized)

    def get_tensor_and_context_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", check_initialized)

    def get_expert_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_EXPERT_GTP_WEIGHT_REMAT_GROUP", check_initialized)

    def get_expert_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_EXPERT_MODEL_PARALLEL_GROUP", check_initialized)

    def get_expert_tensor_parallel_group(self, check_initialized: bool = True) -> ProcessGroup:
        return self._group("_EXPERT_TENSOR_PARALLEL_GROUP", check_initialized)

    def get_expert_tensor_and_model_parallel_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        return self._group("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", check_initialized)

    def get_expert_tensor_model_pipeline_parallel_group(
        self, check_initialized: bool = True, with_egtp_remat: bool = False
    ) -> ProcessGroup:
        slot = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
        return self._group(slot + "_WITH_EGTP" if with_egtp_remat else slot, check_initialized)

    def get_expert_data_parallel_group(
        self,
        check_initialized: bool = True,
        with_gtp_remat: bool = True,
        partial_expert_data_parallel: bool = False,
    ) -> ProcessGroup:
        name = _EXPERT_DATA_PARALLEL[bool(with_gtp_remat), bool(partial_expert_data_parallel)]
        return self._group(NUMBERS[name + "_rank"].group, check_initialized)

    def get_expert_data_parallel_group_gloo(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        name = _EXPERT_DATA_PARALLEL[False, bool(partial_expert_data_parallel)]
        return self._group(NUMBERS[name + "_rank"].group + "_GLOO")

    def get_data_modulo_expert_parallel_group(
        self, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup:
        warnings.warn(
            "get_data_modulo_expert_parallel_group is deprecated: use "
            "get_expert_data_parallel_group.",
            DeprecationWarning,
            stacklevel=3,
        )
        return self.get_expert_data_parallel_group(
            partial_expert_data_parallel=partial_expert_data_parallel
        )

    def get_intra_distributed_optimizer_instance_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        return self._group("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", check_initialized)

    def get_inter_distributed_optimizer_instance_group(
        self, check_initialized: bool = True
    ) -> ProcessGroup:
        return self._group("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", check_initialized)

    # global ranks

    def get_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        return self._group("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)

    def get_expert_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        return self._group("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)

    def get_context_parallel_global_ranks(self, check_initialized: bool = True) -> list[int]:
        return self._group("_CONTEXT_PARALLEL_GLOBAL_RANKS", check_initialized)

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self._group("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")[0]

    def get_model_parallel_src_rank(self) -> int:
        return self._group("_MODEL_PARALLEL_GLOBAL_RANKS")[0]

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        slot = "_DATA_PARALLEL_GLOBAL_RANKS"
        return self._group(slot + "_WITH_CP" if with_context_parallel else slot)[0]

    def get_expert_model_parallel_src_rank(self) -> int:
        return self._group("_EXPERT_MODEL_PARALLEL_RANKS")[0]

    def get_pipeline_model_parallel_first_rank(self) -> int:
        return self._group("_PIPELINE_GLOBAL_RANKS")[0]

    def get_pipeline_model_parallel_last_rank(self) -> int:
        stages = self.get_pipeline_model_parallel_world_size()
        return self._group("_PIPELINE_GLOBAL_RANKS")[stages - 1]

    def get_pipeline_model_parallel_next_rank(self) -> int:
        return Getters._pipeline_neighbour(self, +1)

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        return Getters._pipeline_neighbour(self, -1)

    def _pipeline_neighbour(self, step: int) -> int:
        ranks = self._group("_PIPELINE_GLOBAL_RANKS")
        stage = self.get_pipeline_model_parallel_rank()
        return ranks[(stage + step) % self.get_pipeline_model_parallel_world_size()]

    # ranks and sizes

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._tp_size if self._tp_size is not None else self._ask("_tp_size", zero=False)

    def get_tensor_model_parallel_rank(self) -> int:
        return self._tp_rank if self._tp_rank is not None else self._ask("_tp_rank", zero=False)

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._pp_size if self._pp_size is not None else self._ask("_pp_size", zero=False)

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._pp_rank if self._pp_rank is not None else self._ask("_pp_rank", zero=False)

    def get_data_parallel_world_size(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        if self._MPU_DATA_PARALLEL_WORLD_SIZE is not None:
            return self._MPU_DATA_PARALLEL_WORLD_SIZE
        name = _data_parallel(with_context_parallel, with_gtp_remat, partial_data_parallel)
        return self._number(name + "_size")

    def get_data_parallel_rank(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        if self._MPU_DATA_PARALLEL_RANK is not None:
            return self._MPU_DATA_PARALLEL_RANK
        name = _data_parallel(with_context_parallel, with_gtp_remat, partial_data_parallel)
        return self._number(name + "_rank")

    def get_context_parallel_world_size(self) -> int:
        return self._cp_size if self._cp_size is not None else self._ask("_cp_size")

    def get_context_parallel_rank(self) -> int:
        return self._cp_rank if self._cp_rank is not None else self._ask("_cp_rank")

    def get_tensor_and_context_parallel_world_size(self) -> int:
        return self._number("_tp_cp_size")

    def get_tensor_and_context_parallel_rank(self) -> int:
        return self._number("_tp_cp_rank")

    def get_gtp_weight_remat_world_size(self) -> int:
        return 0 if self._GTP_WEIGHT_REMAT_GROUP is None else self._number("_gtp_size")

    def get_gtp_weight_remat_rank(self) -> int:
        return 0 if self._GTP_WEIGHT_REMAT_GROUP is None else self._number("_gtp_rank")

    def get_expert_gtp_weight_remat_world_size(self) -> int:
        return 0 if self._EXPERT_GTP_WEIGHT_REMAT_GROUP is None else self._number("_egtp_size")

    def get_expert_gtp_weight_remat_rank(self) -> int:
        return 0 if self._EXPERT_GTP_WEIGHT_REMAT_GROUP is None else self._number("_egtp_rank")

    def get_expert_model_parallel_world_size(self) -> int:
        return self._ep_size if self._ep_size is not None else self._ask("_ep_size")

    def get_expert_model_parallel_rank(self) -> int:
        return self._ep_rank if self._ep_rank is not None else self._ask("_ep_rank")

    def get_expert_tensor_parallel_world_size(self) -> int | None:
        if self._etp_size is None and self._EXPERT_TENSOR_PARALLEL_GROUP is None:
            return self._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
        return self._number("_etp_size")

    def get_expert_tensor_parallel_rank(self) -> int | None:
        if self._etp_rank is None and self._EXPERT_TENSOR_PARALLEL_GROUP is None:
            return self._MPU_TENSOR_MODEL_PARALLEL_RANK
        return self._number("_etp_rank")

    def get_expert_tensor_and_model_parallel_world_size(self) -> int:
        return self._number("_etp_ep_size")

    def get_expert_tensor_and_model_parallel_rank(self) -> int:
        return self._number("_etp_ep_rank")

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        name = _EXPERT_DATA_PARALLEL[bool(with_gtp_remat), bool(partial_expert_data_parallel)]
        return self._number(name + "_size")

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        name = _EXPERT_DATA_PARALLEL[bool(with_gtp_remat), bool(partial_expert_data_parallel)]
        return self._number(name + "_rank")

    def _number(self, name: str) -> int:
        number = getattr(self, name)
        return number if number is not None else self._ask(name)

    def get_all_ranks(self) -> str:
        ranks = [
            self.get_tensor_model_parallel_rank(),
            self.get_data_parallel_rank(),
            self.get_context_parallel_rank(),
            self.get_pipeline_model_parallel_rank(),
            self.get_expert_model_parallel_rank(),
        ]
        if HAS_GTP_REMAT:
            ranks.insert(1, self.get_gtp_weight_remat_rank())
        return "_".join(str(rank or 0) for rank in ranks)

    # predicates and virtual pipelines

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
        return not self.is_initialized()

    def is_pipeline_first_stage(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        if not ignore_virtual:
            stages = Getters._virtual_stages(self, vp_stage)
            if stages is not None and vp_stage != 0:
                return False
        return self.get_pipeline_model_parallel_rank() == 0

    def is_pipeline_last_stage(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        if not ignore_virtual:
            stages = Getters._virtual_stages(self, vp_stage)
            if stages is not None and vp_stage != stages - 1:
                return False
        stages = self.get_pipeline_model_parallel_world_size()
        return self.get_pipeline_model_parallel_rank() == stages - 1

    def _virtual_stages(self, vp_stage: int | None) -> int | None:
        stages = self.get_virtual_pipeline_model_parallel_world_size()
        if stages is not None and vp_stage is None:
            raise AssertionError(
                f"virtual pipelines are on ({stages} stages per rank): pass vp_stage, or "
                f"ignore_virtual=True."
            )
        return stages

    def is_rank_in_embedding_group(
        self, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        ranks, rank = self._EMBEDDING_GLOBAL_RANKS, dist.get_rank()
        if ranks is None or rank not in ranks:
            return False
        if not ignore_virtual and rank == ranks[0]:
            return self.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        if not ignore_virtual and rank == ranks[-1]:
            return self.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        return True

    def is_rank_in_position_embedding_group(self) -> bool:
        ranks, rank = self._POSITION_EMBEDDING_GLOBAL_RANKS, dist.get_rank()
        return ranks is not None and rank in ranks

    def get_virtual_pipeline_model_parallel_rank(self) -> int | None:
        return self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        return self._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE

    # overrides

    def set_tensor_model_parallel_world_size(self, world_size: int | None) -> None:
        self._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = world_size

    def set_tensor_model_parallel_rank(self, rank: int | None) -> None:
        self._MPU_TENSOR_MODEL_PARALLEL_RANK = rank

    def set_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        self._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size

    def set_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        self._MPU_PIPELINE_MODEL_PARALLEL_RANK = rank

    def set_virtual_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        self._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size

    def set_virtual_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        warnings.warn(
            "set_virtual_pipeline_model_parallel_rank is deprecated: pass vp_stage to "
            "is_pipeline_first_stage() and its like.",
            DeprecationWarning,
            stacklevel=3,
        )
        self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank

    def set_data_parallel_rank(self, rank: int | None) -> None:
        self._MPU_DATA_PARALLEL_RANK = rank

    def set_expert_model_parallel_world_size(self, world_size: int | None) -> None:
        self._MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE = world_size

    def set_expert_model_parallel_rank(self, rank: int | None) -> None:
        self._MPU_EXPERT_MODEL_PARALLEL_RANK = rank

    def set_expert_tensor_parallel_world_size(self, world_size: int | None) -> None:
        self._MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = world_size

    def set_expert_tensor_parallel_rank(self, rank: int | None) -> None:
        self._MPU_EXPERT_TENSOR_PARALLEL_RANK = rank


def _data_parallel(with_cp: bool, with_gtp: bool, partial: bool) -> str:
    if partial and not with_cp:
        raise AssertionError(
            "a partial data-parallel group includes context parallelism: pass "
            "with_context_parallel=True with partial_data_parallel=True."
        )
    return _DATA_PARALLEL[bool(with_cp), bool(with_gtp), bool(partial)]
