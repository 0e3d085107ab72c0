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
