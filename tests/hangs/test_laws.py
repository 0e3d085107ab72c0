"""Laws of a verdict, on programs that nobody wrote by hand."""

import random

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from hypergrid.hangs.waiting import Waiting
from hypergrid.layout import RankLayout
from tests.support import simulation, table
from tests.support.degraded import KINDS
from tests.support.laws import GOALS, judged, tally, verdict
from tests.support.programs import (
    Op,
    Program,
    groups_of,
    injected,
    random_program,
    with_sends_in_the_world,
)
from tests.support.simulation import Run


@pytest.mark.parametrize("seed", range(40))
def test_a_program_without_a_fault_ends_and_nobody_is_accused(seed):
    run = Run(random_program(random.Random(seed)), random.Random(seed))
    diagnosis = verdict(run)
    assert run.finished
    assert not diagnosis.certain or not diagnosis.ranks, diagnosis.sentence


def test_whoever_is_named_with_certainty_is_guilty_and_nine_of_ten_are_named_first():
    whole = tally(range(160), only="whole")["whole"]
    assert whole.holds(*GOALS["whole"]), [whole.line(), *whole.wrong]
    assert whole.counts["cases"] > 110


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "whole"])
def test_on_worse_evidence_no_innocent_is_named_with_certainty(kind):
    (worse,) = tally(range(80), only=kind).values()
    goal = GOALS.get(f"{kind}, varied", (0.4, 0.1))
    assert worse.holds(*goal), [worse.line(), *worse.wrong]
    assert worse.counts["cases"] > 12  # few worlds have a host of eight


def test_each_backend_of_a_group_numbers_its_own_calls():
    for kind, both in tally(range(40), only="two backends").items():
        assert both.holds(*GOALS.get(kind, (0.5, 0.05))), [both.line(), *both.wrong]
        assert both.counts["cases"] > 25


def test_no_innocent_is_named_with_certainty_if_several_are_guilty():
    whole = tally(range(100), several=True, only="whole")["whole"]
    assert whole.holds(0, certain=1 / 3), [whole.line(), *whole.wrong]
    assert whole.counts["cases"] > 60


@pytest.fixture(scope="module")
def with_rare_calls():
    return tally(range(150), only="a rare call")


@pytest.mark.parametrize("kind", ["whole, a rare call", "whole, a rare call is left out"])
def test_who_cannot_make_a_call_is_no_witness_against_it(with_rare_calls, kind):
    rare = with_rare_calls[kind]
    assert rare.holds(*GOALS[kind]), [rare.line(), *rare.wrong]
    assert rare.counts["cases"] > 100


@pytest.mark.parametrize("row", table("hangs/seeds.txt"), ids=lambda row: row[0])
def test_no_innocent_is_named_where_an_earlier_rule_named_one(row):
    _, seeds, guilty, evidence = row
    # A short recorder keeps other calls after the kinds of evidence before it were written.
    kinds = KINDS if evidence == "every kind" else (evidence,)
    for seed in seeds.split():
        for case in judged(int(seed), guilty == "several", kinds, varied=evidence != "whole"):
            assert not case.wrong, case.diagnosis.sentence


def hangs(seeds, fault, most_ranks=16):
    """The verdicts on random programs that hang by this fault of one rank."""
    for seed in seeds:
        rng = random.Random(seed)
        program = random_program(rng)
        if program.world <= most_ranks:
            program = injected(program, fault, rng.randrange(program.world), rng)
            run = program and Run(program, rng)
            if run and not run.finished:
                yield program, verdict(run)


def test_ranks_that_name_different_roots_leave_nothing_that_is_certain():
    verdicts = [*hangs(range(120), "root")]
    assert len(verdicts) > 15
    for program, diagnosis in verdicts:
        is_guilty = {*diagnosis.ranks} <= program.guilty.keys()
        is_well = diagnosis.kind in ("slow", "ok")
        assert not diagnosis.certain or (is_guilty and not is_well), diagnosis.sentence


def test_what_two_programs_with_other_culprits_leave_alike_is_not_certain():
    """Of two ranks, one skips a call that the other makes, or that one makes a call too many."""
    verdicts = [*hangs(range(3000), "skip", most_ranks=2)]
    assert len(verdicts) > 100
    for _, diagnosis in verdicts:
        assert not (diagnosis.certain and diagnosis.ranks), diagnosis.sentence


def test_what_most_ranks_do_is_the_program_as_no_dump_can_say_otherwise():
    """That two of three skip a call, and that the third makes one too many, is one recording."""
    step = [Op("all_reduce", "world", size) for size in (1, 2, 3, 4)]
    skipping = step * 2 + step[1:] + step
    program = Program([skipping, skipping, step * 4], {"world": [(0, 1, 2)]}, [], stacks=True)
    diagnosis = verdict(Run(program, random.Random(1)))
    assert diagnosis.ranks == (2,), diagnosis.sentence


# Hangs of a GPT that were found by hand. Rank 5 is of the last stage, with 7.


def step(stage):
    """Two micro-batches, four equal gradients and the loss of the world."""
    layers = [Op("all_reduce", "TP", 64, line=line) for line in (20, 21)]
    send = Op("send", "PP", 32, peer=1 - stage)
    receive = Op("recv", "PP", 32, peer=1 - stage)
    micro_batch = [receive, *layers, *layers, send]
    if stage == 0:
        micro_batch = [*layers, send, receive, *layers]
    gradients = [Op("all_reduce", "DP", 16)] * 4
    return [*micro_batch, *micro_batch, *gradients, Op("all_reduce", "default_pg", 1)]


@pytest.fixture(params=["nccl", "gloo"])
def gpt(request):
    """Five steps of tp=2 dp=2 pp=2; a fault is done in the third."""
    ops = [step(rank // 4) * 5 for rank in range(8)]
    groups = groups_of(RankLayout(("tp", "dp", "pp"), (2, 2, 2)))
    return Program(ops, groups, [], nccl=request.param == "nccl", stacks=True)


def third(gpt, rank, call, new):
    """The program in which a rank does ``new`` in place of a call of its third step."""
    ops = gpt.ops[rank]
    place = 2 * len(ops) // 5 + call
    return gpt.with_ops_of(rank, [*ops[:place], *new, *ops[place + 1 :]])


def judge(program):
    return verdict(Run(program, random.Random(1)))


GRADIENT = 13  # the second of four, after two micro-batches of six calls


def test_one_of_several_equal_gradients_is_skipped(gpt):
    diagnosis = judge(third(gpt, 7, GRADIENT, []))
    assert (diagnosis.ranks, diagnosis.certain) == ((7,), True), diagnosis.sentence
    assert (
        "called all_reduce #3 of the default group after all_reduce #11 of DP, where all_reduce "
        "#12 of DP is next" in diagnosis.sentence
    )


def test_of_two_ranks_that_skip_a_call_none_is_exchanged_for_an_innocent(gpt):
    diagnosis = judge(third(third(gpt, 0, GRADIENT, []), 1, GRADIENT, []))
    assert diagnosis.ranks == (0, 1), diagnosis.sentence


@pytest.mark.parametrize("gpt", ["nccl"], indirect=True)
def test_sends_in_the_default_group_do_not_hide_that_two_ranks_skip_a_gradient(gpt):
    program = third(third(gpt, 2, GRADIENT, []), 3, GRADIENT, [])
    diagnosis = judge(with_sends_in_the_world(program))
    assert diagnosis.ranks == (2, 3), diagnosis.sentence


def test_a_call_of_the_wrong_ranks_is_laid_on_the_rank_that_made_it(gpt):
    """The call on the wrong group ends another rank with gloo."""
    diagnosis = judge(third(gpt, 5, 0, [Op("all_reduce", "TP", 80)]))
    assert (diagnosis.ranks, diagnosis.certain) == ((5,), True), diagnosis.sentence


def test_a_send_to_the_wrong_rank_is_named_and_not_certain_as_nobody_else_could_make_it(gpt):
    """Rank 4 may have left its receive out."""
    diagnosis = judge(third(gpt, 1, 2, [Op("send", "default_pg", 32, peer=4)]))
    assert (diagnosis.ranks, diagnosis.certain) == ((1,), False), diagnosis.sentence
    assert diagnosis.sentence.startswith("Rank 1 (host0, tp=1 dp=0 pp=0) called send 1->4 #1")


@pytest.mark.parametrize("gpt", ["nccl"], indirect=True)
def test_a_deadlock_is_of_the_calls_that_ranks_have_entered_and_not_of_queued_ones(gpt, tmp_path):
    """Rank 5 has queued a send behind its all_reduce, and rank 1 the receive of that."""
    simulation.write(Run(third(gpt, 5, GRADIENT, []), random.Random(1)), tmp_path)
    waiting = Waiting(read(tmp_path))
    assert waiting.last_ones == [{5, 7}]
    for rank in (5, 7):
        (wait,) = waiting.of[rank]
        assert wait.call.what.name == "all_reduce" and rank not in wait.behind


def test_what_is_taken_away_from_a_recording_makes_nobody_guilty_with_certainty(gpt, tmp_path):
    run = Run(third(gpt, 5, GRADIENT, []), random.Random(1))
    for rank in range(8):
        directory = tmp_path / str(rank)
        directory.mkdir()
        simulation.write(run, directory)
        for name in (f"trace_{rank}", f"stack_{rank}.json"):
            (directory / name).unlink()
        diagnosis = diagnose(read(directory))
        assert not diagnosis.certain or diagnosis.ranks == (5,), (rank, diagnosis.sentence)
