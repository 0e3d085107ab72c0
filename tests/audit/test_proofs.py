"""Bugs of megatron-core, rebuilt over the releases that have them: found, and silent where fixed.

Numbers are those of pull requests of NVIDIA/Megatron-LM.
"""

import json
import os
from functools import cache

import pytest

from hypergrid.show.audit import read
from tests.support import ROOT, stock, warm

PROGRAMS = {
    "0.15.3": ["norm"],
    "0.16.1": ["norm"],
    "0.18.2": ["cross_entropy"],
    "0.19.2": ["cross_entropy", "norm"],
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
