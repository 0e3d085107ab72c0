"""Shared by all tests: which are slow, and a world in this process."""

import functools
import gc
import os
import random

import hypothesis
import pytest
import torch.distributed as dist

from tests.support import ROOT

# No deadline, as machines may be busy; each run draws the same.
hypothesis.settings.register_profile("hypergrid", deadline=None, derandomize=True)
hypothesis.settings.load_profile("hypergrid")


# What `scripts/test --fast` runs; everything else is marked slow.
FAST = (
    *("hypergrid", "cli", "show"),
    *(f"hangs/test_{each}.py" for each in ("diagnosis", "laws", "recording")),
    *("groups/test_grid.py", "groups/test_splits.py", "groups/test_sharing.py"),
    *("megatron/test_job.py", "megatron/test_hyper_comm_grid.py"),
    *("transformer_engine/test_transformer_engine.py", "scripts/test_torch_lines.py"),
)
IN_PROCESS_OF = "HYPERGRID_TESTS_OF_RELEASE"  # the release whose own process this is
# Files whose tests wait most of the time, for ranks that do not come or have ended.
WAITING = (
    *("agreement/test_agreement.py", "agreement/test_waits.py"),
    *("groups/test_abort.py", "groups/test_gloo.py"),
    *(f"hangs/test_{each}.py" for each in ("hangs", "record")),
    *(f"megatron/test_{each}.py" for each in ("faults", "hanging_gpt", "timeouts", "torchrun")),
    *("resiliency/test_resiliency.py", "scripts/test_gpu_check.py"),
)
# Files of minutes, the longest first.
LONGEST = (
    *("verification/test_verify.py", "swap/test_shadow.py", "cli/test_cluster_scripts.py"),
    *("hangs/test_laws.py", "megatron/test_training.py", "swap/test_swap.py"),
)


def release_of(item):
    """The release in whose own process a test runs: ``@pytest.mark.release("0.19.2")``."""
    marker = item.get_closest_marker("release")
    return marker.args[0] if marker else ""


@functools.cache
def run_in_process_of(release, file):
    """Run all tests of a file that run in this release's own process; what pytest printed."""
    from tests.support import stock, warm

    environment = {stock.ASKED: release}
    if release not in stock.PUBLISHED:
        if not stock.have_stock(release):
            pytest.skip(f"run scripts/fetch_megatron {release}")
        environment = stock.following(release)
    options = ("-rA", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist")
    environment[IN_PROCESS_OF] = release
    return warm.run("-m", "pytest", *options, file, timeout=300, **environment).stdout


def pytest_pyfunc_call(pyfuncitem):
    from compat.megatron.releases import RELEASE

    release = release_of(pyfuncitem)
    is_followed = release.startswith("{}.{}.".format(*RELEASE))
    if not release or is_followed or os.environ.get(IN_PROCESS_OF):
        return None
    printed = run_in_process_of(release, str(pyfuncitem.path))
    if f"PASSED {pyfuncitem.nodeid}\n" not in printed:
        pytest.fail(f"in the process of {release}:\n{printed}", pytrace=False)
    return True


def pytest_ignore_collect(collection_path, config):
    """With ``-m waits`` each process imports the files that wait alone."""
    if collection_path.suffix == ".py" and config.option.markexpr.startswith("waits"):
        return collection_path not in [ROOT / "tests" / each for each in WAITING]
    return None


def pytest_collection_modifyitems(items):
    if release := os.environ.get(IN_PROCESS_OF):
        items[:] = [item for item in items if release_of(item) == release]
    fast = [ROOT / "tests" / each for each in FAST]
    for item in items:
        if not any(item.path.is_relative_to(each) for each in fast):
            item.add_marker(pytest.mark.slow)
        if item.path in [ROOT / "tests" / each for each in WAITING]:
            item.add_marker(pytest.mark.waits)
    # The longest files first and short ones last, so that no worker is left alone with a long one.
    places = {ROOT / "tests" / each: place for place, each in enumerate(LONGEST)}

    def place(item):
        return places.get(item.path, len(places)), not item.get_closest_marker("slow")

    items.sort(key=place)


@pytest.fixture
def seed(request):
    """What random draws begin with: always the same, but new and printed in a long test."""
    if not request.node.get_closest_marker("long"):
        return 1
    drawn = random.SystemRandom().randrange(10**8)
    print(f"seed {drawn}")
    return drawn


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


@pytest.fixture
def loaded_dynamo():
    """What DDP, FSDP and optimizers import, loaded once for all ranks that a test forks."""
    import torch._dynamo  # noqa: F401


@pytest.fixture
def no_pools_of_earlier_tests():
    """Forget those whose groups torch no longer has: forked ranks inherit them otherwise."""
    from hypergrid.groups.pool import live_pools

    live_pools()
    gc.collect()


@pytest.fixture
def clean_state():
    """Destroy the current state afterwards, in this process."""
    yield
    from compat import parallel_state

    parallel_state.destroy_model_parallel()


@pytest.fixture
def world_without_torch(monkeypatch):
    """4096 ranks by WORLD_SIZE, for grids that are laid out and create nothing."""
    monkeypatch.setenv("WORLD_SIZE", "4096")


@pytest.fixture(autouse=True)
def nothing_aborted():
    """Forget an abort() in this process, as ranks that are forked from it would remember it."""
    from hypergrid.agreement import store

    store._aborts_before_creation = store._aborts
