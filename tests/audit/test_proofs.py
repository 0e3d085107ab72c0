"""Bugs of megatron-core, rebuilt over the releases that have them: found, and silent where fixed.

Numbers are those of pull requests of NVIDIA/Megatron-LM.
"""

import json
import os
from functools import cache

import pytest

from hypergrid.show.audit import read
from tests.support import ROOT, stock, warm

LAYERS = "--layers 2 --global-batch-size 8 --seq-length 32"
EXPERTS = "gradients --tp 2 --ep 2 --etp 1 --num-experts 4 --sequence-parallel --expert-biases"
EXPERTS += f" {LAYERS}"
GRADIENTS = {
    "two stages, tied embeddings, experts": (
        f"gradients --tp 2 --pp 2 --ep 2 --num-experts 4 --sequence-parallel {LAYERS}"
    ),
    "sharded over dp": f"gradients --tp 2 --cp 2 --use-distributed-optimizer --bf16 {LAYERS}",
}
PROGRAMS = {
    "0.15.3": ["norm"],
    "0.16.1": ["norm", *GRADIENTS.values()],
    "0.18.2": ["cross_entropy", EXPERTS],
    "0.19.2": ["cross_entropy", "norm", EXPERTS],
}


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    """What the programs of a release gave, and the problems that were recorded, by program."""

    @cache
    def run(release):
        if not stock.have_stock(release):
            pytest.skip(f"the source of megatron-core {release} is not here")
        directory = tmp_path_factory.mktemp(release)
        path = os.pathsep.join(map(str, [ROOT / ".cache" / f"megatron-core-{release}", ROOT]))
        command = ("-W", "ignore", "-m", "tests.support.audited", str(directory))
        done = warm.run(*command, *PROGRAMS[release], PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        found = {}
        for name, results in said.items():
            folder = directory / name.split()[0]
            audit = read(folder) if folder.is_dir() else None
            assert audit is None or audit.releases == (release.rpartition(".")[0],)
            found[name] = results, [each.text for each in audit.problems] if audit else []
        return found

    return run


def test_the_norm_of_a_second_models_gradients_asks_the_first_ones_tensor_rank(on):
    """As 6099 describes: the filter of duplicates falls back to the global tensor group."""
    results, told = on("0.15.3")["norm"]
    (text,) = told
    assert text.startswith(
        "FP32Optimizer given groups of 'critic' read tensor model parallel group of 'actor' at "
        "megatron/core/tensor_parallel/layers.py:"
    )
    assert results == [[pytest.approx(136**0.5), 12.0]] * 8
    results, told = on("0.16.1")["norm"]
    assert told == [] and all(right == wrong for right, wrong in results)


def test_gtps_duplicates_are_filtered_by_another_states_group(on):
    """7359: no release has the repair yet; releases without GTP have no such read."""
    (text,) = on("0.19.2")["norm"][1]
    assert text.startswith("FP32Optimizer given groups of 'critic' read gtp weight remat group of")
    assert "of 'actor'" in text and "get_gtp_weight_remat_rank()" in text


def test_the_loss_over_shards_of_the_vocabulary_reads_the_other_models_group(on):
    """As 6307 describes; since 0.19 the loss takes the group."""
    told = on("0.18.2")["cross_entropy"][1]
    assert len(told) == 5 and all("tensor_parallel/cross_entropy.py:" in each for each in told)
    assert all(each.startswith("Head given groups of 'critic' read tensor") for each in told)
    assert on("0.19.2")["cross_entropy"][1] == []


@pytest.mark.parametrize("layout", GRADIENTS)
def test_each_parameter_of_the_demo_is_reduced_and_counted_once_and_it_trains_on(on, layout):
    results = on("0.16.1")[GRADIENTS[layout]][0]
    assert [found for found, _ in results] == [[]] * 8
    first, second, _ = results[0][1]
    assert second < first


def test_experts_that_the_gradient_norm_leaves_out_are_named_with_both_norms(on):
    """5916, 6165: expert parameters were filtered by the dense tensor group."""
    for release, is_fixed in (("0.18.2", False), ("0.19.2", True)):
        results = on(release)[EXPERTS][0]
        assert all(each[0] == results[0][0] for each in results)
        norm = [each for each in results[0][0] if "norm" in each]
        if is_fixed:
            assert norm == []
            continue
        *parameters, last = norm
        assert len(parameters) == 4
        for text in parameters:
            assert ".linear_fc2.bias (expert): counted 0 times in the gradient norm" in text
            assert "instead of once, at pp=0 ep=1; on ranks 0, 1, 2, 3, 4, 5, 6, 7" in text
        assert "the gradient norm: " in last and "where every gradient is 1" in last


def test_biases_of_experts_that_are_summed_over_dense_tensor_ranks_are_named(on):
    """The second layer's bias is marked sequence-parallel, and so summed over tp, in all releases.

    With ETP 1 and TP 2 the ranks of tp hold different experts.
    """
    for release in ("0.18.2", "0.19.2"):
        reduced = [each for each in on(release)[EXPERTS][0][0][0] if "summed over" in each]
        assert len(reduced) == 8
        assert all(
            ".linear_fc2.bias (expert): summed over the ranks [0, 1, 2," in r for r in reduced
        )
        assert "instead of [0, 2, 4, 6]; on ranks 0, 2, 4, 6" in reduced[0]
