"""The ranks and sizes of one parallel state, and the predicates built on them."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch.distributed as dist

from compat.megatron import group_getters
from compat.megatron.encoder import EncoderGetters
from compat.megatron.group_getters import GroupGetters
from compat.megatron.releases import HAS


class Number(NamedTuple):
    """A rank or a size: the global that overrides it, the group it is of, which of the two."""

    override: str | None
    group: str
    kind: str  # "rank" or "size", the group's own methods

    @property
    def getter(self) -> str:
        """The function that gives the group."""
        return "get" + self.group.lower()


def _pair(name: str, group: str, override: str | None = None) -> dict[str, Number]:
    rank = size = None
    if override is not None:
        rank, size = f"_MPU_{override}_RANK", f"_MPU_{override}_WORLD_SIZE"
    return {
        f"{name}_rank": Number(rank, group, "rank"),
        f"{name}_size": Number(size, group, "size"),
    }


def _number(group: Any, kind: str, from_torch: bool = False) -> int:
    # An encoder's rank is in several pipelines, at the same stage of each.
    group = group[0] if isinstance(group, list) else group
    if from_torch or HAS["numbers_from_torch"]:
        number: int = dist.get_rank(group) if kind == "rank" else dist.get_world_size(group)
        return number
    return getattr(group, kind)()  # type: ignore[no-any-return]


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
}


def _remat(asked: bool) -> dict[str, bool]:
    """The argument of a group getter, for releases that have it and whoever names it."""
    return {"with_gtp_remat": asked} if HAS["gtp_remat"] or not asked else {}


class Getters(GroupGetters, EncoderGetters):
    """Every getter of the module, as a method.

    All are *local*: no communication. A method that is built from other getters asks them through
    ``_via``: the state itself, or the module while somebody has patched a getter there.
    """

    __slots__ = ()

    # The groups come from the getters, and not from their globals: outside code may have replaced
    # a getter in the module, and then its answer counts.

    def _ask(self, name: str, *, zero: bool = True) -> Any:
        number = NUMBERS[name]
        if number.override is not None and getattr(self, number.override) is not None:
            return getattr(self, number.override)
        return self._ask_group(number.getter, number.kind, zero=zero)

    def _ask_group(self, getter: str, kind: str, *, zero: bool = True, **arguments: bool) -> int:
        if zero and not dist.is_initialized():
            return 0
        return _number(getattr(self._via, getter)(**arguments), kind)

    def _ask_or_zero(self, name: str) -> int:
        if not dist.is_initialized():
            return 0
        group = getattr(self._via, NUMBERS[name].getter)(check_initialized=False)
        return 0 if group is None else _number(group, NUMBERS[name].kind)

    def _ask_data_parallel(self, kind: str, with_cp: bool, with_gtp: bool, partial: bool) -> int:
        override = self._MPU_DATA_PARALLEL_RANK
        if kind == "size":
            override = self._MPU_DATA_PARALLEL_WORLD_SIZE
        if override is not None:
            return override
        arguments = {"with_context_parallel": with_cp, "partial_data_parallel": partial}
        return self._ask_group("get_data_parallel_group", kind, **_remat(with_gtp), **arguments)

    def _ask_expert_data_parallel(self, kind: str, with_gtp: bool, partial: bool) -> int:
        arguments = group_getters.partial(partial)
        getter = "get_expert_data_parallel_group"
        return self._ask_group(getter, kind, **_remat(with_gtp), **arguments)

    # ranks and sizes

    def get_tensor_model_parallel_world_size(self) -> int:
        number = self._tp_size
        return number if number is not None else self._ask("_tp_size", zero=False)

    def get_tensor_model_parallel_rank(self) -> int:
        number = self._tp_rank
        return number if number is not None else self._ask("_tp_rank", zero=False)

    def get_pipeline_model_parallel_world_size(self) -> int:
        number = self._pp_size
        return number if number is not None else self._ask("_pp_size", zero=False)

    def get_pipeline_model_parallel_rank(self) -> int:
        number = self._pp_rank
        if number is None:
            if HAS["stage_asks_torch"]:
                dist.get_rank()
            group = self._via.get_pipeline_model_parallel_group()
            return _number(group, "rank", HAS["stage_from_torch"])
        return number

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

    def get_context_parallel_world_size(self) -> int:
        number = self._cp_size
        return number if number is not None else self._ask("_cp_size")

    def get_context_parallel_rank(self) -> int:
        number = self._cp_rank
        return number if number is not None else self._ask("_cp_rank")

    def get_tensor_and_context_parallel_world_size(self) -> int:
        number = self._tp_cp_size
        return number if number is not None else self._ask("_tp_cp_size")

    def get_tensor_and_context_parallel_rank(self) -> int:
        number = self._tp_cp_rank
        return number if number is not None else self._ask("_tp_cp_rank")

    def get_gtp_weight_remat_world_size(self) -> int:
        number = self._gtp_size
        return number if number is not None else self._ask_or_zero("_gtp_size")

    def get_gtp_weight_remat_rank(self) -> int:
        number = self._gtp_rank
        return number if number is not None else self._ask_or_zero("_gtp_rank")

    def get_expert_gtp_weight_remat_world_size(self) -> int:
        number = self._egtp_size
        return number if number is not None else self._ask_or_zero("_egtp_size")

    def get_expert_gtp_weight_remat_rank(self) -> int:
        number = self._egtp_rank
        return number if number is not None else self._ask_or_zero("_egtp_rank")

    def get_expert_model_parallel_world_size(self) -> int:
        number = self._ep_size
        return number if number is not None else self._ask("_ep_size")

    def get_expert_model_parallel_rank(self) -> int:
        number = self._ep_rank
        return number if number is not None else self._ask("_ep_rank")

    def get_expert_tensor_parallel_world_size(self) -> int | None:
        number = self._etp_size
        if number is None and self._EXPERT_TENSOR_PARALLEL_GROUP is None:
            return self._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
        return number if number is not None else self._ask("_etp_size")

    def get_expert_tensor_parallel_rank(self) -> int | None:
        number = self._etp_rank
        if number is None and self._EXPERT_TENSOR_PARALLEL_GROUP is None:
            return self._MPU_TENSOR_MODEL_PARALLEL_RANK
        return number if number is not None else self._ask("_etp_rank")

    def get_expert_tensor_and_model_parallel_world_size(self) -> int:
        number = self._etp_ep_size
        return number if number is not None else self._ask("_etp_ep_size")

    def get_expert_tensor_and_model_parallel_rank(self) -> int:
        number = self._etp_ep_rank
        return number if number is not None else self._ask("_etp_ep_rank")

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        key = (with_gtp_remat, partial_expert_data_parallel)
        number = self._edp_sizes.get(key)
        if number is not None:
            return number
        return self._ask_expert_data_parallel("size", *key)

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        key = (with_gtp_remat, partial_expert_data_parallel)
        number = self._edp_ranks.get(key)
        if number is not None:
            return number
        return self._ask_expert_data_parallel("rank", *key)

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

    def get_virtual_pipeline_model_parallel_rank(self) -> int | None:
        return self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        return self._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
