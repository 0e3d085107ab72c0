"""Broken copies of stock: the harness has to notice each of these."""

from __future__ import annotations

import functools

from tests.parity.repairs import replaced
from tests.parity.running import Report, run
from tests.stock import load_stock

MUTANTS: dict[str, tuple[str, str]] = {
    "tp-cp becomes tp-dp": ("get_ranks('tp-cp')", "get_ranks('tp-dp')"),
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
    "hierarchy from the other end": ('"(l s u) -> (l u) s"', '"(u s l) -> (l u) s"'),
}


def run_mutant(name: str, release: str, n: int, seed: int, max_world: int) -> Report:
    """Stock beside one of the `MUTANTS`, ended by the first configuration that differs."""
    mutant = functools.partial(load_stock, release, replaced(MUTANTS[name]))
    return run(mutant, release, n, seed, max_world, stop_after=1)
