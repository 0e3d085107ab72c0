"""Layouts that compute what one rank computes, and faults: megatron-core's own, and mutants."""

import json
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

import compat
from compat.verification import Layout, collectives, search
from compat.verification.gpt import LATENT, small_gpt, uneven_batch
from compat.verification.launch import verify_line
from compat.verification.layout import SIZES
from compat.verification.on_cpu import REPLACED
from compat.verification.ranks import Refused, in_child, on_ranks
from compat.verification.search import _Job
from compat.verification.small_job import _length, _split_pipeline_unevenly, small_job
from compat.verification.step import Task, masked_sum
from compat.verification.structure import small_layout
from tests.support import ROOT, stock, table, warm
from tests.verification.layouts import AUX, EXPERTS, KNOWN, SHARDED, TOKENS
from tests.verification.mutants import MUTANTS, layout_of, mutated

DENSE = {**TOKENS, **SHARDED, "use_distributed_optimizer": True}
DOCUMENT = (ROOT / "docs" / "verify.md").read_text()
RIGHT = [
    Layout(tp=2, pp=2, dp=2, vp=2, options=DENSE),
    Layout(tp=2, cp=2, dp=2, ep=2, options={**DENSE, **EXPERTS, "gated_linear_unit": True}),
    Layout(tp=2, dp=2, ep=2, etp=1, options={**SHARDED, **AUX}),
    # The gradient of the keys' norm's bias is 0 but for rounding.
    Layout(tp=2, options={**TOKENS, "qk_layernorm": True}),
]


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """What megatron-core imports, loaded once for all processes that verify forks from this one."""
    warm.preload()


def test_layouts_that_megatron_computes_rightly_agree_with_one_rank():
    for report in compat.verify(small_gpt, uneven_batch(4), RIGHT, smallest=False):
        assert report.agrees, str(report)
        assert 0 < report.tolerance < 1e-4
        assert "compute what one rank computes" in str(report)


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
    # Recomputation adds the gradients of keys and values in another order.
    "latent attention": Layout(
        tp=2,
        options={**TOKENS, **SHARDED, **LATENT_ATTENTION, "recompute_granularity": "selective"},
    ),
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


@cache
def _of_features():
    def judged():
        job = _Job(Task(ROTARY, uneven_batch(4)), (), 60)
        return {name: job.report(layout, search=False) for name, layout in FEATURES.items()}

    return in_child(judged)


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced.name)
def test_what_is_replaced_in_megatron_core_is_in_the_documents_table(replaced):
    assert f"| `{replaced.module}.{replaced.name}` | {replaced.does} |" in DOCUMENT


@pytest.mark.parametrize("row", ROWS)
def test_what_users_run_is_verified(row):
    assert row in DOCUMENT, "docs/verify.md has no such row"
    report = _of_features()[ROWS[row]]
    assert report.agrees, str(report)


def verdict(layout):
    """What is said of a layout that cannot be verified."""
    (report,) = compat.verify(small_gpt, uneven_batch(4), layout, smallest=False)
    assert not report.agrees
    raise ValueError(str(report))


@pytest.mark.parametrize(("call", "sentence"), table("verification/refusals.txt"))
def test_what_cannot_be_verified_is_refused_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        eval(call)


def test_without_megatron_core_verify_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ModuleNotFoundError, match="verify needs megatron-core: pip install"):
        verdict(Layout(tp=2))


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


FINDINGS = {
    # "multi-latent attention under tp without sequence parallelism" in docs/verify.md
    "gradient decoder.layers.0.self_attention.linear_kv_down_proj.weight": (
        ROTARY,
        Layout(tp=2, options=TOKENS | LATENT_ATTENTION),
    ),
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
        Layout(dp=2, options={**TOKENS, **MORE_EXPERTS, "moe_shared_expert_intermediate_size": 64}),
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_initial_values_of_replicas_and_buffers_are_compared(name):
    build, layout = FINDINGS[name]
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
        job = _Job(Task(small_gpt, uneven_batch(4)), (), 60)
        reports = {}
        for name, mutant in MUTANTS.items():
            job.task = replace(job.task, build=mutated(mutant))
            report = job.report(layout_of(mutant), search=False)
            # Gloo has ended a process whose collectives nobody waits for: once, at a load of 30.
            if "ended without a word" in (report.refused or ""):
                report = job.report(layout_of(mutant), search=False)
            reports[name] = report
        return reports

    return in_child(judged)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_megatron_core_is_found_where_it_is(name):
    report = _of_mutants()[name]
    assert not report.refused, report.refused
    names = "; ".join(f"{finding.quantity} {finding.name}" for finding in report.findings)
    assert MUTANTS[name]["found"] in names, str(report)


def test_a_constant_factor_is_told_and_a_wrong_replica_has_its_rank():
    for finding in _of_mutants()["gradients are scaled by cp"].findings:
        assert finding.quantity == "gradient"
        assert "is 2 times that of one rank" in str(finding)
    for finding in _of_mutants()["gradients of one replica alone are off by a hundredth"].findings:
        assert finding.quantity != "gradient" or finding.ranks == (3,)


def test_the_smallest_layout_and_the_flag_without_which_it_is_right():
    layout = KNOWN["the auxiliary loss of experts under cp, if the loss is per token"].layout
    larger = replace(layout, dp=2, options={**layout.options, "overlap_grad_reduce": True})
    (report,) = compat.verify(small_gpt, uneven_batch(2), larger)
    assert str(report.smallest) == (
        "cp=2 calculate_per_token_loss moe_aux_loss_coeff=0.01 num_moe_experts=4"
    )
    assert report.needed == dict.fromkeys(
        ["cp=2", "num_moe_experts", "moe_aux_loss_coeff"], "agrees"
    )
    as_json = json.loads(json.dumps(report.as_dict()))
    assert as_json["needed"] == report.needed
    assert "Transformer Engine" in as_json["not_covered"][0]


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


def test_a_collective_whose_lost_result_changes_nothing_is_named(monkeypatch):
    monkeypatch.setattr(search, "SECONDS_FOR_SITES", 300)
    (report,) = compat.verify(
        _with_gradients_of_the_last_rank, uneven_batch(1) * 4, Layout(dp=2, options=TOKENS)
    )
    assert report.agrees, str(report)
    # Samples are equal: so are the gradients of both ranks.
    unseen = [text for text in report.not_covered if text.startswith("lost results of")]
    assert "broadcast in test_verify.py:" in unseen[0] and "(in finished)" in unseen[0]
    assert "get_grad_norm" not in unseen[0], "a lost norm is seen"


def test_collectives_that_were_not_tried_are_named():
    (report,) = compat.verify(small_gpt, uneven_batch(4), Layout(dp=2), smallest=False)
    (untried,) = [text for text in report.not_covered if text.startswith("lost results of")]
    assert untried.endswith(": not tried")
    assert "all_reduce in distributed/param_and_grad_buffer.py:" in untried


def test_every_kind_of_collective_that_is_left_out_gives_the_ranks_own_input():
    """Each rank has the numbers 0 1 or 2 3; on rank 1 the results are its own input."""

    def exchanged(rank):
        dist = torch.distributed
        own = torch.arange(2.0) + 2 * rank
        results = {}

        def called(name, output, call):
            for left_out in (False, True):
                output_of_call = output.clone()
                site = f"{name} in test_verify.py:{call.__code__.co_firstlineno} (in called)"
                record = collectives.watch(site * (left_out and rank == 1))
                work = call(output_of_call)
                if work is not None:
                    assert output_of_call.isnan().all()
                    work.wait()
                assert [call.site for call in record.calls] == [site]
                results[name, left_out] = output_of_call.tolist()

        empty = torch.zeros(4)
        called("all_gather", empty, lambda output: dist.all_gather(list(output.chunk(2)), own))
        called(
            "all_gather_into_tensor",
            empty,
            lambda output: dist.all_gather_into_tensor(output, own, async_op=True),
        )
        called("all_reduce", own, lambda output: dist.all_reduce(output, async_op=True))
        called("all_to_all_single", own, lambda output: dist.all_to_all_single(output, own))
        called("broadcast", own, lambda output: dist.broadcast(output, 0))
        scatter = "reduce_scatter_tensor"
        called(scatter, own[:1], lambda output: dist.reduce_scatter_tensor(output, own))
        dist.barrier()
        return results

    _, of_rank_1 = in_child(lambda: on_ranks(2, exchanged, 60))
    assert of_rank_1 == {
        ("all_gather", False): [0, 1, 2, 3],
        ("all_gather", True): [2, 3, 2, 3],
        ("all_gather_into_tensor", False): [0, 1, 2, 3],
        ("all_gather_into_tensor", True): [2, 3, 2, 3],
        ("all_reduce", False): [2, 4],
        ("all_reduce", True): [2, 3],
        ("all_to_all_single", False): [1, 3],
        ("all_to_all_single", True): [2, 3],
        ("broadcast", False): [0, 1],
        ("broadcast", True): [2, 3],
        ("reduce_scatter_tensor", False): [4],
        ("reduce_scatter_tensor", True): [3],
    }


@pytest.mark.parametrize("async_op", [False, True])
def test_parts_of_unequal_sizes_are_gathered_and_summed(async_op):
    """Ranks 0 and 1 have one and two numbers, as experts do of tokens."""

    def exchanged(rank):
        dist = torch.distributed
        group = dist.group.WORLD
        parts = [torch.zeros(1), torch.zeros(2)]
        own = torch.full((rank + 1,), rank + 5.0)
        # As megatron-core's layer-wise optimizer gathers.
        dist.all_gather(parts, own, group=group, async_op=async_op)
        dist.reduce_scatter(own, [part + rank for part in parts], group=group)
        return [part.tolist() for part in parts], own.tolist()

    of_rank_0, of_rank_1 = in_child(lambda: on_ranks(2, exchanged, 60))
    assert of_rank_0 == ([[5], [6, 6]], [11])
    assert of_rank_1 == ([[5], [6, 6]], [13, 13])


@pytest.mark.parametrize("micro_batch", [{}, {"loss_mask": None}])
def test_without_a_loss_mask_all_tokens_count(micro_batch):
    total, count = masked_sum(torch.full((2, 3), 2.0), micro_batch)
    assert (total, count) == (12, 6)


def _no_loss(output, micro_batch):
    return output.sum() * 0, micro_batch["loss_mask"].sum()


WORTHLESS = {
    "the step did not change": Task(_without_a_step, uneven_batch(4)),
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
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["wrong"] == [] and outcome["refused"] == []
    for name, shown in outcome["known"].items():
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


@pytest.mark.parametrize(("job", "small", "text"), table("verification/small_layouts.txt"))
def test_a_small_layout_keeps_a_jobs_groups_or_says_what_is_lost(job, small, text):
    sizes = {"num_experts": None, **eval(f"dict({job})")}
    keep = sizes.pop("keep", ())
    arguments = {SIZES.get(name, name): size for name, size in sizes.items()}
    notes = []
    if small == "-":
        with pytest.raises(ValueError, match=text):
            small_layout(SimpleNamespace(**arguments), keep, notes)
        return
    assert small_layout(SimpleNamespace(**arguments), keep, notes) == eval(small)
    assert text in "; ".join(notes or "-")


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (3, 3), (4, 2), (8, 1), (2, 8)])
def test_a_small_jobs_tokens_divide_and_are_like_no_other_size(tp, cp):
    length = _length(Layout(tp=tp, cp=cp))
    assert length % (2 * cp * tp) == 0
    sizes = [48 * tp, 48, 56 * tp, 56]  # of hidden features and words of the vocabulary
    for part in (length, length // cp, length // cp // tp):
        assert part not in sizes and 2 * part not in sizes


@pytest.mark.parametrize(
    ("layout", "ends", "kept", "layers"),
    [
        (Layout(pp=3), {"first": 5}, {"first": 1}, 5),
        (Layout(pp=3, vp=2), {"first": 4}, {"first": 2}, 10),
        (Layout(pp=3, vp=2), {"first": 2, "last": 4}, {"first": 2, "last": 2}, 8),
    ],
)
def test_a_stage_of_another_depth_is_kept_also_with_chunks(layout, ends, kept, layers):
    config = SimpleNamespace()
    for end, count in ends.items():
        setattr(config, f"num_layers_in_{end}_pipeline_stage", count)
    sizes = {"num_layers": layout.pp * 2}
    options = {}
    _split_pipeline_unevenly(SimpleNamespace(config=config), layout, sizes, options)
    for end, count in kept.items():
        assert options.pop(f"num_layers_in_{end}_pipeline_stage") == count
    assert not options and sizes["num_layers"] == layers


def _small_job_of_experts(topk=2, **more):
    args = {"num_experts": 8, "world_size": 8, "optimizer": "adam"}
    args |= {"pipeline_model_parallel_size": 4, "untie_embeddings_and_output_weights": True}
    args |= {"position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_base": 10000}
    args |= {"use_rope_scaling": False, "rope_scaling_factor": 8.0}
    args["rotary_seq_len_interpolation_factor"] = None
    args |= more

    def made_small():
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=11,
            hidden_size=64,
            num_attention_heads=8,
            num_moe_experts=8,
            moe_router_topk=topk,
            add_bias_linear=False,
            moe_layer_freq=[0] * 3 + [1] * 8,
            pipeline_model_parallel_size=4,
            pipeline_dtype=torch.float32,
            num_layers_in_first_pipeline_stage=2,
        )
        job = small_job(SimpleNamespace(config=config, **args))
        return job.layout, job.task.build.keywords["sizes"]["num_layers"], job.changed

    return in_child(made_small)


def test_layers_with_experts_are_as_many_as_the_layers_of_unequal_stages():
    layout, layers, _ = _small_job_of_experts()
    assert layout.pp == 3 and layers == 5
    assert layout.options["moe_layer_freq"] == [0, 0, 0, 1, 1]


def test_sizes_that_are_equal_in_the_small_job_alone_are_named():
    # Four stages and four data-parallel ranks become three of each.
    *_, changed = _small_job_of_experts(topk=3, world_size=16)
    (equal,) = [text for text in changed if text.startswith("equal sizes")]
    assert equal.endswith(": pp and top-k of the router, dp and top-k of the router")
    *_, changed = _small_job_of_experts(world_size=64, num_distributed_optimizer_instances=4)
    (equal,) = [text for text in changed if text.startswith("equal sizes")]
    assert equal.endswith(": num_distributed_optimizer_instances and top-k of the router")


STUB = """
import argparse
import megatron.core
from megatron.core.transformer import TransformerConfig

def parse_args(extra_args_provider):
    parser = argparse.ArgumentParser()
    switches = "--swiglu --apply-layernorm-1p --use-torch-fsdp2 --save --fails"
    for flag in [*switches.split(), "--use-distributed-optimizer"]:
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
    args.use_rope_scaling = False
    args.rope_scaling_factor = 8.0
    args.rotary_seq_len_interpolation_factor = None

def core_transformer_config_from_args(args):
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=64,
        num_attention_heads=8,
        gated_linear_unit=args.swiglu,
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
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


def edit(checkout, name, old, new):
    """Change the first ``old`` in a copy of the checkout's megatron-core."""
    core = checkout / "megatron" / "core"
    source = core.resolve()
    core.unlink()
    shutil.copytree(source, core)
    text = (core / name).read_text()
    assert old in text
    (core / name).write_text(text.replace(old, new, 1))


def test_the_verdict_is_told_before_the_search_which_can_be_left_out(checkout):
    factor = "torch.distributed.get_world_size()"
    edit(
        checkout,
        "distributed/finalize_model_grads.py",
        "def finalize_model_grads(",
        "def finalize_model_grads(*a, **k):\n"
        "    for chunk in a[0]:\n"
        f"        for buffer in chunk.buffers: buffer.grad_data *= {factor}\n"
        "    return _finalize_model_grads(*a, **k)\n"
        "def _finalize_model_grads(",
    )
    words = ["--tensor-model-parallel-size", "2", "--num-layers", "2"]
    heard = []
    _, report = verify_line("pretrain_gpt.py", words, 2, checkout, listen=heard.append)
    assert report.smallest
    assert "do not compute what one rank computes" in heard[0]
    assert "Searching" in heard[0] and "does it differ without tp=2?" in heard[1]
    heard.clear()
    _, report = verify_line(
        "pretrain_gpt.py", words, 2, checkout, smallest=False, listen=heard.append
    )
    assert report.findings and not report.smallest and not heard


def test_the_groups_are_those_of_the_checkout_or_the_report_names_the_module(checkout):
    check = "assert torch.distributed.is_initialized()"
    edit(checkout, "parallel_state.py", check, "assert not 'of the checkout'")
    words = ["--tensor-model-parallel-size", "2", "--num-layers", "2"]
    _, report = verify_line("pretrain_gpt.py", words, 2, checkout)
    assert "of the checkout" in report.refused
    # A job of hypergrid's launcher has hypergrid's groups.
    _, report = verify_line("pretrain_gpt.py", words, 2, checkout, order=Layout.order)
    assert report.agrees, str(report)
    assert "megatron.core.parallel_state (compat.parallel_state ran instead)" in str(report)


@pytest.mark.parametrize("checkout", ["0.16.1"], indirect=True)
def test_each_flag_of_the_line_is_verified_or_replaced_or_not_verified(checkout):
    line = "--tensor-model-parallel-size 2 --swiglu --num-layers=24 --apply-layernorm-1p --save"
    line += " --use-distributed-optimizer"
    changed, report = verify_line("pretrain_gpt.py", line.split(), 2, checkout)
    assert report.agrees, str(report)
    assert changed[-3:] == [
        "verified: --tensor-model-parallel-size --swiglu",
        "replaced by a stand-in: --num-layers",
        "not verified: --apply-layernorm-1p --save --use-distributed-optimizer",
    ]
    # Nothing is distributed over one data-parallel rank.
    assert "use_distributed_optimizer: no collective was seen to run for it" in str(report)
    with pytest.raises(ValueError, match="--use-torch-fsdp2 is not verified: its code needs CUDA"):
        verify_line("", ["--use-torch-fsdp2"], 2, checkout)


def _needing_sequence_parallel(refusing_ranks, layout, **where):
    if layout.world_size > 1 and "sequence_parallel" not in layout.options:
        assert torch.distributed.get_rank() not in refusing_ranks, "needs sequence_parallel"
    return small_gpt(layout, **where)


def test_an_option_that_not_all_ranks_need_is_not_verified():
    layout = Layout(tp=2, options={"sequence_parallel": True})
    for refusing_ranks, idle in (((0, 1), []), ((1,), ["sequence_parallel"])):
        build = partial(_needing_sequence_parallel, refusing_ranks)
        # A rank that waits for one that refused is ended then.
        (report,) = compat.verify(build, uneven_batch(), layout, smallest=False, timeout=30)
        assert report.agrees and report.idle == idle, str(report)


def test_an_error_without_a_sentence_has_the_line_that_raised_it():
    def fails(rank):
        raise AssertionError

    with pytest.raises(
        Refused, match=r"AssertionError: raise AssertionError \(test_verify.py, line"
    ):
        on_ranks(1, fails, 60)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's end is a signal on Linux only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_verifies(number):
    read_end, write_end = os.pipe()

    def endless(rank):
        os.write(write_end, b"started")
        time.sleep(600)

    verifying = os.fork()
    if verifying == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        on_ranks(2, endless, 600)
        os._exit(0)
    os.close(write_end)
    for _ in range(2):
        assert os.read(read_end, len(b"started")) == b"started"
    os.kill(verifying, number)
    os.waitpid(verifying, 0)
    # The pipe ends with the last process that could write into it.
    ended, _, _ = select.select([read_end], [], [], 60)
    assert ended and os.read(read_end, 1) == b""


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
    assert "dims are smaller: dp 8 -> 6" in changed
    assert not [text for text in changed if text.startswith("left out")]  # dropout is 0
    assert report.layout.order == "pp-ep-tp-dp-cp"
    assert report.needed["calculate_per_token_loss"] == "agrees"
    with pytest.raises(ValueError, match=r"hybrid model: give compat\.verify"):
        verify_line("", [*LINE.split(), "--hybrid-override-pattern", "M*"], 16, CHECKOUT)
