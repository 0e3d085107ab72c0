"""The arguments of one initialisation: checked, and the layouts that they make.

Also the functions of parallel_state that outside code has replaced. Stock's initialisation calls
its helpers through its module, so frameworks hook into it by replacing them there.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from compat.megatron import communicators
from compat.megatron.releases import NONE_BY_DEFAULT, RELEASE_HAS, take_defaults
from hypergrid.layout import LayoutError, RankLayout
from hypergrid.messages import shown
from hypergrid.policy import CHOICES, Policy, outermost, timeout_of_all

F = TypeVar("F", bound=Callable[..., Any])
Helpers = Mapping[str, Callable[..., Any]]  # replaced functions of parallel_state, by name
RankChooser = Callable[[list[int]], list[int]]

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
# Fields that ranks do not compare: they are no arguments. Of a file it counts what is read from it,
# and not what it is called on a rank.
NOT_COMPARED = ("init_count", "job_size", "helpers", "order_source", communicators.FILE)

# Functions of parallel_state that outside code may replace.
GENERATORS = ("RankGenerator", "generate_masked_orthogonal_rank_groups")
LEVELS = "create_hierarchical_groups"
NEW_GROUP = "torch.distributed.new_group"
CREATORS = (
    "create_group",
    LEVELS,
    "create_hybrid_dp_cp_groups",
    "create_dynamic_dp_cp_groups",
    NEW_GROUP,
)
HELPERS = (
    *CREATORS,
    *GENERATORS,
    "get_nccl_options",
    "overwrite_nccl_comm_cfgs",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "_set_global_memory_buffer",
)
MEMBERS_ONLY = "__hypergrid_members_only__"  # as compat.members_only() sets it

_namespace: Mapping[str, Any] = {}  # the globals of parallel_state
_originals: dict[str, Callable[..., Any]] = {}
_generator_parts: dict[str, Any] = {}  # of the module's own RankGenerator: methods and attributes


def _dist() -> Any:
    import torch.distributed  # here, for plans on machines without torch

    return torch.distributed


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _levels(value: Any) -> list[int] | None:
    if isinstance(value, str | bytes):
        raise TypeError
    return [operator.index(size) for size in value[:]] or None


def _names(value: Any) -> list[Any]:
    names = list(value)
    hash(tuple(names))  # they are looked up in the NCCL configuration
    return names


def _minutes(value: Any) -> float:
    if isinstance(value, float):
        return value
    return operator.index(value)


@dataclass(frozen=True, eq=False)
@take_defaults
class Request:
    """A request to ``initialize_model_parallel``, field by field as its arguments."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
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
    helpers: Helpers = field(default_factory=dict)
    order_source: str = "the argument `order`"
    _refusals: dict[str, str] = field(default_factory=dict, init=False)
    _rank_lists: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, (to_plain, kind) in _KINDS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, to_plain(value))
            except Exception:
                # Refused by check(), which tells the other ranks.
                if value is not None or "None" not in _HINTS[name]:
                    self._refusals[name] = f"{name} must be {kind}, got {shown(value)}."
            if value is None and name in NONE_BY_DEFAULT:
                self._refusals[name] = (
                    f"{name}=None is the default of this Megatron, and hypergrid does not know "
                    f"what it means there. Pass {name} as {kind}."
                )

    def check(self) -> None:
        """Refuse wrong arguments, with upstream's type of error where it has one.

        All that is wrong is said at once, but what follows from something else that is wrong.
        """
        refuse_together(self._check_kinds, self._check_choices, self._check_torch)
        refuse_together(
            self._check_sharp,
            self._check_instances,
            self._check_virtual_stages,
            lambda: self._data_parallel_size("decoder"),
            lambda: self.nccl_configs,
            lambda: self.timeout,
        )
        refuse_together(self._check_window, self._check_pipelines, self._check_grid_instances)

    def _check_kinds(self) -> None:
        if self._refusals:
            raise TypeError(" ".join(self._refusals.values()))

    def _check_torch(self) -> None:
        if self.job_size is None and not _dist().is_initialized():
            raise AssertionError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() "
                "before initialize_model_parallel()."
            )

    def _check_instances(self) -> None:
        instances = self.positive("num_distributed_optimizer_instances")
        if max(self.gtp_remat_size, self.expert_gtp_remat_size) > 1 and instances > 1:
            raise AssertionError(
                f"gtp_remat with num_distributed_optimizer_instances={instances} is not "
                f"supported: set one of them to 1."
            )

    def _check_virtual_stages(self) -> None:
        if self.virtual_pipeline_model_parallel_size is None:
            return
        if self.pipeline_model_parallel_size <= 1:
            raise RuntimeError(
                f"{_VIRTUAL}={self.virtual_pipeline_model_parallel_size} needs "
                f"pipeline_model_parallel_size > 1, got {self.pipeline_model_parallel_size}."
            )
        self.positive(_VIRTUAL)

    def _check_choices(self) -> None:
        """Refuse choices that do not work with the functions that were replaced: ValueError."""
        policy = self.policy
        creators = [name for name in CREATORS if name in self.helpers]
        called = [name for name in (*CREATORS, "get_nccl_options") if name in self.helpers]
        if called and policy.share != "none":
            raise ValueError(
                f"share={policy.share!r} is not possible here: this process has replaced "
                f"{' and '.join(called)}, which must be called for every group. Do not set share, "
                f"restore the functions, or declare a new_group with compat.members_only()."
            )
        needs_every_rank = bool(creators) and not members_only(self.helpers)
        if needs_every_rank and policy.creation not in ("auto", "everyone"):
            raise ValueError(
                f"creation={policy.creation!r} is not possible here: this process has replaced "
                f"{' and '.join(creators)}, which every rank calls for every group. Use 'auto', or "
                f"declare them with compat.members_only(): then only the members of a group call "
                f"them."
            )

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
        if group == "dp_replica" and self.num_distributed_optimizer_instances <= 1:
            raise AssertionError(
                f"sharp_enabled_group='dp_replica' needs num_distributed_optimizer_instances > 1, "
                f"got {self.num_distributed_optimizer_instances}."
            )

    def _check_window(self) -> None:
        if self.rank_offset + self.world_size > self.world:
            raise ValueError(
                f"rank_offset={self.rank_offset} + local_world_size={self.world_size} is larger "
                f"than the world size {self.world}. Make one of them smaller."
            )

    def _check_grid_instances(self) -> None:
        instances = self.num_distributed_optimizer_instances
        sizes = {
            "data x context": self.decoder.dim_size(("dp", "cp")),
            "expert data": self.expert.dim_size("dp"),
        }
        for name, size in sizes.items():
            if size % instances:
                raise AssertionError(
                    f"num_distributed_optimizer_instances={instances} does not divide the {name} "
                    f"parallel size {size}."
                )

    def _check_pipelines(self) -> None:
        """Refuse grids whose pipelines differ: AssertionError."""
        dense = self.decoder
        expert = self.expert
        if self.pipeline_model_parallel_size > 1:
            dense_size = dense.dim_size("dp")
            expert_size = expert.dim_size("dp")
            if not self.order.endswith("pp") and dense_size != expert_size:
                raise AssertionError(
                    f"order {shown(self.order)} does not end in pp, so the data-parallel sizes, "
                    f"dense {dense_size} and expert {expert_size}, must be equal. Put pp last, or "
                    f"change the expert sizes.{self._order_source}"
                )
            dense_stride = dense.stride("pp")
            expert_stride = expert.stride("pp")
            if dense_stride != expert_stride and not self.decides_ranks:
                raise AssertionError(
                    f"pipelines must be the same for dense and expert layers; with order "
                    f"{shown(self.order)} their stages are {dense_stride} and {expert_stride} "
                    f"ranks apart. Put pp last, or make tp x cp and expert tp x ep equal."
                    f"{self._order_source}"
                )
        if self.decides_ranks:
            pipelines = self.rank_lists("decoder", "pp")
            expert_pipelines = self.rank_lists("expert", "pp")
            if pipelines != expert_pipelines:
                raise AssertionError(
                    f"pipelines must be the same for dense and expert layers; "
                    f"{in_words(self.helpers)}, which this process has replaced, gives "
                    f"{shown(pipelines)} and {shown(expert_pipelines)}."
                )

    @cached_property
    def pretended_world(self) -> int | None:
        """The ranks of a world that outside code only says is there; None in a real one.

        Nobody is there to agree with.
        """
        from hypergrid.groups import creation  # here, for plans on machines without torch

        # Where outside code decides the ranks too, it may count more than there are processes.
        if self.decides_ranks:
            return None
        dist = _dist()
        asking = (dist.get_rank, dist.get_world_size, dist.is_initialized)
        if not any(map(creation.is_replaced, asking)) or not dist.is_initialized():
            return None
        default_group = dist.group.WORLD
        size: int = dist.get_world_size()
        if default_group is None or size > default_group.size():
            return size
        return None

    @cached_property
    def calls_helpers(self) -> bool:
        """Whether outside code takes part in creating groups, or pretends that ranks are there."""
        return self.pretended_world is not None or creates(self.helpers)

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
    def sharp_group(self) -> str | None:
        """The rows that SHARP serves, as the table marks them: "dp", "dp_replica" or None."""
        if not self.use_sharp:
            return None
        return self.sharp_enabled_group or "dp"

    @property
    def world_size(self) -> int:
        """Number of ranks in the window that is laid out."""
        return self.world if self.local_world_size is None else self.local_world_size

    @cached_property
    def sources(self) -> dict[str, str]:
        """Where the order and each choice of the policy come from, in words."""
        sources = {"order": self.order_source}
        for name in CHOICES:
            _, sources[name] = outermost(name, getattr(self, name))
        return sources

    @cached_property
    def policy(self) -> Policy:
        """How the groups are created."""
        _ = self.sources  # as the environment is now
        return Policy.resolve(share=self.share, connect=self.connect, creation=self.creation)

    @cached_property
    def timeout_of_all(self) -> timedelta | None:
        """The timeout that the environment gives to all groups, the default group included."""
        return timeout_of_all()

    @cached_property
    def timeout(self) -> timedelta:
        minutes = self.distributed_timeout_minutes
        if self.timeout_of_all is not None:
            return self.timeout_of_all
        try:
            return timedelta(minutes=minutes)
        except (OverflowError, ValueError) as error:
            raise ValueError(
                f"invalid distributed_timeout_minutes={shown(minutes)}: {error}. Give a number of "
                f"minutes, such as 30."
            ) from None

    @cached_property
    def nccl_configs(self) -> communicators.Configs:
        if self.nccl_communicator_config_path is None and not self.high_priority_stream_groups:
            return {}
        return communicators.read_configs(
            self.nccl_communicator_config_path,
            self.high_priority_stream_groups,
            self.helpers.get("overwrite_nccl_comm_cfgs", communicators.overwrite_nccl_comm_cfgs),
        )

    @cached_property
    def decoder(self) -> RankLayout:
        """The grid of dense layers."""
        return self._lay_out("decoder")

    @cached_property
    def expert(self) -> RankLayout:
        """The grid of expert layers: the same ranks, factorised without cp."""
        return self._lay_out("expert")

    @cached_property
    def layouts(self) -> dict[str, RankLayout]:
        """Every layout that the table's rows refer to."""
        layouts = {"decoder": self.decoder, "expert": self.expert}
        has_instances = self.num_distributed_optimizer_instances > 1
        if has_instances:
            within = self.expert.dim_size("dp") // self.num_distributed_optimizer_instances
            parts = {"dp_intra": within, "dp_inter": self.num_distributed_optimizer_instances}
            layouts["expert_instances"] = self.expert.split("dp", parts)
        if self.hierarchical_context_parallel_sizes:
            parts = {f"cp{i}": n for i, n in enumerate(self.hierarchical_context_parallel_sizes)}
            layouts["decoder_cp_levels"] = self.decoder.split("cp", parts)
        return layouts

    def _sizes(self, grid: str) -> dict[str, int]:
        """The sizes of "decoder" or "expert" by dim."""
        sizes = {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "dp": self._data_parallel_size(grid),
            "ep": 1,
            "cp": self.context_parallel_size,
            "gtp_remat": self.gtp_remat_size,
        }
        if grid == "expert":
            sizes["tp"] = self.positive("expert_tensor_parallel_size")
            sizes["ep"] = self.expert_model_parallel_size
            sizes["cp"] = 1
            sizes["gtp_remat"] = self.expert_gtp_remat_size
        return sizes

    def _order(self, grid: str) -> str:
        """The order of a grid's dims, with gtp_remat."""
        if grid == "expert":
            return inject_gtp_remat_axis(self.order, "ep")
        return inject_gtp_remat_axis(self.order)

    def _lay_out(self, grid: str) -> RankLayout:
        sizes = self._sizes(grid)
        has_unknown_dim = "gtp_remat" in self.order.lower() and not RELEASE_HAS["gtp_remat"]
        if has_unknown_dim and not self.decides_ranks:
            self._check_order(sizes)
        if self.rank_offset < 0:
            raise ValueError(f"rank_offset must be at least 0, got {self.rank_offset}.")
        try:
            return lay_out(self._order(grid), sizes, self.rank_offset)
        except (LayoutError, RuntimeError) as error:
            if self.decides_ranks:  # then only the sizes of the layout are used
                return lay_out(inject_gtp_remat_axis(Request.order), sizes, self.rank_offset)
            self._check_order(sizes)
            raise type(error)(f"{error}{self._order_source}") from None

    def _check_order(self, sizes: dict[str, int]) -> None:
        """Refuse the order as the caller wrote it, without the gtp_remat that we insert."""
        named_sizes = dict(sizes)
        if not RELEASE_HAS["gtp_remat"] or "gtp_remat" not in self.order.lower():
            del named_sizes["gtp_remat"]
        try:
            lay_out(self.order, named_sizes)
        except (LayoutError, RuntimeError) as error:
            raise type(error)(f"{error}{self._order_source}") from None

    @property
    def _order_source(self) -> str:
        return "" if self.job_size is not None else f" The order comes from {self.order_source}."

    def _data_parallel_size(self, grid: str) -> int:
        """The world divided by a grid's sizes; RuntimeError if a remainder is left."""
        if self.local_world_size is not None:
            self.positive("local_world_size")
        names = _EXPERT if grid == "expert" else _DENSE
        sizes = {name: self.positive(name) for name in names}
        replicas, remainder = divmod(self.world_size, prod(sizes.values()))
        if remainder:
            divisor = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
            raise RuntimeError(
                f"world size {self.world_size} is not divisible by {divisor}: it leaves a "
                f"remainder of {remainder}. Change a size or the number of ranks."
            )
        return replicas

    def positive(self, name: str) -> int:
        """The size ``name``, the expert tp as the dense one unless given; ValueError below 1."""
        size: int | None = getattr(self, name)
        if size is None:
            size = self.tensor_model_parallel_size
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
        return size

    @cached_property
    def decides_ranks(self) -> bool:
        """Whether outside code has replaced what decides which ranks are in a group."""
        return any(name in self.helpers for name in GENERATORS)

    def rank_lists(self, grid: str, token: str) -> list[list[int]]:
        """All groups over the dims of ``token`` as lists, of "decoder" or "expert"."""
        if not self.decides_ranks:
            lists: list[list[int]] = getattr(self, grid).groups(token).tolist()
            return lists
        # Each generator is asked once for each token: it may communicate.
        if (grid, token) not in self._rank_lists:
            generator = self._generators[grid]
            size = self._sizes(grid)["gtp_remat"]
            if token == "gtp_remat":
                lists = generator.get_gtp_ranks(size)
            elif RELEASE_HAS["gtp_remat"] or size > 1:
                lists = generator.get_ranks(token)
            else:
                lists = generator.get_ranks(token.replace("gtp_remat-", ""))
            plain_lists = [list(map(operator.index, ranks)) for ranks in lists]
            _warn_of_descending(plain_lists, token)
            self._rank_lists[grid, token] = plain_lists
        return self._rank_lists[grid, token]

    @cached_property
    def _generators(self) -> dict[str, Any]:
        """The rank generators, made as upstream makes them; each is asked alike on every rank."""
        make = self.helpers.get("RankGenerator") or _namespace["RankGenerator"]
        generators = {}
        for grid in ("decoder", "expert"):
            sizes = self._sizes(grid)
            order = self._order(grid)
            if not RELEASE_HAS["gtp_remat"] and sizes["gtp_remat"] == 1:
                order = self.order
                del sizes["gtp_remat"]
            generators[grid] = make(**sizes, order=order, rank_offset=self.rank_offset)
        return generators


_HINTS = {name: hint.split(" | ") for name, hint in Request.__annotations__.items()}


def _of_kind(kind: str) -> list[str]:
    return [name for name, hint in _HINTS.items() if kind in hint]


# How each argument becomes plain Python (numbers may be numpy's), and its kind in words.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(_of_kind("int"), (operator.index, "a whole number")),
    **dict.fromkeys(_of_kind("bool"), (bool, "True or False")),
    "order": (_text, "a text such as 'tp-cp-ep-dp-pp'"),
    "pipeline_model_parallel_comm_backend": (_text, "'nccl', 'ucc' or None"),
    "sharp_enabled_group": (_text, "'dp', 'dp_replica' or None"),
    "distributed_timeout_minutes": (_minutes, "a number of minutes, such as 30"),
    "hierarchical_context_parallel_sizes": (_levels, "a list of whole numbers, such as [2, 4]"),
    "high_priority_stream_groups": (_names, "a list of names of groups, such as ['dp_cp']"),
    "nccl_communicator_config_path": (os.fsdecode, "the path of a YAML file"),
}


def refuse_together(*checks: Callable[[], object]) -> None:
    """Call ``checks``. What several refuse is said in one error, the first."""
    errors: list[Exception] = []
    for check in checks:
        try:
            check()
        except Exception as error:  # of any type, where a caller's function raises
            errors.append(error)
    texts = dict.fromkeys(map(str, errors))
    if len(texts) > 1:
        errors[0].args = (" And: ".join(texts),)
    if errors:
        raise errors[0]


def lay_out(order: str, sizes: Mapping[str, int], offset: int = 0) -> RankLayout:
    """``RankLayout.from_order`` as upstream understands an order: a dim of size 1 may repeat.

    RuntimeError if the order leaves out a dim larger than 1, TypeError if it is not a text.
    """
    if not isinstance(order, str):
        raise TypeError(f"order must be a text such as 'tp-cp-ep-dp-pp', got {shown(order)}.")
    dims: list[str] = []
    for token in order.lower().split("-"):
        if sizes.get(token) != 1 or token not in dims:
            dims.append(token)
    try:
        return RankLayout.from_order("-".join(dims), sizes, offset)
    except LayoutError as error:
        larger_dims = {name for name, size in sizes.items() if size != 1}
        if larger_dims - {*dims}:
            raise RuntimeError(str(error)) from None
        raise


def inject_gtp_remat_axis(order_str: str, after: str = "tp") -> str:
    """The order with gtp_remat inserted after ``after``, else after tp, else first."""
    tokens = order_str.split("-")
    if "gtp_remat" in tokens:  # lower case only, as upstream: GTP_REMAT gets a second
        return order_str
    position = 0
    for name in ("tp", after):
        if name in tokens:
            position = tokens.index(name) + 1
    tokens.insert(position, "gtp_remat")
    return "-".join(tokens)


_has_warned_of_descending = False


def _warn_of_descending(lists: list[list[int]], token: str) -> None:
    """Warn once of a generator whose groups are not in torch's order of ranks."""
    global _has_warned_of_descending
    unsorted = [ranks for ranks in lists if ranks != sorted(ranks)]
    if unsorted and not _has_warned_of_descending:
        _has_warned_of_descending = True
        warnings.warn(
            f"a RankGenerator of outside code gives ranks that do not ascend, such as "
            f"{shown(unsorted[0])} over {token}. Torch sorts the ranks of each group: a rank's "
            f"place in the group is another one than in this list, which functions such as "
            f"get_data_parallel_src_rank() read. Let the generator give ascending ranks.",
            RuntimeWarning,
            stacklevel=2,
        )


def watch(namespace: Mapping[str, Any]) -> None:
    """Look for replaced functions in ``namespace``, where those of now are the module's own."""
    global _namespace
    _namespace = namespace
    _originals.update({name: namespace[name] for name in HELPERS if name in namespace})
    _generator_parts.update(vars(namespace["RankGenerator"]))


def replaced_functions() -> dict[str, Callable[..., Any]]:
    """The functions that initialisation calls and that outside code has replaced, by name."""
    from hypergrid.groups import creation  # here, for plans on machines without torch

    replaced = {}
    for name, original in _originals.items():
        if _namespace[name] is not original:
            replaced[name] = _namespace[name]
    own_generator = _originals.get("RankGenerator")
    if own_generator is not None and dict(vars(own_generator)) != _generator_parts:
        # A method was replaced in the class.
        replaced.setdefault("RankGenerator", own_generator)
    new_group = _dist().new_group
    if creation.is_replaced(new_group) and not hasattr(new_group, MEMBERS_ONLY):
        replaced[NEW_GROUP] = new_group
    return replaced


def now(function: F) -> F:
    """The function that is called for ``function`` now: itself, or what has replaced it."""
    replacement: F = _namespace.get(function.__name__, function)
    return replacement


def creates(helpers: Helpers) -> bool:
    """Whether outside code takes part in creating groups."""
    return not helpers.keys().isdisjoint(CREATORS)


def members_only(helpers: Helpers) -> bool:
    """Whether all functions that create groups were declared to need members only."""
    creators = [helpers[name] for name in CREATORS if name in helpers]
    return bool(creators) and all(hasattr(creator, MEMBERS_ONLY) for creator in creators)


def in_words(helpers: Helpers) -> str:
    """The names of what was replaced, for messages; empty if nothing was."""
    return ", ".join(name for name in HELPERS if name in helpers)
