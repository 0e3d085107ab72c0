"""What each rank of ``test_te_processes.py`` does with Transformer Engine's own classes."""

from __future__ import annotations

import inspect
import json
import sys
import warnings

warnings.simplefilter("ignore")

from tests.support import te_on_cpu  # noqa: E402

pytorch = te_on_cpu.load()

import torch  # noqa: E402
import transformer_engine_torch as extension  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling  # noqa: E402
from transformer_engine.pytorch import distributed, ep  # noqa: E402
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402

from compat import transformer_engine as te  # noqa: E402
from compat.state import ParallelState  # noqa: E402
from hypergrid import HyperCommGrid  # noqa: E402
from tests.support import forked  # noqa: E402

# All that Transformer Engine caches of a group.
CACHED = [
    function
    for function in vars(distributed).values()
    if hasattr(function, "__wrapped__") and hasattr(function, "cache_info")
    if "group" in inspect.signature(function).parameters
]


def a_layer(**kwargs):
    """A real layer on the CPU."""
    return pytorch.TransformerLayer(
        64, 128, 8, device="cpu", params_dtype=torch.float32, set_parallel_mode=True, **kwargs
    )


def grid_and_state():
    """The same layout twice: tp=2, cp=4 as 2 x 2."""
    grid = HyperCommGrid([2, 2, 2], ["tp", "a2a", "p2p"])
    te_on_cpu.create_groups(grid)
    state = ParallelState.create(
        tensor_model_parallel_size=2,
        context_parallel_size=4,
        hierarchical_context_parallel_sizes=[2, 2],
    )
    return grid, state


def applied(rank):
    """After the setters: whether every module holds the very groups, and what they are."""
    outcome = []
    for where in grid_and_state():
        for comm_type in ("p2p", "all_gather", "a2a", "a2a+p2p"):
            layer = a_layer(tp_size=2)
            tp = te.tp_args(where)["tp_group"]
            context = te.cp_args(where, comm_type)
            layer.set_tensor_parallel_group(tp)
            layer.set_context_parallel_group(**context, cp_stream=torch.cuda.Stream())
            takers = [m for m in layer.modules() if "tp_group" in vars(m) and m is not layer]
            (attention,) = (
                m for m in layer.modules() if isinstance(m, pytorch.DotProductAttention)
            )
            outcome.append(
                (
                    len(takers) >= 5 and all(m.tp_group is tp for m in takers),
                    attention.cp_group == context["cp_group"],
                    attention.cp_global_ranks == context["cp_global_ranks"],
                    (attention.cp_stream.name, attention.cp_comm_type) == ("stream", comm_type),
                    (layer.self_attention.cp_size, layer.self_attention.cp_rank) == (4, rank // 2),
                )
            )
    return outcome


def greatest(rank, group):
    """The maxima of a module after ``autocast``, where each rank brought its own number."""
    linear = pytorch.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    with pytorch.autocast(enabled=True, recipe=DelayedScaling(), amax_reduction_group=group):
        linear.init_fp8_metadata()
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(linear.fp8_meta)
        history = linear.fp8_meta["scaling_fwd"].amax_history
        history[0].fill_(rank + 1.0)
    return int(history.max()) - 1


def amax(rank):
    """The highest rank that took part in the reduction: over our groups, and over None."""
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    te_on_cpu.create_groups(grid)
    state = ParallelState.create(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    return [
        greatest(rank, te.amax_group(grid)),
        greatest(rank, te.amax_group(grid, tp_only=True)),
        greatest(rank, te.amax_group(state)),
        greatest(rank, None),
    ]


def destroyed(rank):
    """What Transformer Engine says of sizes before and after, and when its context ended."""
    ended = []
    extension.ep_finalize = lambda: ended.append(ep._EP_GROUP in c10d._world.pg_map)
    outcome = []
    for where in grid_and_state():
        group = te.amax_group(where)  # as if its experts used it
        for cached in CACHED:
            cached(group)
        ep._BOOTSTRAPPED, ep._EP_GROUP = True, group
        other = HyperCommGrid([8], ["dp"])
        other.create_pg("dp")
        other.destroy()
        still = ep.is_ep_bootstrapped()  # it goes with its own group alone
        for cached in CACHED:
            cached(group)
        where.destroy()
        held = [cached.cache_info().currsize for cached in CACHED]
        outcome.append((still, ep.is_ep_bootstrapped(), list(ended), held))
        ended.clear()
    return outcome


def too_early(rank):
    """The size of the world, asked too early and after our arguments; part of 128 hidden units."""
    answers = [distributed.get_distributed_world_size()]  # the answer from before the fork
    grid = HyperCommGrid([2, 4], ["tp", "dp"])
    te_on_cpu.create_groups(grid)
    layer = a_layer(**te.tp_args(grid))
    return [*answers, distributed.get_distributed_world_size(), len(layer.layernorm_mlp.fc1_bias)]


if __name__ == "__main__":
    distributed.get_distributed_world_size()  # nothing is initialised yet: 1
    for name in sys.argv[1:]:
        print(json.dumps([name, forked.run_ranks(8, globals()[name], timeout=80)]))
