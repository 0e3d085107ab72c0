"""physicsnemo's tree and manager: as its own, example by example and group by group."""

import copy
import os
import re
import subprocess
import sys
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
from compat.physicsnemo import DistributedManager, ProcessGroupNode
from hypergrid.groups.pool import live_pools
from tests.support import ROOT, physicsnemo_stock, table
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


def example(rank, world, spatial, channel):
    start(rank, world)
    printed = []
    names = {
        **vars(pn),
        "Module": Module,
        "DDP": DistributedDataParallel,
        "topology_mapping": None,
        "print": printed.append,
    }
    exec(EXAMPLE.replace("4, ", f"{channel}, ").replace("2}", f"{spatial}}}"), names)
    size = spatial * channel
    assert printed == [["spatial_parallel", "channel_parallel"], size]
    model = names["model"]
    model(torch.full((3,), float(rank))).backward()
    # Averaged over the ranks that share weights.
    assert model.module.weight.grad[0].item() == np.mean(range(rank % size, world, size))
    DistributedManager.cleanup()
    assert len(open_groups()) == 1


@pytest.mark.usefixtures("loaded_dynamo")
@pytest.mark.parametrize(("world", "spatial", "channel"), [(8, 2, 4), (8, 2, 2), (4, 1, 2)])
def test_the_example_of_pull_request_153_runs(world, spatial, channel):
    run_ranks(world, example, world, spatial, channel)


def grown(kinds, parents, sizes, root_factor=1):
    """The same tree from the given module's two classes; its root may be larger than needed."""
    config = kinds.ProcessGroupConfig(kinds.ProcessGroupNode("n0"))
    for i, parent in enumerate(parents, start=1):
        node = kinds.ProcessGroupNode(f"n{i}")
        config.add_node(node, parent=config.get_node(parent) if i % 2 else parent)
    config.set_leaf_group_sizes(dict(zip(config.leaf_groups(), sizes, strict=False)))
    config.root.size *= root_factor
    return config


@st.composite
def shapes(draw):
    parents = [f"n{draw(st.integers(0, i))}" for i in range(draw(st.integers(0, 5)))]
    sizes = draw(st.lists(st.integers(1, 3), min_size=6, max_size=6))
    return parents, sizes, draw(st.sampled_from([1, 1, 2]))


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
        stock_config = grown(stock, *shape)
        config = grown(pn, *shape)
        upstream.create_groups_from_config(stock_config)
        manager.create_groups_from_config(config)
        assert_equal_groups(manager, upstream)
        assert config.leaf_groups() == stock_config.leaf_groups()
        for name in config.breadth_first():
            assert config.get_node(name).size == stock_config.get_node(name).size
        DistributedManager.cleanup()

    same()


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
        sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 24])
        for number in range(data.draw(st.integers(1, 6))):
            existing = st.sampled_from(["none", *manager.group_names])
            parents = st.none() | existing
            names = st.just(f"g{number}") | existing
            arguments = data.draw(st.tuples(names, existing) | st.tuples(names, sizes, parents))
            outcomes = []
            for creator in (upstream, manager):
                create = creator.create_orthogonal_process_group
                if len(arguments) == 3:
                    create = creator.create_process_subgroup
                try:
                    outcomes.append(create(*arguments))
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
        manager.create_groups_from_config(tree(spatial=1, channel=4, data=1))
    assert len(open_groups()) == 1 and not manager.group_names
    manager.create_groups_from_config(tree(spatial=1, channel=4, data=1))
    assert total(manager.group("channel_parallel"), rank) == 6


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
    with pytest.warns(UserWarning, match="no variables of torchrun, SLURM or OpenMPI"):
        DistributedManager.initialize()
    manager = DistributedManager()
    assert manager.group() is None and manager.group_name() is None
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
        kind._shared_state = {}


def test_a_manager_knows_after_cleanup_what_it_knew(fake_world):
    fake_world(4, rank=2)
    manager = start(2, 4)
    manager.create_process_subgroup("pairs", 2)
    assert copy.deepcopy(manager).group("pairs") is manager.group("pairs")
    manager.cleanup()
    assert manager.rank == 2 and "pairs" in manager.group_names
    start(2, 4)
    assert "pairs" not in DistributedManager().group_names


@pytest.mark.parametrize(("call", "error", "says"), table("physicsnemo/refusals.txt"))
def test_refusals_are_sentences_of_upstreams_types(fake_world, call, error, says):
    fake_world(8)
    names = {**vars(pn), **globals(), "manager": start(0, 8)}
    with pytest.raises(Exception, match=says) as caught:
        eval(call, names)
    assert error in [kind.__name__ for kind in type(caught.value).__mro__]
    if "tree" in call and not physicsnemo_stock.MISSING:
        with pytest.raises(AssertionError):
            eval(call, {"tree": tree, "pn": physicsnemo_stock.load()})


def test_a_node_creates_its_group_and_the_orthogonal_one(fake_world):
    fake_world(4)
    manager = start(0, 4)
    assert manager.create_group_from_node(ProcessGroupNode("x", 2)) == "__orthogonal_to_x"
    manager.create_group_from_node(ProcessGroupNode("y", 2), "__orthogonal_to_x")
    assert dist.get_process_group_ranks(manager.group("y")) == [0, 2]


@on_ranks(4)
def test_a_refusal_on_one_rank_is_raised_on_all(rank):
    manager = start(rank, 4)
    is_wrong = rank == 1
    mapping = [4] if is_wrong else None
    config = pn.ProcessGroupConfig(ProcessGroupNode("x", 4))
    with pytest.raises((ValueError, hypergrid.AgreementError), match="topology_mapping must be"):
        manager.create_process_groups(config, mapping)
    size = None if is_wrong else 2
    with pytest.raises((AssertionError, hypergrid.AgreementError), match="'y' has no size"):
        manager.create_group_from_node(ProcessGroupNode("y", size))
    manager.create_group_from_node(ProcessGroupNode("y", 2))


def test_it_keeps_what_ddp_is_to_be_given():
    DistributedManager._shared_state["_is_initialized"] = True
    manager = DistributedManager()
    manager.broadcast_buffers = True
    with pytest.warns(UserWarning, match="only where parameters stay without gradients"):
        manager.find_unused_parameters = True
    assert DistributedManager().broadcast_buffers and DistributedManager().find_unused_parameters


def test_verbose_prints_the_ranks(fake_world, capsys):
    fake_world(4)
    start(0, 4).create_process_subgroup("pairs", 2, verbose=True)
    assert capsys.readouterr().out == "pairs:\n    [0, 1]\n    [2, 3]\n"


def variables_of(launcher):
    """The variables that a launcher sets."""
    pairs = dict(table("physicsnemo/launches.txt"))[launcher].split()
    return dict(pair.split("=") for pair in pairs)


# Scripts read them, and upstream has no public name for some.
PRIVATE = "rank world_size local_rank distributed device cuda is_initialized broadcast_buffers"
PRIVATE += " find_unused_parameters initialization_method groups group_names group_ranks"
PRIVATE = f"{PRIVATE} global_mesh mesh_dims".split()


def _initialised(kind, environment):
    """Its attributes, what it asks of torch, and more that it leaves; or the error."""
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group") as init,
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
    ):
        try:
            kind.initialize()
            manager = kind()
            attributes = {name: getattr(manager, f"_{name}") for name in PRIVATE}
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
    return attributes, asks, where, drawn


REFUSALS = "is not set, and this init|'x' is not a whole number|'PIGEON'; allowed: ENV, SLURM, OPEN"


@stock_needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("override", [None, "ENV", "SLURM", "OPENMPI", "PIGEON"])
@pytest.mark.parametrize("launcher", dict(table("physicsnemo/launches.txt")))
def test_every_launcher_is_read_as_upstream_reads_it(launcher, override):
    stock = physicsnemo_stock.load()
    environment = variables_of(launcher)
    if override:
        environment["PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"] = override
    expected = _initialised(stock.DistributedManager, environment)
    outcome = _initialised(DistributedManager, environment)
    if isinstance(expected, Exception):
        kind = RuntimeError if isinstance(expected, RuntimeError) else ValueError
        assert isinstance(outcome, kind), outcome
        assert re.search(REFUSALS, str(outcome))
        assert not DistributedManager.is_initialized()
    else:
        assert outcome == expected


def test_modulus_name_for_the_override_is_read_too():
    environment = {**variables_of("torchrun"), **variables_of("mpirun")}
    environment["MODULUS_DISTRIBUTED_INITIALIZATION_METHOD"] = "OPENMPI"
    assert _initialised(DistributedManager, environment)[0]["initialization_method"] == "openmpi"


def test_a_default_group_of_other_numbers_is_refused(fake_world):
    fake_world(4, rank=2)
    with pytest.raises(RuntimeError, match=r"as rank 2 of 4, and .* launched as rank 0 of 2"):
        start(0, 2)
    assert not DistributedManager.is_initialized() and dist.get_world_size() == 4


@on_ranks(4, backend="")
def test_it_joins_makes_groups_and_gives_all_back(rank):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # on_ranks serves the store, as torchrun
    DistributedManager.initialize()
    manager = DistributedManager()
    assert (manager.rank, manager.local_rank, manager.world_size) == (rank, rank, 4)
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


@on_ranks(4)
def test_a_mesh_is_created_on_all_ranks_or_on_none(rank):
    manager = start(rank, 4)
    new_group = dist.new_group

    def failing(ranks, **options):
        # The group over "w" is there, and rank 3 has this one to itself: nobody connects.
        if rank == 3 and options["group_desc"] == "h":
            raise RuntimeError("no more memory")
        return new_group(ranks, **options)

    with (
        mock.patch.object(dist, "new_group", failing),
        pytest.raises(RuntimeError, match="no more memory"),
    ):
        manager.initialize_mesh((1, 4), ("h", "w"))
    assert len(open_groups()) == 1
    mesh = manager.initialize_mesh((1, 4), ("h", "w"))
    assert total(mesh.get_group("w"), rank) == 6


@on_ranks(8, timeout=60)
def test_a_mesh_is_over_groups_of_ours(rank):
    manager = start(rank, 8)
    assert manager.global_mesh.get_group() is dist.group.WORLD
    mesh = manager.initialize_mesh((2, -1, 2), ("ddp", "h", "w"))
    assert manager.global_mesh is mesh
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [*zip(manager.mesh_names(), manager.mesh_sizes(), strict=True)] == [
        ("ddp", 2),
        ("h", 2),
        ("w", 2),
    ]
    assert total(mesh.get_group("ddp"), rank) == rank + (rank + 4) % 8
    with pytest.raises(RuntimeError, match=r"a mesh of \("):
        manager.initialize_mesh((2, 2), ("a", "b"))
    assert manager.global_mesh is mesh
