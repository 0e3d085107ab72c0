"""megatron-core's own users of HyperCommGrid carry the same rows over ours as over stock's."""

import json

import pytest

from tests.support import consumers, warm


@pytest.fixture(scope="module")
def received():
    """The rows that each rank received, by side and layout."""
    sides = {}
    for side in ("stock", "hypergrid"):
        done = warm.run("-W", "ignore", "-m", consumers.__name__, side, timeout=180)
        assert done.returncode == 0, done.stderr
        sides[side] = json.loads(done.stdout.splitlines()[-1])
    return sides


@pytest.mark.parametrize("layout", consumers.LAYOUTS)
def test_a_bridge_between_grids_carries_rows_forward_and_gradients_back(received, layout):
    assert received["hypergrid"][layout] == received["stock"][layout]
