"""Shared by all tests: torch and the package under test from this checkout."""

import hypothesis
import pytest
import torch.distributed as dist

hypothesis.settings.register_profile("hypergrid", deadline=None)  # machines may be busy
hypothesis.settings.load_profile("hypergrid")


@pytest.fixture
def fake_world():
    """Start a world of the given size in this process, as one of its ranks; ended afterwards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(world_size: int, rank: int = 0) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
