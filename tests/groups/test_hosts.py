"""Ranks of one host arrive at the store as one: two hosts of four ranks are faked on this one."""

import os
import signal
import socket
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from hypergrid import AgreementError, CreationError
from hypergrid.groups import hosts
from hypergrid.groups.commit import all_or_none
from hypergrid.groups.creation import Abilities
from hypergrid.groups.prepare import _Memory, _Round
from hypergrid.groups.rendezvous import Phase
from hypergrid.policy import Policy
from tests.support.counting import CountingStore
from tests.support.forked import run_ranks

WORLD = range(8)


@contextmanager
def _host(rank, **environment):
    port = int(os.environ["MASTER_PORT"])
    store = CountingStore(dist.TCPStore("127.0.0.1", port, is_master=False))
    os.environ.update({"LOCAL_WORLD_SIZE": "4", "HYPERGRID_HOSTS_FIRST": "2"} | environment)
    original = hosts._gathered

    def gathered(*given):
        store.underlying_store.set(f"host {rank // 4} listens", "")
        return original(*given)

    with (
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch("hypergrid.groups.commit.shared_store", return_value=store),
        mock.patch.object(hosts, "_gathered", gathered),
    ):
        yield store


def _wait_for(store, host):
    store.underlying_store.wait([f"host {host} listens"], timedelta(seconds=20))


def _both_phases(store, memory, proposal="", seconds=4.0):
    """The epoch, or the error's text; and how long it took."""
    start, limit = time.monotonic(), timedelta(seconds=seconds)
    here = _Round(store, WORLD, memory)
    try:
        here.arrive({"tp": proposal}, Abilities(), Policy(), limit)
        outcome = here.outcome(limit)
        if "error" in outcome:
            raise AgreementError(outcome["error"])
        with all_or_none(outcome["epoch"], WORLD, limit):
            pass
        said = outcome["epoch"]
    except (AgreementError, CreationError) as error:
        said = str(error)
    finally:
        here.mates.close()
    return said, time.monotonic() - start


def _three_lives(rank, environment):
    with _host(rank, **environment) as store:
        memory, found = _Memory(), []
        for _ in range(3):
            before = store.trips
            epoch, seconds = _both_phases(store, memory)
            found.append((epoch, store.trips - before, seconds))
    return found


def test_the_store_serves_hosts_and_not_ranks():
    results = run_ranks(8, _three_lives, {}, backend="")
    for life in range(3):
        epochs, trips, _ = zip(*(result[life] for result in results), strict=True)
        assert set(epochs) == {f"0..7/{life}"}
        # Seven of a host's speaker, or six; both phases may have another one. A rank that is late
        # by a second arrives itself.
        assert sum(trips) <= 2 * 7 + 16, results


def test_a_host_costs_the_store_what_a_rank_costs():
    store, found = CountingStore(dist.HashStore()), []
    mates = mock.Mock(), True
    for rank in (0, 4):
        with mock.patch.object(dist, "get_rank", return_value=rank):
            here = _Round(store, WORLD, _Memory())
        here.mates = hosts.Speaker(dict.fromkeys(range(rank + 1, rank + 4), mates), mock.Mock())
        found.append(here)
        here.arrive({}, Abilities(), Policy())
        if rank == 0:
            assert store.counts == {"add": 2, "multi_set": 1}
    store.counts.clear()
    assert {here.outcome(timedelta(seconds=1))["epoch"] for here in found} == {"0..7/0"}
    assert store.counts == {"wait": 2, "compare_set": 2}


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_WORLD_SIZE": "3"},
        {"LOCAL_WORLD_SIZE": "16"},
        {"LOCAL_WORLD_SIZE": "many"},
        {"LOCAL_WORLD_SIZE": ""},
        {"HYPERGRID_HOSTS_FIRST": "0"},
    ],
)
def test_a_wrong_number_of_ranks_a_host_costs_a_second_once_and_no_more(environment):
    for rank in run_ranks(8, _three_lives, environment, backend=""):
        assert [epoch for epoch, _, _ in rank] == ["0..7/0", "0..7/1", "0..7/2"]
        assert rank[2][2] < 3


def _some_hosts_cannot_meet(rank):
    with _host(rank) as store, mock.patch.object(hosts, "_PATIENCE", 0.2):
        if rank in (1, 4, 5, 6, 7):  # as in a network namespace of their own
            hosts.socket = mock.Mock(wraps=socket)
            hosts.socket.socket.side_effect = OSError
        return _both_phases(store, _Memory())[0]


def test_ranks_that_cannot_reach_each_other_arrive_themselves():
    assert set(run_ranks(8, _some_hosts_cannot_meet, backend="")) == {"0..7/0"}


def _one_differs(rank, odd):
    with _host(rank) as store:
        memory = _Memory()
        return _both_phases(store, memory, "odd" * (rank == odd)), _both_phases(store, memory)[0]


@pytest.mark.parametrize("odd", [0, 6])
def test_a_rank_that_differs_from_its_host_is_named(odd):
    results = run_ranks(8, _one_differs, odd, backend="")
    ((text, _),) = {(said, after) for (said, _), after in results}
    assert f"tp is 'odd' on rank {odd} and '' on" in text or f"'odd' on rank {odd}" in text
    assert {after for _, after in results} == {"0..7/1"}
    assert max(seconds for (_, seconds), _ in results) < 10


def _one_is_missing(rank):
    if rank == 6:
        return None
    with _host(rank) as store:
        return _both_phases(store, _Memory(), seconds=3)


def test_a_rank_that_its_host_misses_is_named():
    results = [each for each in run_ranks(8, _one_is_missing, backend="") if each]
    (text,) = {said for said, _ in results}
    assert f"1 of 8 ranks (6 on {socket.gethostname()}) did not reach group creation" in text
    assert max(seconds for _, seconds in results) < 15


def _dying(rank, patched, victim=4, late=True):
    """Rank 4 speaks for its host, and is killed in a process of its own where ``patched`` says."""
    if rank == victim:
        if (child := os.fork()) == 0:
            with patched(), _host(rank) as store:
                if not late:
                    _wait_for(store, 1)
                _both_phases(store, _Memory())
            os._exit(0)
        return os.waitpid(child, 0)[1], 0.0
    with _host(rank) as store:
        if late:
            _wait_for(store, 1)
        return _both_phases(store, _Memory())


def _kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _when_it_has_gathered():
    return mock.patch.object(hosts.Speaker, "about_to_arrive", _kill)


def _between_promise_and_arrival():
    return mock.patch.object(Phase, "arrive", _kill)


def _when_it_has_arrived():
    return mock.patch.object(Phase, "outcome", _kill)


def _as_a_listener():
    return mock.patch.object(hosts.Listener, "hear", _kill)


@pytest.mark.parametrize("patched", [_when_it_has_gathered, _between_promise_and_arrival])
def test_a_speaker_that_dies_before_it_arrives_is_named_as_any_rank(patched):
    results = run_ranks(8, _dying, patched, backend="")
    assert results.pop(4)[0] == signal.SIGKILL
    (text,) = {said for said, _ in results}
    assert "1 of 8 ranks (4 on" in text and "did not reach group creation" in text
    assert max(seconds for _, seconds in results) < 15


@pytest.mark.parametrize(("patched", "victim"), [(_when_it_has_arrived, 4), (_as_a_listener, 6)])
def test_a_rank_that_dies_when_it_is_counted_is_named_by_the_commit(patched, victim):
    results = run_ranks(8, _dying, patched, victim, victim == 4, backend="")
    assert results.pop(victim)[0] == signal.SIGKILL
    for rank, (text, seconds) in enumerate(results):
        assert f"1 of 8 ranks ({victim} on" in text, (rank, text)
        assert "did not finish creating groups" in text and seconds < 25


def _stopped(rank):
    if rank == 4:
        if (child := os.fork()) == 0:
            stop = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
            with mock.patch.object(hosts.Speaker, "about_to_arrive", stop), _host(rank) as store:
                _both_phases(store, _Memory())
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        time.sleep(14)
        os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1], 0.0
    with _host(rank) as store:
        _wait_for(store, 1)
        return _both_phases(store, _Memory(), seconds=8)


def test_nobody_waits_longer_for_a_speaker_that_is_stopped():
    results = run_ranks(8, _stopped, backend="")
    results.pop(4)
    (text,) = {said for said, _ in results}
    assert "1 of 8 ranks (4 on" in text and max(seconds for _, seconds in results) < 15


def _replaced(rank):
    if rank == 6:  # counted by its host, dead, and back in a fresh process
        if (child := os.fork()) == 0:
            with _as_a_listener(), _host(rank) as store:
                _wait_for(store, 1)
                _both_phases(store, _Memory())
            os._exit(0)
        os.waitpid(child, 0)
    with _host(rank) as store:
        if rank == 6:
            store.underlying_store.set("dead", "")
        if rank == 1:  # so that the round is open meanwhile
            store.underlying_store.wait(["dead"], timedelta(seconds=20))
            time.sleep(1)
        return _both_phases(store, _Memory(), seconds=12)[0]


def test_a_fresh_process_in_a_dead_ones_place_is_counted_once():
    assert set(run_ranks(8, _replaced, backend="")) == {"0..7/0"}
