"""Under torchrun: Ctrl-C ends every process, and ranks without their agent say what is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT

WORLD = 4
TIMEOUT = 6  # seconds: that of the groups
RANK = f"""
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from compat import parallel_state as ps

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()

def write(name, value):
    (folder / "part.{{}}".format(rank)).write_text(json.dumps(value))
    (folder / "part.{{}}".format(rank)).rename(folder / "{{}}.{{}}".format(name, rank))

try:
    while True:
        ps.initialize_model_parallel(2, distributed_timeout_minutes={TIMEOUT} / 60)
        ps.destroy_model_parallel()
        write("process", os.getpid())
except BaseException as error:
    write("outcome", [type(error).__name__, str(error)])
    raise
"""


def has_ended(process):
    try:
        with open(f"/proc/{process}/stat") as status:
            state = status.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def seconds_until(condition, most):
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > most:
            return None
        time.sleep(0.05)
    return time.monotonic() - start


@pytest.fixture
def job(tmp_path):
    """A torchrun whose ranks initialise and destroy in a loop, and the processes of its ranks."""
    script = tmp_path / "script.py"
    script.write_text(RANK)
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={WORLD}", "--standalone"]
    with open(tmp_path / "log", "wb") as log:
        agent = subprocess.Popen(
            [sys.executable, *command, str(script), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    files = [tmp_path / f"process.{rank}" for rank in range(WORLD)]
    try:
        running = seconds_until(lambda: all(file.exists() for file in files), 120)
        assert running is not None, (tmp_path / "log").read_text()
        yield agent, [json.loads(file.read_text()) for file in files]
    finally:
        # Each rank has a session of its own.
        for file in files:
            if file.exists() and not has_ended(process := json.loads(file.read_text())):
                os.kill(process, signal.SIGKILL)
        agent.kill()
        agent.wait()


def test_ctrl_c_ends_torchrun_and_every_rank(job):
    agent, processes = job
    time.sleep(0.3)  # inside an initialisation
    agent.send_signal(signal.SIGINT)
    assert agent.wait(15) != 0
    assert all(has_ended(process) for process in processes)


def test_ranks_whose_agent_is_killed_end_in_time_and_say_that_the_store_is_lost(job, tmp_path):
    agent, processes = job
    agent.kill()
    ended = seconds_until(lambda: all(map(has_ended, processes)), TIMEOUT + 10)
    log = (tmp_path / "log").read_text()
    assert ended is not None, log
    for rank in range(WORLD):
        kind, text = json.loads((tmp_path / f"outcome.{rank}").read_text())
        assert kind in ("AgreementError", "CreationError"), text
        assert re.search("lost the store through|The store through which .* is lost", text), text
