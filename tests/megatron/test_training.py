"""A real Megatron model trains to the same bits on stock and on ours, in every kind of layout."""

import argparse

import pytest

from scripts import compare_training

RUNS = {
    "tensor and pipeline": "--tp 2 --pp 2",
    "virtual pipeline": "--pp 2 --vp 2",
    "context parallel": "--tp 2 --cp 2",
    "experts": "--tp 2 --pp 2 --ep 2 --num-experts 4 --sequence-parallel",
    "two optimizer instances": (
        "--tp 2 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
    ),
    "pipelines inside": "--tp 2 --pp 2 --order tp-cp-pp-dp",
}


def run(side, *arguments, order=None):
    """Train two steps: the loss of the second has what the first changed."""
    settings = argparse.Namespace(ranks=8, steps=2, order=order)
    runs = {number: f"{line} --seq-length 32" for number, line in enumerate(arguments)}
    return compare_training.run_side(side, settings, runs)


@pytest.fixture(scope="module")
def trained():
    """What each run gives on stock and on ours."""
    sides = (run(side, *RUNS.values()) for side in ("stock", "hypergrid"))
    return {name: pair for name, *pair in zip(RUNS, *sides, strict=True)}


@pytest.mark.parametrize("name", RUNS)
def test_training_is_equal_to_the_last_bit_on_every_rank(trained, name, capfd):
    stock, swapped = trained[name]
    assert compare_training.show(name, stock, swapped)
    assert swapped["steps"][-1]["loss"] < swapped["steps"][0]["loss"]
    # Each rank made its own groups and no others.
    assert swapped["new_group_calls"] == swapped["live_groups"]
    assert swapped["live_groups"] == stock["live_groups"]
    assert max(swapped["new_group_calls"]) < min(stock["new_group_calls"])


def test_an_order_that_the_launcher_sets_trains_as_the_script_that_passes_it(trained):
    stock, _ = trained["pipelines inside"]
    (swapped,) = run("hypergrid", "--tp 2 --pp 2", order="tp-cp-pp-dp")
    assert stock["arguments"]["order"] == "tp-cp-pp-dp" != swapped["arguments"]["order"]
    assert stock["rank_digests"] == swapped["rank_digests"]


def test_shared_communicators_that_connect_late_train_to_the_same_bits(trained, monkeypatch):
    monkeypatch.setenv("HYPERGRID_SHARE", "all")
    monkeypatch.setenv("HYPERGRID_CONNECT", "lazy")
    names = ("tensor and pipeline", "experts")
    for name, swapped in zip(names, run("hypergrid", *map(RUNS.get, names)), strict=True):
        stock, _ = trained[name]
        assert stock["rank_digests"] == swapped["rank_digests"]
        assert max(swapped["live_groups"]) < 0.8 * max(stock["live_groups"])


def test_explicit_groups_train_to_the_same_bits_beside_a_module_that_has_no_others(trained):
    """The module then knows the tensor parallel group alone, and refuses all others."""
    names = ("tensor and pipeline", "virtual pipeline", "context parallel", "experts")
    lines = [f"{RUNS[name]} --explicit-groups" for name in names]
    for name, explicit in zip(names, run("hypergrid", *lines), strict=True):
        stock, _ = trained[name]
        assert stock["rank_digests"] == explicit["rank_digests"]
