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
from hypergrid.groups import hosts, rendezvous
from hypergrid.groups.commit import all_or_none
from hypergrid.groups.creation import Abilities
from hypergrid.groups.prepare import _Memory, _place, _Round
from hypergrid.groups.rendezvous import Phase, clear_before
from hypergrid.policy import Policy
from tests.support.counting import CountingStore
from tests.support.forked import run_ranks

WORLD = range(8)


MINUTE = timedelta(minutes=1)


@contextmanager
def _host(rank, patience=15, **environment):
    """A rank of one of two hosts: where all of a host come, they meet, however slow they are."""
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
        mock.patch.object(hosts, "_PATIENCE", patience),
        mock.patch.object(rendezvous, "_LAST", 2),
    ):
        yield store


def _wait_for(store, *keys):
    store.underlying_store.wait([*keys], MINUTE)


def _count(store, name, many):
    """Wait until ``many`` ranks are here."""
    if store.underlying_store.add(name, 1) == many:
        store.underlying_store.set(f"all {name}", "")
    _wait_for(store, f"all {name}")


def _nobody_else_comes():
    hosts._PATIENCE = 0.5


def _both_phases(store, memory, proposal="", seconds=60.0, arrived=lambda: None):
    """The epoch, or the error's text; and how long it took since this rank had ``arrived``."""
    here, limit = _Round(store, WORLD, memory), timedelta(seconds=seconds)
    try:
        here.arrive({"tp": proposal}, Abilities(), Policy(), MINUTE)
        arrived()
        start = time.monotonic()
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
    results = run_ranks(8, _three_lives, {}, backend="", timeout=120)
    for life in range(3):
        epochs, trips, _ = zip(*(result[life] for result in results), strict=True)
        assert set(epochs) == {f"0..7/{life}"}
        # Seven of a host's speaker, or six; both phases may have another one. A rank that finds no
        # speaker that listens arrives itself.
        assert sum(trips) <= 2 * 7 + 16, results


def test_a_host_costs_the_store_what_a_rank_costs():
    store, found = CountingStore(dist.HashStore()), []
    for rank in (0, 4):
        found.append(_on_a_host(store, rank, mock.MagicMock()))
        found[-1].arrive({}, Abilities(), Policy())
        if rank == 0:
            assert store.counts == {"compare_set": 1, "multi_set": 1, "add": 1}
    store.counts.clear()
    assert {here.outcome(timedelta(seconds=1))["epoch"] for here in found} == {"0..7/0"}
    assert store.counts == {"wait": 2, "compare_set": 2}


def _on_a_host(store, rank, connection=None, memory=None):
    """A rank that speaks for the others of its host, or with no connection for itself."""
    with mock.patch.object(dist, "get_rank", return_value=rank):
        here = _Round(store, WORLD, memory or _Memory())
    if connection:
        others = dict.fromkeys(range(rank + 1, rank + 4), connection)
        here.mates = hosts.Speaker(others, mock.Mock())
    return here


def test_a_fresh_process_is_in_the_round_of_the_others_if_its_host_never_met():
    store, memories = dist.HashStore(), [_Memory() for _ in WORLD]
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "4"}):
        for number in range(2):
            ranks = [_on_a_host(store, rank, memory=memories[rank]) for rank in WORLD]
            for here in ranks:
                here.arrive({}, Abilities(), Policy())
            assert {here.outcome(MINUTE)["epoch"] for here in ranks} == {f"0..7/{number}"}
            clear_before(store, f"0..7/{number}")
        fresh = _on_a_host(store, 6)
        fresh.mates = hosts.Speaker(server=mock.Mock())
        fresh.arrive({}, Abilities(), Policy())
    assert fresh.epoch == "0..7/2"


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_WORLD_SIZE": "3"},
        {"LOCAL_WORLD_SIZE": "16"},
        {"LOCAL_WORLD_SIZE": str(1 << 70)},
        {"LOCAL_WORLD_SIZE": "many"},
        {"LOCAL_WORLD_SIZE": ""},
        {"HYPERGRID_HOSTS_FIRST": "0"},
    ],
)
def test_a_wrong_number_of_ranks_a_host_is_no_error(environment):
    for rank in run_ranks(8, _three_lives, environment, backend="", timeout=120):
        assert [epoch for epoch, _, _ in rank] == ["0..7/0", "0..7/1", "0..7/2"]


def test_ranks_of_a_host_that_did_not_come_are_waited_for_once():
    store = mock.Mock(spec=["host", "port"], host="none.example", port=1)
    environment = {"LOCAL_WORLD_SIZE": "4", "HYPERGRID_HOSTS_FIRST": "2"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(hosts, "_gathered", return_value={}) as gathered,
        mock.patch.dict(hosts._met, clear=True),
    ):
        for _ in range(3):
            speaker = hosts.meet("this test", store, WORLD, 0, MINUTE)
            speaker.about_to_arrive()
            speaker.close()
    assert gathered.call_count == 1


def _some_hosts_cannot_meet(rank):
    with _host(rank, patience=0.2) as store:
        if rank in (1, 4, 5, 6, 7):  # as in a network namespace of their own
            hosts.socket = mock.Mock(wraps=socket)
            hosts.socket.socket.side_effect = OSError
        return _both_phases(store, _Memory())[0]


def test_ranks_that_cannot_reach_each_other_arrive_themselves():
    assert set(run_ranks(8, _some_hosts_cannot_meet, backend="", timeout=120)) == {"0..7/0"}


def _one_differs(rank, odd):
    with _host(rank, patience=0.5) as store:
        memory = _Memory()
        return _both_phases(store, memory, "odd" * (rank == odd)), _both_phases(store, memory)[0]


@pytest.mark.parametrize("odd", [0, 6])
def test_a_rank_that_differs_from_its_host_is_named(odd):
    results = run_ranks(8, _one_differs, odd, backend="", timeout=120)
    ((text, _),) = {(said, after) for (said, _), after in results}
    assert f"tp is 'odd' on rank {odd} and '' on" in text or f"'odd' on rank {odd}" in text
    assert {after for _, after in results} == {"0..7/1"}
    assert max(seconds for (_, seconds), _ in results) < 30  # nobody waits for the round's end


def _one_is_missing(rank):
    if rank == 6:
        return None
    with _host(rank, patience=0.5) as store:
        return _both_phases(store, _Memory(), "", 3, lambda: _count(store, "arrived", 7))


def test_a_rank_that_its_host_misses_is_named():
    results = [each for each in run_ranks(8, _one_is_missing, backend="", timeout=120) if each]
    (text,) = {said for said, _ in results}
    assert f"1 of 8 ranks (6 on {socket.gethostname()}) did not reach group creation" in text
    assert max(seconds for _, seconds in results) < 30


def _stop(sign):
    os.kill(os.getpid(), sign)


def _when_it_has_gathered(store, sign):
    return mock.patch.object(hosts.Speaker, "about_to_arrive", lambda _: _stop(sign))


def _between_promise_and_arrival(store, sign):
    return mock.patch.object(Phase, "arrive", lambda *_, **__: _stop(sign))


def _when_it_has_arrived(store, sign):
    return mock.patch.object(Phase, "outcome", lambda *_: _stop(sign))


def _before_it_is_counted(store, sign):
    return mock.patch.object(hosts.Listener, "hear", lambda *_: _stop(sign))


def _when_it_is_counted(store, sign):
    original = hosts.Listener._read

    def read(*given):
        said = original(*given)
        assert said.startswith(b"+")
        _wait_for(store, _place(6))  # a fresh process takes longer to start than this message
        _stop(sign)
        return said

    return mock.patch.object(hosts.Listener, "_read", read)


def _lost_in_a_process_of_its_own(store, rank, where, sign=signal.SIGKILL):
    """Rank 4, which speaks for its host, or rank 6, for which it speaks; gives the process."""
    if (child := os.fork()) == 0:
        with _host(rank) as store, where(store, sign):
            if rank != 4:
                _wait_for(store, "host 1 listens")
            _both_phases(store, _Memory())
        os._exit(0)
    assert os.waitpid(child, os.WUNTRACED)[1] & 0xFF == (sign if sign == signal.SIGKILL else 0x7F)
    store.underlying_store.set("lost", "")
    return child


def _dying(rank, where, victim, sign=signal.SIGKILL):
    with _host(rank) as store:
        if rank == victim:
            child = _lost_in_a_process_of_its_own(store, rank, where, sign)
            _count(store, "arrived", 8)
            if sign != signal.SIGKILL:
                _wait_for(store, "all told")
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return None
        if rank != 4:
            _wait_for(store, "host 1 listens")

        def arrived():
            _count(store, "arrived", 8)
            _nobody_else_comes()

        result = _both_phases(store, _Memory(), "", 3, arrived)
        _count(store, "told", 7)
        return result


@pytest.mark.parametrize(
    ("where", "sign"),
    [
        (_when_it_has_gathered, signal.SIGKILL),
        (_when_it_has_gathered, signal.SIGSTOP),
        (_between_promise_and_arrival, signal.SIGKILL),
    ],
)
def test_a_speaker_that_is_lost_before_it_arrives_is_named_as_any_rank(where, sign):
    results = run_ranks(8, _dying, where, 4, sign, backend="", timeout=120)
    assert results.pop(4) is None
    (text,) = {said for said, _ in results}
    assert "1 of 8 ranks (4 on" in text and "did not reach group creation" in text
    assert max(seconds for _, seconds in results) < 30


@pytest.mark.parametrize(("where", "victim"), [(_when_it_has_arrived, 4), (_when_it_is_counted, 6)])
def test_a_rank_that_dies_when_it_is_counted_is_named_by_the_commit(where, victim):
    results = run_ranks(8, _dying, where, victim, backend="", timeout=120)
    assert results.pop(victim) is None
    for rank, (text, seconds) in enumerate(results):
        assert f"1 of 8 ranks ({victim} on" in text, (rank, text)
        assert "did not finish creating groups" in text and seconds < 40


def _replaced(rank, where, victim):
    with _host(rank, patience=0.3 if rank == victim else 15) as store:
        shared, original = store.underlying_store, hosts.Speaker.about_to_arrive
        if rank == victim:
            _lost_in_a_process_of_its_own(store, rank, where)
        elif rank == 1:  # so that the round is open meanwhile
            _wait_for(store, "back")
        elif rank != 4:
            _wait_for(store, "host 1 listens")

        def when_it_is_lost(speaker):
            if where is _before_it_is_counted and rank == 4:
                _wait_for(store, "lost")
            original(speaker)

        def arrived():
            if rank == victim:
                shared.set("back", "")
            _nobody_else_comes()

        with mock.patch.object(hosts.Speaker, "about_to_arrive", when_it_is_lost):
            return _both_phases(store, _Memory(), arrived=arrived)[0]


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        (_when_it_has_gathered, 4),
        (_when_it_has_arrived, 4),
        (_before_it_is_counted, 6),
        (_when_it_is_counted, 6),
    ],
)
def test_a_fresh_process_in_a_dead_ones_place_is_counted_once(where, victim):
    results = run_ranks(8, _replaced, where, victim, backend="", timeout=120)
    assert set(results) == {"0..7/0"}


def _slow(rank):
    """Rank 4 speaks for its host, but so late that the others have arrived themselves."""
    original, arrive = hosts.Speaker.about_to_arrive, Phase.arrive
    with _host(rank, patience=15 if rank == 4 else 0.1) as store:

        def late(speaker):
            if rank == 4 and speaker.others:
                _wait_for(store, "5 arrived", "6 arrived", "7 arrived")
            original(speaker)

        def arrived(*given, **named):
            count = arrive(*given, **named)
            store.underlying_store.set(f"{rank} arrived", "")
            return count

        if rank != 4:
            _wait_for(store, "host 1 listens")
        with (
            mock.patch.object(hosts.Speaker, "about_to_arrive", late),
            mock.patch.object(Phase, "arrive", arrived),
        ):
            return _both_phases(store, _Memory(), seconds=20)[0]


def test_ranks_that_give_up_waiting_for_their_speaker_are_counted_once():
    assert set(run_ranks(8, _slow, backend="", timeout=120)) == {"0..7/0"}
