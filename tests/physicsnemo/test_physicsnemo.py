"""physicsnemo's tree and manager: as its own, example by example and group by group."""

import copy
import json
import os
import re
import subprocess
import sys
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import hypergrid
from compat import physicsnemo as pn
from compat.physicsnemo import DistributedManager, ProcessGroupConfig, ProcessGroupNode
from hypergrid.groups.pool import live_pools
from tests.support import ROOT, physicsnemo_stock
from tests.support.forked import open_groups, run_ranks

stock_needed = pytest.mark.skipif(
    bool(physicsnemo_stock.MISSING), reason=physicsnemo_stock.MISSING or "it is there"
)
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _a_new_manager(monkeypatch):
    for name in [*LAUNCHERS, *(n for n in os.environ if n.startswith(("SLURM_", "OMPI_")))]:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    DistributedManager.cleanup()
    os.environ.clear()
    os.environ.update(before)


def start(rank=0, world_size=1):
    DistributedManager.setup(rank=rank, world_size=world_size, local_rank=rank)
    return DistributedManager()


# The tree.

# As Modulus' pull request 153 prints it, but for a `self` in the static method, with which Python
# itself refuses the call below.
EXAMPLE = """
class MyModel(Module):
    def __init__(self):
        pass

    @staticmethod
    def get_model_parallel_info() -> ProcessGroupConfig:
        mp = ProcessGroupNode("model_parallel", orthogonal_group="data_parallel")
        config = ProcessGroupConfig(mp)
        config.add_node(ProcessGroupNode("spatial_parallel"), parent=mp)
        config.add_node(ProcessGroupNode("channel_parallel"), parent="model_parallel")
        return config


pg_config = MyModel.get_model_parallel_info()
group_sizes = {"channel_parallel": 4, "spatial_parallel": 2}
pg_config.set_leaf_group_sizes(group_sizes)

print(pg_config.leaf_groups())  # ['spatial_parallel', 'channel_parallel']
print(pg_config.get_node("model_parallel").size)  # 8

DistributedManager.create_process_groups(pg_config, topology_mapping)
manager = DistributedManager()

model = MyModel()
model = DDP(model, process_group=manager.group("data_parallel"))
"""


class Module(torch.nn.Module):
    """What the example's model, which is left out there, needs for DDP to take it."""

    def __new__(cls):
        model = super().__new__(cls)
        torch.nn.Module.__init__(model)
        model.weight = torch.nn.Parameter(torch.zeros(3))
        return model

    def forward(self, x):
        return (self.weight * x).sum()


def _example(rank, sizes, topology_mapping):
    start(rank, dist.get_world_size())
    printed = []
    names = {
        **vars(pn),
        "Module": Module,
        "DDP": DistributedDataParallel,
        "topology_mapping": topology_mapping,
        "print": printed.append,
    }
    exec(EXAMPLE.replace("4, ", f"{sizes[1]}, ").replace("2}", f"{sizes[0]}}}"), names)
    names["model"](torch.full((3,), float(rank))).backward()
    manager = DistributedManager()
    seen = {name: dist.get_process_group_ranks(manager.group(name)) for name in manager.group_names}
    gradient = names["model"].module.weight.grad[0].item()
    DistributedManager.cleanup()
    return printed, seen, gradient, len(open_groups())


@pytest.mark.parametrize(
    ("world", "sizes", "hosts"),
    [(8, (2, 4), None), (8, (2, 4), 8), (8, (2, 2), [4, 4]), (4, (2, 1), None), (4, (1, 2), 2)],
)
def test_the_example_of_pull_request_153_runs(world, sizes, hosts):
    results = run_ranks(world, _example, sizes, hosts)
    size, (spatial, _) = sizes[0] * sizes[1], sizes
    for rank, (printed, seen, gradient, left) in enumerate(results):
        assert printed == [["spatial_parallel", "channel_parallel"], size]
        assert list(seen) == [
            "model_parallel",
            "data_parallel",
            "spatial_parallel",
            "__orthogonal_to_spatial_parallel",
            "channel_parallel",
            "__orthogonal_to_channel_parallel",
        ]
        first = rank // size * size
        assert seen["model_parallel"] == list(range(first, first + size))
        assert seen["data_parallel"] == list(range(rank % size, world, size))
        near = rank // spatial * spatial
        assert seen["spatial_parallel"] == list(range(near, near + spatial))
        far = first + rank % spatial
        assert seen["channel_parallel"] == list(range(far, first + size, spatial))
        assert gradient == np.mean(seen["data_parallel"])  # averaged over those that share weights
        assert left == 1


def grown(kinds, parents, sizes):
    """The same tree from the given module's two classes."""
    config = kinds.ProcessGroupConfig(kinds.ProcessGroupNode("n0"))
    for i, parent in enumerate(parents, start=1):
        node = kinds.ProcessGroupNode(f"n{i}")
        config.add_node(node, parent=config.get_node(parent) if i % 2 else parent)
    config.set_leaf_group_sizes(dict(zip(config.leaf_groups(), sizes, strict=False)))
    return config


@st.composite
def shapes(draw):
    parents = [f"n{draw(st.integers(0, i))}" for i in range(draw(st.integers(0, 5)))]
    return parents, draw(st.lists(st.integers(1, 3), min_size=6, max_size=6))


@stock_needed
@given(shapes())
def test_a_tree_is_as_upstreams(shape):
    stock = physicsnemo_stock.load()
    theirs, ours = grown(stock, *shape), grown(pn, *shape)
    assert ours.leaf_groups() == theirs.leaf_groups()
    assert (ours.root_id, ours.root.size) == (theirs.root_id, theirs.root.size)
    assert ours.update_parent_sizes() == theirs.update_parent_sizes()
    for name in ours.breadth_first():
        assert ours.get_node(name).size == theirs.get_node(name).size


@stock_needed
@pytest.mark.parametrize("sizes", [{"n1": 2}, {"n7": 2}, {"n0": 2}])
def test_a_tree_refuses_with_upstreams_types(sizes):
    stock = physicsnemo_stock.load()
    for kinds in (stock, pn):
        config = kinds.ProcessGroupConfig(kinds.ProcessGroupNode("n0"))
        config.add_node(kinds.ProcessGroupNode("n1"), parent="n0")
        config.add_node(kinds.ProcessGroupNode("n2"), parent="n0")
        with pytest.raises(AssertionError):
            config.set_leaf_group_sizes(sizes)


# Groups beside upstream's.


def assert_equal_groups(ours, theirs):
    assert list(ours.group_names) == list(theirs.group_names)
    assert ours._group_ranks == theirs._group_ranks
    for name in ours.group_names:
        one, other = ours.group(name), theirs.group(name)
        assert dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)
        assert ours.group_size(name) == theirs.group_size(name)
        assert ours.group_rank(name) == theirs.group_rank(name)
        assert ours.group_name(one) == theirs.group_name(other) == name


@stock_needed
def test_a_tree_gives_the_groups_that_upstream_gives(fake_world):
    stock = physicsnemo_stock.load()

    @settings(max_examples=60, deadline=None)
    @given(shapes(), st.integers(1, 3), st.data())
    def same(shape, more, data):
        size = grown(pn, *shape).root.size * more
        if size > 36:
            return
        rank = data.draw(st.integers(0, size - 1))
        fake_world(size, rank)
        theirs, ours = physicsnemo_stock.started(stock, rank, size), start(rank, size)
        theirs.create_groups_from_config(grown(stock, *shape))
        ours.create_groups_from_config(grown(pn, *shape))
        assert_equal_groups(ours, theirs)
        DistributedManager.cleanup()

    same()


@stock_needed
def test_sizes_of_ones_own_on_parents_give_the_groups_that_upstream_gives(fake_world):
    stock = physicsnemo_stock.load()
    for sizes in product((None, 8, 16), (2, 4), (None, 2), (1, 2)):
        fake_world(16, 5)
        managers = physicsnemo_stock.started(stock, 5, 16), start(5, 16)
        for kinds, manager in zip((stock, pn), managers, strict=True):
            node = kinds.ProcessGroupNode
            config = kinds.ProcessGroupConfig(node("world", sizes[0] or 8))
            config.add_node(node("model", sizes[1]), parent="world")
            config.add_node(node("data", sizes[3]), parent="world")
            if sizes[2]:
                config.add_node(node("tensor", sizes[2]), parent="model")
            manager.create_groups_from_config(config)
        assert_equal_groups(*reversed(managers))
        DistributedManager.cleanup()


@stock_needed
def test_cuts_and_orthogonals_of_any_kind_are_as_upstreams(fake_world):
    stock = physicsnemo_stock.load()

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from([1, 4, 6, 8, 12, 16, 24]), st.data())
    def same(size, data):
        rank = data.draw(st.integers(0, size - 1))
        DistributedManager.cleanup()  # of an example that was cut short
        fake_world(size, rank)
        theirs, ours = physicsnemo_stock.started(stock, rank, size), start(rank, size)
        for i in range(data.draw(st.integers(1, 6))):
            known = st.sampled_from(["none", *ours.group_names])
            name = data.draw(st.one_of(st.just(f"g{i}"), known))
            if data.draw(st.booleans()):
                arguments = name, data.draw(known)
                call = "create_orthogonal_process_group"
            else:
                divisors = [d for d in range(1, size + 2) if size % d == 0 or d == 5]
                parent = data.draw(st.one_of(st.none(), known))
                arguments = name, data.draw(st.sampled_from(divisors)), parent
                call = "create_process_subgroup"
            outcomes = []
            for manager in (theirs, ours):
                try:
                    outcomes.append(getattr(manager, call)(*arguments))
                except (AssertionError, KeyError, ValueError) as error:
                    outcomes.append(error)
            assert type(outcomes[0]) is type(outcomes[1]), outcomes
        for groups in theirs._group_ranks.values():  # upstream keeps a trace of what it refused
            assert groups
        assert_equal_groups(ours, theirs)

    same()


@stock_needed
def test_a_cut_may_go_across_earlier_ones(fake_world):
    stock = physicsnemo_stock.load()
    fake_world(24, 17)
    managers = physicsnemo_stock.started(stock, 17, 24), start(17, 24)
    for manager in managers:
        manager.create_process_subgroup("fours", 4)
        manager.create_process_subgroup("pairs", 2, "fours")
        manager.create_orthogonal_process_group("even_and_odd", "pairs")  # 2 x 6 ranks
        manager.create_process_subgroup("threes", 3, "even_and_odd")
        manager.create_orthogonal_process_group("last", "threes")
        manager.create_process_subgroup("uneven", 3, "even_and_odd")
        manager.create_process_subgroup("sixes", 6)
        manager.create_orthogonal_process_group("apart", "sixes")  # 4 ranks, 6 apart
        manager.create_process_subgroup("twos", 2, "apart")
        manager.create_orthogonal_process_group("not_a_product", "twos")
        manager.create_process_subgroup("cut", 4, "not_a_product")  # its ranks are not evenly apart
    assert_equal_groups(*reversed(managers))


def test_a_size_that_does_not_divide_the_parent_is_refused(fake_world):
    fake_world(12)
    manager = start(0, 12)
    manager.create_process_subgroup("a", 3)
    manager.create_orthogonal_process_group("b", "a")
    with pytest.raises(AssertionError, match="groups of 4 ranks cannot be cut into groups of 3"):
        manager.create_process_subgroup("c", 3, "b")
    assert list(manager.group_names) == ["a", "b"]


def tree(kinds=pn, **sizes):
    """The tree of physicsnemo's documentation."""
    config = kinds.ProcessGroupConfig(kinds.ProcessGroupNode("world"))
    config.add_node(kinds.ProcessGroupNode("model_parallel"), parent=config.root)
    config.add_node(kinds.ProcessGroupNode("data_parallel"), parent="world")
    config.add_node(kinds.ProcessGroupNode("spatial_parallel"), parent="model_parallel")
    config.add_node(kinds.ProcessGroupNode("channel_parallel"), parent="model_parallel")
    named = {f"{name}_parallel": size for name, size in sizes.items()}
    config.set_leaf_group_sizes(named)
    return config


def _both(rank, sizes):
    world = dist.get_world_size()
    stock = physicsnemo_stock.load()
    theirs, ours = physicsnemo_stock.started(stock, rank, world), start(rank, world)
    theirs.create_groups_from_config(tree(stock, **sizes))
    before = len(open_groups())
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as calls:
        ours.create_groups_from_config(tree(pn, **sizes))
        ours.create_process_subgroup("halves", world // 2)
    theirs.create_process_subgroup("halves", world // 2)
    before += 1
    assert_equal_groups(ours, theirs)
    for name in ours.group_names:
        sums = [torch.tensor([rank]), torch.tensor([rank])]
        dist.all_reduce(sums[0], group=ours.group(name))
        dist.all_reduce(sums[1], group=theirs.group(name))
        assert torch.equal(*sums)
    record = json.loads(hypergrid.dump())["groups"]
    labels = [entry["label"] for entry in record if entry["owner"] == "DistributedManager"]
    assert sorted(labels) == sorted(ours.group_names)
    DistributedManager.cleanup()
    return calls.call_count, len(open_groups()) - before, dist.is_initialized()


@stock_needed
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(8, {"spatial": 2, "channel": 2, "data": 2}), (4, {"spatial": 1, "channel": 2, "data": 2})],
)
def test_real_groups_beside_upstreams(world, sizes):
    # One call for each of a rank's own groups; afterwards upstream's and the default are left.
    assert run_ranks(world, _both, sizes) == [(11, 0, True)] * world


def _given_to_different_ranks(rank):
    manager = start(rank, 4)
    outcomes = []
    for attempt in (
        lambda: manager.create_groups_from_config(tree(spatial=1, channel=2, data=2 + rank // 3)),
        lambda: manager.create_process_subgroup("pairs" if rank else "others", 2),
        lambda: manager.create_process_subgroup("pairs", 3 if rank == 2 else 2),
    ):
        try:
            attempt()
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    left = len(open_groups()), list(manager.group_names)
    manager.create_process_subgroup("pairs", 2)
    return outcomes, left, dist.get_process_group_ranks(manager.group("pairs"))


def test_ranks_that_ask_for_different_groups_all_say_so_and_go_on():
    results = run_ranks(4, _given_to_different_ranks)
    for rank, (outcomes, left, pairs) in enumerate(results):
        assert left == (1, []) and pairs == [rank // 2 * 2, rank // 2 * 2 + 1]
        divided, named, cut = outcomes
        assert "the world has 4 ranks" in divided
        assert divided.startswith(
            "TreeError: the" if rank == 3 else "AgreementError: rank 3 refused"
        )
        assert named.startswith("AgreementError") and re.search(
            r"group others is None on rank [123] \(and 2 more\) and "
            r"\['0..1', '2..3'\] on rank 0",
            named,
        )
        assert cut.startswith("AssertionError: groups of 4" if rank == 2 else "AgreementError")


def _a_group_that_fails(rank):
    manager = start(rank, 4)
    new_group = dist.new_group

    def failing(ranks, **options):
        if rank == 3 and options["group_desc"] == "__orthogonal_to_channel_parallel":
            raise RuntimeError("no more memory")
        return new_group(ranks, **options)

    # The last group, which rank 3 has to itself: where others connect, they wait for the timeout.
    with mock.patch.object(dist, "new_group", failing):
        with pytest.raises(RuntimeError) as raised:
            manager.create_groups_from_config(tree(spatial=1, channel=4, data=-1))
        text = str(raised.value)
    config = tree(spatial=1, channel=4, data=-1)
    left = len(open_groups()), list(manager.group_names)
    grid = manager.create_groups_from_config(config)
    mesh = grid.device_mesh()
    assert mesh.get_group("data_parallel").group_name == manager.group("data_parallel").group_name
    return text, left, config.get_node("data_parallel").size, config.root.size, mesh.mesh.tolist()


def test_a_tree_is_created_on_all_ranks_or_on_none():
    results = run_ranks(4, _a_group_that_fails)
    assert all(
        "no more memory" in text and "__orthogonal_to_channel_parallel" in text
        for text, *_ in results
    )
    for _, *rest in results:
        assert rest == [(1, []), 1, 4, [[[0], [1], [2], [3]]]]


# Topology.


@pytest.mark.parametrize(
    ("told", "hosts", "says"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, None, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, None, None),
        ({"SLURM_NTASKS_PER_NODE": "2"}, None, "'model' must stay inside a host and does not"),
        ({}, None, "the hosts are not known: give hosts="),
        ({"LOCAL_WORLD_SIZE": "4"}, 2, "does not: 2 of its 2 groups cross hosts"),
        ({"LOCAL_WORLD_SIZE": "2"}, [4, 4], None),
    ],
)
def test_a_node_inside_a_host_is_held_against_what_the_launcher_says(
    fake_world, monkeypatch, told, hosts, says
):
    fake_world(8)
    manager = start(0, 8)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    config = ProcessGroupConfig(ProcessGroupNode("model", size=4, within="host"))
    if says is None:
        DistributedManager.create_process_groups(config, hosts)
        assert manager.group_size("model") == 4
    else:
        with pytest.raises(AssertionError, match=says):
            DistributedManager.create_process_groups(config, hosts)
        assert not manager.group_names


# The manager.


def test_before_it_is_initialised_it_raises_its_warning():
    assert not DistributedManager.is_initialized()
    with pytest.raises(
        pn.PhysicsNeMoUninitializedDistributedManagerWarning, match=r"initialize\(\)"
    ):
        DistributedManager()
    with pytest.raises(pn.ModulusUninitializedDistributedManagerWarning):
        DistributedManager.create_process_subgroup("a", 1)


def test_a_job_of_one_process_has_no_groups():
    with pytest.warns(UserWarning, match="single process: ENV lacks RANK.*OPENMPI lacks"):
        DistributedManager.initialize()
    manager = DistributedManager()
    assert (manager.rank, manager.local_rank, manager.world_size) == (0, 0, 1)
    assert not manager.distributed and manager.group() is None and manager.group_name() is None
    assert manager.device == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert manager.group_size() == 1 and manager.group_rank() == 0
    assert str(manager) == f"rank 0 of 1 on {manager.device}, initialised by 'None'"
    for attempt in (
        lambda: manager.create_process_subgroup("a", 1),
        lambda: manager.create_orthogonal_process_group("b", "a"),
        lambda: manager.create_groups_from_config(tree(spatial=1, channel=1, data=1)),
        lambda: manager.global_mesh,
    ):
        with pytest.raises(AssertionError, match=r"single process without torch\.distributed"):
            attempt()
    with pytest.warns(UserWarning, match="already initialised"):
        DistributedManager.initialize()
    DistributedManager._shared_state = {}  # as upstream's own tests reset it
    assert not DistributedManager.is_initialized()


@stock_needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpirun", "nobody"])
def test_private_attributes_are_read_as_upstreams(launcher):
    seen = []
    for kind in (physicsnemo_stock.load().DistributedManager, DistributedManager):
        with (
            mock.patch.dict(os.environ, LAUNCHES[launcher]),
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(torch.cuda, "device_count", lambda: 2),
        ):
            kind.initialize()
        read = "rank world_size local_rank distributed device cuda broadcast_buffers group_names"
        read += " find_unused_parameters initialization_method groups group_ranks is_initialized"
        read += " global_mesh mesh_dims"
        manager = kind()
        seen.append({name: getattr(manager, f"_{name}") for name in read.split()})
        with pytest.raises(AttributeError, match="_colour"):
            manager._colour  # noqa: B018
        kind._shared_state = {}
    methods = {"torchrun": "env", "mpirun": "openmpi", "nobody": "None"}
    assert seen[0] == seen[1]
    assert seen[1]["initialization_method"] == methods.get(launcher, launcher)


@stock_needed
def test_the_shared_state_is_what_scripts_and_tests_take_it_for():
    for kind in (physicsnemo_stock.load().DistributedManager, DistributedManager):
        kind._shared_state["_is_initialized"] = True  # a script without torch.distributed
        manager = kind()
        assert (manager.rank, manager.world_size, manager.distributed) == (0, 1, False)
        manager.run_name = "a"
        assert kind().run_name == "a" and kind.is_initialized()
        copied = copy.deepcopy(manager)
        assert copied.rank == 0 and copied.run_name == "a"
        kind._shared_state.clear()
        assert not kind.is_initialized()
        kind._shared_state["_is_initialized"] = False
        with pytest.raises(Warning, match=r"initialize\(\)"):
            kind()
        kind._shared_state = {}


def test_a_manager_knows_after_cleanup_what_it_knew(fake_world):
    fake_world(4, rank=2)
    manager = start(2, 4)
    manager.create_process_subgroup("pairs", 2)
    assert copy.deepcopy(manager).group("pairs") is manager.group("pairs")
    manager.cleanup()
    assert (manager.rank, manager.world_size, manager.distributed) == (2, 4, True)
    assert not DistributedManager.is_initialized()
    start(2, 4)
    assert "pairs" in manager.group_names and "pairs" not in DistributedManager().group_names


def test_groups_that_do_not_exist_are_named(fake_world):
    fake_world(4)
    manager = start(0, 4)
    for asks in (manager.group, manager.group_size, manager.group_rank):
        with pytest.raises(pn.PhysicsNeMoUndefinedGroupError, match="no process group 'mp'"):
            asks("mp")
    with pytest.raises(pn.ModulusUndefinedGroupError):
        manager.mesh()
    with pytest.raises(KeyError, match="was not created here"):
        manager.group_name(dist.group.WORLD)
    with pytest.raises(AssertionError, match="'x' has no size"):
        manager.create_group_from_node(ProcessGroupNode("x"))
    assert manager.create_group_from_node(ProcessGroupNode("x", 2)) == "__orthogonal_to_x"
    assert manager.create_group_from_node(ProcessGroupNode("y", 2), "__orthogonal_to_x") is not None
    assert dist.get_process_group_ranks(manager.group("y")) == [0, 2]


def test_it_keeps_what_ddp_is_to_be_given(fake_world):
    fake_world(1)
    manager = start()
    assert not manager.broadcast_buffers and not manager.find_unused_parameters
    manager.broadcast_buffers = True
    with pytest.warns(UserWarning, match="only where parameters stay without gradients"):
        manager.find_unused_parameters = True
    assert DistributedManager().broadcast_buffers and DistributedManager().find_unused_parameters


def test_verbose_prints_the_ranks(fake_world, capsys):
    fake_world(4)
    start(0, 4).create_process_subgroup("pairs", 2, verbose=True)
    assert capsys.readouterr().out == "pairs:\n    [0, 1]\n    [2, 3]\n"


LAUNCHES = {
    "torchrun": {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    | {"MASTER_PORT": "7"},
    "no local rank": {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
    "slurm": {"SLURM_PROCID": "2", "SLURM_NPROCS": "4", "SLURM_LOCALID": "0"}
    | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"},
    "slurm, half": {"SLURM_PROCID": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "MASTER_PORT": "99"},
    "not a number": {"RANK": "x", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
    "nobody": {},
}


def _initialised(kind, environment):
    """What it asks of torch and then says of itself; or the error."""
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group") as init,
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
    ):
        try:
            kind.initialize()
            manager = kind()
            says = manager.rank, manager.world_size, manager.local_rank, manager.distributed
            asks = [{**call.kwargs, "backend": call.args} for call in init.mock_calls]
            where = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            where += (os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"),)
            drawn = np.random.rand()
        except (RuntimeError, TypeError, ValueError) as error:
            return error
        finally:
            kind._shared_state = {}
    for ask in asks:
        if ask.get("device_id") == torch.device("cpu"):
            ask["device_id"] = None  # torch refuses a CPU there
    return says, asks, where, drawn


@stock_needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("override", [None, "ENV", "SLURM", "OPENMPI", "PIGEON"])
@pytest.mark.parametrize("launcher", LAUNCHES)
def test_every_launcher_is_read_as_upstream_reads_it(launcher, override):
    stock = physicsnemo_stock.load()
    environment = dict(LAUNCHES[launcher])
    if override:
        environment["PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"] = override
    theirs = _initialised(stock.DistributedManager, environment)
    ours = _initialised(DistributedManager, environment)
    if isinstance(theirs, Exception):
        kind = RuntimeError if isinstance(theirs, RuntimeError) else ValueError
        assert isinstance(ours, kind), ours
        assert not DistributedManager.is_initialized()
    else:
        assert ours == theirs


def test_modulus_name_for_the_override_is_read_too():
    environment = {**LAUNCHES["torchrun"], **LAUNCHES["mpirun"]}
    environment["MODULUS_DISTRIBUTED_INITIALIZATION_METHOD"] = "OPENMPI"
    assert _initialised(DistributedManager, environment)[0] == (1, 4, 1, True)


@pytest.mark.parametrize(
    ("launcher", "override", "says"),
    [
        ("slurm, half", "", "SLURM_NPROCS is not set, and initialisation by SLURM needs it"),
        ("nobody", "ENV", "RANK is not set"),
        ("not a number", "", "RANK='x' is not a whole number"),
        ("nobody", "PIGEON", "='PIGEON'; allowed: ENV, SLURM, OPENMPI"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_in_a_sentence(launcher, override, says):
    environment = {**LAUNCHES[launcher], "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": override}
    error = _initialised(DistributedManager, environment)
    assert isinstance(error, RuntimeError | ValueError) and says in str(error)


def test_a_default_group_of_other_numbers_is_refused(fake_world):
    fake_world(4, rank=2)
    with pytest.raises(RuntimeError, match=r"as rank 2 of 4, and .* launched as rank 0 of 2"):
        start(0, 2)
    assert not DistributedManager.is_initialized() and dist.get_world_size() == 4


def _launched(rank, method):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # run_ranks serves the store, as torchrun
    if method == "slurm":
        del os.environ["RANK"], os.environ["LOCAL_RANK"]
        os.environ.update(SLURM_PROCID=str(rank), SLURM_NPROCS="4", SLURM_LOCALID=str(rank))
        os.environ["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
    DistributedManager.initialize()
    manager = DistributedManager()
    manager.create_process_subgroup("pairs", 2)
    manager.create_orthogonal_process_group("across", "pairs")
    total = torch.tensor([manager.rank])
    dist.all_reduce(total, group=manager.group("pairs"))
    dist.all_reduce(total, group=manager.group("across"))
    seen = (manager.rank, manager.local_rank, manager.world_size, str(manager.device), total.item())
    descriptions = [manager.group(name).group_desc for name in manager.group_names]
    DistributedManager.cleanup(barrier=True)
    left = (
        dist.is_initialized(),
        DistributedManager.is_initialized(),
        live_pools(),
    )
    return seen, descriptions, left


@pytest.mark.parametrize("method", ["env", "slurm"])
def test_it_joins_makes_groups_and_gives_all_back(method):
    results = run_ranks(4, _launched, method, backend="")
    for rank, (seen, descriptions, left) in enumerate(results):
        device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
        assert seen == (rank, rank, 4, device, 6)
        assert descriptions == ["pairs", "across"] and left == (False, False, [])


def test_an_exit_without_cleanup_cleans_up(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import atexit, os; import torch.distributed as dist\n"
        "def say(*words): os.write(1, (' '.join(map(str, words)) + '\\n').encode())\n"
        "atexit.register(lambda: say('left', dist.is_initialized()))\n"
        "from compat.physicsnemo import DistributedManager\n"
        "DistributedManager.initialize()\n"
        "DistributedManager.create_process_subgroup('pairs', 2)\n"
        "say('size', DistributedManager().group_size('pairs'))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert sorted(done.stdout.split()) == sorted(["size", "2", "left", "False"] * 2)


# The mesh.


def _meshes(rank):
    manager = start(rank, 8)
    flat = manager.global_mesh
    assert flat.get_group() is dist.group.WORLD and flat.mesh_dim_names == ("world",)
    mesh = manager.initialize_mesh((2, -1, 2), ("ddp", "h", "w"))
    assert (
        manager.global_mesh is mesh
        and mesh.mesh.tolist() == torch.arange(8).reshape(2, 2, 2).tolist()
    )
    assert list(manager.mesh_names()) == ["ddp", "h", "w"] and list(manager.mesh_sizes()) == [2] * 3
    assert manager.mesh_dims == {"ddp": 2, "h": 2, "w": 2} and manager.mesh() is mesh
    spatial = mesh["h", "w"]
    group = manager.get_mesh_group(spatial)
    assert manager.get_mesh_group(mesh["h", "w"]) is group
    assert manager.get_mesh_group(manager.mesh("w")) is mesh.get_group("w")
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    apart = torch.tensor([rank])  # over ranks that are not consecutive: 0, 1, 4, 5 and the others
    dist.all_reduce(apart, group=manager.get_mesh_group(mesh["ddp", "w"]))
    assert apart.item() == (10 if rank % 4 < 2 else 18)
    owners = {entry["owner"] for entry in json.loads(hypergrid.dump())["groups"]}
    texts = []
    for shape, names in (
        ((), ()),
        ((8,), ("a", "b")),
        ((2, 4), ("a", "a")),
        ((3, -1), ("a", "b")),
        ((-1, -1), ("a", "b")),
        ((2, 2), ("a", "b")),
        ((0, -1), ("a", "b")),
    ):
        try:
            manager.initialize_mesh(shape, names)
        except RuntimeError as error:
            texts.append(str(error))
    assert manager.global_mesh is mesh
    with pytest.raises(pn.PhysicsNeMoUndefinedGroupError, match="'z'"):
        manager.mesh("z")
    from torch.distributed.device_mesh import init_device_mesh

    torchs = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ddp", "h", "w"))
    for dim in "h", "w", "ddp":
        members = [dist.get_process_group_ranks(m.get_group(dim)) for m in (mesh, torchs)]
        assert members[0] == members[1]
    DistributedManager.cleanup()
    return total.item(), sorted(filter(None, owners)), texts


def test_a_mesh_is_over_groups_of_ours():
    results = run_ranks(8, _meshes, timeout=60)
    for rank, (total, owners, texts) in enumerate(results):
        assert total == (6 if rank < 4 else 22)
        assert owners[0] == "DistributedManager" and owners[1].startswith("HyperCommGrid over")
        assert len(texts) == 7 and all("a mesh of (" in text for text in texts)
        assert "multiply to the world's 8 ranks" in texts[3]
