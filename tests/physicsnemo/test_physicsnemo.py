"""physicsnemo's tree and manager: as its own, example by example and group by group."""

import copy
import json
import os
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
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hypergrid
from compat import physicsnemo as pn
from compat.physicsnemo import DistributedManager, ProcessGroupConfig, ProcessGroupNode
from hypergrid.groups.pool import live_pools
from tests.support import ROOT, physicsnemo_stock
from tests.support.forked import on_ranks, open_groups, run_ranks, total

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


def example(rank, world, spatial, channel, hosts):
    start(rank, world)
    printed = []
    names = {
        **vars(pn),
        "Module": Module,
        "DDP": DistributedDataParallel,
        "topology_mapping": hosts,
        "print": printed.append,
    }
    exec(EXAMPLE.replace("4, ", f"{channel}, ").replace("2}", f"{spatial}}}"), names)
    model = names["model"]
    model(torch.full((3,), float(rank))).backward()
    size = spatial * channel
    assert printed == [["spatial_parallel", "channel_parallel"], size]
    first = rank // size * size
    nearest = rank // spatial * spatial
    farthest = first + rank % spatial
    expected = {
        "model_parallel": range(first, first + size),
        "data_parallel": range(rank % size, world, size),
        "spatial_parallel": range(nearest, nearest + spatial),
        "__orthogonal_to_spatial_parallel": range(rank % spatial, world, spatial),
        "channel_parallel": range(farthest, first + size, spatial),
    }
    manager = DistributedManager()
    assert list(manager.group_names) == [*expected, "__orthogonal_to_channel_parallel"]
    for name, ranks in expected.items():
        assert dist.get_process_group_ranks(manager.group(name)) == [*ranks]
    # Averaged over the ranks that share weights.
    assert model.module.weight.grad[0].item() == np.mean(expected["data_parallel"])
    DistributedManager.cleanup()
    assert len(open_groups()) == 1


@pytest.mark.parametrize(
    ("world", "spatial", "channel", "hosts"), [(8, 2, 4, None), (8, 2, 2, [4, 4]), (4, 1, 2, 2)]
)
def test_the_example_of_pull_request_153_runs(world, spatial, channel, hosts):
    run_ranks(world, example, world, spatial, channel, hosts)


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
    expected = grown(stock, *shape)
    config = grown(pn, *shape)
    assert config.leaf_groups() == expected.leaf_groups()
    assert (config.root_id, config.root.size) == (expected.root_id, expected.root.size)
    assert config.update_parent_sizes() == expected.update_parent_sizes()
    for name in config.breadth_first():
        assert config.get_node(name).size == expected.get_node(name).size


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


def assert_equal_groups(manager, upstream):
    assert list(manager.group_names) == list(upstream.group_names)
    assert manager._group_ranks == upstream._group_ranks
    for name in manager.group_names:
        group = manager.group(name)
        expected = upstream.group(name)
        assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(expected)
        assert manager.group_size(name) == upstream.group_size(name)
        assert manager.group_rank(name) == upstream.group_rank(name)
        assert manager.group_name(group) == upstream.group_name(expected) == name


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
        upstream = physicsnemo_stock.started(stock, rank, size)
        manager = start(rank, size)
        upstream.create_groups_from_config(grown(stock, *shape))
        manager.create_groups_from_config(grown(pn, *shape))
        assert_equal_groups(manager, upstream)
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
        upstream = physicsnemo_stock.started(stock, rank, size)
        manager = start(rank, size)
        for number in range(data.draw(st.integers(1, 6))):
            existing = st.sampled_from(["none", *manager.group_names])
            name = data.draw(st.one_of(st.just(f"g{number}"), existing))
            if data.draw(st.booleans()):
                call = "create_orthogonal_process_group"
                arguments = (name, data.draw(existing))
            else:
                call = "create_process_subgroup"
                divisors = [divisor for divisor in range(1, size + 2) if size % divisor == 0]
                cut_size = data.draw(st.sampled_from([*divisors, 5]))
                arguments = (name, cut_size, data.draw(st.one_of(st.none(), existing)))
            outcomes = []
            for creator in (upstream, manager):
                try:
                    outcomes.append(getattr(creator, call)(*arguments))
                except (AssertionError, KeyError, ValueError) as error:
                    outcomes.append(error)
            assert type(outcomes[0]) is type(outcomes[1]), outcomes
        for groups in upstream._group_ranks.values():  # upstream keeps a trace of what it refused
            assert groups
        assert_equal_groups(manager, upstream)

    same()


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


def same_groups_as_upstream(rank, sizes):
    world = dist.get_world_size()
    stock = physicsnemo_stock.load()
    upstream = physicsnemo_stock.started(stock, rank, world)
    manager = start(rank, world)
    upstream.create_groups_from_config(tree(stock, **sizes))
    upstream.create_process_subgroup("halves", world // 2)
    before = open_groups()
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as new_group:
        manager.create_groups_from_config(tree(pn, **sizes))
        manager.create_process_subgroup("halves", world // 2)
    # One call for each of a rank's own groups.
    assert new_group.call_count == len(manager.group_names) == 11
    assert_equal_groups(manager, upstream)
    for name in manager.group_names:
        assert total(manager.group(name), rank) == total(upstream.group(name), rank)
    labels = []
    for group in json.loads(hypergrid.dump())["groups"]:
        if group["owner"] == "DistributedManager":
            labels.append(group["label"])
    assert sorted(labels) == sorted(manager.group_names)
    DistributedManager.cleanup()
    assert open_groups() == before and dist.is_initialized()


@stock_needed
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(8, {"spatial": 2, "channel": 2, "data": 2}), (4, {"spatial": 1, "channel": 2, "data": 2})],
)
def test_real_groups_beside_upstreams(world, sizes):
    run_ranks(world, same_groups_as_upstream, sizes)


@on_ranks(4)
def test_a_tree_is_created_on_all_ranks_or_on_none(rank):
    manager = start(rank, 4)
    new_group = dist.new_group

    def failing(ranks, **options):
        # The last group, which rank 3 has to itself: where others connect, they wait.
        if rank == 3 and options["group_desc"] == "__orthogonal_to_channel_parallel":
            raise RuntimeError("no more memory")
        return new_group(ranks, **options)

    says = "__orthogonal_to_channel_parallel.*no more memory"
    with mock.patch.object(dist, "new_group", failing), pytest.raises(RuntimeError, match=says):
        manager.create_groups_from_config(tree(spatial=1, channel=4, data=-1))
    assert len(open_groups()) == 1 and not manager.group_names
    config = tree(spatial=1, channel=4, data=-1)
    grid = manager.create_groups_from_config(config)
    assert (config.get_node("data_parallel").size, config.root.size) == (1, 4)
    mesh = grid.device_mesh()
    assert mesh.mesh.tolist() == [[[0], [1], [2], [3]]]
    assert mesh.get_group("data_parallel").group_name == manager.group("data_parallel").group_name


# Topology.


@pytest.mark.parametrize(
    ("variables", "hosts", "says"),
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
    fake_world, monkeypatch, variables, hosts, says
):
    fake_world(8)
    manager = start(0, 8)
    for name, value in variables.items():
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
    attributes = []
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
        attributes.append({name: getattr(manager, f"_{name}") for name in read.split()})
        with pytest.raises(AttributeError, match="_colour"):
            manager._colour  # noqa: B018
        kind._shared_state = {}
    methods = {"torchrun": "env", "mpirun": "openmpi", "nobody": "None"}
    assert attributes[0] == attributes[1]
    assert attributes[1]["initialization_method"] == methods.get(launcher, launcher)


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
    expected = _initialised(stock.DistributedManager, environment)
    outcome = _initialised(DistributedManager, environment)
    if isinstance(expected, Exception):
        kind = RuntimeError if isinstance(expected, RuntimeError) else ValueError
        assert isinstance(outcome, kind), outcome
        assert not DistributedManager.is_initialized()
    else:
        assert outcome == expected


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


@pytest.mark.parametrize("method", ["env", "slurm"])
@on_ranks(4, backend="")
def test_it_joins_makes_groups_and_gives_all_back(rank, method):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # on_ranks serves the store, as torchrun
    if method == "slurm":
        del os.environ["RANK"], os.environ["LOCAL_RANK"]
        os.environ.update(SLURM_PROCID=str(rank), SLURM_NPROCS="4", SLURM_LOCALID=str(rank))
        os.environ["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
    DistributedManager.initialize()
    manager = DistributedManager()
    assert (manager.rank, manager.local_rank, manager.world_size) == (rank, rank, 4)
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    assert str(manager.device) == device
    manager.create_process_subgroup("pairs", 2)
    manager.create_orthogonal_process_group("across", "pairs")
    sum_of_pair = total(manager.group("pairs"), rank)
    assert total(manager.group("across"), sum_of_pair) == 6
    assert [manager.group(name).group_desc for name in manager.group_names] == ["pairs", "across"]
    DistributedManager.cleanup(barrier=True)
    assert not dist.is_initialized() and not DistributedManager.is_initialized()
    assert live_pools() == []


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


@on_ranks(8, timeout=60)
def test_a_mesh_is_over_groups_of_ours(rank):
    manager = start(rank, 8)
    assert manager.global_mesh.get_group() is dist.group.WORLD
    assert manager.global_mesh.mesh_dim_names == ("world",)
    mesh = manager.initialize_mesh((2, -1, 2), ("ddp", "h", "w"))
    assert manager.global_mesh is mesh is manager.mesh()
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert list(manager.mesh_names()) == ["ddp", "h", "w"]
    assert list(manager.mesh_sizes()) == [2, 2, 2]
    assert manager.mesh_dims == {"ddp": 2, "h": 2, "w": 2}
    torchs_mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ddp", "h", "w"))
    for dim in ("h", "w", "ddp"):
        expected = dist.get_process_group_ranks(torchs_mesh.get_group(dim))
        assert dist.get_process_group_ranks(mesh.get_group(dim)) == expected
    spatial = manager.get_mesh_group(mesh["h", "w"])
    assert manager.get_mesh_group(mesh["h", "w"]) is spatial
    assert total(spatial, rank) == (6 if rank < 4 else 22)
    assert manager.get_mesh_group(manager.mesh("w")) is mesh.get_group("w")
    apart = manager.get_mesh_group(mesh["ddp", "w"])  # 0, 1, 4, 5, and the others
    assert total(apart, rank) == (10 if rank % 4 < 2 else 18)
    owners = {group["owner"] for group in json.loads(hypergrid.dump())["groups"]} - {None}
    of_manager, of_grid = sorted(owners)
    assert of_manager == "DistributedManager" and of_grid.startswith("HyperCommGrid over")
    with pytest.raises(pn.PhysicsNeMoUndefinedGroupError, match="'z'"):
        manager.mesh("z")
    for shape, names in INVALID_MESHES:
        with pytest.raises(RuntimeError, match=r"a mesh of \("):
            manager.initialize_mesh(shape, names)
    assert manager.global_mesh is mesh


INVALID_MESHES = [
    ((), ()),
    ((8,), ("a", "b")),
    ((2, 4), ("a", "a")),
    ((3, -1), ("a", "b")),
    ((-1, -1), ("a", "b")),
    ((2, 2), ("a", "b")),
    ((0, -1), ("a", "b")),
]
