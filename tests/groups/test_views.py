"""Views of a grid, coordinates, DeviceMesh both ways, and grids that are declared together."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from compat import hyper_comm_grid
from hypergrid import HyperCommGrid, LayoutError, RankLayout, validate_grids
from tests.support.forked import open_groups, run_ranks
from tests.support.stock import load_stock_grid

NAMES = ("tp", "cp", "ep", "pp", "dp")


pytestmark = pytest.mark.usefixtures("world_without_torch")


@st.composite
def factorised(draw, size, names):
    """Dims and sizes whose product is ``size``."""
    chosen = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
    sizes = []
    for _ in chosen[:-1]:
        part = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        sizes.append(part)
        size //= part
    return [*sizes, size], list(chosen)


@st.composite
def cases(draw):
    size = draw(st.sampled_from([1, 4, 6, 8, 12, 24]))
    base, view = draw(factorised(size, NAMES)), draw(factorised(size, NAMES))
    common = [dim for dim in NAMES if dim in base[1] or dim in view[1]]
    shared = draw(st.lists(st.sampled_from(common), max_size=3))
    dims = draw(st.lists(st.sampled_from(view[1]), min_size=1, unique=True))
    return base, view, shared, dims, draw(st.integers(0, 9))


def test_views_answer_as_upstreams_and_refuse_as_upstreams():
    upstream = load_stock_grid("0.19.2").HyperCommGrid

    @given(cases())
    def same(case):
        base, view, shared, dims, offset = case
        answers = []
        with mock.patch.dict("os.environ", WORLD_SIZE="4096"):
            for kind in (upstream, hyper_comm_grid.HyperCommGrid):
                grid = kind(*base, offset)
                try:
                    grid.register_view("expert", *view, shared)
                except ValueError:
                    answers.append(ValueError)
                    continue
                made = []
                with mock.patch(
                    "torch.distributed.new_subgroups_by_enumeration",
                    lambda ranks, made=made, **options: (made.append(ranks), (str(ranks), None))[1],
                ):
                    group = grid.create_pg(dims, view="expert")
                    assert grid.get_pg(dims, view="expert") is group
                    with pytest.raises(KeyError):
                        grid.create_pg(dims[::-1], view="expert")
                answers.append((made, grid.get_rank_enum(dims, view="expert"), list(grid._pgs)))
        assert answers[0] == answers[1]

    same()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("base", [8], ["x"]), "already registered"),
        (("v", [4], ["x"]), r"has 4 ranks.*the grid size is 8"),
        (("v", [2, 4], ["x"]), "one size per name"),
        (("v", [2, 4], ["x", "x"]), "must not repeat"),
        (("v", [2, 4], ["ep", "dp"], ["ep"]), "'ep' of view 'v' is not in the base view"),
        (("v", [2, 4], ["ep", "dp"], ["tp"]), "'tp' of view 'v' is not in the view's"),
        (("v", [4, 2], ["dp", "tp"], ["tp"]), "different membership"),
        (("v", [2, 4], ["tp", "dp"], ["tp", "tp"]), "duplicate shared_dims"),
    ],
)
def test_a_view_that_cannot_be_is_refused_and_not_kept(arguments, says):
    grid = HyperCommGrid([2, 4], ["tp", "dp"])
    with pytest.raises(ValueError, match=says):
        grid.register_view(*arguments)
    assert list(grid.views) == ["base"]
    with pytest.raises(KeyError, match=r"no view 'v'.*Known: \['base'\]"):
        grid.get_rank_enum("x", view="v")


def _two_views(rank):
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    grid.register_view("expert", [4, 2], ["ep", "pp"], ["pp"])
    pp, ep = grid.create_pg("pp"), grid.create_pg("ep", view="expert")
    assert grid.get_pg("pp", view="expert") is pp
    total = torch.tensor([rank])
    dist.all_reduce(total, group=ep)
    shown = repr(grid)
    grid.destroy()
    return total.item(), len(open_groups()), shown


def test_groups_of_two_views_on_real_ranks():
    results = run_ranks(8, _two_views)
    assert [total for total, _, _ in results] == [6] * 4 + [22] * 4
    assert all(groups == 1 for _, groups, _ in results)
    assert (
        "view expert: RankLayout(ep=4-pp=2, ranks 0..7), created: ['expert/ep', 'pp']"
        in (results[0][2])
    )


@given(factorised(24, NAMES), st.integers(0, 5), st.data())
def test_coordinates_are_the_layouts_and_shift_goes_around(case, offset, data):
    with mock.patch.dict("os.environ", WORLD_SIZE="4096"):
        grid = HyperCommGrid(*case, offset)
    rank = data.draw(st.sampled_from(list(grid.layout.ranks)))
    at, layout = grid.coordinate(rank), grid.layout
    assert layout.rank(**at) == rank and list(at) == grid.dim_names
    for dim in grid.dim_names:
        size = layout.dim_size(dim)
        ring = [layout.shift(rank, dim, by) for by in range(size)]
        assert sorted(ring) == layout.group(rank, dim) and ring[0] == rank
        assert layout.shift(rank, dim, size) == layout.shift(rank, dim, -size) == rank
        if size > 1:
            assert grid.coordinate(layout.shift(rank, dim))[dim] == (at[dim] + 1) % size
        across = layout.group(rank, layout.orthogonal(dim))
        assert set(across) & set(ring) == {rank} and len(across) * size == grid.size


def test_coordinates_are_this_ranks_by_default_and_of_any_view(fake_world):
    fake_world(8, rank=6)
    grid = HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4)
    grid.register_view("expert", [4], ["ep"])
    assert grid.coordinate() == {"tp": 0, "dp": 1}
    assert grid.coordinate(view="expert") == {"ep": 2}
    assert grid.views["expert"].shift(6, "ep", +2) == 4 and grid.size == 4
    with pytest.raises(LayoutError, match="rank 3 is outside"):
        grid.coordinate(3)
    with pytest.raises(LayoutError, match=r"invalid dim 'pp'. Valid dims are"):
        grid.layout.shift(6, "pp")


def _mesh(rank):
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])
    for dim in ("tp", "cp", "dp"):
        grid.create_pg(dim)
    before = len(open_groups())
    mesh = grid.device_mesh()
    assert mesh.mesh_dim_names == ("dp", "cp", "tp") and mesh.device_type == "cpu"
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    for dim in grid.dim_names:
        assert mesh.get_group(dim).group_name == grid.get_pg(dim).group_name
        assert mesh.get_local_rank(dim) == grid.coordinate()[dim]
    part = mesh["dp", "tp"]
    assert part.get_group("tp") is grid.get_pg("tp") and part.mesh_dim_names == ("dp", "tp")
    own = grid.device_mesh("tp-dp")
    assert own.mesh.tolist() == part.mesh.tolist() and own.get_group(0) is grid.get_pg("dp")
    assert mesh["cp"].mesh.tolist() == grid.layout.group(rank, "cp")
    back = HyperCommGrid.from_device_mesh(mesh)
    assert back.layout == grid.layout and back.get_pg("cp") is grid.get_pg("cp")
    back.destroy()
    assert len(open_groups()) == before
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(32.0).reshape(8, 4)
    sharded = distribute_tensor(whole, part, [Shard(0), Shard(1)])
    replicated = sharded.redistribute(placements=[Replicate(), Replicate()])
    turned = sharded.redistribute(placements=[Shard(1), Replicate()]).full_tensor()
    return (
        torch.equal(replicated.to_local(), whole) and torch.equal(turned, whole),
        sharded.to_local().tolist() == whole.chunk(2)[rank // 4].chunk(2, 1)[rank % 2].tolist(),
        len(open_groups()) - before,
    )


def test_a_device_mesh_is_over_the_grids_own_groups_and_dtensor_works_on_it():
    assert run_ranks(8, _mesh, timeout=60) == [(True, True, 0)] * 8


def _meshes_that_cannot_be(rank):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    grid = HyperCommGrid([2], ["tp"], rank_offset=2)
    texts = []
    for attempt in (
        grid.device_mesh,
        lambda: HyperCommGrid.from_device_mesh(init_device_mesh("cpu", (4,))),
        lambda: HyperCommGrid.from_device_mesh(
            DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("x",))
        ),
    ):
        try:
            attempt()
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    grid.create_pg("tp")
    return texts


def test_meshes_that_cannot_be_are_refused():
    outside, *_, inside = run_ranks(4, _meshes_that_cannot_be)
    assert outside[0].startswith("RuntimeError: rank 0 is outside")
    assert "call create_pg('tp')" in inside[0]
    for texts in (outside, inside):
        assert "give it mesh_dim_names" in texts[1] and "[3, 2, 1, 0]" in texts[2]


def test_grids_that_divide_the_world_are_accepted():
    a, b = RankLayout(("tp", "dp"), (2, 2)), RankLayout(("tp", "pp"), (2, 2))
    c = RankLayout(("dp",), (4,), 4)
    grids = [HyperCommGrid([4], ["dp"]), HyperCommGrid([4], ["tp"], 4)]
    for divided, world in (([a, c], 8), ([a, b], 4), ([a, b, c], 8), (grids, 8)):
        with mock.patch.dict("os.environ", WORLD_SIZE=str(world)):
            validate_grids(divided)
        validate_grids(divided, world_size=world)
        with pytest.raises(ValueError, match=rf"ranks? {world} "):  # the next larger world is not
            validate_grids(divided, world_size=world + 1)


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ([RankLayout(("a",), (4,)), RankLayout(("b",), (4,), 2)], "overlap on ranks 2, 3 only"),
        ([RankLayout(("a",), (8,)), RankLayout(("b",), (4,), 4)], "ranks 4, 5, 6, 7 only"),
        ([RankLayout(("a",), (4,)), RankLayout(("b",), (2,), 6)], "ranks 4, 5 are in no grid"),
        ([RankLayout(("a",), (4,)), RankLayout(("b",), (8,), 4)], "outside the world of 8"),
        ([], "ranks 0, 1, 2, 3, 4, 5, 6, 7 are in no grid"),
    ],
)
def test_grids_in_conflict_are_refused_with_the_ranks(layouts, says):
    with pytest.raises(ValueError, match=says):
        validate_grids(layouts, world_size=8)
