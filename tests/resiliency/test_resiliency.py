"""nvidia-resiliency-ext over gloo with our Abort, Initialize and WholeReplicas.

``scripts/fetch_resiliency`` puts it into .cache/resiliency, outside the environment: megatron-core
0.17 and later cannot be imported beside it. Only processes of the tests add that folder to their
path; ``PYTHONPATH=.cache/resiliency python script.py`` does the same for a program of your own.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hypergrid import RankLayout
from hypergrid.agreement import survivors
from hypergrid.errors import AgreementError
from tests.support import ROOT
from tests.support.counting import CountingStore
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
    said = [
        json.loads(line)
        for file in tmp_path.glob("out.*")
        for line in file.read_text().splitlines()
        if line.startswith("{")
    ]
    first = [each for each in said if each.get("iteration") == 0]
    again = [each for each in said if each.get("iteration") == 1]
    assert [each["total"] for each in first] == [3.0] * 3
    assert {each["world"] for each in again} == worlds and len(again) == ended
    assert {each["total"] for each in again} == set(map(float, worlds))
    assert sum("ended" in each for each in said) == ended
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


def importing(body):
    """Make NVRx importable in forked ranks, never in the tests' own process."""

    def run(rank, *given):
        sys.path.append(str(FOLDER))
        return body(rank, *given)

    return run


@pytest.fixture
def assignments():
    """The rank that each process gets after losses, through the NVRx class."""

    def assign(layout, losses, hosts=("a",) * 5 + ("b",) * 5):
        def body(rank):
            from nvidia_resiliency_ext.inprocess.rank_assignment import RankAssignmentCtx
            from nvidia_resiliency_ext.inprocess.state import State

            from compat.resiliency import WholeReplicas

            class Store(dict):
                def wait(self, keys, timeout):
                    assert {*keys} <= {*self}

                def set(self, key, value):
                    self[key] = value.encode()

                def multi_get(self, keys):
                    return [self[key] for key in keys]

            store, found = Store(), []
            for process, host in enumerate(hosts):
                store.set(f"hypergrid/host/{process}", host)
            for process, host in enumerate(hosts):
                socket.gethostname = lambda host=host: host
                whole = WholeReplicas(layout)
                state = State(rank=process, world_size=len(hosts))
                try:
                    for lost in ((), *losses):
                        ctx = RankAssignmentCtx(state, store, {*lost})
                        state = whole(ctx).state
                    found.append((state.mode.name, state.active_rank, state.active_world_size))
                except BaseException as error:
                    found.append((type(error).__name__, str(error)))
            return found

        (found,) = run_ranks(1, importing(body), backend="")
        return found

    return assign


LAYOUT = RankLayout(("tp", "dp", "pp"), (2, 2, 2))


def test_all_processes_compute_the_same_ranks_and_spares_of_the_host_fill_the_holes(assignments):
    found = assignments(LAYOUT, [])
    active = [p for p, each in enumerate(found) if each[0] == "ACTIVE"]
    assert active == [0, 1, 2, 3, 5, 6, 7, 8]
    assert sorted(found[p][1] for p in active) == [*range(8)]
    found = assignments(LAYOUT, [{2}])  # the third rank, which is process 2
    assert found[2][0] == "RankDiscarded" and found[4] == ("ACTIVE", 2, 8)
    assert found[9][0] == "INACTIVE"


def test_ranks_of_later_losses_are_those_of_the_iteration_before(assignments):
    found = assignments(LAYOUT, [{2}, {8}])  # rank 8 is then the one spare, process 9
    assert found[9][0] == "RankDiscarded"
    assert sum(each[0] == "ACTIVE" for each in found) == 8


def test_fewer_replicas_go_on_and_without_one_all_refuse_in_words(assignments):
    found = assignments(LAYOUT, [{0, 1, 2}])
    assert sum(each[0] == "ACTIVE" for each in found) == 4
    found = assignments(LAYOUT, [{0, 1, 2, 3, 4, 5, 6}])
    texts = {each[1] for each in found if each[0] == "RestartAbort"}
    assert len(texts) == 1 and "not one whole replica is left" in texts.pop()


def test_a_refusal_is_one_line_whatever_the_hosts_are_called(assignments):
    forged = ("a\nNobody is stuck: the job has ended.",) * 10
    found = assignments(LAYOUT, [{0, 1, 2, 3, 4, 5, 6}], forged)
    texts = {each[1] for each in found if each[0] == "RestartAbort"}
    assert len(texts) == 1 and "\n" not in texts.pop()


@on_ranks(3, backend="")
def test_initialize_brings_the_active_ranks_together_and_cleans_up_before(rank):
    sys.path.append(str(FOLDER))
    from nvidia_resiliency_ext.inprocess.state import Mode, State

    from compat import parallel_state as ps
    from compat.resiliency import Initialize

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the test's store is at MASTER_PORT
    begin = Initialize(backend="gloo", timeout=timedelta(seconds=20))
    keys = []
    for iteration in range(5):
        state = State(rank=rank, world_size=3, active_rank=rank, active_world_size=2)
        state = dataclasses.replace(state, mode=Mode.ACTIVE if rank < 2 else Mode.INACTIVE)
        state.iteration = iteration
        assert begin(state.freeze()) == state.freeze()
        assert dist.is_initialized() == (rank < 2)
        if rank < 2:
            ps.initialize_model_parallel()  # left as it is: the next iteration destroys it
        from_all(None)
        keys.append(sum(key.startswith("hypergrid") for key in begin.store.list_keys()))
        from_all(None)
    assert keys[2] == keys[3] == keys[4]


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


@pytest.mark.parametrize("world", [16, 32, 64])
def test_the_meeting_costs_each_rank_the_same_in_any_world(world):
    inner = dist.HashStore()
    stores = [CountingStore(inner) for _ in range(world)]
    import threading

    threads = [
        threading.Thread(
            target=survivors.meet_survivors,
            args=(store, range(world), rank, timedelta(seconds=30)),
        )
        for rank, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(store.trips for store in stores[:-1]) <= 5
    assert sorted(store.trips for store in stores)[: world - 1] == [3] * (world - 1)


def test_without_nvrx_the_message_names_the_extra():
    code = "import sys; sys.modules['nvidia_resiliency_ext'] = None; import compat.resiliency"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "pip install '.[resiliency]' in a checkout" in done.stderr


@pytest.mark.parametrize(
    ("value", "gpu", "warned"), [("1", True, 1), ("0", True, 0), ("1", False, 0)]
)
def test_a_watchdog_that_may_end_the_process_is_warned_of_where_there_is_a_gpu(value, gpu, warned):
    def body(rank):
        from compat.resiliency import Abort

        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = value
        torch.cuda.is_available = lambda: gpu
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Abort()
        return [str(each.message) for each in caught if "ASYNC_ERROR" in str(each.message)]

    (said,) = run_ranks(1, importing(body), backend="")
    assert len(said) == warned and all("NCCL's watchdog ends a process" in each for each in said)
