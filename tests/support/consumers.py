"""Drives megatron-core's users of HyperCommGrid on eight ranks; prints what each rank received.

    python -m tests.support.consumers hypergrid|stock

Rows of a batch travel forward, ten times their value backward.
"""

import json
import sys

DIMS = ["tp", "cp", "dp", "pp"]
BATCH, SEQUENCE, HIDDEN = 8, 2, 3
BRIDGES = {  # (tp, dp, pp) of the sending grid on ranks 0-3 and of the receiving one on 4-7
    "gathers replicas": ((2, 2, 1), (4, 1, 1)),
    "spreads replicas": ((2, 2, 1), (1, 4, 1)),
    "between pipelines": ((2, 1, 2), (1, 2, 2)),
}
MODULES = {  # (tp, dp, pp) and first rank
    "image": ((2, 1, 1), 0),
    "audio": ((1, 2, 1), 2),
    "language": ((1, 2, 2), 4),
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

    results = {name: forked.run_ranks(8, bridge, *sizes) for name, sizes in BRIDGES.items()}
    results["modules"] = forked.run_ranks(8, modules)
    print(json.dumps(results))


def grid_of(sizes, offset):
    from megatron.core.hyper_comm_grid import HyperCommGrid

    tp, dp, pp = sizes
    grid = HyperCommGrid([tp, 1, dp, pp], DIMS, rank_offset=offset)
    grid.create_pg("pp")
    grid.create_pg("dp")
    return grid


def rows(start):
    """A batch: row r holds ``start + r`` everywhere."""
    import torch

    column = start + torch.arange(BATCH, dtype=torch.float32)
    return column.view(-1, 1, 1).expand(BATCH, SEQUENCE, HIDDEN).contiguous()


def part(batch, grid):
    """The rows of this rank's data parallel replica."""
    import torch.distributed as dist

    group = grid.get_pg("dp")
    return batch.chunk(group.size())[dist.get_rank(group)].contiguous()


def words_of(tensor):
    """The values of the rows, or None where nothing came."""
    if tensor is None:
        return None
    assert list(tensor.shape[1:]) == [SEQUENCE, HIDDEN]
    assert (tensor == tensor[:, :1, :1]).all()
    return tensor[:, 0, 0].tolist()


def bridge(rank, sending, receiving):
    """One batch alone, then one on its way while the gradients of another come back."""
    import torch
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    source, target = grid_of(sending, 0), grid_of(receiving, 4)
    across = BridgeCommunicator(source, target, comm_dtype=torch.float32)
    if rank < target.rank_offset:
        across.send_forward(part(rows(0), source))
        first = across.send_forward_recv_backward(part(rows(100), source))
        return words_of(first), words_of(across.recv_backward())
    first = across.recv_forward()
    second = across.send_backward_recv_forward(None if first is None else first.detach() * 10)
    across.send_backward(None if second is None else second.detach() * 10)
    return words_of(first), words_of(second)


def modules(rank):
    """Two encoders, whose outputs a pipeline of two stages adds; two batches."""
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.multimodule_communicator import (
        MultiModulePipelineCommunicator,
    )

    grids = {name: grid_of(*where) for name, where in MODULES.items()}
    config = ModelParallelConfig(pipeline_dtype=torch.float32)
    pipeline = MultiModulePipelineCommunicator(grids, TOPOLOGY, config)
    (name,) = pipeline.rank_module_map
    shape = part(rows(0), grids[name]).shape
    place = pipeline.is_pp_first_stage, pipeline.is_pp_last_stage, pipeline.num_warmup_microbatches

    def gradients(grad):
        return {"image": grad.detach() * 2, "audio": grad.detach() * 3}

    def added(inputs):
        return {name: inputs["image"] + inputs["audio"]}

    if name != "language":
        start = {"image": 0, "audio": 1000}[name]
        pipeline.send_forward({name: part(rows(start), grids[name])})
        first = pipeline.send_forward_recv_backward({name: part(rows(start + 100), grids[name])})
        got = [first[name], pipeline.recv_backward()[name]]
    elif pipeline.rank_module_map[name].pp_rank == 0:
        inputs = pipeline.recv_forward()
        first = pipeline.send_forward_recv_backward(added(inputs), tensor_shape=shape)[name]
        inputs = pipeline.send_backward_recv_forward(gradients(first))
        pipeline.send_forward(added(inputs))
        second = pipeline.recv_backward(tensor_shape=shape)[name]
        pipeline.send_backward(gradients(second))
        got = [first, second]
    else:
        first = pipeline.recv_forward(tensor_shape=shape)
        second = pipeline.send_backward_recv_forward(
            {name: first[name].detach() * 10}, tensor_shape=shape
        )
        pipeline.send_backward({name: second[name].detach() * 10})
        got = [first[name], second[name]]
    return name, place, [words_of(tensor) for tensor in got]


if __name__ == "__main__":
    main(sys.argv[1])
