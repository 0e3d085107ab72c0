"""A real Megatron model trains to the same bits on stock and on ours, in every kind of layout."""

import argparse
import json
from unittest import mock

import pytest

from scripts import compare_training
from tests.support import warm

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
# Each is a part of one of those above.
MORE = {
    "data parallel": "",
    "tensor, sequence parallel": "--tp 2 --sequence-parallel",
    "expert tensor": "--tp 2 --ep 2 --etp 1 --num-experts 4 --sequence-parallel",
    "distributed optimizer": "--tp 2 --use-distributed-optimizer",
}


def run(side, *arguments, order=None):
    """Train two steps: the loss of the second has what the first changed."""
    settings = argparse.Namespace(ranks=8, steps=2, order=order)
    runs = {number: f"{line} --seq-length 32" for number, line in enumerate(arguments)}
    with mock.patch.object(compare_training, "in_fresh_process", warm.call):
        return compare_training.run_side(side, settings, runs)


def on_both(runs):
    """What each run gives on stock and on ours."""
    sides = (run(side, *runs.values()) for side in ("stock", "hypergrid"))
    return {name: pair for name, *pair in zip(runs, *sides, strict=True)}


@pytest.fixture(scope="module")
def trained():
    return on_both(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_training_is_equal_to_the_last_bit_on_every_rank(trained, name, capfd):
    are_equal(name, *trained[name])


@pytest.mark.long
def test_training_in_further_layouts_is_equal_to_the_last_bit(capfd):
    for name, pair in on_both(MORE).items():
        are_equal(name, *pair)


def are_equal(name, stock, swapped):
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


SUSPENDING = """
import json, sys
import compat
compat.install()
from scripts import train_gpt
from tests.support import backends, forked
from compat import parallel_state


def train(rank, arguments, backend, suspends):
    calls, reports, loss = [], [], train_gpt.loss_everywhere
    backends.native(calls, [])
    forked.join(rank, 4, backend=backend)

    def then_suspend(*given):
        value, state, groups = loss(*given), parallel_state.current_state(), {*forked.open_groups()}
        reports.append({kind: done.how for kind, done in state.suspend().items()})
        state.resume()
        assert groups == {*forked.open_groups()}
        return value

    if suspends:
        train_gpt.loss_everywhere = then_suspend
    results = train_gpt.main(f"{arguments} --steps 2 --seq-length 32".split()) or {}
    return results.get("rank_digests"), reports, len(calls)


layouts = json.loads(sys.argv[1])
kinds = [("gloo", False), ("gloo", True), ("native", True)]
for each in layouts:
    runs = [forked.run_ranks(4, train, each, *kind, backend="", timeout=60) for kind in kinds]
    print(json.dumps(runs))
"""


def test_training_that_suspends_between_steps_rebuilds_nothing_and_is_bitwise_equal():
    layouts = ["--tp 2 --use-distributed-optimizer", "--tp 2 --pp 2"]
    done = warm.run("-c", SUSPENDING, json.dumps(layouts), timeout=300)
    assert done.returncode == 0, done.stderr
    trained = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(trained) == len(layouts)
    for plain, kept, native in trained:
        assert plain[0][0] == kept[0][0] == native[0][0] and len(plain[0][0]) == 4
        for rank in range(4):
            assert plain[rank][1:] == [[], 0] and kept[rank][1:] == [[{"gloo": "keep"}] * 2, 0]
            assert native[rank][1] == [{"gloo": "keep", "native": "native"}] * 2
            assert native[rank][2] >= 4 * 5  # a call to suspend and one to resume, for each group
