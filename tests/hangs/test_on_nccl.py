"""Real hangs on NCCL: who is named, and that no sentence is false, whatever files are missing.

``on_nccl.tar.xz`` holds six recordings of the demo's GPT (tests/support/hanging.py) on eight ranks
of one GPU, with torch 2.11.0 and NCCL 2.28.9, of 2026-11-26: as ``hypergrid.record`` wrote them,
with other paths. Rank 5 is guilty in all of them. Made by ``tar --sort=name -c . | xz -9e``.
"""

import tarfile
from itertools import combinations
from pathlib import Path

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from hypergrid.hangs.waiting import Waiting
from tests.support import ROOT

HANGS = {
    "adds": "order",
    "another": "mismatch",
    "killed": "no dump",
    "raised_and_stays": "raised",
    "skips": "order",
    "stopped": "no dump",
}
GUILTY = 5


@pytest.fixture(scope="module")
def on_nccl(tmp_path_factory):
    directory = tmp_path_factory.mktemp("on_nccl")
    with tarfile.open(Path(__file__).with_name("on_nccl.tar.xz")) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.parametrize("name", HANGS)
def test_the_guilty_rank_is_named_alone(name, on_nccl):
    diagnosis = diagnose(read(on_nccl / name))
    assert (diagnosis.kind, diagnosis.ranks) == (HANGS[name], (GUILTY,)), diagnosis.sentence
    is_gone = HANGS[name] == "no dump"
    assert diagnosis.certain or is_gone, diagnosis.sentence


def test_the_sample_of_the_page_is_the_verdict_on_a_real_recording(on_nccl):
    words = " ".join((ROOT / "docs" / "hangs.md").read_text().split())
    diagnosis = diagnose(read(on_nccl / "adds"))
    for line in (diagnosis.sentence, *diagnosis.chain):
        assert line in words


@pytest.mark.parametrize("name", HANGS)
def test_ranks_that_are_in_one_call_do_not_wait_for_each_other_there(name, on_nccl):
    waiting = Waiting(read(on_nccl / name))
    for wait in waiting.waits:
        in_the_call = {rank for rank in wait.inside if wait in waiting.of.get(rank, ())}
        assert not in_the_call & wait.missed, wait


@pytest.mark.parametrize("name", HANGS)
def test_a_batch_that_has_ended_has_the_state_of_its_entry(name, on_nccl):
    """Torch leaves the sends and receives of a batch "scheduled", and marks "coalesced" alone."""
    recording = read(on_nccl / name)
    for rank in recording.ranks.values():
        names = {call.what.name for call in rank.calls}
        assert "coalesced" not in names
        assert len(rank.calls) - rank.calls.rows["done"].sum() <= 7, rank.rank


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("name", HANGS)
def test_no_innocent_rank_is_named_with_certainty_where_files_are_missing(name, missing, on_nccl):
    for ranks in combinations(range(8), missing):
        diagnosis = diagnose(_without(on_nccl / name, ranks))
        is_guilty = diagnosis.ranks[:1] in ((), (GUILTY,))
        assert is_guilty or not diagnosis.certain, (ranks, diagnosis.sentence)
        # Whose files are there is not named before the guilty rank.
        assert is_guilty or diagnosis.ranks[0] in ranks, (ranks, diagnosis.sentence)


def _without(directory, ranks):
    """The recording without the flight recorders and the stacks of these ranks."""
    hidden = directory / "hidden"
    hidden.mkdir(exist_ok=True)
    names = [name for rank in ranks for name in (f"trace_{rank}", f"stack_{rank}.json")]
    moved = [name for name in names if (directory / name).exists()]
    for name in moved:
        (directory / name).rename(hidden / name)
    try:
        return read(directory)
    finally:
        for name in moved:
            (hidden / name).rename(directory / name)
