"""Real hangs of small programs on gloo, written before anybody looked at the rules."""

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.support import own_hangs
from tests.support.hung import hang
from tests.support.recorded import Rank, write

# Of two ranks of which one calls and the other does not, nothing says which is wrong.
UNDECIDED = ("log_of_two_that_one_skips", "message_that_nobody_receives")


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_dynamo")
@pytest.mark.parametrize("name", own_hangs.PROGRAMS)
def test_the_guilty_rank_is_named_first_and_nobody_else_with_certainty(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERGRID_RECORD_P2P", "1")
    program = own_hangs.PROGRAMS[name]
    diagnosis = diagnose(read(hang(program.world, program.body, tmp_path)))
    if not program.guilty:
        assert (diagnosis.kind, diagnosis.ranks) == ("outside", (0,)), diagnosis.sentence
        return
    if diagnosis.certain:
        assert diagnosis.ranks == program.guilty, diagnosis.sentence
    if name in UNDECIDED:
        assert not diagnosis.certain, diagnosis.sentence
    else:
        assert diagnosis.ranks == program.guilty, diagnosis.sentence


@pytest.mark.parametrize("beyond", [2, 3])
def test_a_member_beyond_the_world_is_certainly_outside(tmp_path, beyond):
    """Two trainers, of which rank 0 sends weights to an engine; torch's dumps have no more."""
    groups = {"0": ("default_pg", [0, 1]), "weights": ("undefined", [0, beyond])}
    trainers = [Rank(rank, groups) for rank in range(2)]
    trainers[0].call("0").call("weights", "broadcast", done=False)
    trainers[1].call("0").call("0", done=False)
    diagnosis = diagnose(read(write(tmp_path, trainers)))
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.certain) == ("outside", (0,), True)
    assert f"whose member {beyond} is outside of this job." in diagnosis.sentence


def test_a_wait_for_a_process_outside_of_the_job_is_named(tmp_path):
    program = own_hangs.PROGRAMS["engine_that_does_not_take_the_weights"]
    diagnosis = diagnose(read(hang(program.world, program.body, tmp_path)))
    assert (diagnosis.kind, diagnosis.certain) == ("outside", False)
    assert "of weights" in diagnosis.sentence
    assert "whose member 1 is outside of this job" in diagnosis.sentence
