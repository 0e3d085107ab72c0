"""Layouts that compute what one rank computes, and faults: megatron-core's own, and mutants."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import compat
from compat.verification import Layout
from compat.verification.gpt import LATENT, small_gpt, uneven_batch
from compat.verification.launch import verify_line
from compat.verification.layout import SIZES
from compat.verification.ranks import Refused, in_child, on_ranks
from compat.verification.search import _Job
from compat.verification.step import Task
from compat.verification.structure import small_layout
from tests.support import ROOT, stock, warm
from tests.verification.layouts import AUX, EXPERTS, KNOWN, SHARDED, TOKENS
from tests.verification.mutants import MUTANTS, mutated

DENSE = {**TOKENS, **SHARDED, "use_distributed_optimizer": True}
DOCUMENT = (ROOT / "docs" / "verify.md").read_text()
RIGHT = [
    Layout(tp=2, pp=2, dp=2, vp=2, options=DENSE),
    Layout(tp=2, cp=2, dp=2, ep=2, options={**DENSE, **EXPERTS, "gated_linear_unit": True}),
    Layout(tp=2, dp=2, ep=2, etp=1, options={**SHARDED, **AUX}),
    # The gradient of the keys' norm's bias is 0 but for rounding.
    Layout(tp=2, options={**TOKENS, "qk_layernorm": True}),
]


def test_layouts_that_megatron_computes_rightly_agree_with_one_rank():
    for report in compat.verify(small_gpt, uneven_batch(), RIGHT):
        assert report.agrees, str(report)
        assert 0 < report.tolerance < 1e-4
        assert "compute what one rank computes" in str(report)


@pytest.mark.long
def test_rotary_embeddings_are_verified_where_the_sequence_is_cut():
    build = partial(small_gpt, model={"position_embedding_type": "rope", "rotary_percent": 0.5})
    for batch, options in ((uneven_batch(4), TOKENS), (uneven_batch(4, parts=4), {})):
        (report,) = compat.verify(build, batch, Layout(tp=2, cp=2, options=options))
        assert report.agrees, str(report)


GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MORE_EXPERTS = {**EXPERTS, **GROUPS, **BIAS, "num_moe_experts": 8}
OF_EXPERTS = {
    **MORE_EXPERTS,
    "moe_shared_expert_intermediate_size": 64,
    "moe_token_dispatcher_type": "alltoall",
}
ROTARY = partial(small_gpt, model={"position_embedding_type": "rope"})
LATENT_ATTENTION = {"multi_latent_attention": True, **LATENT}
RECOMPUTED = {
    **{"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    **{"num_layers_in_first_pipeline_stage": 1, "mtp_num_layers": 1},
}
# One run of several features that users combine; a row of docs/verify.md for each.
FEATURES = {
    "experts": Layout(tp=2, dp=2, ep=2, options={**DENSE, **OF_EXPERTS}),
    "latent attention": Layout(tp=2, options={**TOKENS, **SHARDED, **LATENT_ATTENTION}),
    "windows": Layout(cp=2, options={**TOKENS, "window_size": (8, 0), "softmax_type": "learnable"}),
    "pipeline": Layout(pp=2, options={**TOKENS, **RECOMPUTED}),
    "overlap": Layout(
        dp=2,
        options={
            **{"use_distributed_optimizer": True, "overlap_grad_reduce": True},
            **{"overlap_param_gather": True, "bucket_size": 10_000},
            **{"average_in_collective": True, "data_parallel_random_init": True},
        },
    ),
}
ROWS = {
    "MoE, group-limited routing, shared experts, bias of experts, alltoall": "experts",
    "multi-latent attention, with sequence parallelism": "latent attention",
    "sliding windows, learnable softmax": "windows",
    "multi-token prediction, recomputation, stages of unequal depth": "pipeline",
    "overlap of reductions and gathers, buckets, average in the collective": "overlap",
}
REFUSED = {
    "latent MoE": ({**EXPERTS, "moe_latent_size": 32}, "TransformerEngine is required"),
    "Megatron-FSDP": ({"use_megatron_fsdp": True}, "use_megatron_fsdp is not verified"),
}


@cache
def _of_features():
    def judged():
        job = _Job(Task(ROTARY, uneven_batch(4)), (), 60)
        return {name: job.report(layout, smallest=False) for name, layout in FEATURES.items()}

    return in_child(judged)


@pytest.mark.parametrize("row", ROWS)
def test_what_users_run_is_verified(row):
    assert row in DOCUMENT, "docs/verify.md has no such row"
    report = _of_features()[ROWS[row]]
    assert report.agrees, f"{report} {report.trace}"


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_run_on_a_cpu_is_refused_by_name(row):
    assert row in DOCUMENT, "docs/verify.md has no such row"
    options, reason = REFUSED[row]
    layout = Layout(dp=2, options={**TOKENS, **options})
    if row == "Megatron-FSDP":
        with pytest.raises(ValueError, match=reason):
            compat.verify(small_gpt, uneven_batch(4), layout)
        return
    (report,) = compat.verify(small_gpt, uneven_batch(4), layout, smallest=False)
    assert reason in report.refused


def test_latent_attention_under_tp_without_sequence_parallelism_differs_in_the_rotary_keys():
    assert "multi-latent attention under tp without sequence parallelism" in DOCUMENT
    layout = Layout(tp=2, options={**TOKENS, **LATENT_ATTENTION})
    (report,) = compat.verify(ROTARY, uneven_batch(4), layout, smallest=False)
    wrong_gradients = set()
    for finding in report.findings:
        if finding.quantity == "gradient":
            wrong_gradients.add(finding.name)
    assert "decoder.layers.0.self_attention.linear_kv_down_proj.weight" in wrong_gradients, report


def _as_replicas_that_differ(layout, **where):
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.broadcast_params = lambda self: None
    return small_gpt(layout, **where)


def _with_an_old_bias_of_experts(layout, **where):
    if layout.world_size > 1:
        module = import_module("megatron.core.distributed.finalize_model_grads")
        module.get_updated_expert_bias = lambda tokens, bias, *_: bias.clone()
    return small_gpt(layout, **where)


def _with_one_seed_for_all_shards(layout, **where):
    from megatron.core import parallel_state, tensor_parallel

    if layout.world_size > 1:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        for name in tracker.states_:
            with tracker.fork(name):
                torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    return small_gpt(layout, **where)


BEYOND_ONE_STEP = {
    "initial value decoder.layers.0.self_attention.linear_qkv.weight": (
        _with_one_seed_for_all_shards,
        Layout(tp=2, options=TOKENS),
    ),
    "initial value embedding.word_embeddings.weight": (
        _as_replicas_that_differ,
        Layout(dp=2, options={**TOKENS, "data_parallel_random_init": True}),
    ),
    "buffer decoder.layers.0.mlp.router.expert_bias": (
        _with_an_old_bias_of_experts,
        Layout(
            dp=2, options={**TOKENS, **{k: v for k, v in OF_EXPERTS.items() if v != "alltoall"}}
        ),
    ),
}


@pytest.mark.parametrize("name", BEYOND_ONE_STEP)
def test_initial_values_of_replicas_and_buffers_are_compared(name):
    build, layout = BEYOND_ONE_STEP[name]
    (report,) = compat.verify(build, uneven_batch(4), layout, smallest=False)
    names = {f"{finding.quantity} {finding.name}" for finding in report.findings}
    assert name in names, str(report)


def test_a_fault_of_the_second_step_is_seen():
    def build(layout, **where):
        from megatron.core.distributed import DistributedDataParallel

        zero = DistributedDataParallel.zero_grad_buffer
        calls = []

        def not_zeroed(self):
            calls.append(self)
            if layout.world_size == 1 or len(calls) == 1:
                zero(self)

        DistributedDataParallel.zero_grad_buffer = not_zeroed
        return small_gpt(layout, **where)

    (report,) = compat.verify(build, uneven_batch(4), Layout(dp=2, options=TOKENS), smallest=False)
    assert report.findings and {finding.step for finding in report.findings} == {2}
    assert "in step 2 is" in str(report) or "in step 2 differs" in str(report)


@cache
def _of_mutants():
    def judged():
        job = _Job(Task(small_gpt, uneven_batch()), (), 60)
        found = {}
        for name, mutant in MUTANTS.items():
            job.task = replace(job.task, build=mutated(mutant))
            job._differing.clear()
            found[name] = job.report(mutant.layout, smallest=False)
        return found

    return in_child(judged)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_megatron_core_is_found_where_it_is(name):
    report = _of_mutants()[name]
    assert not report.refused, report.trace
    found = [f"{each.quantity} {each.name}" for each in report.findings]
    assert any(MUTANTS[name].found in each for each in found), str(report)


def test_a_constant_factor_has_its_reason_and_a_wrong_replica_its_rank():
    twice = _of_mutants()["gradients are scaled by cp"].findings
    assert {(each.quantity, round(each.factor), each.meaning) for each in twice} == {
        ("gradient", 2, "the size of cp")
    }
    odd = _of_mutants()["gradients of one replica alone are off by a hundredth"]
    assert {each.ranks for each in odd.findings if each.quantity == "gradient"} == {(3,)}


def test_the_smallest_layout_and_the_flag_without_which_it_is_right():
    layout = KNOWN["the auxiliary loss of experts under cp, if the loss is per token"].layout
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


RANDOM = {"moe_input_jitter_eps": 0.01, "moe_router_force_load_balancing": True}


def test_a_step_that_cannot_be_repeated_is_refused_and_its_option_named():
    layouts = []
    for name, value in RANDOM.items():
        layouts.append(Layout(tp=2, options={**SHARDED, **EXPERTS, **TOKENS, name: value}))
    for name, report in zip(
        RANDOM, compat.verify(small_gpt, uneven_batch(4), layouts, smallest=False), strict=True
    ):
        assert not report.agrees
        assert report.refused.startswith(f"{name} makes the step random"), str(report)


def _without_a_step(layout, **where):
    from megatron.core.optimizer.optimizer import FP32Optimizer

    FP32Optimizer.step_with_ready_grads = lambda self: True
    return small_gpt(layout, **where)


def _with_gradients_of_the_last_rank(layout, **where):
    """On two ranks, twice the gradient of the last: right, if both have the same samples."""
    from megatron.core.distributed import DistributedDataParallel

    def finished(self, *_, **__):
        for buffer in self.buffers:
            torch.distributed.broadcast(buffer.grad_data, src=layout.dp - 1)
            buffer.grad_data.mul_(layout.dp)

    DistributedDataParallel.finish_grad_sync = finished
    return small_gpt(layout, **where)


def _no_loss(output, micro_batch):
    return output.sum() * 0, micro_batch["loss_mask"].sum()


WORTHLESS = {
    "the step did not change": Task(_without_a_step, uneven_batch(4)),
    "1 % of the gradient, added on one rank, is not seen in": Task(
        _with_gradients_of_the_last_rank, uneven_batch(1) * 4
    ),
    "no parameter has a gradient": Task(small_gpt, uneven_batch(4), _no_loss),
}


@cache
def _of_worthless():
    def judged():
        layout = Layout(dp=2, options=TOKENS)
        return {why: _Job(task, (), 60).report(layout, False) for why, task in WORTHLESS.items()}

    return in_child(judged)


@pytest.mark.parametrize("why", WORTHLESS)
def test_agreement_that_says_nothing_is_refused(why):
    report = _of_worthless()[why]
    assert not report.agrees
    assert report.refused.startswith(why), str(report)


def test_where_there_is_a_gpu_the_cpu_computes_all_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as one that was asked before
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    (report,) = compat.verify(small_gpt, uneven_batch(4), Layout(tp=2), smallest=False)
    assert report.agrees, str(report)


def test_what_is_allowed_is_told_apart():
    layout = Layout(cp=2)
    (report,) = compat.verify(
        small_gpt, uneven_batch(4), layout, allow=["gradient *"], smallest=False
    )
    assert report.agrees and report.allowed
    assert "allowed: gradient of" in str(report)
    assert "differ from one rank only where it is allowed" in str(report)
    assert "compute what one rank computes" not in str(report)


@pytest.mark.long
@pytest.mark.parametrize("release", [pytest.param("0.18.2", marks=pytest.mark.long), "0.19.2"])
def test_faults_of_other_releases_are_found_and_random_layouts_agree(release):
    if not stock.have_stock(release):
        pytest.skip(f"the source of megatron-core {release} is not here")
    path = f"{ROOT / '.cache' / f'megatron-core-{release}'}:{ROOT}"
    done = warm.run("-m", "tests.verification", "-n", "2", timeout=300, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["wrong"] == [] and told["refused"] == []
    for name, shown in told["known"].items():
        is_mended = release == "0.19.2" and KNOWN[name].number in ("5047", "5916")
        assert shown == ("no" if is_mended else "yes"), name


def test_a_small_parameter_that_the_norm_leaves_out_is_seen():
    fault = KNOWN[
        "the norm leaves out the offsets of a learnable softmax on tp ranks but the first"
    ]
    (report,) = compat.verify(small_gpt, uneven_batch(4), fault.layout, smallest=False)
    names = {finding.quantity for finding in report.findings}
    # The ranks also draw the same offsets for different heads.
    assert names == {"gradient norm of equal gradients", "initial value"}


def test_a_wrong_request_gets_its_sentence(monkeypatch):
    batch = uneven_batch(4)
    with pytest.raises(ValueError, match="no option 'no_such' in TransformerConfig"):
        compat.verify(small_gpt, batch, Layout(tp=2, options={"no_such": 1}))
    with pytest.raises(ValueError, match="use_megatron_fsdp is not verified: its code needs CUDA"):
        compat.verify(small_gpt, batch, Layout(dp=2, options={"use_megatron_fsdp": True}))
    with pytest.raises(ValueError, match="sinkhorn is not verified under cp or sequence par"):
        options = {**SHARDED, **EXPERTS, "moe_router_load_balancing_type": "sinkhorn"}
        compat.verify(small_gpt, batch, Layout(tp=2, options=options))
    with pytest.raises(ValueError, match="has 32 ranks, and verify runs at most 16"):
        compat.verify(small_gpt, batch, Layout(tp=4, dp=8))
    with pytest.raises(ValueError, match=r"multiple of 8 micro batches \(dp\), got 4"):
        compat.verify(small_gpt, batch, Layout(dp=8))
    with pytest.raises(ValueError, match="tp must be a positive integer, got 0"):
        Layout(tp=0)
    (report,) = compat.verify(small_gpt, batch, Layout(tp=3), smallest=False)  # of eight heads
    assert not report.agrees and "cannot be verified: " in str(report)
    with pytest.raises(ValueError, match="give a checkout of Megatron-LM"):
        verify_line("", [], 1, Path("/nowhere"))
    for model in ("mamba", "hybrid", "mimo"):
        name = f"pretrain_{model}.py"
        with pytest.raises(ValueError, match=rf"{name} trains no GPT: give compat\.verify"):
            verify_line(f"path/{name}", [], 1, Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ModuleNotFoundError, match="verify needs megatron-core: pip install"):
        compat.verify(small_gpt, batch, Layout(tp=2))


def _small(world_size, keep=(), num_experts=None, **sizes):
    names = {short: name for short, name in SIZES.items()}
    arguments = {names.get(name, name): size for name, size in sizes.items()}
    notes = []
    args = SimpleNamespace(world_size=world_size, num_experts=num_experts, **arguments)
    return small_layout(args, keep, notes), notes


def test_a_small_layout_keeps_which_groups_have_one_two_or_more_members():
    layout, notes = _small(16, num_experts=64, ep=4)
    assert (layout, notes) == (Layout(dp=9, ep=3), ["dims are smaller: dp 16 -> 9, ep 4 -> 3"])
    layout, _ = _small(8, num_experts=8, ep=8)  # expert-dp has one member in the job too
    assert layout == Layout(dp=3, ep=3)
    assert _small(16, tp=2, pp=2, cp=2, num_experts=8, ep=4)[0].world_size == 16
    assert _small(2, tp=2, num_experts=4, ep=2, etp=1)[0] == Layout(tp=2, ep=2, etp=1)
    layout, _ = _small(64, num_experts=8, ep=2, num_distributed_optimizer_instances=4)
    # Two instances instead of four, each with three members of expert-dp.
    assert layout == Layout(dp=12, ep=2, options={"num_distributed_optimizer_instances": 2})
    assert _small(512, tp=8, pp=4, vp=5)[0] == Layout(tp=2, pp=3, dp=2, vp=3)
    # With dp after pp, a job without experts has equal data-parallel sizes by its etp.
    layout, _ = _small(8, tp=2, cp=2, pp=2, etp=4, use_tp_pp_dp_mapping=True)
    assert layout == Layout(tp=2, cp=2, pp=2, etp=4, order="tp-cp-ep-pp-dp")


def test_what_a_small_layout_could_not_keep_is_said_as_a_consequence():
    layout, notes = _small(256, tp=8, pp=4, num_experts=64, ep=8, etp=1)
    assert layout == Layout(tp=2, pp=3, dp=2, ep=2, etp=1)
    assert notes == [
        "dims are smaller: tp 8 -> 2, pp 4 -> 3, dp 8 -> 2, ep 8 -> 2",
        "two members instead of more, so a fault of three or more is not seen: dp-cp, dp, tp, "
        "tp-cp, expert-ep, expert-tp-ep, expert-dp",
    ]
    _, notes = _small(4096, tp=8, cp=4, pp=8, num_experts=64, ep=64, etp=1, keep=["pp"])
    assert "cp has one member: its reductions are not verified" in notes
    layout, notes = _small(64, tp=8, pp=4, keep=["tp"])
    assert layout == Layout(tp=8, dp=2)
    assert "pp has one member: its messages are not verified" in notes
    assert "pp has no middle stage: what only a middle stage does is not verified" in notes
    with pytest.raises(ValueError, match="--keep xp is no dim; allowed: tp, cp, pp, dp, vp, ep"):
        _small(8, keep=["xp"])
    with pytest.raises(ValueError, match="with tp dp kept, no layout has at most 16 ranks"):
        _small(64, tp=8, keep=["tp", "dp"])


STUB = """
import argparse
import megatron.core
from megatron.core.activations import squared_relu
from megatron.core.transformer import TransformerConfig

def parse_args(extra_args_provider):
    parser = argparse.ArgumentParser()
    for flag in ("--swiglu", "--apply-layernorm-1p", "--use-torch-fsdp2", "--save", "--fails"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--attention-output-gate", "--squared-relu"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--num-layers", "--tensor-model-parallel-size"):
        parser.add_argument(flag, type=int, default=1)
    return extra_args_provider(parser).parse_args()

def validate_args(args):
    assert not args.fails, f"of {megatron.core.__version__}"
    args.world_size = 2
    args.num_experts = None
    args.optimizer = "adam"
    args.untie_embeddings_and_output_weights = True
    args.position_embedding_type = "rope"
    args.rotary_percent = 1.0
    args.rotary_base = 10000

def core_transformer_config_from_args(args):
    function = {"activation_func": squared_relu} if args.squared_relu else {}
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=64,
        num_attention_heads=8,
        gated_linear_unit=args.swiglu,
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        attention_output_gate=args.attention_output_gate,
        **function,
    )
"""


@pytest.fixture(params=[pytest.param("0.16.1", marks=pytest.mark.long), "0.19.2"])
def checkout(request, tmp_path):
    """A folder that has a release of megatron-core and a parser of a few flags."""
    if not stock.have_stock(request.param):
        pytest.skip(f"the source of megatron-core {request.param} is not here")
    training = tmp_path / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").touch()
    (training / "arguments.py").write_text(STUB)
    (tmp_path / "megatron" / "core").symlink_to(stock.source_dir(request.param))
    return tmp_path


def test_the_checkout_decides_whichever_megatron_core_is_loaded(checkout, monkeypatch):
    release = (checkout / "megatron" / "core").resolve().parents[1].name.rpartition("-")[2]
    loaded = ModuleType("megatron.core")
    loaded.__version__ = "of the wheel"
    monkeypatch.setitem(sys.modules, "megatron.core", loaded)
    with pytest.raises(ValueError, match=f"refuses the arguments: AssertionError: of {release}"):
        verify_line("", ["--fails"], 2, checkout)


@pytest.mark.parametrize("checkout", ["0.16.1"], indirect=True)
def test_each_flag_of_the_line_is_verified_or_replaced_or_not_verified(checkout):
    line = "--tensor-model-parallel-size 2 --swiglu --num-layers=24 --apply-layernorm-1p --save"
    changed, report = verify_line("pretrain_gpt.py", line.split(), 2, checkout)
    assert report.agrees, str(report)
    assert changed[-3:] == [
        "verified: --tensor-model-parallel-size --swiglu",
        "replaced by a stand-in: --num-layers",
        "not verified: --apply-layernorm-1p --save",
    ]
    with pytest.raises(ValueError, match="--use-torch-fsdp2 is not verified: its code needs CUDA"):
        verify_line("", ["--use-torch-fsdp2"], 2, checkout)


@pytest.mark.long
@pytest.mark.parametrize("checkout", ["0.16.1"], indirect=True)
def test_flags_whose_code_is_compiled_or_of_the_checkout_are_verified(checkout):
    line = "--tensor-model-parallel-size 2 --attention-output-gate --squared-relu"
    changed, report = verify_line("pretrain_gpt.py", line.split(), 2, checkout)
    assert report.agrees, str(report)
    assert changed[-1] == f"verified: {line.replace(' 2', '')}"


def test_an_error_without_a_sentence_has_the_line_that_raised_it():
    def fails(rank):
        raise AssertionError

    with pytest.raises(
        Refused, match=r"AssertionError: raise AssertionError \(test_verify.py, line"
    ):
        on_ranks(1, fails, 60)


def _endless(directory, rank):
    Path(directory, f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's end is a signal on Linux only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_verifies(number, tmp_path):
    verifying = os.fork()
    if verifying == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        on_ranks(2, partial(_endless, tmp_path), 600)
        os._exit(0)
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(0.1)
    time.sleep(0.5)
    ranks = [int(file.read_text()) for file in files]
    os.kill(verifying, number)
    os.waitpid(verifying, 0)
    while time.monotonic() < deadline and any(map(_runs, ranks)):
        time.sleep(0.1)
    assert not any(map(_runs, ranks))


def _runs(pid):
    """Whether the process runs: one that ended may wait for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


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
