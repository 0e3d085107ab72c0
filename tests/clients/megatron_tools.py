"""As Megatron's own tools and tests: sizes set, stand-ins for groups written, getters mocked."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

from tests.clients import Client, Step


class Fake:
    """What a checkpoint converter writes in a group's place."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def a_converter_that_loads(client: Client) -> Iterator[Step]:
    """Sizes through setters, two stand-ins, and a walk over ranks; no torch.distributed."""
    module = client.module
    module.set_tensor_model_parallel_world_size(2)
    module.set_pipeline_model_parallel_world_size(4)
    module.set_virtual_pipeline_model_parallel_world_size(None)
    module.set_expert_model_parallel_world_size(2)
    module._TENSOR_MODEL_PARALLEL_GROUP = Fake(2)
    module._EXPERT_MODEL_PARALLEL_GROUP = Fake(2)
    for tp in range(2):
        module.set_tensor_model_parallel_rank(tp)
        for pp in range(4):
            module.set_pipeline_model_parallel_rank(pp)
            yield f"tp {tp}, pp {pp}", None
    module.set_virtual_pipeline_model_parallel_rank(0)
    yield "a virtual stage", None


def a_converter_that_saves(client: Client) -> Iterator[Step]:
    """A world of one rank that passes for a larger one."""
    module = client.module
    for kind, size in (("tensor", 2), ("pipeline", 2), ("expert", 4)):
        getattr(module, f"set_{kind}_model_parallel_world_size")(size)
        getattr(module, f"set_{kind}_model_parallel_rank")(0)
    data = Fake(1)
    module._TENSOR_MODEL_PARALLEL_GROUP = Fake(2)
    module._PIPELINE_MODEL_PARALLEL_GROUP = Fake(2)
    module._EXPERT_MODEL_PARALLEL_GROUP = Fake(4)
    module._DATA_PARALLEL_GROUP = data
    module._DATA_PARALLEL_GROUP_WITH_CP = data
    module._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = data
    module._EXPERT_DATA_PARALLEL_GROUP = Fake(1)
    yield "written", None
    module.set_pipeline_model_parallel_rank(1)
    yield "the next stage", None


def a_test_that_mocks(client: Client) -> Iterator[Step]:
    """Getters and globals patched by unittest.mock, and put back by it."""
    module = client.module
    client.initialise()
    yield "initialised", None
    with (
        mock.patch.object(module, "get_expert_model_parallel_world_size", lambda: 4),
        mock.patch.object(module, "get_tensor_model_parallel_rank", return_value=1),
        mock.patch.object(module, "is_pipeline_first_stage", return_value=True),
    ):
        yield "getters mocked", None
    with mock.patch.multiple(module, _TENSOR_MODEL_PARALLEL_GROUP=None, _MODEL_PARALLEL_GROUP=None):
        yield "globals mocked", None
    yield "put back", None
    module.set_expert_model_parallel_world_size(2)
    yield "a size set", None
    module.set_expert_model_parallel_world_size(None)
    yield "a size unset", None
    module.destroy_model_parallel()
    yield "destroyed", None


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
    yield "destroyed", None
    try:
        module.initialize_model_parallel(3)
    except RuntimeError as error:
        yield "destroyed, and refused", type(error).__name__
    module.destroy_model_parallel()
    client.initialise()
    yield "initialised anew", None
