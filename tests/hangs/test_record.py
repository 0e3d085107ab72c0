"""The files of `record`, and when it writes them: even while the main thread is in a collective."""

import asyncio
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

import hypergrid
from compat import parallel_state as ps
from compat.cli.asking import ask
from hypergrid import AgreementError, HyperCommGrid
from hypergrid.groups import pool
from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.support import ROOT
from tests.support.forked import on_ranks


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """Of this process, as rank 0 of a world that is not started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    opened = hypergrid.record(tmp_path)
    yield opened
    opened.close()


def test_links_in_a_shared_directory_are_replaced_and_never_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    elsewhere = tmp_path / "elsewhere"
    shared = tmp_path / "shared"
    elsewhere.mkdir()
    shared.mkdir()
    victim = elsewhere / "groups_0.json"
    victim.write_text("mine")
    for name in "groups_0.json", "trace_0", "stack_0.json", "asked", "groups_0.json.guessed.part":
        (shared / name).symlink_to(victim)
    with monkeypatch.context() as guess:
        guess.setattr("secrets.token_hex", lambda *_: "guessed")
        with pytest.raises(FileExistsError, match="guessed"):
            hypergrid.record(shared)
    recorder = hypergrid.record(shared)
    recorder.write("test")
    recorder.close()
    (shared / "earlier").rename(shared / "before")
    (shared / "earlier").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="earlier is a link"):
        hypergrid.record(shared)
    assert victim.read_text() == "mine" and [*elsewhere.iterdir()] == [victim]


def test_a_directory_where_every_user_may_replace_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"every user may replace the files in .*chmod \+t"):
        hypergrid.record(tmp_path)
    tmp_path.chmod(0o1777)
    hypergrid.record(tmp_path).close()


def stacks(directory, rank=0):
    return json.loads((directory / f"stack_{rank}.json").read_text())


def functions(directory, rank=0):
    """The functions that the rank's main thread was in, the innermost first."""
    return [function for *_, function in stacks(directory, rank)["threads"][0]["frames"]]


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def has_written(directory, rank=0, reason=None):
    """Whether the rank has written, for this reason."""
    try:
        return reason in (None, stacks(directory, rank)["reason"])
    except FileNotFoundError:
        return False


@on_ranks(2)
def test_a_signal_has_all_written_while_the_main_thread_sits_in_a_collective(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)
    HyperCommGrid([2], ["tp"]).create_pg("tp", group_desc="TP")
    if rank == 1:
        groups = tmp_path / "groups_0.json"
        wait_for(lambda: groups.exists() and "TP" in groups.read_text())
        time.sleep(0.5)
        os.kill(json.loads(groups.read_text())["pid"], signal.SIGUSR1)
        wait_for(lambda: has_written(tmp_path))
    dist.all_reduce(torch.ones(3))
    recorder.close()
    if rank == 1:
        content = stacks(tmp_path)
        assert content["reason"] == "SIGUSR1" and content["error"] is None
        assert content["threads"][0]["main"]
        assert "hypergrid-record" in [thread["name"] for thread in content["threads"]]
        assert {"all_reduce", "run_ranks"} <= {*functions(tmp_path)}
        last = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"][-1]
        assert last["profiling_name"] == "gloo:all_reduce" and not last["retired"]
        assert last["input_sizes"] == [[3]]
        assert not [*tmp_path.glob("*.part")]


def test_the_stack_is_that_of_the_script_even_in_the_middle_of_the_signals_handler(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("RANK", "0")

    def handler(*_):
        wait_for(lambda: has_written(tmp_path, reason="SIGUSR1"))

    before = signal.signal(signal.SIGUSR1, handler)
    recorder = hypergrid.record(tmp_path)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: has_written(tmp_path, reason="SIGUSR1"))
    finally:
        recorder.close()
        signal.signal(signal.SIGUSR1, before)
    assert functions(tmp_path) and "_on_signal" not in functions(tmp_path)


def test_handlers_and_descriptors_that_were_there_hear_of_every_signal(tmp_path, monkeypatch):
    heard = []
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    monkeypatch.setenv("RANK", "0")
    before = [
        signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1")),
        signal.signal(signal.SIGUSR2, lambda *_: heard.append("USR2")),
    ]
    descriptor = signal.set_wakeup_fd(ours.fileno())
    try:
        handler = signal.getsignal(signal.SIGUSR1)
        hypergrid.record(tmp_path)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        wait_for(lambda: has_written(tmp_path, 0, "SIGUSR1"))
        assert heard == ["USR1", "USR2"]
        assert theirs.recv(2, socket.MSG_WAITALL) == bytes([signal.SIGUSR1, signal.SIGUSR2])
        hypergrid.record(tmp_path).close()
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.set_wakeup_fd(ours.fileno()) == ours.fileno()
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, old in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, old)
        theirs.close()
        ours.close()


def test_a_signal_is_heard_after_asyncio_has_taken_the_descriptor(recorder, tmp_path):
    async def job():
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, heard.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(heard.wait(), 20)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR2)

    asyncio.run(job())
    wait_for(lambda: has_written(tmp_path, 0, "SIGUSR1"))


def test_a_blocking_call_is_not_interrupted(recorder, tmp_path):
    reader, writer = os.pipe()

    def later():
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: has_written(tmp_path, 0, "SIGUSR1"))
        os.write(writer, b"x")

    threading.Thread(target=later).start()
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)


@on_ranks(2)
def test_ranks_that_do_not_agree_write_what_they_were_told(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)
    with pytest.raises(AgreementError):
        ps.initialize_model_parallel(tensor_model_parallel_size=1 + rank)
    recorder.close()
    content = stacks(tmp_path, rank)
    assert content["reason"] == "AgreementError"
    assert "asked for different groups" in content["error"]
    assert "initialize_model_parallel" in functions(tmp_path, rank)


@on_ranks(2)
def test_a_rank_too_long_in_a_collective_writes_and_so_do_the_others(rank, tmp_path):
    recorder = hypergrid.record(tmp_path, after=1)
    if rank == 1:
        wait_for(lambda: has_written(tmp_path, 0) and has_written(tmp_path, 1))
        assert stacks(tmp_path, 0)["reason"] == "timeout: in a call for more than 1 s"
        assert stacks(tmp_path, 1)["reason"] == "asked in the directory"
        first = stacks(tmp_path, 0)["written_ns"]
        time.sleep(2)
        assert stacks(tmp_path, 0)["written_ns"] == first, "it writes once for one call"
    dist.barrier()
    recorder.close()


@on_ranks(2)
def test_groups_are_written_again_when_states_change(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)

    def descriptions():
        groups = json.loads((tmp_path / f"groups_{rank}.json").read_text())["groups"]
        return {group["description"] for group in groups}

    assert descriptions() == {"default_pg"}
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    wait_for(lambda: "TENSOR_MODEL_PARALLEL_GROUP" in descriptions())
    ps.destroy_model_parallel()
    wait_for(lambda: descriptions() == {"default_pg"})
    recorder.close()


def patched_methods():
    return [vars(ProcessGroup)["send"], vars(ProcessGroup)["recv"], vars(Work)["wait"]]


@on_ranks(2)
def test_point_to_point_operations_are_recorded_on_request(rank, tmp_path):
    originals = patched_methods()
    recorder = hypergrid.record(tmp_path, p2p=True)
    tensor = torch.ones(2, 3)
    dist.broadcast(tensor, 0)
    start, other_start = (dist.isend, dist.irecv) if rank == 0 else (dist.irecv, dist.isend)
    start(tensor, 1 - rank).wait()
    work = start(tensor.long(), 1 - rank)
    recorder.write("test")
    dist.barrier()
    work.wait()
    assert all(entry["retired"] for entry in recorder._p2p.entries()), "the handle still lives"
    first, second = stacks(tmp_path, rank)["p2p"]
    assert first["profiling_name"] == ("gloo:send 0->1", "gloo:recv 1<-0")[rank]
    assert (first["input_sizes"], first["input_dtypes"]) == ([[2, 3]], ["float32"])
    assert first["process_group"] == ["0", "default_pg"]
    assert (first["retired"], first["p2p_seq_id"]) == (True, 1)
    assert (second["retired"], second["p2p_seq_id"]) == (False, 2)
    trace = pickle.loads((tmp_path / f"trace_{rank}").read_bytes())
    assert first.keys() >= trace["entries"][-1].keys() - {"thread_id", "thread_name"}
    for _ in range(1100):
        start(tensor, 1 - rank).wait()
        other_start(tensor, 1 - rank).wait()
    recorder.write("test")
    assert len(stacks(tmp_path, rank)["p2p"]) == 2000
    recorder.close()
    for method, original in zip(patched_methods(), originals, strict=True):
        assert method is original
    start(tensor, 1 - rank).wait()
    dist.barrier()


@on_ranks(2)
def test_sends_by_torch_s_names_of_arguments_are_recorded_and_a_group_without_a_name_works(
    rank, tmp_path
):
    recorder = hypergrid.record(tmp_path, p2p=True)
    tensors = [torch.ones(2, 3)]
    unnamed = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(RuntimeError, match="No backend type"):
        unnamed.send(tensors, 0, 0)
    if rank == 0:
        dist.group.WORLD.send(tensors=tensors, dstRank=1, tag=0).wait()
    else:
        dist.group.WORLD.recv(tensors=tensors, srcRank=0, tag=0).wait()
    (entry,) = recorder._p2p.entries()
    assert entry["profiling_name"] == ("gloo:send 0->1", "gloo:recv 1<-0")[rank]
    dist.barrier()
    recorder.close()


SCRIPT = """
import os, sys, hypergrid
recorder = hypergrid.record({directory!r})
def deep(): raise ValueError("a wrong token")
deep()
"""


def test_an_uncaught_exception_is_written_and_printed_as_ever(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(directory=str(tmp_path))],
        env={**os.environ, "RANK": "3", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stderr.endswith("ValueError: a wrong token\n")
    content = stacks(tmp_path, 3)
    assert (content["reason"], content["error"]) == ("exception", "ValueError: a wrong token")
    assert functions(tmp_path, 3) == ["deep", "<module>"]


@on_ranks(2)
def test_what_an_abort_freed_does_not_read_as_if_another_rank_had_crashed(rank, tmp_path):
    recorder, grid = hypergrid.record(tmp_path), HyperCommGrid([2], ["tp"])
    group = grid.create_pg("tp")
    dist.barrier()
    if rank == 0:
        threading.Timer(1, hypergrid.abort).start()
        # The other where torch's logger of errors asks for the group when it is gone already.
        with pytest.raises((RuntimeError, ValueError)) as freed:
            dist.all_reduce(torch.ones(1), group=group)
        recorder.write("exception", freed.value)
        assert "Error after hypergrid.abort() freed this rank: " in stacks(tmp_path, 0)["error"]
    dist.barrier()
    recorder.close()


def test_a_script_that_ends_without_an_error_leaves_a_mark(tmp_path):
    script = SCRIPT.format(directory=str(tmp_path)).removesuffix("deep()\n") + (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\nsys.exit(0)"
    )
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, timeout=120, check=True)
    assert stacks(tmp_path, 0)["reason"] == "ended"
    found = diagnose(read(tmp_path))
    assert found.ok and "ended, none by an exception" in found.sentence


def test_files_of_an_earlier_run_are_moved_and_not_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "later").mkdir()
    for name in ("trace_0", "trace_1", "stack_0.json", "later/stack_0.json"):
        (tmp_path / name).write_text("earlier")
    hypergrid.record(tmp_path).close()
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    moved = {"earlier/trace_0", "earlier/stack_0.json", "earlier/later/stack_0.json"}
    assert files == {"groups_0.json", "trace_1", *moved}


def test_the_first_recording_of_a_hang_is_kept_when_the_job_is_torn_down(recorder, tmp_path):
    recorder.write("SIGUSR1")
    recorder.write("exception", RuntimeError("Connection closed by peer"))
    assert stacks(tmp_path, 0)["reason"] == "SIGUSR1"
    assert stacks(tmp_path / "later", 0)["error"] == "RuntimeError: Connection closed by peer"
    assert (tmp_path / "later" / "trace_0").exists()
    assert not read(tmp_path).ranks[0].error


@on_ranks(1)
def test_an_error_after_more_calls_is_another_hang(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)
    dist.barrier()
    recorder.write("SIGUSR1")
    dist.barrier()
    recorder.write("exception", ValueError("the batch is empty"))
    recorder.close()
    assert stacks(tmp_path, 0)["error"] == "ValueError: the batch is empty"
    assert not (tmp_path / "later").exists()


def test_a_recording_says_when_its_process_started_and_in_which_job(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    begun = time.time_ns()
    recorder = hypergrid.record(tmp_path)
    recorder.write("SIGUSR1")
    recorder.close()
    (rank,) = read(tmp_path).ranks.values()
    assert begun <= rank.started <= time.time_ns() and rank.job == "run7"


def test_a_forked_process_does_not_answer_for_the_rank(recorder, tmp_path):
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)  # ignored: it ends no worker of a data loader
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8
    time.sleep(0.5)
    assert not has_written(tmp_path, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(lambda: has_written(tmp_path, 0, "SIGUSR1"))


def warnings_of_write(recorder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder.write("test")
    return [str(warning.message) for warning in caught]


def test_a_directory_that_is_lost_ends_no_job(recorder, tmp_path):
    shutil.rmtree(tmp_path)
    assert "No such file" in warnings_of_write(recorder)[0]
    tmp_path.mkdir()
    recorder.write("test")
    assert has_written(tmp_path, reason="test")


def test_a_write_that_fails_names_the_directory_once_and_leaves_no_part(recorder, tmp_path):
    (tmp_path / "trace_0").mkdir()
    (message,) = warnings_of_write(recorder)
    assert message.startswith(f"hypergrid.record to {tmp_path}: IsADirectoryError: [Errno 21]")
    assert not [*tmp_path.glob("*.part")]


def test_a_directory_that_cannot_be_written_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    def process_state():
        hooks = (signal.getsignal(signal.SIGUSR1), sys.excepthook, {*pool.after_failure})
        return (*hooks, patched_methods(), len(os.listdir("/proc/self/fd")))

    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    (tmp_path / "groups_0.json").touch()
    (tmp_path / "earlier").touch()
    before = process_state()
    with pytest.raises(FileExistsError, match="earlier"):
        hypergrid.record(tmp_path, p2p=True)
    assert process_state() == before
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ


def test_arguments_come_from_the_environment_and_are_checked(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="needs a directory"):
        hypergrid.record()
    monkeypatch.setenv("HYPERGRID_RECORD", str(tmp_path / "new"))
    for wrong in (0, -1, float("nan"), float("inf"), "soon"):
        with pytest.raises(ValueError, match=f"invalid value for after: '?{wrong}"):
            hypergrid.record(after=wrong)
        monkeypatch.setenv("HYPERGRID_RECORD_AFTER", str(wrong))
        with pytest.raises(ValueError, match=f"invalid value for HYPERGRID_RECORD_AFTER.*{wrong}"):
            hypergrid.record()
    monkeypatch.setenv("HYPERGRID_RECORD_AFTER", "30")
    monkeypatch.setenv("HYPERGRID_RECORD_P2P", "1")
    recorder = hypergrid.record()
    assert recorder.settings == ((tmp_path / "new").resolve(), 30.0, True)
    assert hypergrid.record(tmp_path / "new") is recorder
    with pytest.raises(ValueError, match=r"already records to .*/new"):
        hypergrid.record(tmp_path)
    recorder.close()
    recorder.close()


def test_it_is_opened_in_the_main_thread(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        opened = executor.submit(hypergrid.record, tmp_path)
    with pytest.raises(ValueError, match="main thread"):
        opened.result()


RANK = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2)) if dist.get_rank() == 0 else time.sleep(100)
"""


def test_a_launcher_s_ranks_are_asked_from_outside(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANK)
    directory = tmp_path / "left"
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    job = subprocess.Popen(
        [sys.executable, *command, "-m", "compat.launch", str(script)],
        env={**os.environ, "HYPERGRID_RECORD": "left", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        start_new_session=True,
    )
    groups = [directory / f"groups_{rank}.json" for rank in range(2)]
    try:
        wait_for(
            lambda: all(each.exists() and "default_pg" in each.read_text() for each in groups), 120
        )
        assert ask(directory) == []
        reasons = [stacks(directory, rank)["reason"] for rank in (0, 1)]
        assert reasons == ["asked in the directory"] * 2
        os.kill(json.loads(groups[1].read_text())["pid"], signal.SIGSTOP)
        assert ask(directory, 12) == [1]
    finally:
        for each in groups:  # torchrun gives each rank a session of its own
            if each.exists():
                os.kill(json.loads(each.read_text())["pid"], signal.SIGKILL)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@on_ranks(1)
def test_looking_whether_it_is_stuck_costs_little_and_asks_no_recorder_of_torchs(rank, tmp_path):
    dumps = []
    names = [n for n in dir(torch._C._distributed_c10d) if n.startswith("_dump_")]
    ps.initialize_model_parallel()
    with ExitStack() as patches:
        for name in names:
            own = getattr(torch._C._distributed_c10d, name)
            spy = lambda *given, own=own: dumps.append(1) or own(*given)  # noqa: E731
            patches.enter_context(mock.patch.object(torch._C._distributed_c10d, name, spy))
        recorder = hypergrid.record(tmp_path, after=2)
        clock = time.pthread_getcpuclockid(recorder.thread.ident)
        for _ in range(2000):
            dist.all_reduce(torch.ones(1))
        start, used = time.monotonic(), time.clock_gettime(clock)
        while time.monotonic() - start < 4:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.1)
        assert not dumps, "it communicates"
        assert time.clock_gettime(clock) - used < 0.04
        wait_for(lambda: dumps)  # it does not: whether it is stuck, the recorder knows
        assert not has_written(tmp_path, 0)
        heavy = "torch._inductor.codecache"
        had = sys.modules.pop(heavy, None)  # of another test in the process that was forked
        recorder.write("asked")
        assert heavy not in sys.modules
        sys.modules.update({heavy: had} if had else {})
        recorder.close()
