"""Laws of a verdict, on programs that nobody wrote by hand."""

import random
from dataclasses import replace

import pytest

from tests.support.degraded import KINDS
from tests.support.laws import GOALS, judged, tally, verdict
from tests.support.programs import Op, Program, Run, injected, random_program


@pytest.mark.parametrize("seed", range(40))
def test_a_program_without_a_fault_ends_and_nobody_is_accused(seed):
    run = Run(random_program(random.Random(seed)), random.Random(seed))
    found = verdict(run)
    assert run.finished
    assert not found.certain or not found.ranks, found.sentence


def test_whoever_is_named_with_certainty_is_guilty_and_nine_of_ten_are_named_first():
    found = tally(range(160), only="whole")["whole"]
    assert found.holds(*GOALS["whole"]), [found.line(), *found.wrong]
    assert found.cases > 110


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "whole"])
def test_on_worse_evidence_no_innocent_is_named_with_certainty(kind):
    (found,) = tally(range(80), only=kind).values()
    goal = GOALS.get(f"{kind}, varied", (0.4, 0.1))
    assert found.holds(*goal), [found.line(), *found.wrong]
    assert found.cases > 12  # few worlds have a host of eight


def test_ranks_that_name_different_roots_leave_nothing_that_is_certain():
    cases = 0
    for seed in range(120):
        rng = random.Random(seed)
        program = random_program(rng)
        changed = injected(program, "root", rng.randrange(program.world), rng)
        run = changed and Run(changed, rng)
        if run and not run.finished:
            found = verdict(run)
            assert not found.certain or {*found.ranks} <= run.program.guilty.keys(), found.sentence
            assert not (found.certain and found.kind in ("slow", "ok")), (seed, found.sentence)
            cases += 1
    assert cases > 15


def test_no_innocent_is_named_with_certainty_if_several_are_guilty():
    found = tally(range(100), several=True, only="whole")["whole"]
    assert found.holds(0), found.wrong
    assert found.cases > 60 and found.certain > found.cases / 3


def test_ranks_that_are_missed_in_several_groups_are_not_certain_by_one_of_them():
    """Three ranks called the wrong group: of those missed there, some are missed elsewhere too."""
    (case,) = judged(30000056, several=True, kinds=("short buffer",), varied=True)
    assert not case.wrong, case.found.sentence


def test_a_rank_whose_two_calls_another_role_makes_too_is_not_outvoted_by_its_own_role():
    """Three of four ranks of one stage call another operation; the other stage calls as it was."""
    (case,) = judged(30000283, several=True)
    assert not case.wrong, case.found.sentence


def test_a_rank_without_a_file_is_not_certain_where_others_wait_for_each_other():
    """Two ranks receive from each other; one of them has also queued a call of the rank."""
    kind = "one innocent missing"
    (case,) = judged(41000292, several=True, kinds=(kind,), varied=True)
    assert not case.wrong, case.found.sentence


def test_stages_that_send_in_the_default_group_are_not_taken_for_one_role():
    """Every stage sends to the rank two further on; their other calls differ."""
    kind = "guilty missing"
    (case,) = judged(41000316, several=True, kinds=(kind,), varied=True)
    assert not case.wrong, case.found.sentence


def test_what_two_programs_with_other_culprits_leave_alike_is_not_certain():
    """Of two ranks, one skips a call that the other makes, or that one makes a call too many."""
    cases = 0
    for seed in range(3000):
        rng = random.Random(seed)
        program = random_program(rng)
        if program.world != 2:
            continue
        changed = injected(program, "skip", rng.randrange(2), rng)
        run = changed and Run(changed, rng)
        if run and not run.finished:
            found = verdict(run)
            assert not (found.certain and found.ranks), (seed, found.sentence)
            cases += 1
    assert cases > 100


def test_what_most_ranks_do_is_the_program_as_no_dump_can_say_otherwise():
    """That two of three skip a call, and that the third makes one too many, is one recording."""
    step = [Op("all_reduce", "world", size) for size in (1, 2, 3, 4)]
    groups = {"world": [(0, 1, 2)]}
    two_skip = [step * 2 + step[1:] + step, step * 2 + step[1:] + step, step * 4]
    usual = step * 2 + step[1:] + step
    one_adds = [usual, usual, usual[:8] + step[:1] + usual[8:]]
    assert two_skip == one_adds
    found = verdict(Run(Program(two_skip, groups, [], nccl=True, stacks=True), random.Random(1)))
    assert found.ranks == (2,), found.sentence


# Hangs of a GPT that were found by hand. tp=2 dp=2 pp=2: rank 5 is of the last stage, with 7.

GROUPS = {
    "default_pg": [(0, 1, 2, 3, 4, 5, 6, 7)],
    "TP": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "DP": [(0, 2), (1, 3), (4, 6), (5, 7)],
    "PP": [(0, 4), (1, 5), (2, 6), (3, 7)],
}


def step(stage):
    """Two micro-batches, four equal gradients and the loss of the world."""
    layers = [Op("all_reduce", "TP", 64, line=line) for line in (20, 21)]
    forward, back = ("send", "recv") if stage == 0 else ("recv", "send")
    one, other = Op(forward, "PP", 32, peer=1 - stage), Op(back, "PP", 32, peer=1 - stage)
    micro = [*layers, one, other, *layers] if stage == 0 else [one, *layers, *layers, other]
    return [*micro, *micro, *[Op("all_reduce", "DP", 16)] * 4, Op("all_reduce", "default_pg", 1)]


@pytest.fixture(params=["nccl", "gloo"])
def gpt(request):
    """Five steps of it; a fault is done in the third."""
    ops = [step(rank // 4) * 5 for rank in range(8)]
    nccl = request.param == "nccl"
    return Program(ops, GROUPS, [], nccl=nccl, stacks=True)


def third(gpt, rank, call, new):
    """The program in which a rank does ``new`` in place of a call of its third step."""
    mine = gpt.ops[rank]
    at = 2 * len(mine) // 5 + call
    changed = [*gpt.ops]
    changed[rank] = [*mine[:at], *new, *mine[at + 1 :]]
    return replace(gpt, ops=changed)


GRADIENT = 13  # the second of four, after two micro-batches of six calls


def test_one_of_several_equal_gradients_is_skipped(gpt):
    found = verdict(Run(third(gpt, 7, GRADIENT, []), random.Random(1)))
    assert (found.ranks, found.certain) == ((7,), True), found.sentence
    assert "called all_reduce #3 of the default group after all_reduce #11 of DP" in found.sentence
    assert "where all_reduce #12 of DP is next" in found.sentence


def test_of_two_ranks_that_skip_a_call_none_is_exchanged_for_an_innocent(gpt):
    both = third(third(gpt, 0, GRADIENT, []), 1, GRADIENT, [])
    found = verdict(Run(both, random.Random(1)))
    assert found.ranks == (0, 1), found.sentence


def test_a_call_on_the_wrong_group_that_ends_another_rank_is_not_laid_on_that(gpt):
    run = Run(third(gpt, 5, 0, [Op("all_reduce", "TP", 80)]), random.Random(1))
    assert gpt.nccl or run.hosts[4].state == "killed"
    found = verdict(run)
    assert (found.ranks, found.certain) == ((5,), True), found.sentence


def test_a_send_to_the_wrong_rank(gpt):
    wrong = third(gpt, 1, 2, [Op("send", "default_pg", 32, peer=4)])
    found = verdict(Run(wrong, random.Random(1)))
    assert (found.ranks, found.certain) == ((1,), True), found.sentence
