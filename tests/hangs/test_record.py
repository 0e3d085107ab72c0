"""The files of `record`, and when it writes them: even while the main thread is in a collective."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import hypergrid
from compat import parallel_state as ps
from compat.cli.asking import ask
from hypergrid import AgreementError, HyperCommGrid, of_torch
from hypergrid.groups import pool
from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.support import ROOT, recorded
from tests.support.forked import on_ranks


@pytest.fixture(autouse=True)
def rank_0(monkeypatch):
    """This process is rank 0 of a world that is not started; forked ranks are what they are."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.fixture
def recorder(tmp_path):
    recorder = hypergrid.record(tmp_path)
    yield recorder
    recorder.close()


def stack_of(directory, rank=0):
    return json.loads((directory / f"stack_{rank}.json").read_text())


def functions(directory, rank=0):
    """The functions that the rank's main thread was in, the innermost first."""
    return [function for *_, function in stack_of(directory, rank)["threads"][0]["frames"]]


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


ASKED = "asked in the directory"


def wait_for_writing(directory, rank=0, reason=ASKED):
    """Wait until the rank has written for this reason."""
    path = directory / f"stack_{rank}.json"
    wait_for(lambda: path.exists() and stack_of(directory, rank)["reason"] == reason)


# Directories that other users can change.


def test_links_in_a_shared_directory_are_replaced_and_never_followed(tmp_path, monkeypatch):
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
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match=r"every user may replace the files in .*chmod \+t"):
        hypergrid.record(shared)


# When it writes.


@on_ranks(2)
def test_a_request_has_all_written_while_the_main_thread_sits_in_a_collective(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)
    HyperCommGrid([2], ["tp"]).create_pg("tp", group_desc="TP")
    if rank == 1:
        groups = tmp_path / "groups_0.json"
        wait_for(lambda: groups.exists() and "TP" in groups.read_text())
        time.sleep(0.5)
        (tmp_path / "asked").touch()
        wait_for_writing(tmp_path)
        content = stack_of(tmp_path)
        assert content["error"] is None and content["threads"][0]["main"]
        assert "hypergrid-record" in [thread["name"] for thread in content["threads"]]
        assert {"all_reduce", "run_ranks"} <= {*functions(tmp_path)}
        last = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"][-1]
        assert last["profiling_name"] == "gloo:all_reduce" and not last["retired"]
        assert last["input_sizes"] == [[3]]
        assert not [*tmp_path.glob("*_0.*.part")]  # this rank may still write its own
    dist.all_reduce(torch.ones(3))
    recorder.close()


@on_ranks(2)
def test_ranks_that_do_not_agree_write_what_they_were_told(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)
    with pytest.raises(AgreementError):
        ps.initialize_model_parallel(tensor_model_parallel_size=1 + rank)
    recorder.close()
    content = stack_of(tmp_path, rank)
    assert content["reason"] == "AgreementError"
    assert "asked for different groups" in content["error"]
    assert "initialize_model_parallel" in functions(tmp_path, rank)


@on_ranks(2)
def test_a_rank_too_long_in_a_collective_writes_and_so_do_the_others(rank, tmp_path):
    recorder = hypergrid.record(tmp_path, after=1)
    if rank == 1:
        wait_for_writing(tmp_path, 0, "timeout: in a call for more than 1 s")
        wait_for_writing(tmp_path, 1)
        first = stack_of(tmp_path)["written_ns"]
        time.sleep(2)
        assert stack_of(tmp_path)["written_ns"] == first, "it writes once for one call"
    dist.barrier()
    recorder.close()


@on_ranks(2)
def test_groups_are_written_again_when_states_change(rank, tmp_path):
    def descriptions():
        groups = json.loads((tmp_path / f"groups_{rank}.json").read_text())["groups"]
        return {group["description"] for group in groups}

    recorder = hypergrid.record(tmp_path)
    assert descriptions() == {"default_pg"}
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    wait_for(lambda: "TENSOR_MODEL_PARALLEL_GROUP" in descriptions())
    ps.destroy_model_parallel()
    wait_for(lambda: descriptions() == {"default_pg"})
    recorder.close()


# Sends and receives.


def patched_methods():
    return [vars(ProcessGroup)["send"], vars(ProcessGroup)["recv"]]


@on_ranks(2)
def test_point_to_point_operations_are_recorded_on_request(rank, tmp_path):
    originals = patched_methods()
    recorder = hypergrid.record(tmp_path, p2p=True)
    tensor = torch.ones(2, 3)
    dist.broadcast(tensor, 0)
    if rank == 0:
        dist.group.WORLD.send(tensors=[tensor], dstRank=1, tag=0).wait()
    else:
        dist.group.WORLD.recv(tensors=[tensor], srcRank=0, tag=0).wait()
    start = (dist.isend, dist.irecv)[rank]
    work = start(tensor.long(), 1 - rank)
    recorder.write("test")
    first, second = stack_of(tmp_path, rank)["p2p"]
    assert first["profiling_name"] == ("gloo:send 0->1", "gloo:recv 1<-0")[rank]
    assert (first["input_sizes"], first["input_dtypes"]) == ([[2, 3]], ["float32"])
    assert first["process_group"] == ["0", "default_pg"]
    assert (first["retired"], first["p2p_seq_id"]) == (True, 1)
    assert (second["retired"], second["p2p_seq_id"]) == (False, 2)
    trace = pickle.loads((tmp_path / f"trace_{rank}").read_bytes())
    assert first.keys() >= trace["entries"][-1].keys() - {"thread_id", "thread_name"}
    work.wait()
    for _ in range(2100):
        start(tensor, 1 - rank).wait()
    recorder.write("test")
    entries = stack_of(tmp_path, rank)["p2p"]
    assert len(entries) == 2000 and all(entry["retired"] for entry in entries)
    recorder.close()
    assert patched_methods() == originals
    start(tensor, 1 - rank).wait()
    dist.barrier()


def test_what_one_of_two_recorders_lost_is_lost_in_the_file_of_both(
    recorder, tmp_path, monkeypatch
):
    """NCCL's has lost its first calls, and an earlier one of another backend is the first left."""
    groups = {"0": ("default_pg", [0, 1])}
    rank = recorded.Rank(0, groups, "gloo").call("0")
    others = recorded.Rank(0, groups)
    for _ in range(5):
        others.call("0", after=10)
    del others.entries[:3]
    dumps = [pickle.dumps(others.dump()), pickle.dumps(rank.dump())]
    monkeypatch.setattr(of_torch, "recorded", lambda stacks: dumps)
    recorder.write("test")
    recording = read(tmp_path).ranks[0]
    assert len(recording.calls) == 3
    assert not recording.whole


def test_the_main_thread_is_written_where_there_are_more_threads_than_are_kept(recorder, tmp_path):
    end = threading.Event()
    others = [threading.Thread(target=end.wait) for _ in range(110)]
    for thread in others:
        thread.start()
    recorder.write("test")
    end.set()
    for thread in others:
        thread.join()
    assert read(tmp_path).ranks[0].stack


# How a script ends.


def run_script(directory, end, status):
    """Record a script that ends so; what it prints to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", f"import hypergrid\nhypergrid.record({str(directory)!r})\n{end}"],
        env={**os.environ, "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    return done.stderr


def test_an_uncaught_exception_is_written_and_printed_as_ever(tmp_path):
    end = 'def deep(): raise ValueError("a wrong token")\ndeep()'
    assert run_script(tmp_path, end, status=1).endswith("ValueError: a wrong token\n")
    content = stack_of(tmp_path)
    assert (content["reason"], content["error"]) == ("exception", "ValueError: a wrong token")
    assert functions(tmp_path) == ["deep", "<module>"]


ENDS_WELL = """
import sys, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
sys.exit(0)
"""


def test_a_script_that_ends_without_an_error_leaves_a_mark(tmp_path):
    run_script(tmp_path, ENDS_WELL, status=0)
    assert stack_of(tmp_path)["reason"] == "ended"
    diagnosis = diagnose(read(tmp_path))
    assert diagnosis.ok and "ended, none by an exception" in diagnosis.sentence


@on_ranks(2)
def test_what_an_abort_freed_does_not_read_as_if_another_rank_had_crashed(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)
    group = HyperCommGrid([2], ["tp"]).create_pg("tp")
    dist.barrier()
    if rank == 0:
        threading.Timer(1, hypergrid.abort).start()
        # A ValueError where torch's logger of errors asks for the group when it is gone already.
        with pytest.raises((RuntimeError, ValueError)) as freed:
            dist.all_reduce(torch.ones(1), group=group)
        recorder.write("exception", freed.value)
        error = stack_of(tmp_path)["error"]
        assert "Error after hypergrid.abort() freed this rank: " in error
    dist.barrier()
    recorder.close()


# Recordings of other times.


def test_files_of_an_earlier_run_are_moved_and_not_lost(tmp_path):
    for name in ("trace_0", "trace_1", "stack_0.json"):
        (tmp_path / name).write_text("earlier")
    hypergrid.record(tmp_path).close()
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    moved = {"earlier/trace_0", "earlier/stack_0.json"}
    assert files == {"groups_0.json", "trace_1", *moved}


@on_ranks(1)
def test_the_first_recording_of_a_hang_is_kept_when_the_job_is_torn_down(rank, tmp_path):
    recorder = hypergrid.record(tmp_path)
    dist.barrier()
    recorder.write(ASKED)
    recorder.write("exception", RuntimeError("Connection closed by peer"))
    assert not read(tmp_path).ranks[0].error
    assert stack_of(tmp_path)["error"] is None
    dist.barrier()  # an error after more calls is another hang
    recorder.write("exception", ValueError("the batch is empty"))
    recorder.close()
    assert stack_of(tmp_path)["error"] == "ValueError: the batch is empty"


def test_a_recording_says_when_its_process_started_and_in_which_job(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    start = time.time_ns()
    recorder = hypergrid.record(tmp_path)
    recorder.write(ASKED)
    recorder.close()
    (rank,) = read(tmp_path).ranks.values()
    assert start <= rank.started <= time.time_ns() and rank.job == "run7"


# What may not end a job, and what is refused.


def test_a_forked_process_does_not_answer_for_the_rank(recorder, tmp_path):
    child = os.fork()
    if child == 0:
        recorder.write("exception", ValueError("of the child"))
        other = hypergrid.record(tmp_path / "other")
        other.write("test")
        os._exit(7 if other is not recorder else 1)
    assert os.waitpid(child, 0)[1] == 7 << 8
    assert not (tmp_path / "stack_0.json").exists()
    assert (tmp_path / "other" / "stack_0.json").exists()


def test_a_directory_that_is_lost_ends_no_job(recorder, tmp_path):
    shutil.rmtree(tmp_path)
    with pytest.warns(RuntimeWarning, match="No such file"):
        recorder.write("test")
    tmp_path.mkdir()
    recorder.write("test")
    wait_for_writing(tmp_path, reason="test")


def test_a_write_that_fails_names_the_directory_once_and_leaves_no_part(recorder, tmp_path):
    (tmp_path / "trace_0").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder.write("test")
        recorder.write("test")
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"hypergrid.record to {tmp_path}: IsADirectoryError: [Errno 21]")
    assert not [*tmp_path.glob("*.part")]


def test_a_directory_that_cannot_be_written_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    def process_state():
        hooks = (sys.excepthook, {*pool.after_failure})
        return (*hooks, patched_methods(), len(os.listdir("/proc/self/fd")), dict(os.environ))

    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    (tmp_path / "groups_0.json").touch()
    (tmp_path / "earlier").touch()
    before = process_state()
    with pytest.raises(FileExistsError, match="earlier"):
        hypergrid.record(tmp_path, p2p=True)
    assert process_state() == before


def test_arguments_come_from_the_environment_and_are_checked(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="needs a directory"):
        hypergrid.record()
    directory = tmp_path / "new"
    monkeypatch.setenv("HYPERGRID_RECORD", str(directory))
    for wrong in (0, -1, float("nan"), float("inf"), "soon"):
        with pytest.raises(ValueError, match=f"invalid value for after: '?{wrong}"):
            hypergrid.record(after=wrong)
    monkeypatch.setenv("HYPERGRID_RECORD_AFTER", "soon")
    with pytest.raises(ValueError, match=r"invalid value for HYPERGRID_RECORD_AFTER.*soon"):
        hypergrid.record()
    monkeypatch.setenv("HYPERGRID_RECORD_AFTER", "30")
    monkeypatch.setenv("HYPERGRID_RECORD_P2P", "1")
    recorder = hypergrid.record()
    assert recorder.settings == (directory.resolve(), 30.0, True)
    assert hypergrid.record(directory) is recorder
    with pytest.raises(ValueError, match=r"already records to .*/new"):
        hypergrid.record(tmp_path)
    recorder.close()
    recorder.close()


# Asked from outside.


SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2)) if dist.get_rank() == 0 else time.sleep(100)
"""


def test_a_launcher_s_ranks_are_asked_from_outside(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    directory = tmp_path / "recorded"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    job = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "compat.launch", "script.py"],
        env={**os.environ, "HYPERGRID_RECORD": "recorded", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        start_new_session=True,
    )
    groups = [directory / f"groups_{rank}.json" for rank in range(2)]
    try:
        for path in groups:
            wait_for(lambda path=path: path.exists() and "default_pg" in path.read_text(), 120)
        assert ask(directory) == []
        for rank in range(2):
            assert stack_of(directory, rank)["reason"] == ASKED
        os.kill(json.loads(groups[1].read_text())["pid"], signal.SIGSTOP)
        assert ask(directory, 12) == [1]
    finally:
        for path in groups:  # torchrun gives each rank a session of its own
            if path.exists():
                os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@on_ranks(1)
def test_torchs_recorder_is_asked_only_where_a_rank_communicates_no_more(rank, tmp_path):
    recorder = hypergrid.record(tmp_path, after=2)
    with mock.patch.object(of_torch, "recorded_calls", wraps=of_torch.recorded_calls) as dumps:
        for _ in range(40):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.1)
        assert not dumps.called
        wait_for(lambda: dumps.called)
        assert not (tmp_path / "stack_0.json").exists()
    recorder.close()
