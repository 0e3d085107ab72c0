"""compat.parallel_state beside stock Megatron, release by release: ranks, names, answers."""

import datetime
import functools
import itertools
import math
from types import ModuleType
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.megatron import rank_generator
from compat.megatron.releases import RELEASE_HAS
from tests.parity import run
from tests.parity.mutants import run_mutant
from tests.parity.surface import compare_surface
from tests.support import warm
from tests.support.stock import MAIN, RELEASES, have_stock, load_stock, source_dir

TODAY = int(f"{datetime.date.today():%Y%m%d}")


@pytest.fixture(scope="module", params=MAIN)
def release(request):
    try:
        source_dir(request.param)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return request.param


def compare(*releases, n, world):
    """Run `scripts/parity` over today's configurations, and find no difference."""
    command = ["scripts/parity", "-n", str(n), "--seed", str(TODAY), "--max-world", str(world)]
    for release in releases:
        command += ["--release", release]
    done = warm.run(*command, timeout=600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert [row.split()[:2] for row in done.stdout.splitlines()[1:]] == [
        [release, str(n)] for release in releases
    ]


stock = functools.cache(load_stock)


def dims_of(release):
    return ["tp", "cp", "ep", "dp", "pp"] + ["gtp_remat"] * (release == MAIN[-1])


def generator_arguments(dims):
    """Sizes, offset and an order: any permutation, some dims of size 1 left out, any case."""

    @st.composite
    def drawn(draw):
        sizes = {dim: draw(st.sampled_from([1, 1, 2, 3])) for dim in dims}
        sizes[draw(st.sampled_from(["ep", "cp"]))] = 1
        order = draw(st.permutations(dims))
        # 0.19 takes tp for named where gtp_remat is: there it cannot be left out.
        needed = {"tp"} if "gtp_remat" in dims else set()
        idle = [dim for dim in dims if sizes[dim] == 1 and dim not in needed]
        out = draw(st.sets(st.sampled_from(idle)))
        text = "-".join(dim for dim in order if dim not in out) or dims[0]
        text = draw(st.sampled_from([text, text.upper(), text.title()]))
        return sizes | {"order": text, "rank_offset": draw(st.sampled_from([-2, 0, 1, 30]))}

    return drawn()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_rank_generator_gives_every_combination_of_dims_stocks_groups(release, data):
    dims = dims_of(release)
    arguments = data.draw(generator_arguments(dims))
    stocks = stock(release).RankGenerator(**arguments)
    with mock.patch.dict(RELEASE_HAS, gtp_remat="gtp_remat" in dims):
        generator = rank_generator.RankGenerator(**arguments)
    for name in vars(stocks):
        assert getattr(generator, name) == getattr(stocks, name), name
    for count in range(1, len(dims) + 1):
        for group_dims in itertools.combinations(data.draw(st.permutations(dims)), count):
            token = "-".join(group_dims)
            assert generator.get_ranks(token) == stocks.get_ranks(token), token
            mask = generator.get_mask(generator.order, token)
            assert mask == stocks.get_mask(stocks.order, token)


@settings(deadline=None)
@given(data=st.data())
def test_the_groups_of_a_mask_are_stocks(release, data):
    dims = data.draw(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=5))
    sizes = [size for size, _ in dims]
    mask = [is_picked for _, is_picked in dims]
    world = data.draw(st.integers(1, 2 * math.prod(sizes)))
    arguments = (world, sizes, mask)
    try:
        groups = stock(release).generate_masked_orthogonal_rank_groups(*arguments)
    except AssertionError:
        with pytest.raises(AssertionError, match="Make them equal"):
            rank_generator.generate_masked_orthogonal_rank_groups(*arguments)
    else:
        assert rank_generator.generate_masked_orthogonal_rank_groups(*arguments) == groups


def test_random_configurations_show_no_difference(release):
    compare(release, n=60, world=128)


def test_a_few_configurations_of_the_other_releases_show_no_difference():
    further_releases = [release for release in RELEASES if release not in MAIN]
    fetched = [release for release in further_releases if have_stock(release)]
    if not fetched:
        names = " ".join(further_releases)
        pytest.skip(f"no source of {names}: run scripts/fetch_megatron {names}")
    compare(*fetched, n=4, world=16)


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


def test_stock_differs_in_nothing_from_a_second_copy_of_itself(release):
    report = run(functools.partial(load_stock, release), release, n=5, seed=TODAY, max_world=16)
    assert report.configurations == 5
    assert not report.differences, report


def test_a_module_without_a_function_or_a_global_is_noticed(release):
    poor = ModuleType("poor")
    vars(poor).update(vars(stock(release)))
    del poor.get_data_parallel_group, poor._MODEL_PARALLEL_GROUP
    lacking = {line.partition(":")[0] for line in compare_surface(poor, release)}
    assert lacking == {"get_data_parallel_group", "_MODEL_PARALLEL_GROUP"}
