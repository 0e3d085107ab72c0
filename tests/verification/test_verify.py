"""Layouts that compute what one rank computes, and faults: megatron-core's own, and mutants."""

import json
import os
import select
import signal
import sys
import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import compat
from compat.verification import Layout, collectives, search
from compat.verification.gpt import small_gpt, uneven_batch
from compat.verification.launch import verify_line
from compat.verification.layout import SIZES
from compat.verification.on_cpu import REPLACED
from compat.verification.ranks import Refused, in_child, on_ranks
from compat.verification.search import _Job
from compat.verification.small_job import _length, small_job
from compat.verification.step import Task, masked_sum
from compat.verification.structure import small_layout
from tests.support import ROOT, script_module, stock, table, warm
from tests.verification import layouts
from tests.verification.layouts import KNOWN, TOKENS, VERIFIED
from tests.verification.mutants import MUTANTS, layout_of, mutated

DOCUMENT = (ROOT / "docs" / "verify.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """What megatron-core imports, loaded once for all processes that verify forks from this one."""
    warm.preload()


@cache
def _of_verified():
    def judged():
        reports = {}
        for name, case in VERIFIED.items():
            reports[name] = _Job(case.task(), (), 60).report(case.layout, search=False)
        return reports

    return in_child(judged)


@pytest.mark.parametrize("name", VERIFIED)
def test_what_megatron_computes_rightly_agrees_with_one_rank(name):
    assert name.startswith("(special)") or name in DOCUMENT, "docs/verify.md has no such row"
    report = _of_verified()[name]
    assert report.agrees, str(report)
    assert 0 < report.tolerance < 1e-4
    assert "compute what one rank computes" in str(report)


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced.name)
def test_what_is_replaced_in_megatron_core_is_in_the_documents_table(replaced):
    assert f"| `{replaced.module}.{replaced.name}` | {replaced.does} |" in DOCUMENT


def verdict(layout, build=small_gpt, loss=None):
    """What is said of a layout that cannot be verified."""
    (report,) = compat.verify(build, uneven_batch(4), layout, loss=loss, smallest=False)
    assert not report.agrees
    raise ValueError(str(report))


def _without_a_step(layout, **where):
    from megatron.core.optimizer.optimizer import FP32Optimizer

    FP32Optimizer.step_with_ready_grads = lambda self: True
    return small_gpt(layout, **where)


def _no_loss(output, micro_batch):
    return output.sum() * 0, micro_batch["loss_mask"].sum()


@pytest.mark.parametrize(("call", "sentence"), table("verification/refusals.txt"))
def test_what_cannot_be_verified_is_refused_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        eval(call, {**vars(layouts), **globals()})


def test_without_megatron_core_verify_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ModuleNotFoundError, match="verify needs megatron-core: pip install"):
        verdict(Layout(tp=2))


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
    found = [f"{finding.quantity} {finding.name}: {finding}" for finding in report.findings]
    assert MUTANTS[name]["found"] in "; ".join(found), str(report)


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


def _exchanged(rank):
    """The results on a rank of each call of the table, with and without what rank 1 loses."""
    results = []
    for output, call, _, result_if_left_out in table("verification/collectives.txt"):
        own = torch.arange(2.0) + 2 * rank
        names = {"torch": torch, "dist": torch.distributed, "own": own, "rank": rank}
        site = ""
        results_of_call = []
        for _ in range(1 if result_if_left_out == "-" else 2):
            names["output"] = eval(output, names)
            record = collectives.watch(site if rank == 1 else "")
            work = eval(call, names)
            if work is not None:
                assert names["output"].isnan().all()
                work.wait()
            ((site, *_),) = record.calls
            results_of_call.append(names["output"].tolist())
        results.append(results_of_call)
    return results


def test_every_kind_of_collective_delivers_at_its_wait_or_if_left_out_the_ranks_own_input():
    _, results_on_rank_1 = in_child(lambda: on_ranks(2, _exchanged, 60))
    rows = table("verification/collectives.txt")
    for (_, call, *expected), results in zip(rows, results_on_rank_1, strict=True):
        assert results == [eval(result) for result in expected if result != "-"], call


@pytest.mark.parametrize("micro_batch", [{}, {"loss_mask": None}])
def test_without_a_loss_mask_all_tokens_count(micro_batch):
    total, count = masked_sum(torch.full((2, 3), 2.0), micro_batch)
    assert (total, count) == (12, 6)


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
@pytest.mark.parametrize("release", ["0.18.2", "0.19.2"])
def test_faults_of_other_releases_are_found_and_layouts_agree(release):
    if not stock.have_stock(release):
        pytest.skip(f"the source of megatron-core {release} is not here")
    path = f"{ROOT / '.cache' / f'megatron-core-{release}'}:{ROOT}"
    done = warm.run("-m", "tests.verification", "-n", "6", timeout=300, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["wrong"] == [] and outcome["refused"] == []
    for name, shown in outcome["known"].items():
        is_mended = release == "0.19.2" and KNOWN[name].number in ("5047", "5916")
        assert shown == ("no" if is_mended else "yes"), name


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


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_a_small_jobs_tokens_divide_and_are_like_no_other_size(tp, cp):
    length = _length(Layout(tp=tp, cp=cp))
    assert length % (2 * cp * tp) == 0
    # The tokens of a rank are a multiple of 5: hidden features and words of the vocabulary are not.
    assert length // cp // tp % 5 == 0
    assert 48 * tp % 5 and 56 * tp % 5


# What a checkout's parser sets, and small_job reads.
PARSED = {
    "num_experts": None,
    "world_size": 8,
    "optimizer": "adam",
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
}
STAGES = {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.float32}
MIXTURE = {
    **{"num_layers": 11, "num_layers_in_first_pipeline_stage": 2},
    **{"num_experts": 8, "num_moe_experts": 8, "moe_router_topk": 2, "add_bias_linear": False},
    "moe_layer_freq": [0] * 3 + [1] * 8,
}


def small(job):
    """The small job of a job's arguments and of fields of its configuration."""
    from megatron.core.transformer import TransformerConfig

    fields = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, **job}
    for name in job.keys() - TransformerConfig.__dataclass_fields__.keys():
        del fields[name]
    config = TransformerConfig(**fields)
    return small_job(SimpleNamespace(**{**PARSED, **job, "config": config}))


@pytest.mark.parametrize(
    ("arguments", "layers", "options", "text"), table("verification/small_jobs.txt")
)
def test_a_small_job_keeps_the_structure_of_the_job(arguments, layers, options, text):
    def made_small():
        job = small(eval(arguments))
        return job.layout.options, job.task.build.keywords["sizes"]["num_layers"], job.changed

    small_options, small_layers, changed = in_child(made_small)
    assert small_layers == int(layers)
    assert small_options.items() >= eval(options).items()
    assert text.strip("-") in "".join(f"{change};" for change in changed)


def test_each_flag_of_a_line_is_verified_or_replaced_or_not_verified(tmp_path):
    source = stock.source_dir("0.19.2")
    if not source.with_name("training").is_dir():
        pytest.skip("no megatron.training of 0.19.2: run scripts/fetch_megatron 0.19.2")
    (tmp_path / "megatron").symlink_to(source.parent)
    flags = "--tensor-model-parallel-size 2 --swiglu --use-distributed-optimizer"
    words = f"{script_module('peers').MODEL} {flags}".split()
    # A job of hypergrid's launcher has hypergrid's groups.
    changed, report = verify_line("", words, 2, tmp_path, order=Layout.order, smallest=False)
    assert report.agrees, str(report)
    assert "megatron.core.parallel_state (compat.parallel_state ran instead)" in str(report)
    # Nothing is distributed over one data-parallel rank.
    assert "use_distributed_optimizer: no collective was seen to run for it" in str(report)
    verified, replaced, left = changed[-3:]
    assert verified.startswith("verified: ") and "--swiglu" in verified
    assert replaced.startswith("replaced by a stand-in: --num-layers")
    assert left.startswith("not verified: ") and "--use-distributed-optimizer" in left


def _needing_sequence_parallel(layout, **where):
    if layout.world_size > 1 and "sequence_parallel" not in layout.options:
        assert torch.distributed.get_rank() != 1, "needs sequence_parallel"
    return small_gpt(layout, **where)


def test_an_option_that_not_all_ranks_need_is_not_verified():
    layout = Layout(tp=2, options={"sequence_parallel": True})
    # A rank that waits for one that refused is ended then.
    (report,) = compat.verify(
        _needing_sequence_parallel, uneven_batch(), layout, smallest=False, timeout=30
    )
    assert report.agrees and report.idle == ["sequence_parallel"], str(report)


def test_an_error_without_a_sentence_has_the_line_that_raised_it():
    def fails(rank):
        raise AssertionError

    with pytest.raises(
        Refused, match=r"AssertionError: raise AssertionError \(test_verify.py, line"
    ):
        on_ranks(1, fails, 60)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's end is a signal on Linux only")
def test_ranks_end_with_the_process_that_verifies():
    read_end, write_end = os.pipe()

    def endless(rank):
        os.write(write_end, b"started")
        time.sleep(600)

    verifying = os.fork()
    if verifying == 0:
        on_ranks(2, endless, 600)
        os._exit(0)
    os.close(write_end)
    for _ in range(2):
        assert os.read(read_end, len(b"started")) == b"started"
    os.kill(verifying, signal.SIGKILL)
    os.waitpid(verifying, 0)
    # The pipe ends with the last process that could write into it.
    ended, _, _ = select.select([read_end], [], [], 60)
    assert ended and os.read(read_end, 1) == b""
