"""The arguments of one initialisation: checked in upstream's order, and the layouts they make."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any

from compat.megatron import communicators, encoder, replaced
from compat.megatron.rank_generator import RankGenerator, inject_gtp_remat_axis, lay_out
from compat.megatron.releases import RELEASE_HAS, take_defaults
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.policy import CHOICES, Policy, outermost

# The sizes that divide the world in each grid; dp is what is left of it.
_DENSE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "gtp_remat_size",
)
_EXPERT = (
    "expert_tensor_parallel_size",
    "expert_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_gtp_remat_size",
)

_VIRTUAL = "virtual_pipeline_model_parallel_size"


def _dist() -> Any:
    import torch.distributed  # here, for plans on machines without torch

    return torch.distributed


NO_ARGUMENTS = ("init_count", "job_size", "helpers", "order_source")
RankChooser = Callable[[list[int]], list[int]]


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError
    return given


def _levels(given: Any) -> list[int] | None:
    if isinstance(given, str | bytes):
        raise TypeError
    return [operator.index(size) for size in given[:]] or None


def _names(given: Any) -> list[Any]:
    names = list(given)
    hash(tuple(names))  # they are looked up in the NCCL configuration
    return names


def _minutes(given: Any) -> float:
    return given if isinstance(given, float) else operator.index(given)


@dataclass(frozen=True, eq=False)
@take_defaults
class Arguments:
    """A request to ``initialize_model_parallel``, field by field as its arguments."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_split_rank: int | None = None
    pipeline_model_parallel_comm_backend: str | None = None
    use_sharp: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: list[int] | None = None
    hybrid_context_parallel: bool = False
    dynamic_context_parallel: bool = False
    min_dynamic_context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    gtp_remat_size: int = 1
    expert_gtp_remat_size: int = 1
    num_distributed_optimizer_instances: int = 1
    expert_tensor_parallel_size: int | None = None
    nccl_communicator_config_path: str | None = None
    distributed_timeout_minutes: float = 30
    order: str = "tp-cp-ep-dp-pp"
    encoder_tensor_model_parallel_size: int = 0
    encoder_pipeline_model_parallel_size: int | None = 0
    get_embedding_ranks: RankChooser | None = None
    get_position_embedding_ranks: RankChooser | None = None
    create_gloo_process_groups: bool = True
    high_priority_stream_groups: list[str] | None = None
    sharp_enabled_group: str | None = None
    create_all_gather_group: bool | None = False
    rank_offset: int = 0
    local_world_size: int | None = None
    share: str | None = None
    connect: str | None = None
    creation: str | None = None
    # Not arguments: this process's n-th initialisation; the number of ranks of a job that is only
    # planned (without it, torch is asked); parallel_state's functions that outside code has
    # replaced, by name; where the order comes from.
    init_count: int | None = None
    job_size: int | None = None
    helpers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    order_source: str = "the argument `order`"
    _wrong: dict[str, str] = field(default_factory=dict, init=False)
    _asked: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, (plain, kind) in _KINDS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, plain(value))
            except Exception:  # check() refuses it, and tells the other ranks
                if value is not None or "None" not in _HINTS[name]:
                    self._wrong[name] = f"{name} must be {kind}, got {shown(value)}."

    def check(self) -> None:
        """Refuse wrong arguments in upstream's order, with its type of error where it has one."""
        replaced.check(self.helpers, self.policy.share, self.policy.creation)
        for name, refusal in self._wrong.items():
            if name != "distributed_timeout_minutes":  # upstream reads it last
                raise TypeError(refusal)
        self._check_sharp()
        if self.job_size is None and not _dist().is_initialized():
            raise AssertionError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() "
                "before initialize_model_parallel()."
            )
        encoder.check(self._encoder_sizes, self.tensor_model_parallel_size)
        if max(self.gtp_remat_size, self.expert_gtp_remat_size) > 1 and self.instances > 1:
            raise AssertionError(
                f"gtp_remat with num_distributed_optimizer_instances={self.instances} is not "
                f"supported: set one of them to 1."
            )
        if self.local_world_size is not None:
            self.positive("local_world_size")
        self._divide(*_DENSE)
        if self.virtual_pipeline_model_parallel_size is not None:
            if self.pipeline_model_parallel_size <= 1:
                raise RuntimeError(
                    f"{_VIRTUAL}={self.virtual_pipeline_model_parallel_size} needs "
                    f"pipeline_model_parallel_size > 1, got {self.pipeline_model_parallel_size}."
                )
            self.positive(_VIRTUAL)
        _ = self.nccl_configs
        dense, expert = self.decoder, self.expert
        if self.pipeline_model_parallel_size > 1:
            sizes = [layout.dim_size("dp") for layout in (dense, expert)]
            if not self.order.endswith("pp") and sizes[0] != sizes[1]:
                raise AssertionError(
                    f"order {shown(self.order)} does not end in pp, so the data-parallel sizes, "
                    f"dense {sizes[0]} and expert {sizes[1]}, must be equal. Put pp last, or "
                    f"change the expert sizes.{self._order_source}"
                )
            strides = [layout.stride("pp") for layout in (dense, expert)]
            if strides[0] != strides[1] and not self.decides_ranks:
                raise AssertionError(
                    f"pipelines must be the same for dense and expert layers; with order "
                    f"{shown(self.order)} their stages are {strides[0]} and {strides[1]} ranks "
                    f"apart. Put pp last, or make tp x cp and expert tp x ep equal."
                    f"{self._order_source}"
                )
        if self.decides_ranks:
            stages = [self.rank_lists(grid, "pp") for grid in ("decoder", "expert")]
            if stages[0] != stages[1]:
                raise AssertionError(
                    f"pipelines must be the same for dense and expert layers; "
                    f"{replaced.in_words(self.helpers)}, which this process has replaced, gives "
                    f"{shown(stages[0])} and {shown(stages[1])}."
                )
        _ = self.timeout
        # Upstream reads the file before it compares sizes, and its sections afterwards.
        if not isinstance(self.nccl_configs, dict):
            communicators.check_mapping(self.nccl_communicator_config_path, self.nccl_configs)

    @cached_property
    def pretended_world(self) -> int | None:
        """The ranks of a world that is not there: nobody to agree with. None in a real one."""
        # Where outside code decides the ranks too, it may count more than there are processes.
        return None if self.decides_ranks else replaced.pretended_world()

    def telling_others(self) -> AbstractContextManager[None]:
        """Tell the other ranks of the window when this one refuses, so that none waits for it."""
        if self.pretended_world is not None:
            return nullcontext()
        from hypergrid.agreement.commit import telling_others

        return telling_others(self._window, self.init_count)

    def _window(self) -> Sequence[int]:
        try:
            return range(self.rank_offset, self.rank_offset + self.world_size)
        except TypeError:  # not numbers
            return range(self.world)

    @property
    def world(self) -> int:
        """Number of ranks in the job."""
        return _dist().get_world_size() if self.job_size is None else self.job_size

    @cached_property
    def instances(self) -> int:
        """Instances of the distributed optimizer."""
        return self.num_distributed_optimizer_instances

    @cached_property
    def sharp_group(self) -> str | None:
        """The rows that SHARP serves: "dp", "dp_replica" or None."""
        return (self.sharp_enabled_group or "dp") if self.use_sharp else None

    @property
    def world_size(self) -> int:
        """Number of ranks in the window that is laid out."""
        return self.world if self.local_world_size is None else self.local_world_size

    @cached_property
    def sources(self) -> dict[str, str]:
        """Where the order and each choice of the policy come from, in words."""
        choices = {name: outermost(name, getattr(self, name))[1] for name in CHOICES}
        return {"order": self.order_source, **choices}

    @cached_property
    def policy(self) -> Policy:
        """How the groups are created."""
        _ = self.sources  # as the environment is now
        return Policy.resolve(share=self.share, connect=self.connect, creation=self.creation)

    @cached_property
    def timeout(self) -> timedelta:
        given = self.distributed_timeout_minutes
        if refusal := self._wrong.get("distributed_timeout_minutes"):
            raise TypeError(refusal)
        try:
            return timedelta(minutes=given)
        except (OverflowError, ValueError) as error:
            raise ValueError(
                f"invalid distributed_timeout_minutes={shown(given)}: {error}. Give a number of "
                f"minutes, such as 30."
            ) from None

    @cached_property
    def nccl_configs(self) -> communicators.Configs:
        return communicators.read_configs(
            self.nccl_communicator_config_path,
            self.high_priority_stream_groups,
            self.helpers.get("overwrite_nccl_comm_cfgs", communicators.overwrite_nccl_comm_cfgs),
        )

    @cached_property
    def decoder(self) -> RankLayout:
        """The grid of dense layers."""
        return self._lay_out(*self._grid("decoder"))

    @cached_property
    def encoder(self) -> RankLayout | None:
        """The grid of the encoder, which lies in front of the decoder's; None without one."""
        return self._lay_out(*self._grid("encoder")) if self._encoder_sizes[1] else None

    @cached_property
    def _encoder_sizes(self) -> tuple[int, int]:
        tensor, stages = (getattr(self, name) for name in (encoder.TENSOR, encoder.STAGES))
        return encoder.sizes(tensor, stages or 0, self.tensor_model_parallel_size)

    @property
    def _encoder_size(self) -> int:
        return 0 if self.encoder is None else self.encoder.size

    @cached_property
    def expert(self) -> RankLayout:
        """The grid of expert layers: the same ranks, factorised without cp."""
        return self._lay_out(*self._grid("expert"))

    def _grid(self, name: str) -> tuple[dict[str, int], str, int]:
        """The sizes of a grid, the dim that gtp_remat comes behind, and the ranks in front."""
        sizes = {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "dp": self._divide(*(_EXPERT if name == "expert" else _DENSE)),
            "ep": 1,
            "cp": self.context_parallel_size,
            "gtp_remat": self.gtp_remat_size,
        }
        if name == "expert":
            tensor = self.positive("expert_tensor_parallel_size")
            sizes |= {"tp": tensor, "ep": self.expert_model_parallel_size}
            sizes |= {"cp": 1, "gtp_remat": self.expert_gtp_remat_size}
        if name == "encoder":
            sizes |= dict(zip(("tp", "pp"), self._encoder_sizes, strict=True)) | {"gtp_remat": 1}
            return sizes, "tp", 0
        return sizes, "ep" if name == "expert" else "tp", self._encoder_size

    @cached_property
    def decides_ranks(self) -> bool:
        """Whether outside code has replaced what decides which ranks are in a group."""
        return any(name in self.helpers for name in replaced.GENERATORS)

    def rank_lists(self, grid: str, token: str) -> list[list[int]]:
        """All groups over the dims of ``token`` as lists, of "decoder", "expert" or "encoder"."""
        if not self.decides_ranks:
            lists: list[list[int]] = getattr(self, grid).groups(token).tolist()
            return lists
        if (grid, token) not in self._asked:
            generator, size = self._generators[grid], self._grid(grid)[0]["gtp_remat"]
            if token == "gtp_remat":
                given = generator.get_gtp_ranks(size)
            else:
                known = RELEASE_HAS["gtp_remat"] or size > 1
                given = generator.get_ranks(token if known else token.replace("gtp_remat-", ""))
            self._asked[grid, token] = [list(map(operator.index, ranks)) for ranks in given]
        return self._asked[grid, token]

    @cached_property
    def _generators(self) -> dict[str, Any]:
        """The rank generators, made as upstream makes them; each is asked alike on every rank."""
        make, made = self.helpers.get("RankGenerator", RankGenerator), {}
        for name in ("encoder", "decoder", "expert") if self.encoder else ("decoder", "expert"):
            sizes, after, behind = self._grid(name)
            order = inject_gtp_remat_axis(self.order, after)
            if not RELEASE_HAS["gtp_remat"] and sizes["gtp_remat"] == 1:
                order = self.order
                del sizes["gtp_remat"]
            made[name] = make(**sizes, order=order, rank_offset=self.rank_offset + behind)
        return made

    @cached_property
    def layouts(self) -> dict[str, RankLayout]:
        """Every layout that the table's rows refer to."""
        layouts = {"decoder": self.decoder, "expert": self.expert}
        if RELEASE_HAS["instances_in_expert"]:
            within = self.expert.dim_size("dp") // self.instances
            parts = {"dp_intra": within, "dp_inter": self.instances}
            layouts["expert_instances"] = self.expert.split("dp", parts)
        if self.hierarchical_context_parallel_sizes:
            parts = {f"cp{i}": n for i, n in enumerate(self.hierarchical_context_parallel_sizes)}
            layouts["decoder_cp_levels"] = self.decoder.split("cp", parts)
        return layouts

    def _lay_out(self, sizes: dict[str, int], after: str, behind: int = 0) -> RankLayout:
        named = RELEASE_HAS["gtp_remat"] and "gtp_remat" in self.order.lower()
        own = {name: size for name, size in sizes.items() if named or name != "gtp_remat"}
        offset = self.rank_offset + behind
        try:
            lay_out(self.order, own)  # first: its message shows the order as it was given
            if self.rank_offset < 0:
                raise ValueError(f"rank_offset must be at least 0, got {self.rank_offset}.")
            return lay_out(inject_gtp_remat_axis(self.order, after), sizes, offset)
        except (LayoutError, RuntimeError) as error:
            if self.decides_ranks:  # then only the sizes of the layout are used
                return lay_out(inject_gtp_remat_axis(Arguments.order), sizes, offset)
            raise type(error)(f"{error}{self._order_source}") from None

    @property
    def _order_source(self) -> str:
        return "" if self.job_size is not None else f" The order comes from {self.order_source}."

    def _divide(self, *names: str) -> int:
        """The world divided by these sizes, which is the data-parallel size; RuntimeError if a
        remainder is left."""
        sizes = {name: self.positive(name) for name in names}
        model: int = prod(sizes.values())
        world = self.world_size
        large = [f"{n}={size}" for n, size in sizes.items() if size > 1]
        asked = " x ".join(large)
        if names == _DENSE and (beside := prod(self._encoder_sizes)):
            model += beside * self.context_parallel_size
            asked += f" and its encoder of {encoder.TENSOR} x {encoder.STAGES} = {beside}"
        elif names != _DENSE:
            world -= self._encoder_size
        if world % model:
            product = f" = {model}" if " x " in asked else ""
            raise RuntimeError(
                f"world size {world} is not divisible by {asked}{product}: it leaves a remainder "
                f"of {world % model}. Change a size or the number of ranks."
            )
        return world // model

    def positive(self, name: str) -> int:
        """The size ``name``, the expert tp as the dense one unless given; ValueError below 1."""
        given = getattr(self, name)
        size: int = self.tensor_model_parallel_size if given is None else given
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
        return size

    def _check_sharp(self) -> None:
        group = self.sharp_enabled_group
        if not self.use_sharp and group is not None:
            raise AssertionError(
                f"sharp_enabled_group={shown(group)} needs use_sharp=True: set that, or leave the "
                f"group out."
            )
        if group not in (None, "dp", "dp_replica"):
            raise AssertionError(
                f"sharp_enabled_group={shown(group)} is not supported: use 'dp' or 'dp_replica'."
            )
        if group == "dp_replica" and self.instances <= 1:
            raise AssertionError(
                f"sharp_enabled_group='dp_replica' needs num_distributed_optimizer_instances > 1, "
                f"got {self.instances}."
            )


_HINTS = {name: hint.split(" | ") for name, hint in Arguments.__annotations__.items()}


def _typed(kind: str) -> list[str]:
    return [name for name, hint in _HINTS.items() if kind in hint]


# The kind of each argument, in words, and how it is made of plain Python values: numbers and lists
# may come from numpy or torch, paths from pathlib.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(_typed("int"), (operator.index, "a whole number")),
    **dict.fromkeys(_typed("bool"), (bool, "True or False")),
    "order": (_text, "a text such as 'tp-cp-ep-dp-pp'"),
    "pipeline_model_parallel_comm_backend": (_text, "'nccl', 'ucc' or None"),
    "sharp_enabled_group": (_text, "'dp', 'dp_replica' or None"),
    "distributed_timeout_minutes": (_minutes, "a number of minutes, such as 30"),
    "hierarchical_context_parallel_sizes": (_levels, "a list of whole numbers, such as [2, 4]"),
    "high_priority_stream_groups": (_names, "a list of names of groups, such as ['dp_cp']"),
    "nccl_communicator_config_path": (os.fsdecode, "the path of a YAML file"),
}
