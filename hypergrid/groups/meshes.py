"""Meshes of torch over groups that there are: their dims, their ranks, flattened dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.layout import Dims, RankLayout, ordered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshDims = Mapping[str, Sequence[str]]  # by the name of each dim of a mesh: the dims that it joins


def over(
    layout: RankLayout,
    mesh_dims: MeshDims,
    groups: Sequence[ProcessGroup | None],
    device_type: str | None,
) -> DeviceMesh:
    """The mesh of this rank, with a group for each of ``mesh_dims``. *Local*."""
    from torch.distributed.device_mesh import DeviceMesh

    if device_type is None:
        device_type = _device_type(groups[0])
    return DeviceMesh.from_group(
        groups,  # type: ignore[arg-type]
        device_type,
        mesh=ranks_of(layout, dist.get_rank(), list(mesh_dims.values())),
        mesh_dim_names=tuple(mesh_dims),
    )


def flattened_dims(mesh_dims: MeshDims, further: Mapping[str, Dims]) -> dict[str, Sequence[str]]:
    """Dims of the mesh that may be flattened into one, by torch's name for it; ``further`` names.

    Of the dims a, b and c: "a_b", "a_c", "b_c" and "a_b_c".
    """
    by_name: dict[str, Sequence[str]] = {}
    for count in range(2, len(mesh_dims) + 1):
        for parts in combinations(mesh_dims, count):
            by_name["_".join(parts)] = parts
    for name in mesh_dims:
        by_name.pop(name, None)
    for name, dims in further.items():
        by_name[name] = _named(mesh_dims, dims)
    return by_name


def flatten(
    mesh: DeviceMesh, name: str, parts: Sequence[str], group: ProcessGroup | None, must: bool
) -> None:
    """Let ``parts`` of the mesh, flattened as ``name``, have ``group``."""
    part = mesh[tuple(parts)]
    ranks = part.mesh.flatten().tolist()
    # Not over a-c and b: torch takes the ranks by a, c, b, and the group by a, b, c.
    if ranks == dist.get_process_group_ranks(group):
        of_torch.flatten(part, name, group)
    elif must:
        raise ValueError(
            f"dims {list(parts)} cannot be flattened as {name!r}: the ranks of the mesh are not in "
            f"the order of the group. Take a mesh over {'-'.join(parts)!r}."
        )


def joined_dims(layout: RankLayout, dims: Dims | None) -> dict[str, list[str]]:
    """The dims of a mesh by name, the slowest first: which dims of the layout each joins.

    Of ("cp", "shard", "replicate") the dims ["shard-cp", "replicate"] are {"replicate":
    ["replicate"], "shard-cp": ["shard", "cp"]}.
    """
    if dims is None:
        dims = layout.dims
    elif isinstance(dims, str):
        dims = ordered(layout, dims)
    names = list(dims)
    joined_by_name = {name: ordered(layout, name) for name in names}
    all_dims = join(joined_by_name, names)
    layout.axes(all_dims)  # refuses a dim that is there twice

    def slowest_axis(name: str) -> int:
        return max(layout.axes(joined_by_name[name]))

    slowest_first = sorted(joined_by_name, key=slowest_axis, reverse=True)
    return {name: joined_by_name[name] for name in slowest_first}


def join(mesh_dims: MeshDims, names: Iterable[str]) -> list[str]:
    """The dims of the layout that these dims of a mesh join."""
    return [dim for name in names for dim in mesh_dims[name]]


def _named(mesh_dims: MeshDims, dims: Dims) -> list[str]:
    """The dims of a mesh that ``dims`` names, in the order of the mesh. LayoutError on others."""
    fastest_first = tuple(mesh_dims)[::-1]
    mesh = RankLayout(fastest_first, (1,) * len(fastest_first))
    names = ordered(mesh, dims)
    if len(names) < 2:
        raise ValueError(
            f"cannot flatten {names}: name two dims of the mesh or more, of {list(mesh_dims)}."
        )
    return names


def ranks_of(layout: RankLayout, rank: int, mesh_dims: Sequence[Sequence[str]]) -> torch.Tensor:
    """The ranks of the mesh of ``rank``, one axis for each of ``mesh_dims``."""
    all_dims = list(chain.from_iterable(mesh_dims))
    first_rank = layout.group(rank, all_dims)[0]
    # Rank 5 of (tp=2, dp=4), over dp and tp: [0], over dp [0, 2, 4, 6], over tp [[0, 1], [2, 3] ...
    ranks = torch.tensor(first_rank, device="cpu")
    for joined in mesh_dims:
        group = layout.group(first_rank, joined)
        distances = torch.tensor(group, device="cpu") - first_rank
        ranks = ranks.unsqueeze(-1) + distances
    return ranks


def _device_type(group: ProcessGroup | None) -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    # An accelerator is of no use to a group of gloo alone.
    if accelerator.type not in of_torch.device_types(group):
        return "cpu"
    return accelerator.type
