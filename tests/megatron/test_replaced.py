"""Functions of parallel_state that outside code replaces: on real ranks, refused, and told."""

import functools
import json
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

import hypergrid
from compat import parallel_state as ps
from compat.report import report
from tests.support.forked import from_all, on_ranks, open_groups, total

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
    assert "outside code has replaced create_group" in report(ps.current_state())
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


@pytest.mark.parametrize("is_real", [True, False])
def test_a_world_that_is_only_told_is_refused_with_the_way_to_plan_it(fake_world, is_real):
    if is_real:
        fake_world(1)
    told = {"get_rank": 5, "get_world_size": 8, "is_initialized": True}
    with ExitStack() as patched:
        for name, answer in told.items():
            function = functools.partial(lambda answer, group=None: answer, answer)
            patched.enter_context(mock.patch.object(dist, name, function))
        with pytest.raises(RuntimeError, match=r"8 ranks.*`hypergrid plan --world-size 8`"):
            ps.initialize_model_parallel(2)
    assert not ps.model_parallel_is_initialized()
