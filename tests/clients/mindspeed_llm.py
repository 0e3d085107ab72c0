"""As MindSpeed-LLM: create_group and RankGenerator replaced while Megatron initialises."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tests.clients import Client, Step

EDGE = 2  # ranks of the first host, which the other hosts' pipelines share


def create_group(
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: Any = None,
) -> Any:
    """Its own: every rank once, and not by way of the original."""
    return dist.new_group(
        ranks=list(set(ranks)),
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )


def a_question_to_all_ranks() -> None:
    """Its generator asks rank 0 in every call: the ranks must make the same calls in step."""
    if dist.get_backend() != "fake":
        edges = [EDGE if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(edges, src=0)
        assert edges == [EDGE]


def ranks_in_another_order(client: Client) -> Iterator[Step]:
    """A generator that begins to count at another rank."""
    module = client.module
    tokens: Counter[str] = Counter()

    class Generator(module.RankGenerator):  # type: ignore[name-defined, misc]
        def get_ranks(self, token: str) -> list[list[int]]:
            a_question_to_all_ranks()
            tokens[token] += 1
            world = dist.get_world_size()
            return [[(rank + 1) % world for rank in ranks] for ranks in super().get_ranks(token)]

    original = module.RankGenerator, module.create_group
    module.RankGenerator, module.create_group = Generator, create_group
    try:
        client.initialise()
    finally:
        module.RankGenerator, module.create_group = original
    yield "initialised", None
    yield "what it was asked for", sorted(tokens)


def pipelines_that_share_a_stage(client: Client) -> Iterator[Step]:
    """A small first host serves several pipelines; torch tells a larger world meanwhile.

    From inside a wrapper of ``initialize_model_parallel`` that calls the original by position.
    """
    module, initialise = client.module, client.module.initialize_model_parallel

    class Generator(module.RankGenerator):  # type: ignore[name-defined, misc]
        def get_ranks(self, token: str) -> list[list[int]]:
            a_question_to_all_ranks()
            sizes = (self.tp, self.ep, self.dp), (self.cp, self.order)
            edge = original[0](*sizes[0], 1, *sizes[1]).get_ranks(token)
            rest = original[0](*sizes[0], self.pp - 1, *sizes[1]).get_ranks(token)
            edge = [[rank % EDGE for rank in ranks] for ranks in edge]
            rest = [[rank + EDGE for rank in ranks] for ranks in rest]
            if "pp" in token.split("-"):
                return [at_edge + inside for at_edge, inside in zip(edge, rest, strict=True)]
            return edge + rest

    original = module.RankGenerator, dist.get_world_size

    @functools.wraps(initialise)
    def wrapper(tp: int = 1, pp: int = 1, virtual: Any = None) -> None:
        world = dist.get_world_size()
        dist.get_world_size = lambda *args, **kwargs: world + tp
        module.RankGenerator = Generator
        try:
            initialise(tp, pp, virtual)
        finally:
            module.RankGenerator, dist.get_world_size = original

    module.initialize_model_parallel = wrapper
    before, module.create_group = module.create_group, create_group
    try:
        module.initialize_model_parallel(*client.sizes.values())
    finally:
        module.initialize_model_parallel, module.create_group = initialise, before
    yield "initialised", None


def groups_written_anew(client: Client) -> Iterator[Step]:
    """After a repair: a new gloo group made by its members alone, in the place of the old one."""
    client.initialise()
    yield "initialised", None
    module = client.module
    for slot, ranks in (
        ("_DATA_PARALLEL_GROUP_GLOO", "_DATA_PARALLEL_GLOBAL_RANKS"),
        ("_DATA_PARALLEL_GROUP_WITH_CP_GLOO", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"),
    ):
        group = module.create_group(
            getattr(module, ranks),
            timeout=None,
            backend="gloo",
            group_desc=slot.strip("_"),
            use_local_synchronization=True,
        )
        dist.destroy_process_group(getattr(module, slot))
        setattr(module, slot, group)
    yield (
        "repaired",
        [
            dist.get_process_group_ranks(module.get_data_parallel_group_gloo(with_cp))
            for with_cp in (False, True)
        ],
    )
    module.destroy_model_parallel()
    yield "destroyed", None
