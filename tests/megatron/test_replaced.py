"""Functions of parallel_state that outside code replaces: on real ranks, refused, and told."""

import functools
import json
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

import hypergrid
from compat import parallel_state as ps
from tests.support.forked import from_all, on_ranks, open_groups, total
from tests.support.stock import load_stock

SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def names_of_working_groups():
    """By label and ranks, the name of each group of this rank; each adds up its ranks."""
    name_of = {}
    for pooled in ps.current_state().pool.groups:
        assert total(pooled.group, float(dist.get_rank())) == sum(pooled.ranks), pooled
        name_of[pooled.label, pooled.ranks] = pooled.group.group_name
    return name_of


@on_ranks(8)
def test_a_replaced_create_group_makes_working_groups_that_close_with_the_others(rank):
    calls = []
    original = ps.create_group

    @functools.wraps(original)
    def create_group(ranks=None, timeout=None, *rest, **kwargs):
        calls.append(kwargs.get("group_desc"))
        return original(ranks, timeout or timedelta(days=200), *rest, **kwargs)

    with mock.patch.object(ps, "create_group", create_group):
        ps.initialize_model_parallel(**SIZES, num_distributed_optimizer_instances=2)
    (count,) = {*from_all(len(calls))}
    assert count > 50  # every rank, for every group of the world
    name_of = {}
    for of_rank in from_all(names_of_working_groups()):
        for group, name in of_rank.items():
            assert name_of.setdefault(group, name) == name  # on every member
    assert len({*name_of.values()}) == len(name_of)
    owners = {group["owner"] for group in json.loads(hypergrid.dump())["groups"]} - {None}
    assert any("with create_group replaced" in owner for owner in owners)
    ps.destroy_model_parallel()
    assert len(open_groups()) == 1


@pytest.mark.parametrize("policy", [{"share": "all"}, {"creation": "members"}])
def test_what_cannot_be_had_with_a_replaced_function_is_refused_by_name(fake_world, policy):
    fake_world(4)
    original = ps.create_group
    replacement = mock.patch.object(ps, "create_group", lambda *a, **k: original(*a, **k))
    with replacement, pytest.raises(ValueError, match=r"replaced .*create_group|create_group"):
        ps.initialize_model_parallel(2, **policy)
    assert not ps.is_initialized()


class Pretended:
    """A group of a world that is not there, as one of its ranks."""

    def __init__(self, rank, ranks):
        self.rank = lambda: list(ranks).index(rank)
        self.size = lambda: len(ranks)


def rehearsed_groups(module, rank, world):
    """What a module creates where torch is replaced, so that it tells of a larger world."""
    created = []

    def new_group(ranks=None, group_desc=None, timeout=None, backend=None, **options):
        created.append((group_desc, tuple(ranks), str(timeout), backend))
        return Pretended(rank, ranks)

    replaced = mock.patch.multiple(
        dist,
        new_group=new_group,
        get_rank=lambda group=None: rank,
        get_world_size=lambda group=None: world,
        is_initialized=lambda: True,
    )
    with replaced:
        module.initialize_model_parallel(
            2,
            pipeline_model_parallel_size=2,
            context_parallel_size=2,
            expert_model_parallel_size=2,
            create_gloo_process_groups=False,
        )
        module.destroy_model_parallel()
    return created


def test_a_world_that_is_only_told_is_rehearsed_as_on_stock():
    with pytest.warns(UserWarning, match="says that there are 16 ranks") as caught:
        ours = rehearsed_groups(ps, 11, 16)
    assert caught[0].filename == __file__
    stock = rehearsed_groups(load_stock("0.16.1"), 11, 16)
    assert ours == stock and len(ours) > 50


@on_ranks(4)
def test_a_generator_whose_groups_descend_is_warned_of_once(rank):
    class Descending(ps.RankGenerator):
        def get_ranks(self, token):
            return [ranks[::-1] for ranks in super().get_ranks(token)]

    with (
        mock.patch.object(ps, "RankGenerator", Descending),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            ps.initialize_model_parallel(tensor_model_parallel_size=2)
            ps.destroy_model_parallel()
    told = [str(each.message) for each in caught if "do not ascend" in str(each.message)]
    assert len(told) == 1
    assert "such as [2, 0] over dp" in told[0]


def another_get_ranks(module):
    plain = module.RankGenerator.get_ranks
    tensor_ranks = [[0, 2], [1, 3]]
    module.RankGenerator.get_ranks = lambda generator, token: (
        tensor_ranks if token == "tp" else plain(generator, token)
    )


def another_order_behind_init(module):
    plain = module.RankGenerator.__init__

    def init(generator, *args, **kwargs):
        plain(generator, *args, **kwargs)
        generator.order = "-".join(sorted(generator.order.split("-")))
        sizes = generator.name_to_size
        generator.ordered_size = [sizes[name] for name in generator.order.split("-")]

    module.RankGenerator.__init__ = init


def a_subclass_with_another_mask(module):
    class Generator(module.RankGenerator):
        def get_mask(self, order, token):
            return super().get_mask(order, {"tp": "dp", "dp": "tp"}.get(token, token))

    module.RankGenerator = Generator


def a_subclass_without_its_parents_init(module):
    class Generator(module.RankGenerator):
        def __init__(self, tp, ep, dp, pp, cp, order, rank_offset=0):
            self.name_to_size = {"dp": dp, "tp": tp, "cp": cp, "ep": ep, "pp": pp}
            self.order = "-".join(self.name_to_size)
            self.ordered_size = list(self.name_to_size.values())
            self.world_size = 4
            self.rank_offset = 0

    module.RankGenerator = Generator


def groups_with(replace, module):
    """The ranks of this rank's groups, with RankGenerator replaced for this time."""
    generator = module.RankGenerator
    parts = {name: vars(generator)[name] for name in ("__init__", "get_ranks")}
    replace(module)
    try:
        module.initialize_model_parallel(tensor_model_parallel_size=2)
        tensor_group = module.get_tensor_model_parallel_group()
        data_group = module.get_data_parallel_group()
        ranks = [dist.get_process_group_ranks(group) for group in (tensor_group, data_group)]
        module.destroy_model_parallel()
    finally:
        module.RankGenerator = generator
        for name, part in parts.items():
            setattr(generator, name, part)
    return ranks


@on_ranks(4)
def test_what_replaces_a_part_of_rank_generator_decides_the_groups_as_on_stock(rank):
    stock = load_stock("0.16.1")
    for replace in (
        another_get_ranks,
        another_order_behind_init,
        a_subclass_with_another_mask,
        a_subclass_without_its_parents_init,
    ):
        expected = groups_with(replace, stock)
        assert {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}[rank] == expected[0]
        assert groups_with(replace, ps) == expected, replace.__name__
    assert groups_with(lambda module: None, ps)[0] == [rank // 2 * 2, rank // 2 * 2 + 1]
