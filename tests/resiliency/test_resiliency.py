"""nvidia-resiliency-ext over gloo with our Abort, Initialize and WholeReplicas.

``scripts/fetch_resiliency`` puts it into .cache/resiliency, outside the environment: megatron-core
0.17 and later cannot be imported beside it. Only processes of the tests add that folder to their
path; ``PYTHONPATH=.cache/resiliency python script.py`` does the same for a program of your own.
"""

import dataclasses
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

from compat.resiliency import survivors
from hypergrid import RankLayout
from hypergrid.errors import AgreementError
from tests.support import ROOT
from tests.support.forked import from_all, on_ranks

FOLDER = ROOT / ".cache" / "resiliency"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="nvidia-resiliency-ext is missing: run scripts/fetch_resiliency"
)


@pytest.mark.long
def test_a_rank_that_raises_restarts_and_trains_on_to_the_bits_of_a_fresh_start():
    """tests/scripts/test_recover.py tries a killed rank, for which nine others do the same."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "scripts/recover", "--faults", "exception"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("equal")


@on_ranks(1, backend="")
def test_without_torchruns_store_and_another_the_job_ends_in_a_sentence(rank):
    sys.path.append(str(FOLDER))
    from nvidia_resiliency_ext.inprocess.exception import RestartAbort
    from nvidia_resiliency_ext.inprocess.state import State

    from compat.resiliency import Initialize

    with pytest.raises(RestartAbort, match="Initialize has no store") as caught:
        Initialize(backend="gloo")(State(rank=0, world_size=1).freeze())
    assert "Start the job with torchrun, or pass Initialize(store)" in str(caught.value)


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


@on_ranks(1, backend="")  # in a process of its own: the tests' never has NVRx
def test_after_losses_all_processes_compute_the_same_ranks_of_whole_replicas(rank):
    sys.path.append(str(FOLDER))
    whole = assigned([])
    active = [process for process, (mode, _) in enumerate(whole) if mode == "ACTIVE"]
    assert active == [0, 1, 2, 3, 5, 6, 7, 8]
    assert sorted(whole[process][1] for process in active) == [*range(8)]
    # A spare process of the same host fills the hole.
    without_2 = assigned([{2}])
    assert without_2[2][0] == "RankDiscarded"
    assert without_2[3:5] == [("ACTIVE", 2), ("ACTIVE", 3)]
    # A later loss names a rank of the iteration before: 8 is then the one spare, process 9.
    without_spare = assigned([{2}, {8}])
    assert without_spare[9][0] == "RankDiscarded"
    one_replica = [mode for mode, _ in assigned([{0, 1, 2}])]
    assert one_replica.count("ACTIVE") == 4
    refusals = [text for mode, text in assigned([{*range(7)}]) if mode == "RestartAbort"]
    assert len(refusals) == 3
    assert all("not one whole replica is left" in text for text in refusals)


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


@on_ranks(2, backend="")
def test_a_rank_that_has_failed_before_the_meeting_is_named_and_torch_does_not_wait(rank):
    if rank == 0:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        start = time.monotonic()
        with pytest.raises(AgreementError, match=r"1 of 2 ranks \(1\) did not begin this life"):
            survivors.meet_survivors(store, range(2), 0, timedelta(seconds=1))
        assert time.monotonic() - start < 10
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
