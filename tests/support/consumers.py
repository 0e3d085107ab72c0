"""Drives megatron-core's users of HyperCommGrid on eight ranks; prints what each rank received.

    python -m tests.support.consumers hypergrid|stock

Two encoders, whose outputs a pipeline of two stages adds. Rows of two batches travel forward; their
gradients travel back, while the second batch is on its way.
"""

import json
import sys

DIMS = ["tp", "cp", "dp", "pp"]
BATCH = 8
LAYOUTS = {  # (tp, dp, pp) and first rank of each module
    "replicas are spread": {
        "image": ((2, 1, 1), 0),
        "audio": ((1, 2, 1), 2),
        "language": ((1, 2, 2), 4),
    },
    "replicas are gathered": {
        "image": ((1, 2, 1), 0),
        "audio": ((2, 1, 1), 2),
        "language": ((2, 1, 2), 4),
    },
}
TOPOLOGY = {"image": ["language"], "audio": ["language"], "language": []}


def main(side):
    if side == "hypergrid":
        import compat

        compat.install()
    from compat.verification import on_cpu

    on_cpu.adapt()
    import megatron.core.pipeline_parallel.multimodule_communicator  # noqa: F401 - once, not forked

    from tests.support import forked

    results = {name: forked.run_ranks(8, modules, name) for name in LAYOUTS}
    print(json.dumps(results))


def grid_of(sizes, offset):
    from megatron.core.hyper_comm_grid import HyperCommGrid

    tp, dp, pp = sizes
    grid = HyperCommGrid([tp, 1, dp, pp], DIMS, rank_offset=offset)
    grid.create_pg("pp")
    grid.create_pg("dp")
    return grid


def rows(start, grid):
    """A batch whose row r holds ``start + r`` everywhere: the part of this rank's replica."""
    import torch

    column = start + torch.arange(BATCH, dtype=torch.float32)
    batch = column.view(-1, 1, 1).expand(BATCH, 2, 3)
    group = grid.get_pg("dp")
    return batch.chunk(group.size())[group.rank()].contiguous()


def modules(rank, layout):
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.multimodule_communicator import (
        MultiModulePipelineCommunicator,
    )

    grids = {name: grid_of(*where) for name, where in LAYOUTS[layout].items()}
    config = ModelParallelConfig(pipeline_dtype=torch.float32)
    pipeline = MultiModulePipelineCommunicator(grids, TOPOLOGY, config)
    (name,) = pipeline.rank_module_map
    shape = rows(0, grids[name]).shape
    place = (pipeline.is_pp_first_stage, pipeline.is_pp_last_stage)

    def gradients(grad):
        return {"image": grad.detach() * 2, "audio": grad.detach() * 3}

    def added(inputs):
        return {name: inputs["image"] + inputs["audio"]}

    if name != "language":
        start = {"image": 0, "audio": 1000}[name]
        pipeline.send_forward({name: rows(start, grids[name])})
        first = pipeline.send_forward_recv_backward({name: rows(start + 100, grids[name])})[name]
        second = pipeline.recv_backward()[name]
    elif pipeline.rank_module_map[name].pp_rank == 0:
        inputs = pipeline.recv_forward()
        first = pipeline.send_forward_recv_backward(added(inputs), tensor_shape=shape)[name]
        inputs = pipeline.send_backward_recv_forward(gradients(first))
        pipeline.send_forward(added(inputs))
        second = pipeline.recv_backward(tensor_shape=shape)[name]
        pipeline.send_backward(gradients(second))
    else:
        first = pipeline.recv_forward(tensor_shape=shape)[name]
        gradient = {name: first.detach() * 10}
        second = pipeline.send_backward_recv_forward(gradient, tensor_shape=shape)[name]
        pipeline.send_backward({name: second.detach() * 10})
    return name, place, first.tolist(), second.tolist()


if __name__ == "__main__":
    main(sys.argv[1])
