"""Laws of a verdict, on programs that nobody wrote by hand; and hangs of a simulated GPT."""

import random
from dataclasses import replace

import pytest

from hypergrid.layout import RankLayout
from tests.support import table
from tests.support.laws import GOALS, KINDS, judged, summary, tally, verdict
from tests.support.programs import Program, groups_of, random_program, written_ops
from tests.support.simulation import Run


def test_a_program_without_a_fault_ends_and_nobody_is_accused():
    for seed in range(40):
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


def test_no_innocent_is_named_with_certainty_if_several_are_guilty():
    whole = tally(range(100), several=True, only="whole")["whole"]
    assert whole.holds(0, certain=1 / 3), [whole.line(), *whole.wrong]
    assert whole.counts["cases"] > 60


@pytest.mark.parametrize("row", table("hangs/seeds.txt"), ids=lambda row: row[0])
def test_no_innocent_is_named_where_an_earlier_rule_named_one(row):
    _, seeds, guilty, evidence = row
    # A short recorder keeps other calls after the kinds of evidence before it were written.
    kinds = KINDS if evidence == "every kind" else (evidence,)
    for seed in seeds.split():
        for case in judged(int(seed), guilty == "several", kinds, varied=evidence != "whole"):
            assert not case.is_wrong, case.diagnosis.sentence


def gpt():
    """Five steps of tp=2 dp=2 pp=2: micro-batches, four equal gradients, the loss of the world."""
    micro_batch_of_stage = (
        "TP[64] TP[64] PP=send_0->1[32] PP=recv_0<-1[32] TP[64] TP[64]",
        "PP=recv_1<-0[32] TP[64] TP[64] TP[64] TP[64] PP=send_1->0[32]",
    )
    ops = []
    for rank in range(8):
        micro_batch = micro_batch_of_stage[rank // 4]
        step = f"{micro_batch} {micro_batch} (DP[16])*4 world[1]"
        ops.append(written_ops(step) * 5)
    groups = groups_of(RankLayout(("tp", "dp", "pp"), (2, 2, 2)))
    return Program(ops, groups, [], stacks=True)


@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "gloo"])
@pytest.mark.parametrize("row", table("hangs/gpt.txt"), ids=lambda row: row[0])
def test_the_guilty_rank_of_a_gpt_is_named(row, nccl):
    _, faults, expected, words = row
    program = replace(gpt(), nccl=nccl)
    for fault in faults.split(", "):
        rank, call, *new = fault.split()
        ops = program.ops[int(rank)]
        place = 2 * len(ops) // 5 + int(call)
        ops[place : place + 1] = written_ops(" ".join(new))
    diagnosis = verdict(Run(program, random.Random(1)))
    assert summary(diagnosis).endswith(f" {expected}"), diagnosis.sentence
    assert words in diagnosis.sentence
