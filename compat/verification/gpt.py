"""A small GPT of megatron-core's own layers, for any layout, and an uneven batch for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compat.verification import on_cpu
from compat.verification.layout import MIXED_PRECISION, Layout
from compat.verification.step import MicroBatch

SMALL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
TIED = {"share_embeddings_and_output_weights": True}
# Of multi-latent attention; the defaults are those of a model of 236 billion parameters.
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8},
    **{"v_head_dim": 8, "rope_type": "rope"},
}


def config_of(layout: Layout, **model: Any) -> Any:
    """The ``TransformerConfig`` of a layout and its options, without dropout, in float32."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    has_latent_attention = layout.options.get("multi_latent_attention", False)
    kind = MLATransformerConfig if has_latent_attention else TransformerConfig
    interleaved = layout.vp is not None
    fields = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipeline_dtype": torch.float32,
        # Two messages for one peer in one batch are exchanged by gloo, without a word.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "masked_softmax_fusion": False,
        **model,
        **layout.fields_of(kind),
        **layout.sizes,
        # Of the optimizer alone: layers would convert their data.
        **dict.fromkeys(MIXED_PRECISION, False),
    }
    return kind(**fields)


def small_gpt(
    layout: Layout,
    seq_length: int = 32,
    vocab: int = 128,
    sizes: Mapping[str, Any] = SMALL,
    model: Mapping[str, Any] = TIED,
    **where: Any,
) -> Any:
    """A GPT with 4 layers, 8 heads and a hidden size of 64; options of the layout change it.

    ``sizes`` are fields of ``TransformerConfig``, ``model`` arguments of ``GPTModel``.
    """
    from megatron.core.models.gpt import GPTModel

    config = config_of(layout, **sizes)
    stage = where.get("vp_stage")
    layers = on_cpu.local_layers(config, stage)
    if config.mtp_num_layers:
        where["mtp_block_spec"] = on_cpu.predicting_layers(config, layers, stage)
    return GPTModel(
        config,
        layers,
        vocab_size=vocab,
        max_sequence_length=seq_length,
        **model,
        **where,
    )


def uneven_batch(
    micro_batches: int = 8, samples: int = 2, length: int = 32, vocab: int = 128, parts: int = 1
) -> list[MicroBatch]:
    """Random tokens; each sample has another number of tokens that count.

    With ``parts`` this number is the same in each of so many parts of a sample.
    """
    generator = torch.Generator().manual_seed(7)
    batch: list[MicroBatch] = []
    for _ in range(micro_batches):
        tokens = torch.randint(vocab, (samples, length + 1), generator=generator)
        positions = torch.arange(length).repeat(samples, 1)
        part = length // parts
        ends = torch.randint(part // 4, part, (samples, 1), generator=generator)
        drawn = torch.rand((samples, part), generator=generator) < 0.8
        counts = ((positions[:, :part] < ends) & drawn).float().repeat(1, parts)
        batch.append(
            {
                "input_ids": tokens[:, :-1].contiguous(),
                "position_ids": positions,
                "attention_mask": None,
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": counts,
            }
        )
    return batch
