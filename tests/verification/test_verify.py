"""Layouts that compute what one rank computes, and faults: megatron-core's own, and mutants."""

import json
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compat
from compat.verification import Layout
from compat.verification.gpt import small_gpt, uneven_batch
from compat.verification.launch import _cut, verify_line
from compat.verification.ranks import in_child
from compat.verification.search import _Job
from compat.verification.step import Task
from tests.support import ROOT, stock, warm
from tests.verification.layouts import AUX, EXPERTS, KNOWN, SHARDED, TOKENS
from tests.verification.mutants import MUTANTS, mutated

DENSE = {**TOKENS, **SHARDED, "use_distributed_optimizer": True}
RIGHT = [
    Layout(tp=2, pp=2, dp=2, vp=2, options=DENSE),
    Layout(tp=2, cp=2, dp=2, ep=2, options={**DENSE, **EXPERTS, "gated_linear_unit": True}),
    Layout(tp=2, dp=2, ep=2, etp=1, options={**SHARDED, **AUX}),
]


def test_layouts_that_megatron_computes_rightly_agree_with_one_rank():
    for report in compat.verify(small_gpt, uneven_batch(), RIGHT):
        assert report.agrees, str(report)
        assert 0 < report.tolerance < 1e-4
        assert "compute what one rank computes" in str(report)


def test_rotary_embeddings_are_verified_where_the_sequence_is_cut():
    build = partial(small_gpt, model={"position_embedding_type": "rope", "rotary_percent": 0.5})
    for batch, options in ((uneven_batch(4), TOKENS), (uneven_batch(4, parts=4), {})):
        (report,) = compat.verify(build, batch, Layout(tp=2, cp=2, options=options))
        assert report.agrees, str(report)


@cache
def _of_mutants():
    def judged():
        job = _Job(Task(small_gpt, uneven_batch()), (), 60)
        found = {}
        for name, mutant in MUTANTS.items():
            job.task = replace(job.task, build=mutated(mutant))
            job._found.clear()
            found[name] = job.report(mutant.layout, smallest=False)
        return found

    return in_child(judged)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_megatron_core_is_found_where_it_is(name):
    report = _of_mutants()[name]
    assert not report.refused, report.trace
    found = [f"{each.what} {each.name}" for each in report.findings]
    assert any(MUTANTS[name].found in each for each in found), str(report)


def test_a_constant_factor_has_its_reason_and_a_wrong_replica_its_rank():
    twice = _of_mutants()["gradients are scaled by cp"].findings
    assert {(each.what, round(each.factor), each.meaning) for each in twice} == {
        ("gradient", 2, "the size of cp")
    }
    odd = _of_mutants()["gradients of one replica alone are off by a hundredth"]
    assert {each.ranks for each in odd.findings if each.what == "gradient"} == {(3,)}


def test_the_smallest_layout_and_the_flag_without_which_it_is_right():
    layout = KNOWN["the auxiliary loss of experts under cp, if the loss is per token"]
    larger = replace(layout, dp=2, options={**layout.options, "overlap_grad_reduce": True})
    (report,) = compat.verify(small_gpt, uneven_batch(4), larger)
    (least,) = report.smallest
    assert str(least.layout) == (
        "cp=2 calculate_per_token_loss moe_aux_loss_coeff=0.01 num_moe_experts=4"
    )
    assert least.needed == dict.fromkeys(
        ["cp=2", "num_moe_experts", "moe_aux_loss_coeff"], "agrees"
    )
    told = json.loads(json.dumps(report.as_dict()))
    assert told["smallest"][0]["needed"] == least.needed
    assert "Transformer Engine" in told["not_covered"][0]


def test_where_there_is_a_gpu_the_cpu_computes_all_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as one that was asked before
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    (report,) = compat.verify(small_gpt, uneven_batch(4), Layout(tp=2), smallest=False)
    assert report.agrees, str(report)


def test_what_is_allowed_is_told_apart():
    layout = Layout(cp=2)
    (report,) = compat.verify(small_gpt, uneven_batch(4), layout, allow=["gradient *"])
    assert report.agrees and report.allowed
    assert "allowed: gradient of" in str(report)


@pytest.mark.parametrize("release", [pytest.param("0.18.2", marks=pytest.mark.releases), "0.19.2"])
def test_faults_of_other_releases_are_found_and_random_layouts_agree(release):
    if not stock.have_stock(release):
        pytest.skip(f"the source of megatron-core {release} is not here")
    path = f"{ROOT / '.cache' / f'megatron-core-{release}'}:{ROOT}"
    done = warm.run("-m", "tests.verification", "-n", "2", timeout=300, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["wrong"] == [] and told["refused"] == []
    always = {name for name in KNOWN if "mean of means" in name or "second layer" in name}
    rest = "yes" if release == "0.18.2" else "no"
    for name, seen in told["known"].items():
        assert seen == ("yes" if name in always else rest), name


def test_a_wrong_request_gets_its_sentence(monkeypatch):
    batch = uneven_batch(4)
    with pytest.raises(ValueError, match="no option 'no_such' in TransformerConfig"):
        compat.verify(small_gpt, batch, Layout(tp=2, options={"no_such": 1}))
    with pytest.raises(ValueError, match="has 32 ranks, and verify runs at most 16"):
        compat.verify(small_gpt, batch, Layout(tp=4, dp=8))
    with pytest.raises(ValueError, match=r"multiple of 8 micro batches \(dp\), got 4"):
        compat.verify(small_gpt, batch, Layout(dp=8))
    with pytest.raises(ValueError, match="tp must be a positive integer, got 0"):
        Layout(tp=0)
    (report,) = compat.verify(small_gpt, batch, Layout(tp=3))  # of eight heads
    assert not report.agrees and "cannot be verified: " in str(report)
    with pytest.raises(ValueError, match="give a checkout of Megatron-LM"):
        verify_line("", [], 1, Path("/nowhere"))
    with pytest.raises(ValueError, match=r"pretrain_mamba.py trains no GPT: give compat\.verify"):
        verify_line("path/pretrain_mamba.py", [], 1, Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ModuleNotFoundError, match="verify needs megatron-core: pip install"):
        compat.verify(small_gpt, batch, Layout(tp=2))


def test_a_launch_lines_dims_are_cut_to_two_and_named():
    sizes = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}
    experts = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    given = SimpleNamespace(**sizes, **experts, world_size=256, num_experts=64)
    changed = []
    assert _cut(given, changed) == Layout(tp=2, pp=2, dp=2, ep=2, etp=1)
    assert changed == ["dims are smaller: tp 8 -> 2, pp 4 -> 2, ep 8 -> 2, dp 8 -> 2"]


CHECKOUT = ROOT / ".cache" / "Megatron-LM-core_v0.16.1"
LINE = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096
--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 1 --lr 1
--tensor-model-parallel-size 2 --sequence-parallel --num-experts 8 --expert-model-parallel-size 2
--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss --calculate-per-token-loss
--disable-bias-linear --swiglu --mock-data --tokenizer-type NullTokenizer --vocab-size 32000"""


@pytest.mark.skipif(not CHECKOUT.is_dir(), reason=f"no checkout of Megatron-LM in {CHECKOUT.name}")
def test_a_launch_line_is_read_by_megatrons_own_parser_and_its_fault_is_named():
    words = [*LINE.split(), "--hidden-dropout", "0", "--attention-dropout", "0"]
    changed, report = verify_line("my_train.py", words, 16, CHECKOUT, order="pp-ep-tp-dp-cp")
    assert changed[0] == "the model is a GPT, whatever my_train.py has"
    assert "dims are smaller: dp 8 -> 2" in changed
    assert not any("dropout" in each for each in changed)  # of 0: nothing is left out
    assert report.layout.order == "pp-ep-tp-dp-cp"
    (least,) = report.smallest
    assert least.needed["calculate_per_token_loss"] == "agrees"
    with pytest.raises(ValueError, match=r"hybrid model: give compat\.verify"):
        verify_line("", [*LINE.split(), "--hybrid-override-pattern", "M*"], 16, CHECKOUT)
