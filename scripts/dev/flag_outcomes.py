"""Every flag of Megatron's parser: has it an effect on the small job, or why has it none?

A flag is added to two lines, with each of a few values, until one changes what is verified.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from compat.verification.arguments import parse
from compat.verification.launch import NOT_VERIFIED, Line, treatment, with_effect
from compat.verification.ranks import in_checkout
from compat.verification.small_job import SmallJob

TABLE = Path(__file__).with_name("verify_flags.csv")
_COMMON = """--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64
--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1
--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --tensor-model-parallel-size 2
--sequence-parallel --use-distributed-optimizer"""
DENSE = f"{_COMMON} --pipeline-model-parallel-size 2 --position-embedding-type rope"
EXPERTS = f"""{_COMMON} --num-experts 4 --expert-model-parallel-size 2 --swiglu
--disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"""
LINES = {"dense": DENSE, "experts": EXPERTS}
WORLD_SIZE = 8
NONE = "none"

_OTHER_MODEL = "another model, or another training program"
_SERVICES = "a service beside the training step"
# Why the flags of an argument group have no effect on the small job.
GROUP_REASONS: dict[str, str] = {
    **dict.fromkeys(("In-process restart", "autoresume", "ft_package", "msc"), _SERVICES),
    **dict.fromkeys(("fault injector", "rerun engine", "straggler"), _SERVICES),
    **dict.fromkeys(("one logger", "workload inspector", "profiling", "logging"), _SERVICES),
    **dict.fromkeys(("vision", "biencoder", "kitchen", "rl", "sft"), _OTHER_MODEL),
    **dict.fromkeys(("Logits Distillation", "heterogeneous architecture"), _OTHER_MODEL),
    **dict.fromkeys(("experimental_attention_variant",), _OTHER_MODEL),
    "checkpointing": "weights are those of one rank, and nothing is saved",
    "data and dataloader": "the batch is ours",
    "inference": "inference, and no training step",
    "learning rate and weight decay": "the settings of the optimizer have stand-ins",
    "mixed precision": "the small job computes in float32",
    "regularization": "dropout is left out, and the settings of the optimizer have stand-ins",
    "tokenizer": "the batch is ours",
    "Transformer-Engine": "Transformer Engine does not run on a CPU",
    "validation": "no validation step",
}
_WITH_ANOTHER = "has an effect only with another flag, which the two lines do not have"
_LEFT_OUT = "left out of the small job; the report names it"
_STAND_IN = "a layer of ours stands in, which has no such option"
_GPU = "needs a GPU or Transformer Engine"
_COMMUNICATORS = "how groups are created, and not what they compute"
_MESSAGES = "the small job has its own way of messages between stages"
_WHEN = "when a job stops, prints or collects garbage, and no step"
_INITIAL = "weights are compared between replicas, and then those of one rank"
# Why flags have none, by pattern: the first that fits.
REASONS: dict[str, str] = {
    **dict.fromkeys(("--cp-comm-type", "--apply-layernorm-1p", "--mrope-section"), _STAND_IN),
    **dict.fromkeys(("--relative-attention-*", "--no-clone-scatter*"), _STAND_IN),
    **dict.fromkeys(("*dropout", "--moe-expert-capacity*", "--moe-token-drop*"), _LEFT_OUT),
    **dict.fromkeys(("--account-for-*", "--linear-*", "--dsa-*", "--no-dsa-*"), _LEFT_OUT),
    "--microbatch-group-size*": _LEFT_OUT,
    **dict.fromkeys(("--mup-*", "--yarn-*", "--no-yarn-*", "--mscale*"), _WITH_ANOTHER),
    **dict.fromkeys(("--mtp-*", "--qk-clip-*", "--*-lora-rank", "--*-head-dim"), _WITH_ANOTHER),
    **dict.fromkeys(("--rotary-scaling-factor", "--rope-scaling-factor"), _WITH_ANOTHER),
    **dict.fromkeys(("--window-attn-skip-freq", "--moe-shared-expert-*"), _WITH_ANOTHER),
    **dict.fromkeys(("--moe-router-bias-*", "--moe-router-quantile*"), _WITH_ANOTHER),
    **dict.fromkeys(("--moe-latent-size", "--activation-func-clamp*"), _WITH_ANOTHER),
    **dict.fromkeys(("--no-position-embedding", "--moe-upcycling*"), _WITH_ANOTHER),
    **dict.fromkeys(("--no-align-*", "--ddp-num-buckets", "--outer-dp-*"), _WITH_ANOTHER),
    **dict.fromkeys(("--max-seqlen-per*", "--moe-apply-probs*"), _WITH_ANOTHER),
    **dict.fromkeys(("--recompute-activations", "--moe-layer-recompute"), _WITH_ANOTHER),
    **dict.fromkeys(("--cache-mla-latents",), _WITH_ANOTHER),
    "--moe-aux-loss-coeff": "the second line has it, with the value that is tried",
    "--moe-layer-freq": "takes a pattern, and a number alone is tried",
    "--moe-enable-routing-replay": "records and replays routes, for reinforcement learning",
    "--decoder-num-layers": "another name of --num-layers, which has a stand-in",
    "--apply-residual-connection-post-layernorm": "no layer of megatron-core reads it",
    "--openai-gelu": "a kernel of the same function",
    "--apply-query-key-layer-scaling": "scores are divided by a number, and multiplied by it again",
    "--no-check-for-nan-in-loss-and-grad": "a check, which does not run",
    **dict.fromkeys(
        ("--check-*", "--result-rejected*", "--gpu-sniff*"), "a check while a job runs"
    ),
    **dict.fromkeys(("--train-iters", "--exit-*", "--*manual-gc*", "--train-sync*"), _WHEN),
    **dict.fromkeys(("--iterations-to-skip", "--decrease-batch*", "--empty-unused*"), _WHEN),
    **dict.fromkeys(("--*flight-recorder*", "--distributed-timeout*"), _SERVICES),
    **dict.fromkeys(("--*init-*", "--no-initialization", "--*rng-tracker"), _INITIAL),
    **dict.fromkeys(("--disable-gloo*", "--create-all-gather*"), _COMMUNICATORS),
    **dict.fromkeys(("--high-priority*", "--local-rank", "--fake-process*"), _COMMUNICATORS),
    **dict.fromkeys(("--suggested-communication*", "--lazy-mpu-init"), _COMMUNICATORS),
    **dict.fromkeys(("--use-ring-exchange*", "--no-overlap-p2p*", "--no-scatter*"), _MESSAGES),
    **dict.fromkeys(("*fusion*", "*fused*", "*fuser*", "*cuda*", "*nccl*", "*sharp*"), _GPU),
    **dict.fromkeys(("*offload*", "*tp-comm*", "*deepep*", "*hybridep*", "*d2h*"), _GPU),
    **dict.fromkeys(("*kernel*", "*-backend*", "*symm*", "*batch-invariant*", "*pin-cpu*"), _GPU),
    **dict.fromkeys(("*flash*", "*gemm*", "*async*", "*wgrad*", "*persist-layer-norm"), _GPU),
    **dict.fromkeys(("*num-sms", "*glu-interleave*", "*paged-stash*"), _GPU),
    **dict.fromkeys(("*num-weight-shards", "*kitchen*", "--moe-extended-tp"), _GPU),
    **dict.fromkeys(("*fp8*", "*fp4*", "*bf16*", "*fp16*", "*fp32*", "*dtype*"), "float32 runs"),
    "--use-precision-aware-optimizer": "float32 runs",
    **dict.fromkeys(("*mamba*", "*hybrid*", "*bert*", "*retro*", "*ict*"), _OTHER_MODEL),
    **dict.fromkeys(("--spec", "--yaml-cfg", "--enable-experimental"), _OTHER_MODEL),
    **dict.fromkeys(("--mlp-chunks*", "--inference-*", "--onnx*"), "inference, or export"),
    **dict.fromkeys(("--use-mcore-models", "--dataloader-type"), "obsolete, or of the data"),
    **dict.fromkeys(("--dump-*", "--no-use-layer-wise*"), "files, and where parameters lie"),
    **dict.fromkeys(("*log*", "*timing*", "*print*", "*wandb*", "*tensorboard*"), _SERVICES),
    **dict.fromkeys(("*fsdp*", "*hsdp*", "*data-parallel-sharding*"), "its code needs CUDA"),
}


def outcomes(checkout: Path, only: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """The outcome of each flag of a checkout's parser, or of some, and the flag's group."""
    return in_checkout(partial(_outcomes, tuple(only)), checkout)


def flags_of(checkout: Path) -> list[str]:
    """The flags of the parser of a checkout."""
    return in_checkout(_all_flags, checkout)


def _all_flags() -> list[str]:
    _, parser = parse(DENSE.split(), WORLD_SIZE)
    return [flag for flag, _, _ in _flags(parser)]


def _outcomes(only: Sequence[str]) -> dict[str, tuple[str, str]]:
    result: dict[str, tuple[str, str]] = {}
    for text in LINES.values():
        line = Line(tuple(text.split()), WORLD_SIZE)
        parsed, parser = parse(line.words, WORLD_SIZE)
        base = line.small_job(parsed)
        jobs: dict[str, SmallJob] = {}
        for flag, action, group in _flags(parser):
            known = result.get(flag, (NONE, ""))[0]
            # The second line is for flags without an effect on the first.
            if (only and flag not in only) or not (known == NONE or known.startswith("refused")):
                continue
            kind, others = _kind(line, action, base, parsed)
            # A line that takes the flag says more than one that refuses it.
            if not (kind.startswith("refused") and flag in result):
                result[flag] = (kind, group)
            for number, other in enumerate(others):
                jobs[f"{flag} {number}"] = other
        for name in with_effect(base, jobs):
            flag = name.split()[0]
            result[flag] = ("effect", result[flag][1])
    return result


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action, str]]:
    """The first long name of each flag, and the title of its group."""
    for group in parser._action_groups:
        for action in group._group_actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            if names and action.dest != "help":
                yield names[0], action, str(group.title)


def _kind(
    line: Line, action: argparse.Action, base: SmallJob, parsed: Any
) -> tuple[str, list[SmallJob]]:
    """The outcome, as far as it needs no step, and the jobs that decide otherwise."""
    refusal = ""
    for value in _values(action):
        with_flag = copy.deepcopy(parsed)
        setattr(with_flag, action.dest, value)
        try:
            job = line.small_job(with_flag)
        except Exception as error:
            refusal = f"refused: {error}"
            continue
        kind, other = treatment(line, action.dest, job, parsed)
        if other is not None:
            return NONE, [job]
        if kind != NOT_VERIFIED:
            return ("layout" if kind == "verified" else "stand-in"), []
    return refusal[:120] or NONE, []


def _values(action: argparse.Action) -> Iterable[Any]:
    """A few values other than the default."""
    if action.nargs == 0:
        return [action.const]
    if action.choices is not None:
        return [choice for choice in action.choices if choice != action.default][:3]
    if action.type is int:
        default = action.default if isinstance(action.default, int) else 1
        return [2 * default + 2, default + 1]
    if action.type is float:
        default = action.default if isinstance(action.default, int | float) else 0.5
        return [default / 2 + 0.01]
    return ["1"]


def reason_of(flag: str, kind: str, group: str) -> str:
    """Why a flag has no effect; "" where it has one, or where nobody knows."""
    if kind.startswith("refused"):
        return kind.partition(": ")[2].replace("\n", " ")
    if kind != NONE:
        return ""
    if group in GROUP_REASONS:
        return GROUP_REASONS[group]
    for pattern, reason in REASONS.items():
        if fnmatchcase(flag, pattern):
            return reason
    return ""
