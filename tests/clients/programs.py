"""What other projects do to ``parallel_state``, each in our own words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.parity.patching import Stub
from tests.parity.surface import Config, private_globals
from tests.parity.watching import Client, Step

EDGE = 2  # ranks of the first host, which the other hosts' pipelines share


@dataclass(frozen=True)
class Program:
    """One behaviour of one client: the code, and the world in which it is tried."""

    run: Callable[[Client], Iterator[Step]]
    world: int = 16  # 0: torch.distributed is not initialised
    tp: int = 2
    pp: int = 2
    cp: int = 1
    ep: int = 2

    def config(self) -> Config:
        """The world as ``tests.parity`` has it."""
        sizes = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
        }
        return {"world_size": self.world, "kwargs": sizes, "environment": {}, "positional": 0}


def forgotten_by_hand(client: Client) -> Iterator[Step]:
    """Close every group through torch, write None to every global, and initialise anew."""
    client.initialise()
    yield "initialised", None
    module = client.module
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    for name in private_globals(client.release):
        value = getattr(module, name)
        is_listed = name.endswith("_GROUPS") and value is not None
        setattr(module, name, type(value)() if is_listed else None)
    yield "forgotten", None
    module.initialize_model_parallel(tensor_model_parallel_size=4, expert_model_parallel_size=2)
    yield "initialised anew", None


def ranks_in_another_order(client: Client) -> Iterator[Step]:
    """A generator that begins to count at another rank, and asks rank 0 in every call.

    The ranks must make the same calls in step.
    """
    module = client.module

    class Generator(module.RankGenerator):  # type: ignore[name-defined, misc]
        def get_ranks(self, token: str) -> list[list[int]]:
            if dist.get_backend() != "fake":
                dist.broadcast_object_list([token], src=0)
            world = dist.get_world_size()
            return [[(rank + 1) % world for rank in ranks] for ranks in super().get_ranks(token)]

    with mock.patch.object(module, "RankGenerator", Generator):
        client.initialise()
    yield "initialised", None


def pipelines_that_share_a_stage(client: Client) -> Iterator[Step]:
    """A small first host serves several pipelines; torch tells a larger world meanwhile."""
    module = client.module
    original = module.RankGenerator

    class Generator(original):  # type: ignore[valid-type, misc]
        def get_ranks(self, token: str) -> list[list[int]]:
            edge = original(self.tp, self.ep, self.dp, 1, self.cp, self.order).get_ranks(token)
            edge = [[rank % EDGE for rank in ranks] for ranks in edge]
            inner_stages = self.pp - 1
            inside = original(self.tp, self.ep, self.dp, inner_stages, self.cp, self.order)
            rest = [[rank + EDGE for rank in ranks] for ranks in inside.get_ranks(token)]
            if "pp" in token.split("-"):
                return [at_edge + behind for at_edge, behind in zip(edge, rest, strict=True)]
            return edge + rest

    def create_group(ranks: list[int], **options: Any) -> Any:
        return dist.new_group(sorted(set(ranks)), **options)  # every rank once

    larger_world = dist.get_world_size() + EDGE
    with (
        mock.patch.multiple(module, RankGenerator=Generator, create_group=create_group),
        mock.patch.object(dist, "get_world_size", lambda *_, **__: larger_world),
    ):
        client.initialise()
    yield "initialised", None


def groups_written_anew(client: Client) -> Iterator[Step]:
    """After a repair: a new gloo group made by its members alone, in the place of the old one."""
    client.initialise()
    yield "initialised", None
    module = client.module
    slot = "_DATA_PARALLEL_GROUP_GLOO"
    group = module.create_group(
        module._DATA_PARALLEL_GLOBAL_RANKS,
        backend="gloo",
        group_desc="REPAIRED",
        use_local_synchronization=True,
    )
    dist.destroy_process_group(getattr(module, slot))
    setattr(module, slot, group)
    yield "repaired", dist.get_process_group_ranks(module.get_data_parallel_group_gloo())
    module.destroy_model_parallel()
    yield "destroyed", None


class Reloadable(dist.ProcessGroup):
    """Stands for a group, also while there is none."""

    def __init__(self, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(rank=dist.get_rank(group), size=dist.get_world_size(group))
        self.group = group
        self.args = args
        self.kwargs = kwargs

    def rank(self) -> int:
        return self.group.rank()  # type: ignore[no-any-return]

    def size(self) -> int:
        return self.group.size()  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def _unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that takes `Reloadable` groups too."""

    def plain(value: Any) -> Any:
        return value.group if isinstance(value, Reloadable) else value

    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        keywords = {name: plain(value) for name, value in kwargs.items()}
        return function(*map(plain, args), **keywords)

    return unwrapped


def groups_closed_and_made_anew(client: Client) -> Iterator[Step]:
    """torch's new_group gives groups that are closed to free memory, and made anew."""
    original = dist.new_group
    groups: list[Reloadable] = []

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = original(*args, **kwargs)
        groups.append(Reloadable(group, args, kwargs))
        return groups[-1]

    taking_both = {}
    for name in ("get_rank", "get_world_size", "get_process_group_ranks", "all_reduce"):
        taking_both[name] = _unwrapping(getattr(dist, name))
    with mock.patch.multiple(dist, new_group=new_group, **taking_both):
        client.initialise()
        yield "initialised", None
        for group in groups:
            if isinstance(group.group, dist.ProcessGroup):
                dist.destroy_process_group(group.group)
            group.group = None
        for group in groups:
            group.group = original(*group.args, **group.kwargs)
        yield "made anew", None
        client.module.destroy_model_parallel()
        yield "destroyed", None


def a_converter(client: Client) -> Iterator[Step]:
    """Sizes through setters, two stand-ins, and a walk over ranks; no torch.distributed."""
    module = client.module
    for kind, size in (("tensor", 2), ("pipeline", 4), ("virtual_pipeline", None), ("expert", 2)):
        getattr(module, f"set_{kind}_model_parallel_world_size")(size)
    module._TENSOR_MODEL_PARALLEL_GROUP = Stub()
    module._EXPERT_MODEL_PARALLEL_GROUP = Stub()
    for pp in range(4):
        module.set_tensor_model_parallel_rank(pp % 2)
        module.set_pipeline_model_parallel_rank(pp)
        yield f"stage {pp}", None
    module.set_virtual_pipeline_model_parallel_rank(0)
    yield "a virtual stage", None


def numbers_and_groups_before(client: Client) -> Iterator[Step]:
    """What is written before an initialisation, or left by one that failed."""
    module = client.module
    module.set_tensor_model_parallel_world_size(16)
    module.set_virtual_pipeline_model_parallel_world_size(3)
    module.set_virtual_pipeline_model_parallel_rank(2)
    for description in ("ONE", "TWO"):
        module.create_group([*range(client.config["world_size"])], group_desc=description)
    yield "written", None
    client.initialise()
    yield "initialised", None
    module.destroy_model_parallel()
    with contextlib.suppress(RuntimeError):
        module.initialize_model_parallel(3)
    yield "destroyed, and refused", None
    module.destroy_model_parallel()
    client.initialise()
    yield "initialised anew", None


PROGRAMS = {
    "MindSpeed: forgotten by hand": Program(forgotten_by_hand, cp=2),
    "MindSpeed-LLM: ranks in another order": Program(ranks_in_another_order, cp=2),
    "MindSpeed-LLM: pipelines that share a stage": Program(
        pipelines_that_share_a_stage, world=6, ep=1
    ),
    "MindSpeed-LLM: groups written anew": Program(groups_written_anew, cp=2),
    "slime: groups closed and made anew": Program(groups_closed_and_made_anew, cp=2),
    "Megatron's tools: a converter": Program(a_converter, world=0),
    "Megatron's tests: numbers and groups before": Program(numbers_and_groups_before, cp=2),
}
