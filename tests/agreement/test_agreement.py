"""Ranks agree before they create: nobody waits in vain, and all say the same."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import members_only
from compat import parallel_state as ps
from hypergrid import AgreementError, CreationError
from hypergrid.agreement import commit, reports
from hypergrid.agreement.commit import Phase, _Memory, _Round
from hypergrid.agreement.store import abortable, end_waits
from tests.support.forked import from_all, on_ranks, total

# The model: ranks are objects over one store.

WORLD = 4
ONE_AT_A_TIME = threading.Lock()


class Rank:
    """A rank as a process of its own would be: it remembers its own rounds."""

    def __init__(self, store, rank, world=WORLD):
        self.store = store
        self.rank = rank
        self.ranks = range(world)
        self.memory = _Memory()

    def arrive(self, proposal=None):
        with ONE_AT_A_TIME, mock.patch.object(dist, "get_rank", return_value=self.rank):
            self.round = _Round(self.store, self.ranks, self.memory)
        self.round.arrive(proposal or {"tp": 2})
        return self

    def outcome(self, seconds=1.0):
        """The error that is heard, or the epoch."""
        text = self.round.outcome(timedelta(seconds=seconds))
        return json.loads(text)["epoch"] if text.startswith("{") else text


def test_a_rank_that_has_refused_is_counted_once_where_another_is_missing():
    store = dist.HashStore()
    ranks = [Rank(store, rank) for rank in range(WORLD)]
    for rank in ranks[:2]:
        rank.arrive()
    ranks[2].arrive({"refused": "ValueError: no rank 2"}).round.report()  # rank 3 does not arrive
    with ThreadPoolExecutor() as threads:
        called = [threads.submit(ranks[number].outcome) for number in (0, 2)]
        time.sleep(2)  # both have answered
        called.append(threads.submit(ranks[1].outcome))
    (heard,) = {each.result() for each in called}
    assert heard.startswith("1 of 4 ranks (3) did not reach group creation")


# A process that takes the place of a dead one.


def test_a_fresh_process_in_a_dead_ones_place_is_counted_once():
    store = dist.HashStore()
    Rank(store, 1, 3).arrive({"tp": 4})  # and dies: what it proposed is forgotten
    ranks = [Rank(store, 0, 3).arrive(), Rank(store, 1, 3).arrive()]
    assert not store.check(["hypergrid/0..2/0/prepare/outcome"])
    ranks.append(Rank(store, 2, 3).arrive())
    assert {rank.outcome() for rank in ranks} == {"0..2/0"}
    for rank in ranks:  # and the round after it is open to a fresh process too
        rank.memory = _Memory()
        rank.arrive()
    assert {rank.outcome() for rank in ranks} == {"0..2/1"}


def test_a_process_in_the_place_of_the_last_that_arrived_finds_its_round_decided():
    store = dist.HashStore()
    ranks = [Rank(store, rank, 3).arrive() for rank in range(3)]
    assert {rank.outcome() for rank in ranks} == {"0..2/0"}
    assert Rank(store, 2, 3).arrive().round.number == 1


def test_where_the_rank_that_closed_a_phase_ended_before_it_said_why_all_others_say_so():
    store = dist.HashStore()
    killed = mock.Mock(side_effect=SystemExit)
    phases = [Phase(store, range(3), rank, killed) for rank in range(3)]
    for phase in phases:
        phase.arrive()
    with pytest.raises(SystemExit):
        phases[2].publish("all have theirs")
    start = time.monotonic()
    for phase in phases[:2]:
        outcome = phase.outcome(timedelta(seconds=2), "did not come")
        assert outcome == "a rank of 0..2 ended before it could say what came out."
    assert time.monotonic() - start < 15


def test_an_abort_while_others_still_read_of_a_failure_does_not_hide_it():
    phase = Phase(dist.HashStore(), range(2), 0)

    def aborted_meanwhile(_):
        end_waits()
        return True

    with abortable(), mock.patch.object(commit, "serves", aborted_meanwhile):
        reason = "KeyboardInterrupt: "
        assert phase.fail(reason, timedelta(seconds=2), "did not finish") == reason


# Real ranks; see test_entry_points.py for the promises of every call.


@on_ranks(4)
def test_where_a_rank_that_differs_says_it_too_late_all_refuse_with_one_text(rank):
    report = reports.report

    def reports_late(*arguments):
        if rank == 2:
            time.sleep(3)
        return report(*arguments)

    # Rank 0 gives up before rank 2 reports, and rank 1 after.
    limit = timedelta(seconds=1 if rank == 0 else 6)
    with (
        mock.patch.object(commit, "_FOR_VERDICT", limit),
        mock.patch.object(reports, "report", reports_late),
        pytest.raises(AgreementError, match=r"1 of 4 ranks \(2\) did not say") as raised,
    ):
        ps.initialize_model_parallel(4 if rank == 2 else 2)
    assert len({*from_all(str(raised.value))}) == 1
    ps.initialize_model_parallel(2)


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


@on_ranks(2)
def test_an_error_on_every_rank_is_short_and_names_the_first_to_fail(rank):
    keys = ", ".join(
        f"/default_pg/0//222381884149770745077552881044418759526//{n}" for n in range(64)
    )
    error = RuntimeError(f"wait timeout after 3000ms, keys: {keys}, remote=[10.77.0.{rank}]:1")
    fails = members_only(mock.Mock(side_effect=error))
    with mock.patch.object(dist, "new_group", fails), pytest.raises(CreationError) as raised:
        ps.initialize_model_parallel()
    text = str(raised.value)
    assert text.startswith(f"rank {rank} could not create ")
    assert len(text) < 600
    assert "RuntimeError: wait timeout" in text and "remote=[10.77.0." in text
    first_to_fail = {other.partition("The first to fail: ")[2] for other in from_all(text)}
    assert len(first_to_fail - {""}) == 1


@on_ranks(4, timeout=90)
def test_where_ranks_wait_for_one_that_waits_itself_all_name_the_one_at_the_end(rank):
    create = c10d.ProcessGroupGloo.__init__

    def connects_late(group, store, place, *args, **kwargs):
        if rank == 0:
            time.sleep(9)  # the others wait five seconds for its address
            raise RuntimeError("no route to host")
        # Groups of ranks 0, 2 and 0, 1. So rank 3, which waits for rank 2, is the first to give up.
        if rank in (1, 2) and place == 1:
            time.sleep(1)
        create(group, store, place, *args, **kwargs)

    with (
        mock.patch.object(c10d.ProcessGroupGloo, "__init__", connects_late),
        pytest.raises(CreationError) as raised,
    ):
        ps.initialize_model_parallel(2, distributed_timeout_minutes=0.1)
    text = str(raised.value)
    if rank == 0:
        assert "no route to host" in text and "first to fail" not in text
    else:
        assert "ranks 0 published no address to connect to" in text and "keys" not in text
