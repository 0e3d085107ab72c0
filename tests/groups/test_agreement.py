"""Ranks agree before they create: nobody waits in vain, and all say the same."""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from hypergrid import AgreementError
from hypergrid.groups.prepare import Abilities, Policy, _Round
from tests.support.forked import from_all, on_ranks


def _check(rank):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=True))


@on_ranks(8)
def test_a_rank_that_refuses_its_arguments_keeps_nobody_waiting(rank):
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        ps.initialize_model_parallel(3 if rank == 3 else 2)
    assert time.monotonic() - start < 10
    assert not ps.is_initialized() and len(c10d._world.pg_map) == 1
    own = "world size 8 is not divisible by tensor_model_parallel_size=3"
    if rank == 3:
        assert raised.type is RuntimeError and str(raised.value).startswith(own)
    else:
        assert raised.type is AgreementError and own in str(raised.value)
        assert str(raised.value).startswith("rank 3 refused its arguments")
    assert len({*from_all(str(raised.value))}) == 2
    ps.initialize_model_parallel(2)  # corrected, in the same processes
    _check(rank)


@on_ranks(8)
def test_who_did_not_come_is_named_and_all_can_try_again(rank):
    if rank != 5:
        with pytest.raises(AgreementError, match=r"1 of 8 ranks \(5\) did not.*0:00:05\."):
            ps.initialize_model_parallel(2, distributed_timeout_minutes=5 / 60)
    dist.barrier()
    ps.initialize_model_parallel(2)
    _check(rank)


def _round(store, rank, ranks=range(3)):
    with mock.patch("torch.distributed.get_rank", return_value=rank):
        return _Round(store, ranks)


def test_a_fresh_process_in_a_dead_ones_place_is_counted_once():
    store = dist.HashStore()
    rounds = [_round(store, rank) for rank in (0, 1, 1, 2)]
    for each in rounds:
        each.arrive({"tp": 2}, Abilities(), Policy())
    assert {each.wait(timedelta(seconds=1))["epoch"] for each in (rounds[0], *rounds[2:])} == {
        "0..2/0"
    }
    assert _round(store, 0).number == 1


def test_what_a_dead_process_said_is_forgotten():
    store = dist.HashStore()
    _round(store, 1).arrive({"tp": 4}, Abilities(), Policy())
    rounds = [_round(store, rank) for rank in range(3)]
    for each in rounds:
        each.arrive({"tp": 2}, Abilities(), Policy())
    assert all("error" not in each.wait(timedelta(seconds=1)) for each in rounds)


def test_a_refusal_stands_until_all_have_heard_of_it():
    store = dist.HashStore()
    assert _round(store, 1, range(2)).arrive({"refused": "no"}, Abilities(), Policy())
    again, other = _round(store, 1, range(2)), _round(store, 0, range(2))
    assert not again.arrive({"tp": 2}, Abilities(), Policy())
    assert other.arrive({"tp": 2}, Abilities(), Policy())
    assert "rank 1 refused" in other.wait(timedelta(seconds=1))["error"]
    assert again.wait(timedelta(seconds=1)) == other.wait(timedelta(seconds=1))
    assert _round(store, 1, range(2)).arrive({"tp": 2}, Abilities(), Policy())


def _meet(store, meeting):
    rounds = [_round(store, rank) for rank in range(3)]
    for each in rounds:
        each.arrive({"tp": 2}, Abilities("slow"), Policy())
    for each in rounds:
        assert each.wait(timedelta(seconds=1))["epoch"] == f"0..2/{meeting}"


def test_once_all_have_read_the_verdict_nothing_is_left_but_the_number_of_the_round():
    store = dist.HashStore()
    for meeting in range(3):
        _meet(store, meeting)
        assert store.num_keys() == 1


def test_a_rank_that_comes_to_a_round_that_was_given_up_learns_why():
    store = dist.HashStore()
    early, late = _round(store, 0, range(2)), _round(store, 1, range(2))
    early.arrive({}, Abilities(), Policy())
    given_up = early.wait(timedelta(milliseconds=100))
    late.arrive({}, Abilities(), Policy())
    assert late.wait(timedelta(seconds=1)) == given_up and "1 of 2 ranks" in given_up["error"]


class _Plain(dist.Store):
    """A store of somebody's own in Python, with no more than torch asks for."""

    def __init__(self):
        super().__init__()
        self.kept = dist.HashStore()

    def set(self, key, value):
        self.kept.set(key, value)

    def get(self, key):
        return self.kept.get(key)

    def add(self, key, amount):
        return self.kept.add(key, amount)

    def check(self, keys):
        return self.kept.check(keys)

    def wait(self, keys, timeout=timedelta(seconds=5)):
        self.kept.wait(keys, timeout)


def test_a_store_that_cannot_delete_is_as_good():
    store = _Plain()
    for meeting in range(3):
        keys = store.kept.num_keys()
        _meet(store, meeting)
        assert store.kept.num_keys() > keys  # what the last round left is still there
