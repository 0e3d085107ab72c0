"""compat.parallel_state beside stock Megatron, release by release: ranks, names, answers."""

import datetime
import functools
import itertools
import random
from types import ModuleType
from unittest import mock

import pytest

from compat.megatron import rank_generator
from compat.megatron.releases import RELEASE_HAS
from tests.parity.configurations import random_order
from tests.parity.mutants import run_mutant
from tests.parity.surface import compare_surface
from tests.support import warm
from tests.support.stock import MAIN, RELEASES, have_stock, load_stock

TODAY = int(f"{datetime.date.today():%Y%m%d}")


@pytest.fixture(scope="module", params=MAIN)
def release(request):
    if not have_stock(request.param):
        pytest.skip(f"run scripts/fetch_megatron {request.param}")
    return request.param


def compare(release, *how, n, world):
    """Run `scripts/parity` over today's configurations, and find no difference."""
    command = ["scripts/parity", "--release", release, *how, "-n", str(n), "--seed", str(TODAY)]
    command += ["--max-world", str(world)]
    done = warm.run(*command, timeout=600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert done.stdout.splitlines()[1].split()[:2] == [release, str(n)]


stock = functools.cache(load_stock)


def test_the_rank_generator_gives_every_combination_of_dims_stocks_groups(release):
    gtp = release == MAIN[-1]
    dims = ["tp", "cp", "ep", "dp", "pp"] + ["gtp_remat"] * gtp
    for number in range(60):
        rng = random.Random(f"{TODAY}/{number}")
        arguments = {dim: rng.choice([1, 1, 2, 3]) for dim in dims}
        arguments["order"] = random_order(rng, rng.sample(dims, len(dims)), arguments, gtp)
        arguments["rank_offset"] = rng.choice([-2, 0, 1, 30])
        with mock.patch.dict(RELEASE_HAS, gtp_remat=gtp):
            try:
                stocks = stock(release).RankGenerator(**arguments)
            except AssertionError:  # both ep and cp
                with pytest.raises(AssertionError):
                    rank_generator.RankGenerator(**arguments)
                continue
            generator = rank_generator.RankGenerator(**arguments)
        for name in vars(stocks):
            assert getattr(generator, name) == getattr(stocks, name), (name, arguments)
        for count in range(1, len(dims) + 1):
            for group_dims in itertools.combinations(rng.sample(dims, len(dims)), count):
                token = "-".join(group_dims)
                assert generator.get_ranks(token) == stocks.get_ranks(token), (token, arguments)
                mask = generator.get_mask(generator.order, token)
                assert mask == stocks.get_mask(stocks.order, token), (token, arguments)


def test_random_configurations_show_no_difference(release):
    compare(release, n=30, world=128)


@pytest.mark.parametrize("release", [release for release in RELEASES if release not in MAIN])
def test_a_few_configurations_of_the_other_releases_show_no_difference(release):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    compare(release, n=4, world=16)


QUICK_MUTANTS = [
    "tp-cp becomes tp-dp",
    "another timeout",
    "a getter of another group",
    "an alias becomes a copy",
    "another default",
    "another exception",
    "zero taken for unset",
    "destroy forgets",
]


@pytest.mark.parametrize("mutant", QUICK_MUTANTS)
def test_a_broken_copy_of_stock_is_noticed(release, mutant):
    assert run_mutant(mutant, release, n=30, seed=1, max_world=16).differences


def test_a_module_without_a_function_or_a_global_is_noticed(release):
    poor = ModuleType("poor")
    vars(poor).update(vars(stock(release)))
    del poor.get_data_parallel_group, poor._MODEL_PARALLEL_GROUP
    lacking = {line.partition(":")[0] for line in compare_surface(poor, release)}
    assert lacking == {"get_data_parallel_group", "_MODEL_PARALLEL_GROUP"}
