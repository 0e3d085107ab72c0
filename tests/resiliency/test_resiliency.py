"""nvidia-resiliency-ext over gloo with our Abort, Initialize and WholeReplicas.

``scripts/fetch_resiliency`` puts it into .cache/resiliency, outside the environment: megatron-core
0.17 and later cannot be imported beside it. Only processes of the tests add that folder to their
path; ``PYTHONPATH=.cache/resiliency python script.py`` does the same for a program of your own.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from unittest import mock
from warnings import catch_warnings, simplefilter

import pytest
import torch
import torch.distributed as dist

from hypergrid import RankLayout
from tests.support import ROOT
from tests.support.forked import from_all, on_ranks, run_ranks

FOLDER = ROOT / ".cache" / "resiliency"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="nvidia-resiliency-ext is missing: run scripts/fetch_resiliency"
)


def restarted(how, folder):
    """Run the job in processes of its own: one in which NVRx is imported, a fork for each rank."""
    code = f"import sys; sys.path[:0] = {sys.path!r}\n"
    code += f"from tests.support.restarting import job; job({how!r}, {str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("how", "worlds", "ended"),
    [("exception", {3}, 3), ("kill", {2}, 2), ("stop", {2}, 2)],
)
def test_a_program_like_nvrxs_basic_example_goes_on_after_a_fault(tmp_path, how, worlds, ended):
    restarted(how, tmp_path)
    lines = []
    for file in tmp_path.glob("out.*"):
        for line in file.read_text().splitlines():
            if line.startswith("{"):
                lines.append(json.loads(line))
    first_life = [line for line in lines if line.get("iteration") == 0]
    second_life = [line for line in lines if line.get("iteration") == 1]
    assert [line["total"] for line in first_life] == [3.0] * 3
    assert len(second_life) == ended
    assert {line["world"] for line in second_life} == worlds
    assert {line["total"] for line in second_life} == {float(world) for world in worlds}
    assert sum("ended" in line for line in lines) == ended
    # As docs/recovery.md says, c10d's lines about polls of the store do not bury these.
    errors = [file.read_text() for file in tmp_path.glob("err.*")]
    assert any("RankShouldRestart" in text for text in errors)
    assert not any("[c10d]" in text for text in errors)


def test_without_torchruns_store_and_another_the_job_ends_in_a_sentence(tmp_path):
    start = time.monotonic()
    restarted("no store", tmp_path)
    assert time.monotonic() - start < 60
    for text in [(tmp_path / f"err.{rank}").read_text() for rank in range(3)]:
        assert text.count("RestartAbort: compat.resiliency.Initialize has no store.") == 1
        assert "Start the job with torchrun, or pass Initialize(store)" in text
    assert not any("trains" in file.read_text() for file in tmp_path.glob("out.*"))


class StoreOfNvrx(dict):
    """The store that NVRx gives, as far as ``WholeReplicas`` asks it."""

    def wait(self, keys, timeout):
        assert {*keys} <= {*self}

    def set(self, key, value):
        self[key] = value.encode()

    def multi_get(self, keys):
        return [self[key] for key in keys]


HOSTS = ("a",) * 5 + ("b",) * 5


def assigned(losses):
    """What each process is after ``losses``: mode and rank, or the name and text of its error."""
    # In a process of its own: the tests' never has NVRx.
    (outcomes,) = run_ranks(1, assigned_here, losses, backend="")
    return outcomes


def assigned_here(_, losses):
    sys.path.append(str(FOLDER))
    from nvidia_resiliency_ext.inprocess.rank_assignment import RankAssignmentCtx
    from nvidia_resiliency_ext.inprocess.state import State

    from compat.resiliency import WholeReplicas

    store = StoreOfNvrx()
    for process, host in enumerate(HOSTS):
        store.set(f"hypergrid/host/{process}", host)
    outcomes = []
    for process, host in enumerate(HOSTS):
        whole = WholeReplicas(RankLayout(("tp", "dp", "pp"), (2, 2, 2)))
        state = State(rank=process, world_size=len(HOSTS))
        try:
            with mock.patch("socket.gethostname", return_value=host):
                for lost in ((), *losses):
                    state = whole(RankAssignmentCtx(state, store, {*lost})).state
            outcomes.append((state.mode.name, state.active_rank))
        except BaseException as error:
            outcomes.append((type(error).__name__, str(error)))
    return outcomes


def test_all_processes_compute_the_same_ranks_and_spares_of_the_host_fill_the_holes():
    outcomes = assigned([])
    rank_of = {}
    for process, (mode, rank) in enumerate(outcomes):
        if mode == "ACTIVE":
            rank_of[process] = rank
    assert list(rank_of) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert sorted(rank_of.values()) == [*range(8)]
    outcomes = assigned([{2}])  # the third rank, which is process 2
    assert outcomes[2][0] == "RankDiscarded"
    assert outcomes[3:5] == [("ACTIVE", 2), ("ACTIVE", 3)]
    assert outcomes[9][0] == "INACTIVE"


def test_ranks_of_later_losses_are_those_of_the_iteration_before():
    outcomes = assigned([{2}, {8}])  # rank 8 is then the one spare, process 9
    assert outcomes[9][0] == "RankDiscarded"
    assert [mode for mode, _ in outcomes].count("ACTIVE") == 8


def test_fewer_replicas_go_on_and_without_one_all_refuse():
    modes = [mode for mode, _ in assigned([{0, 1, 2}])]
    assert modes.count("ACTIVE") == 4
    outcomes = assigned([{0, 1, 2, 3, 4, 5, 6}])
    (text,) = {text for mode, text in outcomes if mode == "RestartAbort"}
    assert "not one whole replica is left" in text


@on_ranks(3, backend="")
def test_initialize_brings_the_active_ranks_together_and_cleans_up_before(rank):
    sys.path.append(str(FOLDER))
    from nvidia_resiliency_ext.inprocess.state import Mode, State

    from compat import parallel_state as ps
    from compat.resiliency import Initialize

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the test's store is at MASTER_PORT
    begin = Initialize(backend="gloo", timeout=timedelta(seconds=20))
    for iteration in range(3):
        state = State(rank=rank, world_size=3, active_rank=rank, active_world_size=2)
        state = dataclasses.replace(state, mode=Mode.ACTIVE if rank < 2 else Mode.INACTIVE)
        state.iteration = iteration
        assert begin(state.freeze()) == state.freeze()
        assert dist.is_initialized() == (rank < 2)
        if rank < 2:
            ps.initialize_model_parallel()  # left as it is: the next iteration destroys it
        from_all(None)


def test_without_nvrx_the_message_names_the_extra():
    code = "import sys; sys.modules['nvidia_resiliency_ext'] = None; "
    code += "from compat.resiliency import Abort"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "pip install '.[resiliency]' in a checkout" in done.stderr


@pytest.mark.parametrize(
    ("setting", "has_gpu", "warnings"), [("1", True, 1), ("0", True, 0), ("1", False, 0)]
)
@on_ranks(1, backend="")
def test_a_watchdog_that_may_end_the_process_is_warned_of_where_there_is_a_gpu(
    rank, setting, has_gpu, warnings
):
    sys.path.append(str(FOLDER))
    from compat.resiliency import Abort

    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = setting
    torch.cuda.is_available = lambda: has_gpu
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        Abort()
    texts = [str(warning.message) for warning in caught]
    assert sum("NCCL's watchdog ends a process" in text for text in texts) == warnings
