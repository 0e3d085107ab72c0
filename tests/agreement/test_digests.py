"""How many bits of what the ranks propose are compared, in worlds of each size."""

import pytest
import torch.distributed as dist

from hypergrid.agreement.commit import Phase

DIGEST = 0x0123456789ABCDEF


def arrived(world, digests):
    """The phase of the last rank; rank ``r`` has the digest ``digests[r]``, or ``DIGEST``."""
    store = dist.HashStore()
    ranks = range(world)
    for rank in ranks:
        phase = Phase(store, ranks, rank)
        phase.arrive(digests.get(rank, DIGEST))
    return phase


@pytest.mark.parametrize(("world", "bits"), [(8, 52), (4096, 34), (16_384, 64), (70_000, 64)])
def test_one_other_digest_is_seen_in_each_of_its_bits(world, bits):
    assert arrived(world, {}).all_equal(DIGEST)
    for bit in {0, bits // 2, bits - 1} if world < 10_000 else {bits // 2}:
        assert not arrived(world, {3: DIGEST ^ 1 << bit}).all_equal(DIGEST)


def test_a_million_ranks_compare_59_bits():
    phase = Phase(dist.HashStore(), range(1 << 20), 0)
    assert phase._digest_bits == 18
    assert phase._further_bits((1 << 59) - 1) == (1 << 41) - 1
    most = (1 << 20) * phase._further_bits((1 << 64) - 1)
    assert most < 1 << 63  # the store adds numbers of 64 bits


@pytest.mark.parametrize("world", [4, 16_384])
def test_a_process_in_the_place_of_a_dead_one_takes_its_digest_back(world):
    store = dist.HashStore()
    ranks = range(world)
    Phase(store, ranks, 1).arrive(~DIGEST & (1 << 64) - 1)
    for rank in ranks:
        replaced = ~DIGEST & (1 << 64) - 1 if rank == 1 else None
        phase = Phase(store, ranks, rank)
        phase.arrive(DIGEST, replaced)
    assert phase.all_equal(DIGEST)
