"""Views of a grid, coordinates, DeviceMesh both ways, and grids that are declared together."""

from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from compat import hyper_comm_grid
from hypergrid import HyperCommGrid, LayoutError, RankLayout, validate_grids
from tests.support import table
from tests.support.forked import on_ranks, open_groups, total
from tests.support.stock import load_stock_grid

pytestmark = pytest.mark.usefixtures("world_without_torch")


def answers_of_view(kind, case):
    """What a grid of ``kind`` creates and answers for a view; ValueError if it refuses it."""
    base, view, shared, dims, offset = case
    grid = kind(*base, offset)
    try:
        grid.register_view("expert", *view, shared)
    except ValueError:
        return ValueError
    created = []

    def enumeration(ranks, **options):
        created.append(ranks)
        return str(ranks), None

    with mock.patch("torch.distributed.new_subgroups_by_enumeration", enumeration):
        group = grid.create_pg(dims, view="expert")
        with pytest.raises(KeyError):
            grid.create_pg(dims[::-1], view="expert")
    assert grid.get_pg(dims, view="expert") is group
    return created, grid.get_rank_enum(dims, view="expert"), list(grid._pgs)


@pytest.mark.parametrize(
    ("sizes", "dims", "view_sizes", "view_dims", "shared", "asked", "offset"),
    [[eval(cell) for cell in row] for row in table("groups/views.txt")],
)
def test_views_answer_as_upstreams_and_refuse_as_upstreams(
    sizes, dims, view_sizes, view_dims, shared, asked, offset
):
    case = (
        (sizes, dims.split()),
        (view_sizes, view_dims.split()),
        shared.split(),
        asked.split(),
        offset,
    )
    upstream = load_stock_grid("0.19.2").HyperCommGrid
    with mock.patch.dict("os.environ", WORLD_SIZE="4096"):
        expected = answers_of_view(upstream, case)
        assert answers_of_view(hyper_comm_grid.HyperCommGrid, case) == expected


def test_a_view_that_is_not_registered_is_refused_with_the_known_ones():
    grid = HyperCommGrid([2, 4], ["tp", "dp"])
    with pytest.raises(KeyError, match=r"View 'v' is not.*Known: \['base'\]"):
        grid.get_rank_enum("x", view="v")


@on_ranks(8)
def test_groups_of_two_views_on_real_ranks(rank):
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    grid.register_view("expert", [4, 2], ["ep", "pp"], ["pp"])
    pp = grid.create_pg("pp")
    ep = grid.create_pg("ep", view="expert")
    assert grid.get_pg("pp", view="expert") is pp
    assert total(ep, rank) == (6 if rank < 4 else 22)
    created = "created: ['expert/ep', 'pp']"
    assert f"view expert: RankLayout(ep=4-pp=2, ranks 0..7), {created}" in repr(grid)
    grid.destroy()
    assert len(open_groups()) == 1


def test_coordinates_are_this_ranks_by_default_and_of_any_view(fake_world):
    fake_world(8, rank=6)
    grid = HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4)
    grid.register_view("expert", [4], ["ep"])
    assert grid.coordinate() == {"tp": 0, "dp": 1}
    assert grid.coordinate(view="expert") == {"ep": 2}
    with pytest.raises(LayoutError, match="rank 3 is outside"):
        grid.coordinate(3)


@on_ranks(4)
def test_a_grid_gives_a_device_mesh_and_a_device_mesh_the_grid(rank):
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    for dim in grid.dim_names:
        grid.create_pg(dim)
    before = open_groups()
    mesh = grid.device_mesh()
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh.device_type == "cpu"
    for dim in grid.dim_names:
        assert mesh.get_group(dim) is grid.get_pg(dim)
        assert mesh.get_local_rank(dim) == grid.coordinate()[dim]
    back = HyperCommGrid.from_device_mesh(mesh)
    assert back.layout == grid.layout and back.get_pg("tp") is grid.get_pg("tp")
    back.destroy()
    assert open_groups() == before


@on_ranks(4)
def test_meshes_that_cannot_be_are_refused(rank):
    grid = HyperCommGrid([2], ["tp"], rank_offset=2)
    says = f"rank {rank} is outside" if rank < 2 else r"call create_pg\('tp'\)"
    with pytest.raises((RuntimeError, KeyError), match=says):
        grid.device_mesh()
    with pytest.raises(ValueError, match="give it mesh_dim_names"):
        HyperCommGrid.from_device_mesh(init_device_mesh("cpu", (4,)))
    turned = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("x",))
    with pytest.raises(ValueError, match=r"\[3, 2, 1, 0\]"):
        HyperCommGrid.from_device_mesh(turned)


def over(*spans):
    """A layout over each span: its first rank, and how many."""
    return [RankLayout(("dp",), (size,), first) for first, size in spans]


@pytest.mark.parametrize("spans", [[(0, 4), (4, 4)], [(0, 8), (0, 8)], [(0, 4), (0, 4), (4, 4)]])
def test_grids_that_divide_the_world_are_accepted(spans, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    validate_grids(over(*spans))
    validate_grids([HyperCommGrid([size], ["tp"], first) for first, size in spans])
    with pytest.raises(ValueError, match="ranks 8 are in no grid"):
        validate_grids(over(*spans), world_size=9)


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(0, 4), (2, 4)], "overlap on ranks 2, 3 only"),
        ([(0, 8), (4, 4)], "ranks 4, 5, 6, 7 only"),
        ([(0, 4), (6, 2)], "ranks 4, 5 are in no grid"),
        ([(0, 4), (4, 8)], "outside the world of 8"),
        ([], "ranks 0, 1, 2, 3, 4, 5, 6, 7 are in no grid"),
    ],
)
def test_grids_in_conflict_are_refused_with_the_ranks(spans, says):
    with pytest.raises(ValueError, match=says):
        validate_grids(over(*spans), world_size=8)
