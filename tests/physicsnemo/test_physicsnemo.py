"""physicsnemo's tree and manager: as its own, call by call and group by group."""

import copy
import os
import re
import subprocess
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compat import physicsnemo as pn
from compat.physicsnemo import DistributedManager
from tests.support import ROOT, forerunners, table
from tests.support.forked import on_ranks, open_groups, run_ranks, total

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
# The tree of physicsnemo's documentation: each node with its parent.
DOCUMENTED = "model:world data:world spatial:model channel:model"


@pytest.fixture(autouse=True)
def _a_new_manager(monkeypatch):
    for name in [*LAUNCHERS, *(n for n in os.environ if n.startswith(("SLURM_", "OMPI_")))]:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    DistributedManager.cleanup()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def stock():
    return forerunners.physicsnemo()


def start(rank, world_size):
    DistributedManager.setup(rank=rank, world_size=world_size, local_rank=rank)
    return DistributedManager()


def started(stock, rank, world_size):
    """The stock manager over a default group that runs already. Its own start refuses a CPU."""
    stock.DistributedManager._shared_state = {
        "_is_initialized": True,
        "_distributed": True,
        "_rank": rank,
        "_world_size": world_size,
    }
    return stock.DistributedManager()


def alone(kinds):
    """The manager of a script without torch.distributed, as users and tests set it up."""
    kinds.DistributedManager._shared_state = {"_is_initialized": True}
    return kinds.DistributedManager()


def tree(kinds, nodes=DOCUMENTED, **sizes):
    """A tree of the classes of either module, with the sizes of its leaves."""
    config = kinds.ProcessGroupConfig(kinds.ProcessGroupNode("world"))
    for node in nodes.split():
        name, parent = node.split(":")
        config.add_node(kinds.ProcessGroupNode(name), parent=config.get_node(parent))
    config.set_leaf_group_sizes(sizes)
    return config


# Beside upstream's.


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


def answer(call, kinds, manager):
    """What a call of the table gives, or its error."""
    names = {
        "dist": dist,
        "manager": manager,
        "ProcessGroupConfig": kinds.ProcessGroupConfig,
        "ProcessGroupNode": kinds.ProcessGroupNode,
        "tree": partial(tree, kinds),
        "cut": manager.create_process_subgroup,
        "orthogonal": manager.create_orthogonal_process_group,
        "create": manager.create_groups_from_config,
        "mesh": manager.initialize_mesh,
    }
    try:
        return eval(call, names)
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world", "rank", "call", "says"), table("physicsnemo/parity.txt"))
def test_equal_calls_have_equal_answers_errors_and_groups(
    stock, fake_world, world, rank, call, says
):
    if world == "alone":
        upstream = alone(stock)
        manager = alone(pn)
    else:
        numbers = int(rank), int(world)
        fake_world(numbers[1], numbers[0])
        upstream = started(stock, *numbers)
        manager = start(*numbers)
    expected = answer(call, stock, upstream)
    outcome = answer(call, pn, manager)
    if isinstance(expected, Exception):
        assert type(outcome).__name__ == type(expected).__name__, outcome
        assert re.search(says, str(outcome))
    else:
        assert outcome == expected
    assert_equal_groups(manager, upstream)


def test_what_upstream_answers_otherwise_is_refused_in_a_sentence(fake_world):
    fake_world(8)
    manager = start(0, 8)
    with pytest.raises(ValueError, match="order of the tree"):
        manager.create_process_groups(tree(pn, spatial=2, channel=2, data=2), [4, 4])
    with pytest.raises(RuntimeError, match=r"a mesh of \("):
        manager.initialize_mesh((0, -1), ("a", "b"))


def same_groups_as_upstream(rank, stock):
    world = dist.get_world_size()
    upstream = started(stock, rank, world)
    manager = start(rank, world)
    sizes = {"spatial": 2, "channel": 2, "data": 2}
    upstream.create_groups_from_config(tree(stock, **sizes))
    before = open_groups()
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as new_group:
        manager.create_groups_from_config(tree(pn, **sizes))
    # One call for each of a rank's own groups.
    assert new_group.call_count == len(manager.group_names) == 10
    assert_equal_groups(manager, upstream)
    for name in manager.group_names:
        assert total(manager.group(name), rank) == total(upstream.group(name), rank)
        assert manager.group(name).group_desc == name
    DistributedManager.cleanup(barrier=True)
    assert open_groups() == before and dist.is_initialized()


def test_real_groups_beside_upstreams(stock):
    run_ranks(8, same_groups_as_upstream, stock)


def variables_of(launcher):
    """The variables that a launcher sets."""
    pairs = dict(table("physicsnemo/launches.txt"))[launcher].split()
    return dict(pair.split("=") for pair in pairs)


# Scripts read them, and upstream has no public name for some.
PRIVATE = "rank world_size local_rank distributed device cuda is_initialized broadcast_buffers"
PRIVATE += " find_unused_parameters initialization_method groups group_names group_ranks"
PRIVATE = f"{PRIVATE} global_mesh mesh_dims".split()


def initialised(kinds, environment):
    """Its attributes, what it asks of torch, and more that it leaves; or the error."""
    kind = kinds.DistributedManager
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group") as init,
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
    ):
        try:
            kind.initialize()
            manager = kind()
        except (RuntimeError, TypeError, ValueError) as error:
            return error
        finally:
            kind._shared_state = {}
        address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        error_handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    attributes = {name: getattr(manager, f"_{name}") for name in PRIVATE}
    asks = [{**call.kwargs, "backend": call.args} for call in init.mock_calls]
    for ask in asks:
        if ask.get("device_id") == torch.device("cpu"):
            ask["device_id"] = None  # torch refuses a CPU there
    return attributes, asks, address, error_handling, np.random.rand()


REFUSALS = "is not set, and this init|'x' is not a whole number|'PIGEON'; allowed: ENV, SLURM, OPEN"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("override", [None, "ENV", "SLURM", "OPENMPI", "PIGEON"])
@pytest.mark.parametrize("launcher", dict(table("physicsnemo/launches.txt")))
def test_every_launcher_is_read_as_upstream_reads_it(stock, launcher, override):
    environment = variables_of(launcher)
    if override:
        environment["PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"] = override
    expected = initialised(stock, environment)
    outcome = initialised(pn, environment)
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
    assert initialised(pn, environment)[0]["initialization_method"] == "openmpi"


def test_the_shared_state_is_what_scripts_and_tests_take_it_for(stock):
    for kinds in (stock, pn):
        manager = alone(kinds)
        manager.run_name = "a"
        assert kinds.DistributedManager().run_name == "a"
        assert copy.deepcopy(manager).run_name == "a"
        assert kinds.DistributedManager.is_initialized()
        kinds.DistributedManager._shared_state = {}
        assert not kinds.DistributedManager.is_initialized()


# The example.

# As Modulus' pull request 153 prints it, but for a `self` in the static method, with which Python
# itself refuses the call below, and for channels on two ranks instead of four.
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
group_sizes = {"channel_parallel": 2, "spatial_parallel": 2}
pg_config.set_leaf_group_sizes(group_sizes)

print(pg_config.leaf_groups())  # ['spatial_parallel', 'channel_parallel']
print(pg_config.get_node("model_parallel").size)  # 4

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


@pytest.mark.usefixtures("loaded_dynamo")
@on_ranks(8)
def test_the_example_of_pull_request_153_runs(rank):
    start(rank, 8)
    printed = []
    names = {
        **vars(pn),
        "Module": Module,
        "DDP": DistributedDataParallel,
        "topology_mapping": None,
        "print": printed.append,
    }
    exec(EXAMPLE, names)
    assert printed == [["spatial_parallel", "channel_parallel"], 4]
    model = names["model"]
    model(torch.full((3,), float(rank))).backward()
    # Averaged over the two ranks that share weights.
    assert model.module.weight.grad[0].item() == rank % 4 + 2
    DistributedManager.cleanup()
    assert len(open_groups()) == 1


# The manager.


def test_before_it_is_initialised_it_raises_its_warning():
    with pytest.raises(
        pn.PhysicsNeMoUninitializedDistributedManagerWarning, match=r"initialize\(\)"
    ):
        DistributedManager()
    with pytest.raises(pn.ModulusUninitializedDistributedManagerWarning):
        DistributedManager.create_process_subgroup("a", 1)


def test_a_job_of_one_process_is_warned_of_and_initialised_once():
    with pytest.warns(UserWarning, match="no variables of torchrun, SLURM or OpenMPI"):
        DistributedManager.initialize()
    manager = DistributedManager()
    assert str(manager) == f"rank 0 of 1 on {manager.device}, initialised by 'None'"
    with pytest.warns(UserWarning, match="already initialised"):
        DistributedManager.initialize()


def test_a_manager_knows_after_cleanup_what_it_knew(fake_world):
    fake_world(4, rank=2)
    manager = start(2, 4)
    manager.create_process_subgroup("pairs", 2)
    assert copy.deepcopy(manager).group("pairs") is manager.group("pairs")
    manager.cleanup()
    assert manager.rank == 2 and "pairs" in manager.group_names
    assert "pairs" not in start(2, 4).group_names


def test_it_keeps_what_ddp_is_to_be_given():
    manager = alone(pn)
    manager.broadcast_buffers = True
    with pytest.warns(UserWarning, match="only where parameters stay without gradients"):
        manager.find_unused_parameters = True
    assert DistributedManager().broadcast_buffers and DistributedManager().find_unused_parameters


def test_verbose_prints_the_ranks(fake_world, capsys):
    fake_world(4)
    start(0, 4).create_process_subgroup("pairs", 2, verbose=True)
    assert capsys.readouterr().out == "pairs:\n    [0, 1]\n    [2, 3]\n"


def test_a_default_group_of_other_numbers_is_refused(fake_world):
    fake_world(4, rank=2)
    with pytest.raises(RuntimeError, match=r"as rank 2 of 4, and .* launched as rank 0 of 2"):
        start(0, 2)
    assert not DistributedManager.is_initialized() and dist.get_world_size() == 4


def test_a_job_of_torchrun_that_ends_without_cleanup_cleans_up(tmp_path):
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


@on_ranks(4)
def test_a_mesh_is_over_groups_of_ours(rank):
    manager = start(rank, 4)
    assert manager.global_mesh.get_group() is dist.group.WORLD
    mesh = manager.initialize_mesh((2, -1), ("ddp", "h"))
    assert total(mesh.get_group("ddp"), rank) == rank + (rank + 2) % 4
    with pytest.raises(RuntimeError, match=r"a mesh of \("):
        manager.initialize_mesh((2, 3), ("a", "b"))
    assert manager.global_mesh is mesh
    manager.cleanup()
    assert len(open_groups()) == 1
