"""Meshes over the groups of a grid: joined dims, views, flattened dims; FSDP2, DTensor on them."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hypergrid import HyperCommGrid, of_torch
from tests.support import table
from tests.support.forked import on_ranks, open_groups, total


def grid_of(sizes, dims, *created):
    grid = HyperCommGrid(sizes, dims)
    for each in created:
        grid.create_pg(each)
    return grid


@on_ranks(8, timeout=60)
def test_a_mesh_with_joined_dims_is_that_of_torch_over_the_grids_groups(rank):
    grid = grid_of([2, 2, 2], ["cp", "shard", "replicate"], "replicate", "shard-cp")
    before = open_groups()
    mesh = grid.device_mesh(["shard-cp", "replicate"])
    assert open_groups() == before
    torchs = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "cp"))
    flat = torchs["shard", "cp"]._flatten("shard_cp")
    assert mesh.mesh_dim_names == ("replicate", "shard-cp")
    assert mesh.mesh.tolist() == torchs.mesh.reshape(2, 4).tolist()
    assert mesh.get_coordinate() == (torchs.get_coordinate()[0], flat.get_coordinate()[0])
    assert mesh["shard-cp"].mesh.tolist() == flat.mesh.tolist()
    assert mesh.get_group("shard-cp") is grid.get_pg("shard-cp")
    assert total(mesh["shard-cp"].get_group()) == 4


@on_ranks(8, timeout=60)
def test_a_flattened_dim_has_the_grids_group(rank):
    if not of_torch.has("flattened meshes"):
        pytest.skip(of_torch.PARTS["flattened meshes"].without)
    dims = ["cp", "shard", "replicate"]
    grid = grid_of([2, 2, 2], dims, *dims, "shard-cp", "replicate-shard-cp", "replicate-cp")
    before = open_groups()
    mesh = grid.device_mesh(flattened={"fsdp": "cp-shard", "loss": dims})
    for names in (("shard", "cp"), ("replicate", "cp"), ("replicate", "shard", "cp")):
        assert mesh[names]._flatten().get_group() is grid.get_pg(names)
    fsdp = mesh["shard", "cp"]._flatten("fsdp")  # as torchtitan asks
    assert fsdp.get_group() is grid.get_pg("shard-cp")
    assert fsdp.mesh.tolist() == grid.layout.group(rank, "shard-cp")
    assert mesh.get_group("loss") is grid.get_pg("replicate-shard-cp")
    assert open_groups() == before
    other = mesh["replicate", "shard"]._flatten()  # of which the grid has none: torch creates it
    assert total(other.get_group()) == 4
    assert len(open_groups()) > len(before)


@pytest.mark.usefixtures("loaded_dynamo")
@on_ranks(8, timeout=60)
def test_fsdp_shards_over_joined_dims_and_trains_as_one_rank(rank):
    from torch.distributed.fsdp import fully_shard

    grid = grid_of([2, 2, 2], ["cp", "shard", "replicate"], "replicate", "shard-cp")
    before = open_groups()
    torch.manual_seed(3)
    whole = torch.nn.Linear(8, 8)
    model = copy.deepcopy(whole)
    fully_shard(model, mesh=grid.device_mesh(["replicate", "shard-cp"]))
    batch = torch.randn(8, 8)
    for each, samples in ((whole, batch), (model, batch[rank : rank + 1])):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            each(samples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, alone in zip(model.parameters(), whole.parameters(), strict=True):
        assert ours.to_local().shape[0] == 2
        torch.testing.assert_close(ours.full_tensor(), alone)
    assert open_groups() == before


@on_ranks(8, timeout=60)
def test_megatrons_instances_and_experts_have_meshes(rank):
    from compat.state import ParallelState

    state = ParallelState.create(
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        num_distributed_optimizer_instances=2,
    )
    before = open_groups()
    mesh = state.grid.device_mesh(["dp_inter", "dp_intra-cp", "tp"], view="instances")
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    within = state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    between = state.get_inter_distributed_optimizer_instance_group()
    assert mesh.get_group("dp_intra-cp") is within
    assert mesh.get_group("dp_inter") is between
    assert mesh.get_group("tp") is state.get_tensor_model_parallel_group()
    experts = ParallelState.create(expert_model_parallel_size=4)
    mesh = experts.grid.device_mesh(["dp", "ep"], view="expert")
    assert mesh.get_group("ep") is experts.get_expert_model_parallel_group()
    experts.destroy()
    assert open_groups() == before


def test_the_device_of_a_mesh_is_what_is_there(fake_world):
    fake_world(8)  # serves every type of device that torch names
    grid = grid_of([2, 4], ["tp", "dp"], "tp", "dp")
    assert grid.device_mesh().device_type == "cpu"
    assert grid.device_mesh(device_type="cuda").device_type == "cuda"


@pytest.mark.parametrize(
    ("dims", "flattened", "kind", "text"), table("groups/refusals_of_meshes.txt")
)
def test_meshes_that_the_groups_do_not_give_are_refused(fake_world, dims, flattened, kind, text):
    fake_world(8)
    grid = grid_of([2, 2, 2], ["a", "b", "c"], "a", "b", "c", "a-c", "a-b-c")
    names = None
    if flattened != "-":
        names = {"flat": flattened.split() if " " in flattened else flattened}
    with pytest.raises(Exception) as caught:
        grid.device_mesh(dims.split(), flattened=names)
    assert caught.type.__name__ == kind
    assert text in str(caught.value)
