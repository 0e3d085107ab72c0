"""A start warns of groups of tp that span hosts where other places, or another order, avoid it."""

import socket
import warnings
from unittest import mock

import pytest

from compat import parallel_state as ps
from compat.megatron.hosts import tp_across_hosts
from hypergrid import RankLayout
from tests.support.counting import CountingStore
from tests.support.forked import from_all, on_ranks, store, total


def warned(rank, hosts, **arguments):
    """By rank the warnings of one start, where each rank is on one of ``hosts``."""
    with (
        mock.patch.object(socket, "gethostname", lambda: hosts[rank]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        ps.initialize_model_parallel(2, **arguments)
    ps.destroy_model_parallel()
    texts = [str(warning.message) for warning in caught if "groups of tp" in str(warning.message)]
    return from_all(texts)


@on_ranks(4)
def test_the_first_rank_alone_warns_where_ranks_are_interleaved_over_hosts(rank):
    (sentence,), *others = warned(rank, "abab")
    assert others == [[], [], []]
    assert sentence.startswith(
        "2 of 2 groups of tp span hosts (ranks 0, 1 are on a, b), though a host could hold such a "
        "group: every layer waits for the network. None would with the ranks of each host next to "
        "each other, hosts in the order a, b (srun --distribution=block"
    )


@on_ranks(4)
def test_where_warnings_are_errors_the_rank_that_warns_has_its_groups_as_all_others(rank):
    with mock.patch.object(socket, "gethostname", lambda: "abab"[rank]):
        warnings.filterwarnings("error", ".* groups of tp span hosts")
        ps.initialize_model_parallel(2)
    assert total(ps.get_tensor_model_parallel_group()) == 2


@on_ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "aaaa", "abcd"])
def test_nothing_is_said_where_tp_is_inside_hosts_or_no_host_could_hold_it(rank, hosts):
    assert warned(rank, hosts) == [[], [], [], []]


@on_ranks(4)
def test_the_first_rank_reads_all_hosts_in_two_messages_and_the_others_write_one(rank):
    counting = CountingStore(store())
    with mock.patch("compat.megatron.hosts.shared_store", lambda: counting):
        warned(rank, "abab")
    reads = {"check": 1, "multi_get": 1} if rank == 0 else {}
    assert counting.counts == {"set": 1, **reads}


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("abababab", "2 of 2 groups of tp span hosts"),
        # Six ranks on each host: the middle one of three groups of 4 spans two hosts anyhow.
        ("aaaaaabbbbbb", ""),
        # The host of 4 is cut by its neighbours of 2, unless it comes first.
        ("aabbbbcc", "1 would with the ranks of each host next to each other, hosts in the order"),
        ("abcdefgh", ""),
    ],
)
def test_a_way_is_named_only_where_fewer_groups_would_span_hosts(hosts, expected):
    layout = RankLayout(("tp", "dp"), (4, len(hosts) // 4), offset=8)
    sentence = tp_across_hosts(layout, "tp-cp-ep-dp-pp", list(hosts))
    assert expected in sentence
    assert bool(expected) == bool(sentence)
