"""Functions of parallel_state that outside code replaces: on real ranks, refused, and told."""

import functools
import json
from contextlib import ExitStack, suppress
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

import hypergrid
from compat import members_only
from compat import parallel_state as ps
from compat.report import report
from tests.parity.surface import public_functions
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

    for sizes in ({"context_parallel_size": 2}, {"num_distributed_optimizer_instances": 2}):
        with mock.patch.object(ps, "create_group", create_group):
            ps.initialize_model_parallel(**SIZES, **sizes)
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
    (count,) = {*from_all(len(calls))}
    assert count > 100  # every rank, for every group of the world
    ps.initialize_model_parallel(**SIZES)
    names_of_working_groups()


@on_ranks(8)
def test_one_that_needs_members_only_is_called_for_a_ranks_own_groups(rank):
    original, calls = ps.create_group, []

    @members_only
    def create_group(ranks, **options):
        calls.append(ranks)
        return original(ranks, **options)

    with mock.patch.object(ps, "create_group", create_group):
        ps.initialize_model_parallel(**SIZES, num_distributed_optimizer_instances=2)
    assert all(rank in ranks for ranks in calls)
    assert len(calls) == len(names_of_working_groups())


class Duplicating(ps.RankGenerator):
    """Talks to all ranks for each token, and lists ranks twice, as a real framework's does."""

    def get_ranks(self, token):
        groups = [super().get_ranks(token)]
        dist.broadcast_object_list(groups, src=0)
        return [[*ranks, ranks[0]] if "pp" not in token else ranks for ranks in groups[0]]


@on_ranks(8)
def test_a_rank_generator_that_communicates_decides_the_ranks(rank):
    def create_group(ranks=None, timeout=None, backend=None, pg_options=None, **options):
        return dist.new_group(
            list(set(ranks)), timeout=timeout, backend=backend, pg_options=pg_options, **options
        )

    with (
        mock.patch.object(ps, "RankGenerator", Duplicating),
        mock.patch.object(ps, "create_group", create_group),
    ):
        ps.initialize_model_parallel(**SIZES)
    assert ps.get_tensor_model_parallel_world_size() == 2
    assert ps.get_pipeline_model_parallel_rank() == rank // 4
    assert total(ps.get_data_parallel_group()) == 2


@pytest.mark.parametrize("policy", [{"share": "all"}, {"creation": "members"}])
def test_what_cannot_be_had_with_a_replaced_function_is_refused_by_name(fake_world, policy):
    fake_world(4)
    original = ps.create_group
    replacement = mock.patch.object(ps, "create_group", lambda *a, **k: original(*a, **k))
    with replacement, pytest.raises(ValueError, match=r"replaced .*create_group|create_group"):
        ps.initialize_model_parallel(2, **policy)
    assert not ps.is_initialized()


def test_groups_that_outside_code_closed_and_forgot_can_be_made_anew(fake_world):
    fake_world(8)
    ps.initialize_model_parallel(2)
    for name in dir(ps):
        if name.startswith("_") and "_GROUP" in name and getattr(ps, name) is not None:
            setattr(ps, name, None)
    ps.destroy_global_memory_buffer()  # or it is refused, as on stock
    ps.initialize_model_parallel(4)
    assert ps.get_tensor_model_parallel_world_size() == 4
    ps.destroy_model_parallel()
    assert len(open_groups()) == 1


class Pretended:
    """A group of a world that is not there, as one of its ranks."""

    def __init__(self, rank, ranks, desc):
        self.ranks, self.desc = list(ranks), desc
        self.rank = lambda: self.ranks.index(rank)
        self.size = lambda: len(self.ranks)


def rehearsed(module, rank, world):
    """What is created, and what getters answer, in two initialisations."""
    created = []
    answers_of_getters = []

    def new_group(ranks=None, group_desc=None, **options):
        created.append(
            (group_desc, tuple(ranks), str(options.get("timeout")), options.get("backend"))
        )
        return Pretended(rank, ranks, group_desc)

    answers = {"get_rank": rank, "get_world_size": world, "is_initialized": True}
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(dist, "new_group", new_group))
        for name, answer in answers.items():
            function = functools.partial(lambda answer, group=None: answer, answer)
            patched.enter_context(mock.patch.object(dist, name, function))
        for sizes in (2, 2, 2), (4, 1, 1):
            module.initialize_model_parallel(
                sizes[0],
                sizes[1],
                context_parallel_size=sizes[2],
                expert_model_parallel_size=2,
                create_gloo_process_groups=world == 16,
            )
            for name in public_functions("0.16.1"):
                if name.endswith(("_rank", "_world_size")) and name.startswith("get_"):
                    answers_of_getters.append((name, getattr(module, name)()))
                if name.endswith("_parallel_group"):
                    with suppress(AssertionError):
                        group = getattr(module, name)()
                        answers_of_getters.append((name, group.desc, group.ranks))
            with pytest.raises((KeyError, ValueError), match="zz"):
                module.initialize_model_parallel(2, order="tp-cp-ep-dp-pp-zz")
            module.destroy_model_parallel()
            answers_of_getters.append(module.is_initialized())
    return created, answers_of_getters


@pytest.mark.parametrize("real", [False, True], ids=["no default group", "one real rank"])
def test_a_world_that_is_only_told_is_rehearsed_as_on_stock(real, tmp_path):
    if real:
        dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for rank, world in (5, 8), (11, 16):
            stock = rehearsed(load_stock("0.16.1"), rank, world)
            with pytest.warns(UserWarning, match=f"says that there are {world} ranks") as caught:
                ours = rehearsed(ps, rank, world)
            assert ours == stock
            assert {warning.filename for warning in caught} == {__file__}
    finally:
        if real:
            dist.destroy_process_group()
