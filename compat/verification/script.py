"""The functions of Megatron's training script that cut a batch and compute the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from compat.verification.layout import Layout
from compat.verification.step import MicroBatch


class Script:
    """``pretrain_gpt.py`` of the checkout that is first on the path.

    Its ``forward_step`` calls its ``get_batch`` and gives its ``loss_func``; all three read the
    job's global arguments, which here have the sizes of the small layout.
    """

    def __init__(self, name: str, args: Any) -> None:
        self.module: Any = import_module(Path(name).stem)
        self.args = args

    def __call__(
        self, config: Any, layout: Layout, batch: Sequence[MicroBatch]
    ) -> Callable[..., Any]:
        from megatron.core.timers import Timers
        from megatron.training import global_vars

        samples, length = batch[0]["input_ids"].shape
        args = copy.copy(self.args)
        vars(args).update(
            layout.sizes,
            micro_batch_size=samples,
            seq_length=length,
            # A check of one value, which asks torch for a GPU's memory.
            check_for_nan_in_loss_and_grad=False,
            check_for_spiky_loss=False,
            # Without a mask, each layer makes its causal one.
            create_attention_mask_in_dataloader=False,
        )
        variables: Any = global_vars
        variables._GLOBAL_ARGS = args
        variables._GLOBAL_TIMERS = Timers(0, "minmax")
        # get_batch asks which stage predicts further tokens: the small model's configuration.
        self.module.core_transformer_config_from_args = lambda *_, **__: config

        def forward(number: int, model: Any) -> Any:
            micro_batch = batch[number]
            # As Megatron's data loader gives it: without a key where there is no mask, since
            # the batch's functions move whatever a key has to the GPU.
            given = {key: value for key, value in micro_batch.items() if value is not None}
            sample = {"tokens": given["input_ids"], **given}
            return self.module.forward_step(iter([sample]), model)

        return forward
