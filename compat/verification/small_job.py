"""The small job that the arguments of a launch line become: a GPT, a layout and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from compat.verification.arguments import BY_HAND
from compat.verification.gpt import LATENT, small_gpt, uneven_batch
from compat.verification.layout import (
    INSTANCES,
    LOSS_PER_TOKEN,
    MIXED_PRECISION,
    SIZES,
    Layout,
    matches,
)
from compat.verification.script import Script
from compat.verification.step import Task
from compat.verification.structure import (
    DIMS_TOLD_APART,
    equal_sizes,
    job_sizes,
    small_layout,
)

# Sizes of the small model are unlike each other, and unlike the number of heads and of their
# groups, 6 and 3 for each tp rank: code that takes one for another must compute something else.
_HEAD = 8  # the size of an attention head
_VOCAB_FOR_EACH_RANK = 56
_LEAST_LENGTH = 40
# Sizes that have no name of a dim.
_DEPTH = "layers of a stage"
_TOP_K = "top-k of the router"
# Fields of TransformerConfig that the small model sets itself.
SHAPE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "*ffn_hidden_size",
    "num_moe_experts",
    "moe_shared_expert_intermediate_size",
    "num_layers_in_*_pipeline_stage",
    "seq_length",
    *SIZES.values(),
    "microbatch_group_size_per_vp_stage",
    "*_num_weight_shards",
    "multi_latent_attention",
)
# Fields that change how fast something is computed, or how precisely, and not what.
_HOW = (
    "*_dtype",
    "bf16",
    "fp16",
    "fp4*",
    "fp8*",
    "*init_method*",
    "perform_initialization",
    "*fusion*",
    "persist_layer_norm",
    "transformer_impl",
    "*cuda*",
    "attention_backend",
    "tp_comm_*",
    "*p2p*",
    "deallocate_*",
    "*offload*",
    "inference_*",
    "config_logger_dir",
    "*_func",
    "symmetric_ar_type",
    "use_te_*",
    "timers",
    "moe_grouped_gemm",
    "moe_enable_deepep",
    "cp_comm_type",
    "memory_efficient_layer_norm",
    "barrier_with_L1_time",
    "use_ring_exchange_p2p",
    "moe_*_backend",
    "moe_flex*",
    "moe_deepep*",
    "moe_hybridep*",
    "variable_seq_lengths",
    "external_cuda_graph",
    "flash_decode",
    "batch_invariant_mode",
    "disable_parameter_*",
    "enable_autocast",
    "use_kitchen*",
    "*_sync_func",
    "attention_softmax_in_fp32",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
    "delay_wgrad_compute",
)
# Fields that a small model on a CPU leaves out though they change the result.
_LEFT_OUT = (
    "*dropout*",
    "*capacity_factor*",
    "moe_pad_expert*",
    "hetero*",
    "mamba_*",
    "experimental_attention*",
    "linear_*",
    "pipeline_model_parallel_layout",
    "moe_router_dtype",
)
# Arguments that set fields of DistributedDataParallelConfig, or how the job starts.
_SAME_NAME = (
    "data_parallel_random_init",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    *MIXED_PRECISION,
)
FIELD_OF = {
    **{name: name for name in _SAME_NAME},
    "ddp_average_in_collective": "average_in_collective",
    "ddp_bucket_size": "bucket_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_OF_HYBRID_MODELS = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern")
_BUCKET_SIZE = 10_000  # parameters: several buckets for each small chunk
# Sizes that are smaller in the small model, if the job has them.
_AT_MOST = {"recompute_num_layers": 1, "mtp_num_layers": 2}


class SmallJob(NamedTuple):
    """The small job that is verified, and in words what became smaller or was left out."""

    task: Task
    layout: Layout
    changed: list[str]

    def is_same(self, other: SmallJob) -> bool:
        """Whether two jobs have the same model, options and layout."""
        build: Any = self.task.build
        other_build: Any = other.task.build
        return build.keywords == other_build.keywords and self.layout == other.layout


def small_job(
    args: Any, order: str | None = None, keep: Sequence[str] = (), script: str = ""
) -> SmallJob:
    """The small job of checked arguments; ``script`` is the training script, if Megatron's."""
    if any(getattr(args, name, None) for name in _OF_HYBRID_MODELS):
        raise ValueError(f"the arguments describe a hybrid model: {BY_HAND}")
    changed: list[str] = []
    layout = small_layout(args, keep, changed)
    if order is not None:
        layout = replace(layout, order=order)
    sizes = _sizes(args, layout)
    options = {**layout.options, **_options(args, sizes, changed)}
    _split_pipeline_unevenly(args, layout, sizes, options)
    if args.config.num_moe_experts:
        options |= _experts(args.config, layout, sizes)
    layout = replace(layout, options=options)

    vocab = _VOCAB_FOR_EACH_RANK * layout.tp
    length = _length(layout)
    model = {
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
    }
    build = partial(small_gpt, seq_length=length, vocab=vocab, sizes=sizes, model=model)
    dims = {name: getattr(layout, name) for name in DIMS_TOLD_APART}
    samples = _unlike(2, dims.values())  # of a micro batch
    # Of each data-parallel rank; an interleaved pipeline needs a multiple of its stages.
    multiple = layout.pp if layout.vp else 1
    micro_batches = layout.dp * _unlike(2 * multiple, dims.values(), multiple)
    parts = 1
    if layout.cp > 1 and not options.get(LOSS_PER_TOKEN):
        # Megatron then averages the means of the ranks' parts: another loss, if counts differ.
        parts = 2 * layout.cp
        changed.append(
            "each cp rank has the same number of unmasked tokens: without "
            "--calculate-per-token-loss Megatron weighs them unequally otherwise"
        )
    batch = uneven_batch(max(micro_batches, 4), samples, length, vocab, parts)
    top_k = args.config.moe_router_topk if args.config.num_moe_experts else 1
    of_job = {**job_sizes(args), _TOP_K: top_k}
    of_job[_DEPTH] = args.config.num_layers // of_job["pp"]
    of_small = {
        **dims,
        _DEPTH: sizes["num_layers"] // layout.pp,
        INSTANCES: options.get(INSTANCES, 1),
        _TOP_K: top_k,
    }
    equal = equal_sizes(of_job, of_small, of_small)
    if equal:
        changed.append(
            f"equal sizes, which differ in the job, so a fault that takes one for the other is "
            f"not seen: {', '.join(equal)}"
        )
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items() if value)
    changed.append(f"the model is smaller: {shown}, sequences of {length} tokens")
    task = Task(build, batch)
    if script:
        task = replace(task, script=Script(script, args))
    return SmallJob(task, layout, changed)


def _unlike(least: int, sizes: Iterable[int], step: int = 1) -> int:
    """The first of ``least``, ``least + step`` ... that none of the ``sizes`` is."""
    return next(size for size in count(least, step) if size not in sizes)


def _length(layout: Layout) -> int:
    """The tokens of a sample: divisible by the chunks of cp and by tp, and like no other size.

    A multiple of 5, as the tokens of each rank are: those of hidden size and vocabulary are not.
    """
    unit = 2 * layout.cp * layout.tp * 5
    return unit * -(-_LEAST_LENGTH // unit)


def _sizes(args: Any, layout: Layout) -> dict[str, Any]:
    config = args.config
    heads = 6 * layout.tp
    groups = config.num_query_groups
    query_groups = None
    if groups not in (None, config.num_attention_heads):
        query_groups = 3 * layout.tp
        # Several ranks of the job hold the keys and values of one group.
        if groups < config.tensor_model_parallel_size:
            query_groups = max(1, layout.tp // 2)
    # Two layers on each stage, or one or two in each chunk of an interleaved pipeline.
    num_layers = layout.pp * 2
    if layout.vp:
        chunks = config.pipeline_model_parallel_size * config.virtual_pipeline_model_parallel_size
        num_layers = layout.pp * layout.vp * min(2, max(1, config.num_layers // chunks))
    if layout.pp > 1:
        # The embedding on the first stage, or the loss on the last, counts as a layer.
        num_layers -= config.account_for_embedding_in_pipeline_split
        num_layers -= config.account_for_loss_in_pipeline_split
    return {
        "num_layers": num_layers,
        "hidden_size": heads * _HEAD,
        "num_attention_heads": heads,
        "num_query_groups": query_groups,
    }


def _experts(config: Any, layout: Layout, sizes: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    topk = config.moe_router_topk
    least = max(topk, 4)
    step = 1
    if config.moe_router_num_groups:
        # Two groups, of which one is chosen: it alone must have enough experts.
        options |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
        least = 2 * max(topk, 2)
        step = 2  # both groups have as many experts, also where ep is odd
    for_each_rank = max(2, -(-least // layout.ep))
    for_each_rank += for_each_rank % step
    other_sizes = (layout.tp, layout.cp, layout.dp, layout.ep, topk)
    for_each_rank = _unlike(for_each_rank, other_sizes, step)
    options["num_moe_experts"] = layout.ep * for_each_rank
    if config.moe_shared_expert_intermediate_size:
        options["moe_shared_expert_intermediate_size"] = 2 * sizes["hidden_size"]
    if isinstance(config.moe_layer_freq, list):
        layer_kinds = config.moe_layer_freq[: sizes["num_layers"]]
        # Of a model whose first layers are dense, the last layer has the experts.
        if 1 not in layer_kinds:
            layer_kinds[-1] = 1
        options["moe_layer_freq"] = layer_kinds
    return options


def _split_pipeline_unevenly(
    args: Any, layout: Layout, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    """Give the first or last stage one layer, where the job gives it another number."""
    if layout.pp == 1:
        return
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    names = [name for name in ends if getattr(args.config, name, None)]
    chunks = layout.vp or 1
    if layout.vp and names:
        sizes["num_layers"] = layout.pp * chunks * 2
    for name in names:
        # One layer in each chunk of this stage, and two in the others. Of two stages without
        # chunks, the other one already has another number.
        if layout.vp or layout.pp > 2 or sizes["num_layers"] % 2 == 0:
            options[name] = chunks
            sizes["num_layers"] -= chunks


def _options(args: Any, sizes: dict[str, Any], changed: list[str]) -> dict[str, Any]:
    """Fields of the configurations that the arguments set, if they change what is computed."""
    from megatron.core.transformer import TransformerConfig

    options: dict[str, Any] = {}
    left_out = []
    for field in dataclasses.fields(TransformerConfig):
        value = getattr(args.config, field.name)
        if value in (None, field.default) or matches(field.name, SHAPE):
            continue
        is_plain = isinstance(value, int | float | str)
        is_function = field.name in ("activation_func", "window_attn_skip_freq")
        # The fused loss that is not Transformer Engine's has collectives of its own.
        is_fused_loss = field.name == "cross_entropy_loss_fusion" and (
            args.cross_entropy_fusion_impl == "native"
        )
        is_left_out = value == "flex" or matches(field.name, _LEFT_OUT)
        if field.name == "window_size":
            options[field.name] = (4, 0)
        elif field.name in _AT_MOST:
            options[field.name] = min(value, _AT_MOST[field.name])
        elif field.name == "moe_layer_freq" and not is_plain:
            continue  # a pattern: the small model has the part of it that its layers need
        elif matches(field.name, _HOW) and not is_function and not is_fused_loss:
            continue
        elif is_function or (is_plain and not is_left_out):
            options[field.name] = value
        elif value:
            left_out.append(f"{field.name}={value}")
    if getattr(args, "multi_latent_attention", False):
        options |= {"multi_latent_attention": True, **LATENT, "rope_type": args.config.rope_type}
        if args.config.q_lora_rank is None:
            options["q_lora_rank"] = None
    for name, field_name in FIELD_OF.items():
        if getattr(args, name, None) is True:
            options[field_name] = True
    if getattr(args, "ddp_bucket_size", None) or options.get("overlap_grad_reduce"):
        options["bucket_size"] = _BUCKET_SIZE
    if args.optimizer != "adam":
        left_out.append(f"optimizer={args.optimizer}")
    if left_out:
        changed.append(f"left out: {', '.join(left_out)}")
    return options
