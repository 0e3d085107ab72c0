"""compat.parallel_state beside stock Megatron, release by release: ranks, names, answers."""

import itertools
import random
from unittest import mock

import pytest

from compat.megatron import rank_generator
from compat.megatron.releases import RELEASE_HAS
from tests.parity.configurations import random_order
from tests.support import warm
from tests.support.stock import EACH_RELEASE, MAIN, RELEASES, have_stock, load_stock


def compare(release, *how, n, world, seed):
    """Run `scripts/parity`, and find no difference."""
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    command = [
        "scripts/parity",
        *("--release", release),
        *("-n", str(n)),
        *("--seed", str(seed)),
        *("--max-world", str(world)),
        *how,
    ]
    done = warm.run(*command, timeout=600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert done.stdout.splitlines()[1].split()[:2] == [release, str(n)]


@pytest.mark.parametrize("release", MAIN)
def test_the_rank_generator_gives_every_combination_of_dims_stocks_groups(release):
    stock = load_stock(release)
    gtp = release == MAIN[-1]
    dims = ["tp", "cp", "ep", "dp", "pp"] + ["gtp_remat"] * gtp
    for number in range(60):
        rng = random.Random(number)
        arguments = {dim: rng.choice([1, 1, 2, 3]) for dim in dims}
        arguments["order"] = random_order(rng, rng.sample(dims, len(dims)), arguments, gtp)
        arguments["rank_offset"] = rng.choice([-2, 0, 1, 30])
        with mock.patch.dict(RELEASE_HAS, gtp_remat=gtp):
            try:
                stocks = stock.RankGenerator(**arguments)
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


@pytest.mark.parametrize("release", MAIN)
def test_random_configurations_show_no_difference(release, seed):
    compare(release, n=30, world=128, seed=seed)


@pytest.mark.parametrize("release", [release for release in RELEASES if release not in MAIN])
def test_a_few_configurations_of_the_other_releases_show_no_difference(release, seed):
    compare(release, n=4, world=16, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("release", MAIN)
def test_configurations_drawn_anew_show_no_difference(release, seed):
    compare(release, n=100, world=128, seed=seed)


@pytest.mark.parametrize("release", EACH_RELEASE)
def test_whatever_is_written_or_replaced_getters_answer_as_stock(release, seed):
    compare(release, "--patched", n=1, world=16, seed=seed)


@pytest.mark.parametrize("release", EACH_RELEASE)
def test_a_client_sees_what_it_sees_on_stock(release, seed):
    compare(release, "--clients", n=1, world=16, seed=seed)


@pytest.mark.parametrize("release", MAIN)
def test_wrong_arguments_are_refused_as_by_stock_in_a_sentence_and_leave_nothing(release, seed):
    compare(release, "--wild", n=150, world=16, seed=seed)
