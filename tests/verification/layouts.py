"""Layouts of a small GPT: those that show a known fault of megatron-core, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from compat.verification import Layout
from compat.verification.gpt import TIED, small_gpt, uneven_batch
from compat.verification.step import Build, Loss, MicroBatch, Task, masked_sum
from tests.support import table

TOKENS = {"calculate_per_token_loss": True}
SHARDED = {"sequence_parallel": True}
OPTIMIZER = {"use_distributed_optimizer": True}
GATHERED = {
    **OPTIMIZER,
    **{"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000},
}
EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False}
AUX = {**EXPERTS, "moe_aux_loss_coeff": 1e-2}


class Known(NamedTuple):
    """A fault of some release: its number in Megatron-LM's tracker, and what shows it."""

    number: str  # "7452 (9)" is the ninth finding of issue 7452
    layout: Layout
    build: Build = small_gpt
    change: Callable[[dict[str, Any]], None] | None = None  # of each micro batch
    loss: Loss | None = None

    def task(self) -> Task:
        batch = []
        for micro_batch in uneven_batch(4):
            changed = dict(micro_batch)
            if self.change is not None:
                self.change(changed)
            batch.append(changed)
        return Task(self.build, batch, self.loss)


def _give_labels_to_the_loss(micro_batch: dict[str, Any]) -> None:
    micro_batch["targets"] = micro_batch.pop("labels")


def _mask_padding(micro_batch: dict[str, Any]) -> None:
    micro_batch["padding_mask"] = ~micro_batch["loss_mask"].bool()


def _smoothed(output: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core.tensor_parallel import cross_entropy

    # Logits are (samples, length, vocabulary); the function takes the length first.
    logits = output.transpose(0, 1).contiguous()
    targets = micro_batch["targets"].t().contiguous()
    losses = cross_entropy.vocab_parallel_cross_entropy(logits, targets, 0.1)
    return masked_sum(losses.t(), micro_batch)


_GATHERED = partial(small_gpt, model={**TIED, "parallel_output": False})
_ROTARY = partial(small_gpt, model={"position_embedding_type": "rope"})
# What is wrong in some release: the smallest layout that shows it.
KNOWN: dict[str, Known] = {}
for _name, _number, _layout, _more in table("verification/known.txt"):
    KNOWN[_name] = Known(_number, eval(_layout), **eval(f"dict({_more.strip('-')})"))


def random_layout(draw: random.Random) -> Layout:
    """A layout of at most eight ranks that shows none of the faults above."""
    while True:
        dims = ("tp", "cp", "pp", "dp")
        sizes: dict[str, Any] = {name: draw.choice([1, 1, 2, 2, 4]) for name in dims}
        if not 2 <= prod(sizes.values()) <= 8:
            continue
        options: dict[str, Any] = {}
        if sizes["pp"] == 2 and draw.random() < 0.4:
            sizes["vp"] = 2
        if draw.random() < 0.5 or sizes["cp"] > 1:
            options |= TOKENS
        if sizes["tp"] > 1 and draw.random() < 0.5:
            options |= SHARDED
        if draw.random() < 0.5:
            options |= EXPERTS
            if sizes["tp"] > 1:  # megatron-core asks for it
                options |= SHARDED
            sizes["ep"] = draw.choice([1, 2, 4])
            sizes["etp"] = draw.choice([None, 1]) if sizes["ep"] > 1 else None
            options["moe_router_topk"] = draw.choice([1, 2])
            options["moe_router_pre_softmax"] = options["moe_router_topk"] == 1
            if "calculate_per_token_loss" not in options:
                options["moe_aux_loss_coeff"] = draw.choice([0.0, 1e-2])
            if draw.random() < 0.3:
                options["moe_shared_expert_intermediate_size"] = 64
        else:
            options["add_bias_linear"] = draw.choice([True, False])
        if draw.random() < 0.4:
            options["gated_linear_unit"] = True
        if draw.random() < 0.3 and sizes["tp"] <= 4:
            options["num_query_groups"] = 4
        if draw.random() < 0.5:
            options["use_distributed_optimizer"] = True
            if sizes["dp"] % 2 == 0 and draw.random() < 0.4:
                options["num_distributed_optimizer_instances"] = 2
        if draw.random() < 0.3 and "num_distributed_optimizer_instances" not in options:
            options["overlap_grad_reduce"] = True  # with several instances it needs CUDA's streams
        # With pp not last, dense and expert layers need the same data-parallel size.
        same = sizes["cp"] == 1 and "ep" not in sizes
        order = draw.choice([Layout.order, "tp-cp-ep-pp-dp"]) if same else Layout.order
        try:
            return Layout(**sizes, order=order, options=options)
        except ValueError:
            continue
