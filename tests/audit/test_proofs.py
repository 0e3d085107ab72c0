"""Bugs of megatron-core, rebuilt over the releases that have them: found, and silent where fixed.

Numbers are those of pull requests of NVIDIA/Megatron-LM.
"""

import json
import os
from functools import cache

import pytest

from compat.audit.recordings import read
from tests.support import ROOT, stock, warm

PROGRAMS = {
    "0.15.3": ["norm"],
    "0.16.1": ["norm"],
    "0.18.2": ["cross_entropy"],
    "0.19.2": ["cross_entropy", "norm"],
}


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    """What the programs of a release returned, and the problems that were recorded, by program."""

    @cache
    def run(release):
        if not stock.have_stock(release):
            pytest.skip(f"the source of megatron-core {release} is not here")
        directory = tmp_path_factory.mktemp(release)
        path = os.pathsep.join(map(str, [ROOT / ".cache" / f"megatron-core-{release}", ROOT]))
        command = ("-W", "ignore", "-m", "tests.support.audited", str(directory))
        done = warm.run(*command, *PROGRAMS[release], PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        outcomes = {}
        for name, results in json.loads(done.stdout.splitlines()[-1]).items():
            recording = read(directory / name)
            assert recording.releases == [release.rpartition(".")[0]]
            outcomes[name] = results, [problem.text for problem in recording.problems]
        return outcomes

    return run


def test_the_norm_of_a_second_models_gradients_asks_the_first_ones_tensor_rank(on):
    """As 6099 describes: the filter of duplicates falls back to the global tensor group."""
    norms, (problem,) = on("0.15.3")["norm"]
    assert problem.startswith(
        "FP32Optimizer given groups of 'critic' read tensor model parallel group of 'actor' at "
        "megatron/core/tensor_parallel/layers.py:"
    )
    assert norms == [[pytest.approx(136**0.5), 12.0]] * 8
    norms, problems = on("0.16.1")["norm"]
    assert problems == []
    assert all(right == wrong for right, wrong in norms)


def test_gtps_duplicates_are_filtered_by_another_states_group(on):
    """7359: no release has the repair yet; releases without GTP have no such read."""
    _, (problem,) = on("0.19.2")["norm"]
    assert problem.startswith("FP32Optimizer given groups of 'critic' read gtp weight remat group")
    assert "of 'actor'" in problem
    assert "get_gtp_weight_remat_rank()" in problem


def test_the_loss_over_shards_of_the_vocabulary_reads_the_other_models_group(on):
    """As 6307 describes; since 0.19 the loss takes the group."""
    _, problems = on("0.18.2")["cross_entropy"]
    assert len(problems) == 5
    for problem in problems:
        assert "tensor_parallel/cross_entropy.py:" in problem
        assert problem.startswith("Head given groups of 'critic' read tensor")
    assert on("0.19.2")["cross_entropy"][1] == []
