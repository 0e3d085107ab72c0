"""Each example in scripts/examples runs on eight ranks and shows what it says."""

import json

import pytest

from tests.support import warm

# A process of its own: an example may swap megatron's parallel_state and adapt torch.
RUN = """
import importlib, json, sys
from tests.support import forked
example = importlib.import_module("scripts.examples." + sys.argv[1])
print(json.dumps(forked.run_ranks(8, lambda rank: example.main(), timeout=60)))
"""


def run(name):
    """What ``main()`` gives on each rank, and what was printed."""
    done = warm.run("-c", RUN, name)
    assert done.returncode == 0, done.stderr
    *printed, results = done.stdout.splitlines()
    return json.loads(results), printed


def test_two_models_keep_their_layouts_and_compute_what_one_rank_would():
    results, printed = run("two_models")
    for result in results:
        assert result["held"]["teacher"] == "tp=4, (16, 16) of (64, 16)"
        assert result["held"]["student"] == "tp=2, (32, 16) of (64, 16)"
        assert max(result["errors"].values()) < 1e-5 < 1e-2 < result["gradient"]
    assert len(printed) == 5


def test_encoder_and_decoder_on_other_ranks_have_the_gradients_of_one_rank():
    results, printed = run("encoder_decoder")
    assert [set(result) for result in results] == [{"up", "down"}] * 4 + [{"out"}] * 4
    assert all(error < 1e-12 for result in results for error in result.values())
    assert len(printed) == 8


def test_fsdp_and_tensor_parallelism_use_the_grids_groups_and_make_none():
    results, printed = run("fsdp_tp")
    for result in results:
        assert result["sharded"] == pytest.approx(result["whole"], rel=1e-5)
        assert result["whole"][-1] < 0.6 * result["whole"][0]
        assert result["same"] and result["made"] == 0
    assert "groups that the mesh, FSDP2 and tensor parallelism made: 0" in printed


def test_a_suspended_actor_trains_on_afterwards_over_the_same_groups():
    results, _ = run("actor_critic")
    for result in results:
        assert result["how"] == {"gloo": "keep"} and result["is_same_group"]
    for rank, result in enumerate(results):
        mean = [1, 2, 1, 2, 5, 6, 5, 6][rank]  # of the data parallel ranks, two apart
        assert result["weights"][0] == pytest.approx(1 - 0.1 * mean)
        assert result["weights"][3] == pytest.approx((1 - 0.1 * mean) ** 2)
