"""Functions of parallel_state that outside code replaces: on real ranks, refused, and told."""

import functools
import json
from contextlib import ExitStack, suppress
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hypergrid
from compat import members_only
from compat import parallel_state as ps
from compat.report import report
from compat.state import ParallelState
from hypergrid.errors import AgreementError
from tests.parity.surface import public_functions
from tests.support.forked import from_all, on_ranks, open_groups, run_ranks
from tests.support.stock import load_stock

SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def works_on_every_group():
    """The sums of all ranks' numbers over each of this rank's groups, by the group's ranks."""
    seen = {}
    for pooled in ps.current_state().pool.groups:
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=pooled.group)
        assert total.item() == sum(pooled.ranks), pooled
        seen[pooled.label] = (list(pooled.ranks), pooled.group.group_name)
    return seen


def _wrapped(rank):
    calls, original = [], ps.create_group

    @functools.wraps(original)
    def create_group(ranks=None, timeout=None, *rest, **kwargs):
        calls.append(kwargs.get("group_desc"))
        return original(ranks, timeout or timedelta(days=200), *rest, **kwargs)

    with mock.patch.object(ps, "create_group", create_group):
        ps.initialize_model_parallel(**SIZES, context_parallel_size=2)
        first = works_on_every_group()
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(**SIZES, num_distributed_optimizer_instances=2)
        second = works_on_every_group()
        state = ps.current_state()
        text = report(state)
        owners = {group["owner"] for group in json.loads(hypergrid.dump())["groups"]}
        ps.destroy_model_parallel()
    assert len(open_groups()) == 1
    ps.initialize_model_parallel(**SIZES)
    third = works_on_every_group()
    ps.destroy_model_parallel()
    return len(calls), first, second, third, text, owners


def test_a_replaced_create_group_makes_working_groups_that_close_with_the_others():
    results = run_ranks(8, _wrapped)
    counts, firsts, seconds, thirds, texts, owners = zip(*results, strict=True)
    assert len(set(counts)) == 1 and counts[0] > 100  # every rank, for every group of the world
    for lives in (firsts, seconds, thirds):
        named = {}
        for label, (ranks, name) in (each for life in lives for each in life.items()):
            assert named.setdefault((label, tuple(ranks)), name) == name  # on every member
        assert len(set(named.values())) == len(named)
    assert "outside code has replaced create_group" in texts[0]
    assert any(owner and "with create_group replaced" in owner for owner in owners[0])


@on_ranks(8)
def test_one_that_needs_members_only_is_called_for_a_ranks_own_groups(rank):
    original, calls = ps.create_group, []

    @members_only
    def create_group(ranks, **options):
        calls.append(ranks)
        return original(ranks, **options)

    with mock.patch.object(ps, "create_group", create_group):
        ps.initialize_model_parallel(**SIZES, num_distributed_optimizer_instances=2)
    seen = works_on_every_group()
    ps.destroy_model_parallel()
    assert all(rank in ranks for ranks in calls) and len(calls) == len(seen)


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
    total = torch.ones(1)
    dist.all_reduce(total, group=ps.get_data_parallel_group())
    ps.destroy_model_parallel()
    assert total.item() == 2


@on_ranks(4)
def test_ranks_that_replaced_different_functions_are_told(rank):
    original = ps.create_group
    if rank == 2:
        ps.create_group = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(AgreementError) as raised:
        ps.initialize_model_parallel(2)
    (text,) = {*from_all(str(raised.value))}
    assert "replaced in parallel_state is 'create_group' on rank 2 and None on rank 0" in text
    ps.create_group = original
    ps.initialize_model_parallel(2)


@on_ranks(4)
def test_a_state_of_ones_own_listens_too(rank):
    calls, original = [], ps.get_nccl_options

    def get_nccl_options(name, configs):
        calls.append(name)
        return original(name, configs)

    with mock.patch.object(ps, "get_nccl_options", get_nccl_options):
        state = ParallelState.create(**SIZES)
    state.destroy()
    assert len(calls) > 10


@on_ranks(4)
def test_groups_of_a_replaced_function_are_suspended_too(rank):
    original = ps.create_group
    with mock.patch.object(ps, "create_group", lambda *a, **k: original(*a, **k)):
        state = ParallelState.create(tensor_model_parallel_size=2)
    tp = state.get_tensor_model_parallel_group()
    assert state.suspend()["gloo"].how == "keep"
    state.resume()
    assert state.get_tensor_model_parallel_group() is tp
    state.destroy()


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


def _rehearsed(module, rank, world):
    """What is created, and what getters answer, in two initialisations."""
    created, seen = [], []

    def new_group(ranks=None, group_desc=None, **asked):
        created.append((group_desc, tuple(ranks), str(asked.get("timeout")), asked.get("backend")))
        return Pretended(rank, ranks, group_desc)

    told = {"get_rank": rank, "get_world_size": world, "is_initialized": True}
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(dist, "new_group", new_group))
        for name, value in told.items():
            answer = functools.partial(lambda value, group=None: value, value)
            patched.enter_context(mock.patch.object(dist, name, answer))
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
                    seen.append((name, getattr(module, name)()))
                if name.endswith("_parallel_group"):
                    with suppress(AssertionError):
                        group = getattr(module, name)()
                        seen.append((name, group.desc, group.ranks))
            with pytest.raises((KeyError, ValueError), match="zz"):
                module.initialize_model_parallel(2, order="tp-cp-ep-dp-pp-zz")
            module.destroy_model_parallel()
            seen.append(module.is_initialized())
    return created, seen


@pytest.mark.parametrize("real", [False, True], ids=["no default group", "one real rank"])
def test_a_world_that_is_only_told_is_rehearsed_as_on_stock(real, tmp_path):
    if real:
        dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for rank, world in (5, 8), (11, 16):
            stock = _rehearsed(load_stock("0.16.1"), rank, world)
            with pytest.warns(UserWarning, match=f"says that there are {world} ranks") as told:
                ours = _rehearsed(ps, rank, world)
            assert ours == stock
            assert {each.filename for each in told} == {__file__}
    finally:
        if real:
            dist.destroy_process_group()
