"""The arguments of a launch line, read by the parser of a checkout of Megatron-LM."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from compat.verification.layout import FULLY_SHARDED
from compat.verification.ranks import text_of

BY_HAND = "give compat.verify a function that builds the model."
# Arguments that need Transformer Engine or a GPU, and what is parsed instead.
INSTEAD: dict[str, Any] = {
    "apply_rope_fusion": False,
    "defer_embedding_wgrad_compute": False,
    "delay_wgrad_compute": False,
    "fine_grained_activation_offloading": False,
    "fp4": None,
    "fp8": None,
    "fp8_param_gather": False,
    "gradient_accumulation_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    # Recomputation changes no result; of what is named, some exists only in grouped layers.
    "recompute_modules": [],
    "tp_comm_overlap": False,
    "transformer_impl": "local",
}


def parse(words: Sequence[str], world_size: int) -> tuple[Any, argparse.ArgumentParser]:
    """The arguments as Megatron's own parser reads them, and the parser.

    Raises
    ------
    ValueError
        The parser refuses the words, or a flag asks for fully sharded data parallelism.
    """
    import torch

    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    cuda.get_device_capability = lambda *_: (9, 0)
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    parsers: list[argparse.ArgumentParser] = []

    def keep_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(parser)
        return parser

    with _refusals():
        from megatron.training import arguments

        parsed = arguments.parse_args(extra_args_provider=keep_parser)
    for name in FULLY_SHARDED:
        if getattr(parsed, name, False):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is not verified: its code needs CUDA.")
    for name in INSTEAD.keys() & vars(parsed).keys():
        setattr(parsed, name, INSTEAD[name])
    return parsed, parsers[0]


def check(parsed: Any) -> Any:
    """The arguments after Megatron's own checks, which change some, with their ``config``."""
    args = copy.deepcopy(parsed)
    with _refusals():
        from megatron.training import arguments

        args = arguments.validate_args(args) or args
        args.config = arguments.core_transformer_config_from_args(args)
    return args


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn Megatron's refusal into a ValueError with a sentence; its prints are left out."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            yield
    except SystemExit:
        reason = " ".join(printed.getvalue().split("error:")[-1].split())
        if "unrecognized arguments" in reason:
            reason += f". If they are flags of a script of your own: {BY_HAND}"
        raise ValueError(f"Megatron's parser refuses the arguments: {reason}") from None
    except Exception as error:
        raise ValueError(f"Megatron refuses the arguments: {text_of(error)}") from error
