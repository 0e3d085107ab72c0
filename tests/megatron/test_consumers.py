"""megatron-core's own users of HyperCommGrid carry the right rows over ours, as over stock's."""

import json

import pytest

from tests.support import consumers, warm


@pytest.fixture(scope="module")
def received():
    """The words that each rank received, by test and side."""
    sides = {}
    for side in ("stock", "hypergrid"):
        done = warm.run("-W", "ignore", "-m", consumers.__name__, side, timeout=180)
        assert done.returncode == 0, done.stderr
        sides[side] = json.loads(done.stdout.splitlines()[-1])
    return sides


def place(rank, sizes, offset):
    """A rank's data parallel rank and pipeline stage, with tp the fastest and pp the slowest."""
    tp, dp, _ = sizes
    return (rank - offset) // tp % dp, (rank - offset) // (tp * dp)


def share(start, factor, part, parts):
    size = consumers.BATCH // parts
    return [factor * (start + row) for row in range(part * size, (part + 1) * size)]


@pytest.mark.parametrize("name", consumers.BRIDGES)
def test_a_bridge_carries_rows_forward_and_gradients_back(received, name):
    sending, receiving = consumers.BRIDGES[name]
    for rank, got in enumerate(received["hypergrid"][name]):
        forward = rank >= 4
        sizes = receiving if forward else sending
        replica, stage = place(rank, sizes, 4 if forward else 0)
        if stage != (0 if forward else sizes[2] - 1):
            assert got == [None, None]  # no bridge ends here
            continue
        factor = 1 if forward else 10
        assert got == [share(start, factor, replica, sizes[1]) for start in (0, 100)]


def test_stocks_grid_carries_the_same(received):
    assert received["stock"] == received["hypergrid"]
