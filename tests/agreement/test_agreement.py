"""Ranks agree before they create: nobody waits in vain, and all say the same."""

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import hyper_comm_grid, members_only
from compat import parallel_state as ps
from compat.physicsnemo import DistributedManager
from hypergrid import AgreementError, CreationError, EnvironmentTable, HyperCommGrid
from hypergrid.agreement.commit import Phase, _Memory, _Round, all_or_none
from hypergrid.agreement.reports import clear_before
from hypergrid.policy import Abilities, Policy
from tests.support.forked import from_all, on_ranks, open_groups, total

# The model: ranks are threads over one store, and random pauses decide who comes first.

WORLD = 4
HERE = threading.local()


@pytest.fixture(autouse=True)
def rank_of_this_thread():
    def get_rank(group=None, of_torch=dist.get_rank):
        if hasattr(HERE, "rank"):
            return HERE.rank
        return of_torch(group)

    with mock.patch.object(dist, "get_rank", get_rank):
        yield


class MinimalStore(dist.Store):
    """A store in Python that has no more than torch asks for, and pauses before each operation."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.kept = dist.HashStore()
        self.random = random.Random(seed)

    def _pause(self):
        time.sleep(self.random.random() / 500)
        return self.kept

    def set(self, key, value):
        self._pause().set(key, value)

    def get(self, key):
        return self._pause().get(key)

    def add(self, key, amount):
        return self._pause().add(key, amount)

    def check(self, keys):
        return self._pause().check(keys)

    def wait(self, keys, timeout=timedelta(seconds=5)):
        self._pause().wait(keys, timeout)


class Rank:
    """A rank as a process of its own would be: it remembers its own rounds."""

    def __init__(self, store, rank, world=WORLD):
        self.store = store
        self.rank = rank
        self.ranks = range(world)
        self.memory = _Memory()

    def arrive(self, proposal=None, abilities=None):
        HERE.rank = self.rank
        self.round = _Round(self.store, self.ranks, self.memory)
        del HERE.rank
        self.round.arrive(proposal or {"tp": 2}, abilities or Abilities(), Policy())
        return self

    def outcome(self, seconds=1.0):
        return self.round.outcome(timedelta(seconds=seconds))

    def live(self, behaviour, seconds, pause):
        """One round and the creation after it; gives the epoch, or the error that is heard."""
        time.sleep(pause)
        proposal = {"tp": 4} if behaviour == "differs" else {"tp": 2}
        if behaviour == "refuses":
            proposal = {"refused": f"ValueError: no rank {self.rank}"}
        self.arrive(proposal, Abilities("slow") if behaviour == "slow" else None)
        if behaviour == "refuses":
            self.round.report()
        outcome = self.outcome(seconds)
        if "error" in outcome:
            return outcome["error"]
        HERE.rank = self.rank
        try:
            with all_or_none(self.store, outcome["epoch"], self.ranks, timedelta(seconds=20)):
                if behaviour == "fails":
                    raise CreationError(f"no memory on rank {self.rank}")
        except CreationError as error:
            return re.search(r"no memory on rank \d", str(error))[0]
        finally:
            del HERE.rank
        return outcome["epoch"], outcome["way"]


def heard_by_all(ranks, behaviours, pauses):
    """What each rank that comes hears in a round; each lives in a thread."""
    coming = [rank for rank in ranks if behaviours[rank.rank] != "is missing"]
    seconds = 20 if len(coming) == len(ranks) else 0.3
    with ThreadPoolExecutor(len(coming)) as threads:
        lives = []
        for rank in coming:
            behaviour = behaviours[rank.rank]
            lives.append(threads.submit(rank.live, behaviour, seconds, pauses.random() / 50))
        return {life.result() for life in lives}


SAYS = {
    "differs": "tp is 4 on rank {} and 2 on rank",
    "refuses": "rank {} refused its arguments, so no rank of 0..3 created a group: ValueError",
    "is missing": "1 of 4 ranks ({}",
    "fails": "no memory on rank {}",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["hash", "file", "minimal"])
def test_one_text_for_all_all_or_none_and_the_next_round_works(kind, seed, tmp_path):
    stores = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "minimal": lambda: MinimalStore(seed),
    }
    store = stores[kind]()
    chance = random.Random(seed)
    ranks = [Rank(store, rank) for rank in range(WORLD)]
    keys = []
    for fault in chance.sample([*SAYS], len(SAYS)):
        odd = chance.randrange(1, WORLD)
        behaviours = ["agrees"] * WORLD
        behaviours[odd] = fault
        (heard,) = heard_by_all(ranks, behaviours, chance)
        assert SAYS[fault].format(odd) in heard
        for behaviour, expected_way in (("slow", "everyone"), ("agrees", "members")):
            behaviours[odd] = behaviour
            ((epoch, way),) = heard_by_all(ranks, behaviours, chance)
            assert way == expected_way  # what one rank cannot do is done by none
        clear_before(store, epoch)
        if kind != "minimal":  # which cannot delete
            keys.append(store.num_keys())
    assert len({*keys}) <= 1, keys


# A process that takes the place of a dead one.


def test_a_fresh_process_in_a_dead_ones_place_is_counted_once():
    store = dist.HashStore()
    Rank(store, 1, 3).arrive()  # and dies
    ranks = [Rank(store, 0, 3).arrive(), Rank(store, 1, 3).arrive()]
    assert not store.check(["hypergrid/0..2/0/prepare/outcome"])
    ranks.append(Rank(store, 2, 3).arrive())
    assert {rank.outcome()["epoch"] for rank in ranks} == {"0..2/0"}
    for rank in ranks:  # and the round after it is open to a fresh process too
        rank.memory = _Memory()
        rank.arrive()
    assert {rank.outcome()["epoch"] for rank in ranks} == {"0..2/1"}


def test_what_a_dead_process_said_is_forgotten():
    store = dist.HashStore()
    Rank(store, 1, 3).arrive({"tp": 4})
    ranks = [Rank(store, rank, 3).arrive() for rank in range(3)]
    assert all("error" not in rank.outcome() for rank in ranks)


def test_a_process_in_the_place_of_the_last_that_arrived_finds_its_round_decided():
    store = dist.HashStore()
    ranks = [Rank(store, rank, 3).arrive() for rank in range(3)]
    assert {rank.outcome()["epoch"] for rank in ranks} == {"0..2/0"}
    assert Rank(store, 2, 3).arrive().round.epoch == "0..2/1"


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


# Every interface, on real ranks.


class Interface(NamedTuple):
    """One call of an interface, which one rank makes differently."""

    call: Callable[[bool], object]  # with whether this rank is the odd one
    says: str
    raises: type[Exception] | None = None  # what the odd rank raises if it refuses its arguments


def asked_of_a_manager(size, name="pairs"):
    if not DistributedManager.is_initialized():
        DistributedManager.setup(rank=dist.get_rank(), world_size=4, local_rank=0)
    DistributedManager().create_process_subgroup(name, size)


def initialized_with_a_function_replaced(odd):
    original = ps.create_group
    wrapper = lambda *args, **kwargs: original(*args, **kwargs)  # noqa: E731
    with mock.patch.object(ps, "create_group", wrapper if odd else original):
        ps.initialize_model_parallel(2)


INTERFACES = {
    "a policy": Interface(
        lambda odd: ps.initialize_model_parallel(share="all" if odd else "none"),
        "share is 'all' on rank 2 and 'none' on rank 0",
    ),
    "a replaced function": Interface(
        initialized_with_a_function_replaced,
        "replaced in parallel_state is 'create_group' on rank 2 and None on rank 0",
    ),
    "a grid": Interface(
        lambda odd: HyperCommGrid([4, 1] if odd else [2, 2], ["tp", "dp"]).create_pg("tp"),
        "tp=4-dp=1, ranks 0..3)' on rank 2",
    ),
    "megatron-core's grid": Interface(
        lambda odd: hyper_comm_grid.HyperCommGrid(
            [4, 1] if odd else [2, 2], ["tp", "dp"]
        ).create_pg("tp"),
        "on rank 2",
    ),
    "a group of a table": Interface(
        lambda odd: EnvironmentTable().create_process_group("x", [0, 3 if odd else 1]),
        "ranks is ['0,3'] on rank 2 and ['0..1'] on rank 0",
    ),
    "a group of a manager": Interface(
        lambda odd: asked_of_a_manager(2, "others" if odd else "pairs"),
        "group others is",
    ),
    "sizes": Interface(
        lambda odd: ps.initialize_model_parallel(3 if odd else 2),
        "world size 4 is not divisible by tensor_model_parallel_size=3",
        RuntimeError,
    ),
    "a window": Interface(
        lambda odd: ps.initialize_model_parallel(2, rank_offset="0" if odd else 0),
        "offset",
        TypeError,
    ),
    "ranks of a table": Interface(
        lambda odd: EnvironmentTable().create_process_group("x", [0, 9 if odd else 1]),
        "of 0 to 3",
        ValueError,
    ),
    "a mesh of a table": Interface(
        lambda odd: EnvironmentTable().create_device_mesh("m", (2, 3 if odd else 2), ("a", "b")),
        "has 6 ranks",
        ValueError,
    ),
    "a cut of a manager": Interface(
        lambda odd: asked_of_a_manager(3 if odd else 2),
        "groups of 4 ranks cannot be cut into groups of 3",
        AssertionError,
    ),
}
DIFFERING = [name for name, interface in INTERFACES.items() if interface.raises is None]
REFUSING = [name for name, interface in INTERFACES.items() if interface.raises is not None]


@pytest.mark.parametrize("interface", DIFFERING)
@on_ranks(4)
def test_ranks_that_ask_for_different_things_all_say_so_and_the_next_call_works(rank, interface):
    call, says, _ = INTERFACES[interface]
    with pytest.raises(AgreementError) as raised:
        call(rank == 2)
    (text,) = {*from_all(str(raised.value))}
    assert says in text
    assert len(open_groups()) == 1
    call(False)


@pytest.mark.parametrize("interface", REFUSING)
@on_ranks(4)
def test_a_rank_that_refuses_its_arguments_keeps_nobody_waiting(rank, interface):
    call, says, refusal = INTERFACES[interface]
    start = time.monotonic()  # of 30 minutes
    with pytest.raises(refusal if rank == 2 else AgreementError, match=re.escape(says)) as raised:
        call(rank == 2)
    assert time.monotonic() - start < 20
    texts = from_all(str(raised.value))
    del texts[2]
    (text,) = {*texts}
    assert text.startswith("rank 2 refused its arguments")
    assert len(open_groups()) == 1
    call(False)


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
def test_a_rank_that_others_only_waited_for_names_its_own_failure(rank):
    def connects_in_vain(*args, **kwargs):
        time.sleep(8)  # the others wait five seconds for its address
        raise RuntimeError("no route to host")

    create = connects_in_vain if rank == 2 else c10d.ProcessGroupGloo.__init__
    with (
        mock.patch.object(c10d.ProcessGroupGloo, "__init__", create),
        pytest.raises(CreationError) as raised,
    ):
        HyperCommGrid([4], ["tp"]).create_pg("tp", timeout=timedelta(seconds=10))
    text = str(raised.value)
    if rank == 2:
        assert "no route to host" in text and "first to fail" not in text
    else:
        assert "ranks 2 published no address to connect to" in text and "keys" not in text


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
    cause = "ranks 0 published no address" if rank else "no route to host"
    assert cause in str(raised.value)
