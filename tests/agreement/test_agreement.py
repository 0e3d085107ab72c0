"""Ranks agree before they create: nobody waits in vain, and all say the same."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat import parallel_state as ps
from hypergrid import AgreementError, CreationError, HyperCommGrid
from hypergrid.agreement.commit import Phase, _Memory, _Round, all_or_none
from hypergrid.agreement.reports import clear_before
from hypergrid.policy import Abilities, Policy
from tests.support.forked import from_all, on_ranks, open_groups, total


@on_ranks(8)
def test_a_rank_that_refuses_its_arguments_keeps_nobody_waiting(rank):
    start = time.monotonic()  # of 30 minutes
    with pytest.raises(RuntimeError) as raised:
        ps.initialize_model_parallel(3 if rank == 3 else 2)
    assert time.monotonic() - start < 35
    assert not ps.is_initialized() and len(open_groups()) == 1
    own = "world size 8 is not divisible by tensor_model_parallel_size=3"
    if rank == 3:
        assert raised.type is RuntimeError and str(raised.value).startswith(own)
    else:
        assert raised.type is AgreementError and own in str(raised.value)
        assert str(raised.value).startswith("rank 3 refused its arguments")
    assert len({*from_all(str(raised.value))}) == 2
    ps.initialize_model_parallel(2)  # corrected, in the same processes
    assert total(ps.get_data_parallel_group()) == 4


@on_ranks(8)
def test_who_did_not_come_is_named_and_all_can_try_again(rank):
    if rank != 5:
        with pytest.raises(
            AgreementError, match=r"1 of 8 ranks \(5.*\) did not reach group creation.*0:00:05\."
        ):
            ps.initialize_model_parallel(2, distributed_timeout_minutes=5 / 60)
    dist.barrier()
    ps.initialize_model_parallel(2)
    assert total(ps.get_data_parallel_group()) == 4


class _Rank:
    """A rank of its own process: it remembers its own rounds."""

    def __init__(self, store, rank, ranks=range(3)):
        self.store, self.rank, self.ranks, self.memory = store, rank, ranks, _Memory()

    def arrive(self, proposal=None, can=None):
        with mock.patch("torch.distributed.get_rank", return_value=self.rank):
            self.round = _Round(self.store, self.ranks, self.memory)
        self.round.arrive(proposal or {"tp": 2}, can or Abilities(), Policy())
        return self

    def outcome(self, seconds=1):
        return self.round.outcome(timedelta(seconds=seconds))


def _agree(ranks):
    """Each in a thread, since ranks that differ wait for each other."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(lambda rank: rank.outcome(), ranks)]


@on_ranks(2)
def test_the_last_to_arrive_does_not_succeed_before_a_failure_is_published(rank):
    store = c10d._get_default_store()
    publish = Phase.publish

    def late(phase, *outcome, **early):
        store.set("failed", "")  # it has arrived
        time.sleep(1)
        return publish(phase, *outcome, **early)

    with pytest.raises(RuntimeError), all_or_none(store, "1", range(2), timedelta(seconds=10)):
        if rank == 0:
            Phase.publish = late
            raise CreationError("no more memory")
        store.wait(["failed"])


@on_ranks(2)
def test_an_error_on_every_rank_is_short_and_names_the_first_to_fail(rank):
    keys = ", ".join(
        f"/default_pg/0//222381884149770745077552881044418759526//{n}" for n in range(64)
    )
    why = RuntimeError(f"wait timeout after 3000ms, keys: {keys}, remote=[10.77.0.{rank}]:1")

    @members_only
    def new_group(*args, **kwargs):
        raise why

    with mock.patch.object(dist, "new_group", new_group), pytest.raises(CreationError) as raised:
        ps.initialize_model_parallel()
    text = str(raised.value)
    assert text.startswith(f"rank {rank} could not create ") and len(text) < 600
    assert len({each.partition("The first to fail: ")[2] for each in from_all(text)} - {""}) == 1
    assert "RuntimeError: wait timeout" in text and "remote=[10.77.0." in text


def test_a_fresh_process_in_a_dead_ones_place_is_counted_once():
    store = dist.HashStore()
    dead = _Rank(store, 1).arrive()
    others = [_Rank(store, 0).arrive(), _Rank(store, 1).arrive()]
    assert not store.check(["hypergrid/0..2/0/prepare/outcome"])
    others.append(_Rank(store, 2).arrive())
    assert {each.outcome()["epoch"] for each in others} == {"0..2/0"}
    assert dead.rank == 1
    for each in others:  # and the round after it is open to a fresh process too
        each.memory = _Memory()
        each.arrive()
    assert {each.outcome()["epoch"] for each in others} == {"0..2/1"}


def test_what_a_dead_process_said_is_forgotten():
    store = dist.HashStore()
    _Rank(store, 1).arrive({"tp": 4})
    ranks = [_Rank(store, rank).arrive() for rank in range(3)]
    assert all("error" not in each.outcome() for each in ranks)


def test_a_process_in_the_place_of_the_last_that_arrived_finds_its_round_decided():
    store = dist.HashStore()
    ranks = [_Rank(store, rank).arrive() for rank in range(3)]
    assert {each.outcome()["epoch"] for each in ranks} == {"0..2/0"}
    fresh = _Rank(store, 2).arrive()
    assert fresh.round.epoch == "0..2/1"


def test_ranks_that_differ_hear_of_one_of_each_kind():
    store = dist.HashStore()
    ranks = [_Rank(store, rank).arrive({"tp": 4 if rank == 2 else 2}) for rank in range(3)]
    (text,) = {outcome["error"] for outcome in _agree(ranks)}
    assert "tp is 4 on rank 2 and 2 on rank" in text


def test_what_one_rank_cannot_do_is_done_by_none():
    store = dist.HashStore()
    slow = Abilities("slow")
    ranks = [_Rank(store, rank).arrive(can=slow if rank == 1 else None) for rank in range(3)]
    assert {outcome["way"] for outcome in _agree(ranks)} == {"everyone"}


def test_what_a_rank_decided_holds_though_it_ended_before_it_published():
    store = dist.HashStore()
    killed = mock.Mock(side_effect=SystemExit)
    phases = [Phase(store, range(3), rank, killed) for rank in range(3)]
    for phase in phases:
        phase.arrive()
    with pytest.raises(SystemExit):
        phases[2].publish("all have theirs")
    start = time.monotonic()
    for phase in phases[:2]:
        assert phase.outcome(timedelta(seconds=2), str) == "all have theirs"
    assert time.monotonic() - start < 15


def _meet(ranks, meeting):
    for each in ranks:
        each.arrive()
    for each in ranks:
        assert each.outcome()["epoch"] == f"0..2/{meeting}"


def test_of_all_rounds_only_the_keys_of_the_last_one_are_left():
    store, counts = dist.HashStore(), []
    ranks = [_Rank(store, rank) for rank in range(3)]
    for meeting in range(4):
        _meet(ranks, meeting)
        clear_before(store, f"0..2/{meeting}")
        counts.append(store.num_keys())
    assert counts[0] == counts[-1] <= 4 + len(ranks)


def test_ranks_that_are_missing_are_named_and_a_late_one_is_in_the_next_round():
    store = dist.HashStore()
    early, late = _Rank(store, 0, range(2)).arrive(), _Rank(store, 1, range(2))
    given_up = early.outcome(0.1)
    assert "1 of 2 ranks (1" in given_up["error"]
    late.arrive()
    assert late.round.number == 1
    assert early.arrive().outcome() == late.outcome()


def test_a_store_of_files_keeps_no_line_of_a_round_that_failed(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    ranks = [_Rank(store, rank) for rank in range(3)]
    _meet(ranks, 0)
    clear_before(store, "0..2/0")
    before = store.num_keys()
    for rank in ranks:
        rank.arrive({"tp": rank.rank})
    assert "tp is" in _agree(ranks)[0]["error"]
    ranks[0].arrive()
    assert "2 of 3 ranks" in ranks[0].outcome(0.1)["error"]
    for rank in ranks:
        rank.memory.rounds["0..2"] = 3
    _meet(ranks, 3)
    clear_before(store, "0..2/3")
    assert store.num_keys() == before


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


def test_a_store_that_can_do_only_what_torch_asks_for_is_as_good():
    store = _Plain()
    ranks = [_Rank(store, rank) for rank in range(3)]
    for meeting in range(3):
        _meet(ranks, meeting)
        clear_before(store, f"0..2/{meeting}")  # it cannot delete, as etcd's
    for rank in ranks:
        rank.arrive({"tp": rank.rank})
    (text,) = {outcome["error"] for outcome in _agree(ranks)}
    assert "tp is" in text


@on_ranks(4, timeout=90)
def test_a_rank_that_others_only_waited_for_names_its_own_failure(rank):
    def connects_in_vain(*args, **kwargs):
        time.sleep(8)  # the others wait five seconds for its address
        raise RuntimeError("no route to host")

    grid = HyperCommGrid([4], ["tp"])
    create = c10d.ProcessGroupGloo.__init__
    fails = connects_in_vain if rank == 2 else create
    with (
        mock.patch.object(c10d.ProcessGroupGloo, "__init__", fails),
        pytest.raises(CreationError) as raised,
    ):
        grid.create_pg("tp", timeout=timedelta(seconds=10))
    text = str(raised.value)
    if rank == 2:
        assert "no route to host" in text and "first to fail" not in text
    else:
        assert "ranks 2 published no address to connect to" in text and "keys" not in text
