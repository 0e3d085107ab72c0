"""Layouts of a small GPT: those that show a known fault of megatron-core, and those that are right.

Each is a row of a table beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from compat.verification import Layout
from compat.verification.gpt import LATENT, TIED, small_gpt, uneven_batch
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
LATENT_ATTENTION = {"multi_latent_attention": True, **LATENT}
# Group-limited routing over eight experts, with a bias that the step updates.
GROUPED_EXPERTS = {
    **EXPERTS,
    **{"num_moe_experts": 8, "moe_shared_expert_intermediate_size": 64},
    **{"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2},
    **{"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}


class Case(NamedTuple):
    """What one layout computes; of a fault of some release, its number in Megatron-LM's tracker."""

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


def _case(number: str, layout: str, more: str) -> Case:
    return Case(number, eval(layout), **eval(f"dict({more.strip('-')})"))


# What is wrong in some release: the smallest layout that shows it.
KNOWN = {name: _case(*cells) for name, *cells in table("verification/known.txt")}
# What users combine, and is right, by the row of docs/verify.md or by what is special.
VERIFIED = {name: _case("", *cells) for name, *cells in table("verification/verified.txt")}
# More that show none of the faults above.
LAYOUTS = [eval(layout) for (layout,) in table("verification/layouts.txt")]
