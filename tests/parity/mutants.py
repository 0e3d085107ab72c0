"""Broken copies of stock: the harness has to notice each of these."""

from __future__ import annotations

import functools

from tests.parity.repairs import replaced
from tests.parity.running import Report, run
from tests.support.stock import load_stock, source

# What to replace, in the spelling of the release that spells it so: newer ones quote with ".
MUTANTS: dict[str, tuple[str, str]] = {
    "tp-cp becomes tp-dp": ("('tp-cp')", "('tp-dp')"),
    "a group's members": ("if rank in embedding_ranks:", "if rank in ranks:"),
    "another timeout": (
        "timedelta(minutes=distributed_timeout_minutes)",
        "timedelta(minutes=distributed_timeout_minutes + 1)",
    ),
    "another description": ('group_desc="MODEL_PARALLEL_GROUP"', 'group_desc="MODEL"'),
    "another group's options": ('get_nccl_options("tp_cp",', 'get_nccl_options("tp",'),
    "a getter of another group": (
        "return _CONTEXT_PARALLEL_GROUP\n",
        "return _TENSOR_AND_CONTEXT_PARALLEL_GROUP\n",
    ),
    "an alias becomes a copy": (
        "            _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = _EXPERT_DATA_PARALLEL_GROUP\n",
        "            _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = create_group(\n"
        "                ranks, timeout=timeout, group_desc='EXPERT_DATA_PARALLEL_GROUP')\n",
    ),
    "a gloo group with a timeout": (
        'ranks, backend="gloo", group_desc="EXPERT_DATA_PARALLEL_GROUP_GLOO"',
        'ranks, timeout=timeout, backend="gloo", group_desc="EXPERT_DATA_PARALLEL_GROUP_GLOO"',
    ),
    "another default": (
        "def is_pipeline_last_stage(ignore_virtual=True",
        "def is_pipeline_last_stage(ignore_virtual=False",
    ),
    "arguments swapped": (
        "get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False)",
        "get_amax_reduction_group(tp_only_amax_red=False, with_context_parallel=False)",
    ),
    "another exception": ('raise RuntimeError(f"world_size', 'raise ValueError(f"world_size'),
    "zero taken for unset": (
        "if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:",
        "if _MPU_PIPELINE_MODEL_PARALLEL_RANK:",
    ),
    "case of the order": ('order.endswith("pp")', 'order.lower().endswith("pp")'),
    "destroy forgets": ("    _MODEL_PARALLEL_GROUP = None\n\n    global", "\n    global"),
    "sharp on every group": ('del os.environ["NCCL_COLLNET_ENABLE"]', "pass"),
    "a group of gloo left open": (
        "torch.distributed.destroy_process_group(_EXPERT_DATA_PARALLEL_GROUP_GLOO)",
        "pass",
    ),
    "checks in another order": (
        "    assert torch.distributed.is_initialized()\n",
        "    assert torch.distributed.is_initialized() and not is_initialized()\n",
    ),
    "a global of a copy": ("_EMBEDDING_GLOBAL_RANKS = embedding_ranks", "pass"),
    "ucc without its variables": ('os.environ["UCX_NET_DEVICES"] = "all"', "pass"),
    "hybrid sizes": ("range(int(log2(len(ranks))))", "range(int(log2(len(ranks))) + 1)"),
    "dynamic sizes": ("if 2**i >= min_cp_size]", "if 2**i > min_cp_size]"),
    "dynamic groups that do not meet": ("for group_size in group_sizes:", "for group_size in ():"),
    "hierarchy from the other end": ('"(l s u) -> (l u) s"', '"(u s l) -> (l u) s"'),
    "an encoder that feeds others": (
        "yield x + y\n        elif",
        "yield e_ranks[0] + y\n        elif",
    ),
    "the last stage of one pipeline": (
        "[group[last_rank_local] for group in _PIPELINE_GLOBAL_RANKS]",
        "[group[last_rank_local] for group in _PIPELINE_GLOBAL_RANKS[:1]]",
    ),
    "a split without embeddings": (
        "split_rank=pipeline_model_parallel_split_rank",
        "split_rank=None",
    ),
    "an optimizer instance's neighbours": (
        "i::intra_partial_data_parallel_size",
        "i : i + intra_partial_data_parallel_size",
    ),
    "the split taken for the decoder's start": (
        "return _PIPELINE_MODEL_PARALLEL_SPLIT_RANK\n",
        "return _PIPELINE_MODEL_PARALLEL_DECODER_START\n",
    ),
}


def spelt(name: str, release: str) -> tuple[str, str] | None:
    """A mutant as the release's source spells it; None where there is nothing to break so."""
    old, new = MUTANTS[name]
    for quote in ('"', "'"):
        if old.replace('"', quote) in source(release):
            return old.replace('"', quote), new.replace('"', quote)
    return None


def mutants_of(release: str) -> list[str]:
    """The names of the `MUTANTS` that apply to a release."""
    return [name for name in MUTANTS if spelt(name, release) is not None]


def run_mutant(name: str, release: str, n: int, seed: int, max_world: int) -> Report:
    """Stock beside one of the `MUTANTS`, ended by the first configuration that differs."""
    pair = spelt(name, release)
    if pair is None:
        raise ValueError(f"megatron-core {release} has nothing that {name!r} would break")
    mutant = functools.partial(load_stock, release, replaced(pair))
    return run(mutant, release, n, seed, max_world, stop_after=1)
