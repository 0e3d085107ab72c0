"""Verify a launch line of Megatron-LM: its own parser reads it, and the model is made small."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from compat.verification.compare import same_results
from compat.verification.gpt import small_gpt, uneven_batch
from compat.verification.layout import FULLY_SHARDED, OF_SEVERAL, SIZES, Layout
from compat.verification.ranks import Refused, in_checkout, on_ranks, with_python
from compat.verification.search import Report, reports
from compat.verification.step import Computed, MicroBatch, Task, run_variants
from compat.verification.structure import small_layout

_BY_HAND = "give compat.verify a function that builds the model."
# Scripts of Megatron-LM that train another model: a Mamba, a BERT ...
_OTHER_MODELS = ("mamba", "hybrid", "bert", "t5", "ict", "realm", "vision", "vlm", "retro")
_HEAD = 8  # the size of an attention head
# Fields of TransformerConfig that the small model sets itself.
_SHAPE = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("*ffn_hidden_size", "num_moe_experts", "moe_shared_expert_intermediate_size"),
    *("num_layers_in_*_pipeline_stage", "seq_length", *SIZES.values()),
    "microbatch_group_size_per_vp_stage",
)
# Fields that change how fast something is computed, or how precisely, and not what.
_HOW = (
    *("*_dtype", "bf16", "fp16", "fp4*", "fp8*", "*init_method*", "perform_initialization"),
    *("use_cpu_initialization", "*fusion*", "persist_layer_norm", "transformer_impl", "*cuda*"),
    *("attention_backend", "tp_comm_*", "*p2p*", "deallocate_*", "recompute_*", "*offload*"),
    *("inference_*", "config_logger_dir", "*_func", "symmetric_ar_type", "use_te_*", "timers"),
    *("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep", "cp_comm_type"),
    *("memory_efficient_layer_norm", "barrier_with_L1_time", "use_ring_exchange_p2p"),
    *("moe_*_backend", "moe_flex*", "moe_deepep*", "moe_hybridep*", "variable_seq_lengths"),
    *("external_cuda_graph", "flash_decode", "batch_invariant_mode", "disable_parameter_*"),
    *("enable_autocast", "use_kitchen*", "*_sync_func", "distribute_saved_activations"),
    *("attention_softmax_in_fp32", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    "delay_wgrad_compute",
)
# Flags that a small model on a CPU leaves out though they change the result.
_LEFT_OUT = (
    *("*dropout*", "mtp_*", "moe_layer_freq", "window_*", "multi_latent_attention"),
    *("*capacity_factor*", "moe_pad_expert*", "hetero*", "moe_router_num_groups", "mamba_*"),
    *("moe_router_group_topk", "experimental_attention*", "linear_*", "is_hybrid_model"),
    *("softmax_type", "no_rope_freq", "pipeline_model_parallel_layout", "moe_latent_size"),
    *("moe_router_dtype",),
)
# Arguments that need Transformer Engine or a GPU, and what is parsed instead.
_INSTEAD = {
    **dict.fromkeys(
        ("apply_rope_fusion", "gradient_accumulation_fusion", "tp_comm_overlap"), False
    ),
    **dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"), False),
    **{"transformer_impl": "local", "fp8": None, "fp4": None, "fp8_param_gather": False},
}
_DDP = ("use_distributed_optimizer", "overlap_grad_reduce")


# How a flag of the line is treated.
_VERIFIED = "verified"
_STAND_IN = "replaced by a stand-in"
_NOT_VERIFIED = "not verified"
# Arguments in place of which the small job has something else: its sizes, layers, data, optimizer.
_REPLACED = (
    *(*_SHAPE[:6], *_INSTEAD, "num_experts", "max_position_embeddings", "seq_length"),
    *("micro_batch_size", "global_batch_size", "vocab_size", "padded_vocab_size"),
    *("make_vocab_size_divisible_by", "bf16", "fp16", "attention_backend", "optimizer"),
    *("moe_token_dispatcher_type", "mock_data", "data_path", "tokenizer_*", "seed"),
    *("lr", "min_lr", "lr_*", "weight_decay", "adam_*", "clip_grad", "init_method_std"),
)


class Launched(NamedTuple):
    """The small job that a launch line becomes."""

    task: Task
    layout: Layout
    changed: list[str]  # in words


def verify_line(
    script: str,
    words: Sequence[str],
    world_size: int,
    checkout: Path,
    *,
    order: str | None = None,
    allow: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> tuple[list[str], Report]:
    """Verify the job that ``script WORDS`` starts on so many ranks: ``pretrain_gpt.py --lr 1``.

    ``checkout`` is one of Megatron-LM: the wheel of megatron-core has no ``megatron.training``.
    ``order`` takes precedence over that of the arguments. Dims in ``keep`` have the job's size.
    Gives what was made smaller or left out, in words, and the report.

    Raises
    ------
    ValueError
        ``checkout`` is none, Megatron's own parser or its checks refuse the arguments, or the
        script trains another model than a GPT.
    """
    name = Path(script).name
    if name.startswith(tuple(f"pretrain_{each}" for each in _OTHER_MODELS)):
        raise ValueError(f"{name} trains no GPT: {_BY_HAND}")
    if not (checkout / "megatron" / "training" / "arguments.py").is_file():
        raise ValueError(
            f"{checkout} has no megatron/training/arguments.py: give a checkout of Megatron-LM."
        )

    return in_checkout(partial(_verified, name, words, world_size, order, allow, keep), checkout)


def _verified(
    name: str,
    words: Sequence[str],
    world_size: int,
    order: str | None,
    allow: Sequence[str],
    keep: Sequence[str],
) -> tuple[list[str], Report]:
    parsed, parser = _parsed(words, world_size)
    launched = _launched(_checked(parsed), order, keep)
    (report,) = reports(launched.task, [launched.layout], allow)
    if not report.refused:
        launched.changed.extend(_treatments(words, parsed, parser, launched, order, keep))
    if name and not name.startswith("pretrain_gpt"):
        launched.changed.insert(0, f"the model is a GPT, whatever {name} has")
    smallest = [
        replace(least, layout=_without_functions(least.layout)) for least in report.smallest
    ]
    report = replace(report, layout=_without_functions(report.layout), smallest=smallest)
    return launched.changed, report


def _without_functions(layout: Layout) -> Layout:
    """The layout for a process that cannot import the functions of the checkout."""
    options = {name: getattr(value, "__name__", value) for name, value in layout.options.items()}
    return replace(layout, options=options)


def _parsed(words: Sequence[str], world_size: int) -> tuple[Any, argparse.ArgumentParser]:
    """The arguments as Megatron's own parser reads them, and the parser."""
    import torch

    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    cuda.get_device_capability = lambda *_: (9, 0)
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(parser)
        return parser

    with _refusals():
        from megatron.training import arguments

        parsed = arguments.parse_args(extra_args_provider=keep)
    for name in FULLY_SHARDED:
        if getattr(parsed, name, False):
            raise ValueError(f"{_flag(name)} is not verified: its code needs CUDA.")
    for name in _INSTEAD.keys() & vars(parsed).keys():
        setattr(parsed, name, _INSTEAD[name])
    return parsed, parsers[0]


def _checked(parsed: Any) -> Any:
    """The arguments after Megatron's own checks, which change some, and their configuration."""
    given = copy.deepcopy(parsed)
    with _refusals():
        from megatron.training import arguments

        given = arguments.validate_args(given) or given
        given.config = arguments.core_transformer_config_from_args(given)
    return given


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What Megatron raises, as a ValueError with a sentence; what it prints is left out."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            yield
    except SystemExit:
        reason = " ".join(said.getvalue().split("error:")[-1].split())
        if "unrecognized arguments" in reason:
            reason += f". If they are flags of a script of your own: {_BY_HAND}"
        raise ValueError(f"Megatron's parser refuses the arguments: {reason}") from None
    except ModuleNotFoundError as error:
        raise ValueError(
            f"megatron.training needs {error.name}: pip install {error.name}"
        ) from None
    except (ImportError, SyntaxError) as error:
        raise with_python(error) from error
    except Exception as error:
        kind, last = type(error).__name__, traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"Megatron refuses the arguments: {kind}: {str(error) or last.line}"
        ) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _treatments(
    words: Sequence[str],
    parsed: Any,
    parser: argparse.ArgumentParser,
    launched: Launched,
    order: str | None,
    keep: Sequence[str],
) -> list[str]:
    """Which flags are verified, replaced by a stand-in, or not verified: one line for each."""
    flags_of: dict[str, list[str]] = {_VERIFIED: [], _STAND_IN: [], _NOT_VERIFIED: []}
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    computed = _of_one_rank(launched)
    for flag in dict.fromkeys(word.partition("=")[0] for word in words):
        if flag in actions:
            treatment = _treatment(actions[flag], parsed, launched, order, keep, computed)
            flags_of[treatment].append(flag)
    return [f"{treatment}: {' '.join(flags)}" for treatment, flags in flags_of.items() if flags]


def _treatment(
    action: argparse.Action,
    parsed: Any,
    launched: Launched,
    order: str | None,
    keep: Sequence[str],
    computed: Any,
) -> str:
    name = action.dest
    if _matches(name, _REPLACED):
        return _STAND_IN
    layout = launched.layout
    of_the_layout = {SIZES[short]: getattr(layout, short) for short in SIZES}
    if (of_the_layout.get(name) or 1) > 1 or (name in OF_SEVERAL and name in layout.options):
        return _VERIFIED
    without = copy.deepcopy(parsed)
    setattr(without, name, action.default)
    try:
        other = _launched(_checked(without), order, keep)
    except ValueError:
        # Megatron's checks need this flag for others of the line; the small job may do without.
        options = {option: value for option, value in layout.options.items() if option != name}
        other = launched._replace(layout=replace(layout, options=options))
    if replace(other.layout, options=layout.options) != layout:
        return _VERIFIED  # another size or order of dims
    is_same_model = other.task.build.keywords == launched.task.build.keywords  # type: ignore[attr-defined]
    if is_same_model and other.layout == layout:
        return _NOT_VERIFIED
    # An option that reaches the small model may have no effect on it.
    try:
        has_effect = not same_results(computed, _of_one_rank(other))
    except Refused:
        has_effect = False
    return _VERIFIED if has_effect else _NOT_VERIFIED


def _of_one_rank(launched: Launched) -> Computed:
    alone = launched.layout.alone()
    ((computed,),) = on_ranks(1, lambda _: run_variants(launched.task, alone, None), 120)
    return computed


def _launched(given: Any, order: str | None = None, keep: Sequence[str] = ()) -> Launched:
    if getattr(given, "multi_latent_attention", False):
        raise ValueError("multi-latent attention is not verified: its layers need CUDA.")
    if getattr(given, "is_hybrid_model", False) or getattr(given, "hybrid_override_pattern", None):
        raise ValueError(f"the arguments describe a hybrid model: {_BY_HAND}")
    changed: list[str] = []
    layout = small_layout(given, keep, changed)
    if order is not None:
        layout = replace(layout, order=order)
    options = {**layout.options, **_options(given, changed)}
    config = given.config
    tp, groups = layout.tp, getattr(config, "num_query_groups", None)
    heads = 4 * tp
    sizes: dict[str, Any] = {
        # Two layers on each stage, and one in each chunk of an interleaved pipeline.
        "num_layers": layout.pp * (layout.vp or 2),
        "hidden_size": heads * _HEAD,
        "num_attention_heads": heads,
        "num_query_groups": 2 * tp if groups not in (None, config.num_attention_heads) else None,
    }
    if config.num_moe_experts:
        experts = max(config.moe_router_topk, 4)
        options["num_moe_experts"] = layout.ep * max(2, -(-experts // layout.ep))
        if getattr(config, "moe_shared_expert_intermediate_size", None):
            options["moe_shared_expert_intermediate_size"] = heads * _HEAD
    options = {name: value for name, value in options.items() if value is not None}
    model = {
        "share_embeddings_and_output_weights": not given.untie_embeddings_and_output_weights,
        "position_embedding_type": given.position_embedding_type,
        "rotary_percent": given.rotary_percent,
        "rotary_base": given.rotary_base,
    }
    # Divisible by the chunks of cp and by tp.
    length = 48 if layout.tp % 3 == 0 or layout.cp % 3 == 0 else 32
    build = partial(small_gpt, seq_length=length, vocab=64 * tp, sizes=sizes, model=model)
    count, parts = 2 * layout.dp * (layout.pp if layout.vp else 1), 1
    if layout.cp > 1 and not options.get("calculate_per_token_loss"):
        # Megatron then averages the means of the ranks' parts: another loss, if counts differ.
        parts = 2 * layout.cp
        changed.append(
            "each cp rank has the same number of unmasked tokens: without "
            "--calculate-per-token-loss Megatron weighs them unequally otherwise"
        )
    vocab = 64 * tp
    batch: list[MicroBatch] = uneven_batch(max(count, 4), 2, length, vocab, parts)
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items() if value)
    changed.append(f"the model is smaller: {shown}, sequences of {length} tokens")
    return Launched(Task(build, batch), replace(layout, options=options), changed)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _options(given: Any, changed: list[str]) -> dict[str, Any]:
    """Fields of the configurations that the arguments set, if they change what is computed."""
    from megatron.core.transformer import TransformerConfig

    kept: dict[str, Any] = {}
    left_out = []
    for field in dataclasses.fields(TransformerConfig):
        value = getattr(given.config, field.name)
        if value == field.default or _matches(field.name, _SHAPE):
            continue
        if field.name == "activation_func":
            kept[field.name] = value
        elif _matches(field.name, _HOW):
            continue
        elif _matches(field.name, _LEFT_OUT) or not isinstance(value, bool | int | float | str):
            left_out += [f"{field.name}={value}"] if value else []
        else:
            kept[field.name] = value
    of_ddp = ((name, getattr(given, name, None)) for name in _DDP)
    kept |= {name: value for name, value in of_ddp if value is True or (value or 1) > 1}
    if given.optimizer != "adam":
        left_out.append(f"optimizer={given.optimizer}")
    if left_out:
        changed.append(f"left out: {', '.join(left_out)}")
    return kept
