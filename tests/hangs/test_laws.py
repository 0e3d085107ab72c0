"""Laws of a verdict, on programs that nobody wrote by hand."""

import random
from dataclasses import replace

import pytest

from tests.support.degraded import KINDS
from tests.support.laws import GOALS, judged, tally, verdict
from tests.support.programs import Op, Program, Run, injected, random_program


def hang(seed, fault, size=None):
    """A random program of ``size`` ranks that hangs as one rank does this; or None."""
    rng = random.Random(seed)
    program = random_program(rng)
    if size not in (None, program.world):
        return None
    changed = injected(program, fault, rng.randrange(program.world), rng)
    run = changed and Run(changed, rng)
    return None if run is None or run.finished else run


@pytest.mark.parametrize("seed", range(40))
def test_a_program_without_a_fault_ends_and_nobody_is_accused(seed):
    run = Run(random_program(random.Random(seed)), random.Random(seed))
    diagnosis = verdict(run)
    assert run.finished
    assert not diagnosis.certain or not diagnosis.ranks, diagnosis.sentence


def test_whoever_is_named_with_certainty_is_guilty_and_nine_of_ten_are_named_first():
    whole = tally(range(160), only="whole")["whole"]
    assert whole.holds(*GOALS["whole"]), [whole.line(), *whole.wrong]
    assert whole.cases > 110


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "whole"])
def test_on_worse_evidence_no_innocent_is_named_with_certainty(kind):
    (worse,) = tally(range(80), only=kind).values()
    goal = GOALS.get(f"{kind}, varied", (0.4, 0.1))
    assert worse.holds(*goal), [worse.line(), *worse.wrong]
    assert worse.cases > 12  # few worlds have a host of eight


def test_no_innocent_is_named_with_certainty_if_several_are_guilty():
    whole = tally(range(100), several=True, only="whole")["whole"]
    assert whole.holds(0), whole.wrong
    assert whole.cases > 60 and whole.certain > whole.cases / 3


def test_ranks_that_name_different_roots_leave_nothing_that_is_certain():
    runs = [run for run in (hang(seed, "root") for seed in range(120)) if run]
    assert len(runs) > 15
    for run in runs:
        diagnosis = verdict(run)
        if diagnosis.certain:
            assert {*diagnosis.ranks} <= run.program.guilty.keys(), diagnosis.sentence
            assert diagnosis.kind not in ("slow", "ok"), diagnosis.sentence


def test_what_two_programs_with_other_culprits_leave_alike_is_not_certain():
    """Of two ranks, one skips a call that the other makes, or that one makes a call too many."""
    runs = [run for run in (hang(seed, "skip", size=2) for seed in range(3000)) if run]
    assert len(runs) > 100
    for run in runs:
        diagnosis = verdict(run)
        assert not (diagnosis.certain and diagnosis.ranks), diagnosis.sentence


# Programs of which an earlier rule named an innocent rank with certainty: seed, whether several
# ranks are guilty, and the evidence.
MISSING = "one innocent missing"
SEEDS = {
    "a rank whose queued calls wait for a send that its recorder lost is not certain": [
        (800329, False, "short buffer"),
    ],
    "a rank whose recorder lost earlier calls is not certain unless others wait for the due call": [
        (20268180, False, "short buffer"),
        (20269503, False, "short buffer"),
    ],
    "a rank is not certain where those that wait for it may be in a call that is lost": [
        (20270930, False, "every kind"),
    ],
    "ranks that are missed in several groups are not certain by one of them": [
        (30000056, True, "short buffer"),
    ],
    "a rank whose two calls another role makes too is not outvoted by its own role": [
        (30000283, True, "whole"),
    ],
    "stages that send in the default group are not taken for one role": [
        (41000316, True, "guilty missing"),
    ],
    "a rank without a file is not certain where others wait for each other": [
        (41000292, True, MISSING),
    ],
    "a rank without a file is not certain where one that did as always is outvoted": [
        (800292, True, MISSING),
    ],
    "a rank without a file is not certain where a recorder lost the call that its rank is in": [
        (20263266, False, MISSING),
        (20264511, False, MISSING),
        (20266811, False, MISSING),
        (20266974, False, MISSING),
        (20267041, False, MISSING),
    ],
    "a rank without a file is not certain where nobody knows how many ranks there are": [
        (20265738, False, "several missing"),
    ],
    "a rank without a file is not certain where most ranks of a role left its usual course": [
        (800484, True, MISSING),
    ],
}


@pytest.mark.parametrize("name", SEEDS)
def test_no_innocent_is_named_where_an_earlier_rule_named_one(name):
    for seed, several, kind in SEEDS[name]:
        # A short recorder keeps other calls after the kinds of evidence before it were written.
        kinds = KINDS if kind == "every kind" else (kind,)
        for case in judged(seed, several, kinds=kinds, varied=kind != "whole"):
            assert not case.wrong, case.diagnosis.sentence


def test_what_most_ranks_do_is_the_program_as_no_dump_can_say_otherwise():
    """That two of three skip a call, and that the third makes one too many, is one recording."""
    step = [Op("all_reduce", "world", size) for size in (1, 2, 3, 4)]
    groups = {"world": [(0, 1, 2)]}
    two_skip = [step * 2 + step[1:] + step, step * 2 + step[1:] + step, step * 4]
    usual = step * 2 + step[1:] + step
    one_adds = [usual, usual, usual[:8] + step[:1] + usual[8:]]
    assert two_skip == one_adds
    program = Program(two_skip, groups, [], nccl=True, stacks=True)
    diagnosis = verdict(Run(program, random.Random(1)))
    assert diagnosis.ranks == (2,), diagnosis.sentence


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
    first = Op(forward, "PP", 32, peer=1 - stage)
    second = Op(back, "PP", 32, peer=1 - stage)
    micro = [first, *layers, *layers, second]
    if stage == 0:
        micro = [*layers, first, second, *layers]
    return [*micro, *micro, *[Op("all_reduce", "DP", 16)] * 4, Op("all_reduce", "default_pg", 1)]


@pytest.fixture(params=["nccl", "gloo"])
def gpt(request):
    """Five steps of it; a fault is done in the third."""
    ops = [step(rank // 4) * 5 for rank in range(8)]
    return Program(ops, GROUPS, [], nccl=request.param == "nccl", stacks=True)


def third(gpt, rank, call, new):
    """The program in which a rank does ``new`` in place of a call of its third step."""
    rank_ops = gpt.ops[rank]
    at = 2 * len(rank_ops) // 5 + call
    ops = [*gpt.ops]
    ops[rank] = [*rank_ops[:at], *new, *rank_ops[at + 1 :]]
    return replace(gpt, ops=ops)


GRADIENT = 13  # the second of four, after two micro-batches of six calls


def test_one_of_several_equal_gradients_is_skipped(gpt):
    diagnosis = verdict(Run(third(gpt, 7, GRADIENT, []), random.Random(1)))
    assert (diagnosis.ranks, diagnosis.certain) == ((7,), True), diagnosis.sentence
    assert (
        "called all_reduce #3 of the default group after all_reduce #11 of DP, where all_reduce "
        "#12 of DP is next" in diagnosis.sentence
    )


def test_of_two_ranks_that_skip_a_call_none_is_exchanged_for_an_innocent(gpt):
    both = third(third(gpt, 0, GRADIENT, []), 1, GRADIENT, [])
    diagnosis = verdict(Run(both, random.Random(1)))
    assert diagnosis.ranks == (0, 1), diagnosis.sentence


@pytest.mark.parametrize(
    "rank, call, operation",
    [
        # The call on the wrong group ends another rank with gloo.
        (5, 0, Op("all_reduce", "TP", 80)),
        # A send to the wrong rank.
        (1, 2, Op("send", "default_pg", 32, peer=4)),
    ],
)
def test_a_call_of_the_wrong_ranks_is_laid_on_the_rank_that_made_it(gpt, rank, call, operation):
    diagnosis = verdict(Run(third(gpt, rank, call, [operation]), random.Random(1)))
    assert (diagnosis.ranks, diagnosis.certain) == ((rank,), True), diagnosis.sentence
