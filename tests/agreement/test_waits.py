"""Nobody waits in silence: who is missing, who has ended, and what a job logs."""

import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from datetime import timedelta
from itertools import chain, pairwise
from unittest import mock

import pytest
import torch.distributed as dist

import hypergrid
from compat import members_only
from compat import parallel_state as ps
from hypergrid import HyperCommGrid, logs
from hypergrid.agreement import commit, store, waits
from hypergrid.agreement.connections import at_the_store, to_the_store
from tests.support import forked, nccl_rules
from tests.support.faults import Case, broken_laws, run
from tests.support.forked import from_all, on_ranks, run_ranks, total

# Seconds of waiting, where a real job has 8, 10 to 60, 2 and 3.
QUICK = {
    "LONG_WAIT": 0.5,
    "_WARNS_AFTER": (2.0, 9.0),
    "_CLAIMS_BEFORE": 1.5,
    "_CLAIMS_WITHIN": 1.0,
    "_SEARCH_PERIOD": 0.3,
}
REAL = {name: getattr(waits, name) for name in QUICK}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in QUICK.items():
        monkeypatch.setattr(waits, name, value)
    for module in (store, commit):
        monkeypatch.setattr(module, "LONG_WAIT", QUICK["LONG_WAIT"])


def warned(call):
    """The texts of the warnings of a call, of all ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return from_all([re.sub(r"waited \d+ s", "waited N s", str(w.message)) for w in caught])


def slow_group(rank, slow_rank, label, seconds):
    """Torch's new_group, which takes a while on one rank for one label."""
    new_group = dist.new_group

    @members_only
    def create(ranks, *arguments, **options):
        if rank == slow_rank and options.get("group_desc") == label:
            time.sleep(seconds)
        return new_group(ranks, *arguments, **options)

    return mock.patch.object(dist, "new_group", create)


# Who is missing.


@pytest.mark.parametrize(("absent", "speaker"), [(1, 0), (0, 1), (3, 0)])
@on_ranks(4)
def test_the_lowest_rank_that_waits_says_for_whom_and_no_other_says_anything(rank, absent, speaker):
    if rank == absent:
        time.sleep(4)
    texts = chain.from_iterable(warned(lambda: ps.initialize_model_parallel(2)))
    # On a slow machine the others are late too, and the groups take a while: the last one counts.
    *_, text = (text for text in texts if "are here, missing" in text)
    assert text.startswith(
        f"rank {speaker} has waited N s of 1800 s in initialize_model_parallel of ParallelState "
    )
    assert text.endswith(f": 3 of 4 ranks are here, missing: {absent}")


def test_a_wait_prints_no_line_of_torchs_about_the_socket_of_the_store(capfd):
    def initialize(rank):
        if rank == 1:
            time.sleep(3.8)  # torch's own wait, of three seconds, would be in vain
        ps.initialize_model_parallel(2)

    run_ranks(4, initialize)
    assert "waitForInput" not in capfd.readouterr().err


@on_ranks(4)
def test_where_all_wait_for_the_confirmation_one_says_at_which_group_a_rank_is(rank):
    grid = HyperCommGrid((2, 2), ("tp", "dp"))
    with slow_group(rank, 1, "tp", 4.0):
        texts = warned(lambda: grid.create_pg("tp"))
    # Rank 0 waits in torch, for the address of rank 1.
    assert texts[0][0].endswith(": 2 of 4 ranks have created their groups, ranks 0..1 still at tp")
    assert not texts[1] + texts[2] + texts[3]


def suspend_in_vain():
    with pytest.raises(RuntimeError, match="could not suspend"):
        ps.current_state().suspend()


@pytest.mark.parametrize("call", ["suspend", "closing"])
@on_ranks(4, backend="")
def test_a_call_after_creation_says_who_is_missing_too(rank, call):
    nccl_rules.start(rank, 4)
    ps.initialize_model_parallel(4, create_gloo_process_groups=False)
    total(ps.get_tensor_model_parallel_group())
    if rank == 3:
        time.sleep(4)
    if call == "suspend":
        texts = warned(suspend_in_vain)
        assert "in suspend of ParallelState" in texts[0][0]
    else:  # where NCCL waits
        texts = warned(ps.destroy_model_parallel)
        assert "in closing TENSOR_MODEL_PARALLEL_GROUP of ranks 0..3" in texts[0][0]
    assert texts[0][0].endswith("3 of 4 ranks are here, missing: 3")


def test_where_the_last_rank_has_just_come_none_is_missing():
    watch = waits.Watch(dist.HashStore(), range(4), 0, "a test", lambda: 4)
    assert watch._text().endswith(" in a test: 4 of 4 ranks are here, the last a moment ago")


def test_of_many_missing_ranks_sixteen_are_shown_and_their_number():
    assert waits._spans(range(1, 4096)) == "1..16,... (4095 ranks)"
    assert waits._spans([1, 2, 7]) == "1..2,7"


class CallsStore(dist.HashStore):
    """Counts calls by operation and key."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def compare_set(self, key, expected, value):
        self.calls["read", key] += 1
        return super().compare_set(key, expected, value)

    def append(self, key, value):
        self.calls["append", key] += 1
        super().append(key, value)


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as waits see them."""
    now = [0.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    return now


def test_the_lowest_rank_warns_and_another_when_it_is_stopped_at_one_further_call_a_rank(
    clock, monkeypatch
):
    warning_ranks = []
    monkeypatch.setattr(logs, "warn", lambda text, _: warning_ranks.append(text.split()[1]))
    for name, value in REAL.items():
        monkeypatch.setattr(waits, name, value)
    shared = CallsStore()
    world = 64
    ranks = []
    for rank in range(63):
        ranks.append(waits.Watch(shared, range(world), rank, "a test", lambda: 63, begin=0.0))
    while clock[0] < 12:
        for watch in reversed(ranks):  # the highest looks first
            watch.look()
        clock[0] += 0.5
    assert warning_ranks == ["0"]
    assert shared.calls["append", "places"] == 63
    assert shared.calls["append", "claims"] < 24
    assert shared.calls["read", "claims"] < 63 + 24
    while clock[0] < 65:  # rank 0 is stopped
        for watch in ranks[1:]:
            watch.look()
        clock[0] += 0.5
    assert warning_ranks == ["0", "1", "1"]
    assert shared.calls["append", "places"] == 63


@pytest.mark.parametrize("ranks", [8, 4096, 100_000])
def test_all_ranks_together_look_at_most_20_000_times_a_second(ranks, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(store, "_sleep", lambda pause: now.__setitem__(0, now[0] + pause))
    looks = []
    with pytest.raises(dist.DistStoreError):
        store.look_until(lambda: looks.append(now[0]), timedelta(minutes=1), ranks)
    for waited, following in pairwise(looks[:-1]):
        of_a_small_world = min(0.5, max(0.0005, waited / 16))
        assert following - waited == pytest.approx(max(ranks / 20_000, of_a_small_world))


# Who has ended.


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("kill", place=0.0, timeout=180.0, store_on_rank_0=True),
        Case("kill", place=0.6, timeout=180.0, store_on_rank_0=True),
        Case("stop", place=0.0, pause=5.0, timeout=180.0, store_on_rank_0=True),
    ],
    ids=str,
)
def test_a_rank_that_has_ended_is_named_and_one_that_is_stopped_is_waited_for(case):
    world = run(case)
    assert "fault" in world[2].steps and not broken_laws(case, world)


@on_ranks(2)
def test_the_host_that_serves_the_store_knows_the_connection_of_each_process(rank):
    own = from_all(to_the_store(forked.store()))
    assert own[0] and own[1] and not set(own[0]) & set(own[1])
    assert at_the_store(forked.store()) == {*own[0], *own[1]}


# What a job logs.


def logged(level, call):
    """The records of a call under hypergrid's logger, as text."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hypergrid")
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return records


@on_ranks(4)
def test_info_tells_each_phase_and_debug_each_group(rank):
    texts = logged("INFO", lambda: ps.initialize_model_parallel(2))
    assert len(texts) == 3
    agreed, created, confirmed = texts
    call = "initialize_model_parallel of ParallelState over RankLayout"
    assert all(text.startswith(call) for text in texts)
    assert re.search(
        r": ranks 0..3 agreed in \d+\.\d+ s, epoch 0..3/0, created by members$", agreed
    )
    assert re.search(r": created \d+ groups on \d+ communicators in [\d.]+ s, by members$", created)
    assert re.search(r": confirmed by all ranks in [\d.]+ s$", confirmed)
    (destroyed,) = logged("INFO", ps.destroy_model_parallel)
    assert re.match(r"destroyed \d+ groups of ParallelState over .* in [\d.]+ s$", destroyed)
    texts = logged("DEBUG", lambda: ps.initialize_model_parallel(2))
    mine = f"TENSOR_MODEL_PARALLEL_GROUP of ranks {'0..1' if rank < 2 else '2..3'}: created by"
    assert any(text.startswith(mine) for text in texts)
    grid = HyperCommGrid((4,), ("dp",))
    grid.create_pg("dp")
    texts = logged("INFO", grid.suspend)
    assert [text.partition(":")[0].partition(" of ")[0] for text in texts] == ["suspend"] * 3
    texts = logged("INFO", hypergrid.abort)
    assert texts[-1].startswith("abort: ended ")


def started_with(value, code):
    """A process in which HYPERGRID_LOG is ``value``: its status and what it prints."""
    environment = {**os.environ, "HYPERGRID_LOG": value, "RANK": "3"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


WARN = "import logging; from hypergrid import logs; logs.warn('w', logging.getLogger('hypergrid'))"


@pytest.mark.parametrize(
    ("value", "prints"),
    [("", r"<string>:1: RuntimeWarning: w\n"), ("INFO", r"\[rank 3 \+\d\.\d{3} s\] WARNING w\n")],
)
def test_a_warning_is_printed_once(value, prints):
    status, printed = started_with(value, WARN)
    assert status == 0 and re.fullmatch(prints, printed)


def test_an_unknown_level_is_refused():
    status, printed = started_with("LOUD", WARN)
    assert status and "invalid value for HYPERGRID_LOG: 'LOUD'; allowed: INFO, DEBUG." in printed


def test_where_warnings_are_errors_a_rank_that_waits_goes_on(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs.warn("rank 1 is missing", logging.getLogger("hypergrid.test"))
    assert "rank 1 is missing" in caplog.text
