"""Real worlds on one machine: forks a process per rank from one that has torch loaded."""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
import itertools
import os
import pickle
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class RankFailure(AssertionError):
    """What went wrong on which rank: a line, and the traceback from there."""

    def __init__(self, line: str, trace: str = "") -> None:
        super().__init__(f"{line}\n{trace}" if trace else line)
        self.line = line


_STORE: dist.Store  # of this rank's world
_TURNS = itertools.count()
# What a handler of signals may add to, instead of raising: fork has hooks that swallow exceptions.
SIGNALS: list[int] = []
LATE = 1000  # the status of a rank that has not ended in time


def on_ranks(world: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on each of ``world`` forked ranks; it is called with ``rank`` first.

    Fixtures and parameters follow ``rank`` and are those of the parent. The first rank that raises
    ends the test with its traceback. ``options`` are those of :func:`run_ranks`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            run_ranks(world, lambda rank: test(rank, **fixtures), **options)

        _, *parameters = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def store() -> dist.Store:
    """The store of this rank's world; rank 0 serves it until all ranks have finished."""
    return _STORE


def from_all(value: Any) -> list[Any]:
    """Every rank's ``value``, through the store of the world; every rank calls it together."""
    turn, world = next(_TURNS), int(os.environ["WORLD_SIZE"])
    _STORE.set(f"from_all/{turn}/{os.environ['RANK']}", pickle.dumps(value))
    return [pickle.loads(_STORE.get(f"from_all/{turn}/{rank}")) for rank in range(world)]


def open_groups() -> list[dist.ProcessGroup]:
    """What torch has open, the default group first; torch itself is asked, not hypergrid."""
    return list(c10d._world.pg_map)


def total(group: dist.ProcessGroup | None = None, value: float = 1.0) -> float:
    """The sum of every rank's ``value`` over the group."""
    summand = torch.tensor(float(value))
    dist.all_reduce(summand, group=group)
    return summand.item()


def own_sockets() -> list[socket.socket]:
    """Duplicates of this process's sockets; the caller closes them."""
    duplicates = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                duplicates.append(socket.socket(fileno=os.dup(int(name))))
    return duplicates


def sockets() -> tuple[int, int]:
    """How many of this process's sockets listen, and how many are connected."""
    listening = connected = 0
    for copied in own_sockets():
        with copied:
            try:
                listening += copied.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                connected += bool(copied.getpeername())
            except OSError:
                pass
    return listening, connected


def run_ranks(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout: float = 40,
) -> list[Any]:
    """Call ``body(rank, *args)`` on each rank of a real process group; give what they return.

    The first rank that raises ends the others, and its traceback is raised here.

    With ``backend=""`` there is a store at MASTER_PORT, and no process group.

    The port is bound here and handed to rank 0, so that nobody else can take it in between.
    """
    with _listening(world) as listener, tempfile.TemporaryDirectory() as directory:
        children: dict[int, int] = {}
        try:
            for rank in range(world):
                process = os.fork()
                if process == 0:
                    _child(rank, world, body, args, backend, listener, directory, timeout)
                children[process] = rank
        except BaseException:  # an interrupt
            statuses(children, 0)
            raise
        status_of_rank = statuses(children, timeout, to_the_first=True)
        lost = [rank for rank, status in status_of_rank.items() if status]
        results: list[Any] = []
        for rank in lost or range(world):
            file = Path(directory, str(rank))
            if not file.exists():
                status = status_of_rank[rank]
                how = f"ended with status {status}" if status < LATE else "did not finish in time"
                raise RankFailure(f"rank {rank} {how}")
            kind, value = pickle.loads(file.read_bytes())
            if kind == "error":
                name, text, trace = value
                raise RankFailure(f"rank {rank}: {name}: {text}", trace)
            results.append(value)
        return results


def _listening(world: int) -> socket.socket:
    """A socket on a free port of this host, for so many ranks."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(world)
    return listener


def statuses(
    children: dict[int, int],
    seconds: float,
    to_the_first: bool = False,
    late: Callable[[int, int], object] = lambda process, rank: None,
) -> dict[int, int]:
    """Exit status of each rank of ``children``, ``LATE`` of those that do not end in time.

    ``children`` has the rank of each process id. Those that do not end are killed; with
    ``to_the_first`` as soon as one has failed, and they have no status then. ``late`` is called
    with each process that has not ended in time, and its rank, before any is killed.
    """
    status_of_rank: dict[int, int] = {}
    running = dict(children)
    deadline = time.monotonic() + seconds
    try:
        while running and time.monotonic() < deadline:
            if SIGNALS:
                raise KeyboardInterrupt
            for process in list(running):
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    status_of_rank[running.pop(process)] = os.waitstatus_to_exitcode(status)
            if to_the_first and any(status_of_rank.values()):
                return status_of_rank
            time.sleep(0.005)
        for process, rank in running.items():
            status_of_rank[rank] = LATE
            late(process, rank)
        return status_of_rank
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
        for process in running:
            os.waitpid(process, 0)


def device_of(rank: int) -> torch.device:
    """The GPU of this rank, before its process uses CUDA; ranks share one where there are fewer.

    NCCL takes several ranks on one GPU only if each says that it is a host of its own.
    """
    count = torch.cuda.device_count()
    index = rank % count
    if int(os.environ["WORLD_SIZE"]) > count:
        os.environ["NCCL_HOSTID"] = f"host{rank}"
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ["LOCAL_RANK"] = str(index)
    return torch.device("cuda", index)


@contextmanager
def served() -> Iterator[tuple[int, int]]:
    """A process that serves a store and does nothing else: its id and the port."""
    read, write = os.pipe()
    if (server := os.fork()) == 0:  # without this process's threads
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        time.sleep(900)
        os._exit(0)
    os.close(write)
    try:
        yield server, int(os.read(read, 16))
    finally:
        os.close(read)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def fork_logged(body: Callable[[], object], log: Path, **environment: object) -> int:
    """Fork a process that calls ``body``, prints to ``log`` and ends; its id.

    It ends with status 0, or with 1 and a traceback in the log if ``body`` raises.
    """
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        for name, value in environment.items():
            os.environ[name] = str(value)
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _start(rank: int, world: int, listener: socket.socket, backend: str) -> dist.Store:
    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    descriptor = listener.detach()
    if rank:  # else the port would stay open when rank 0 has ended
        os.close(descriptor)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=descriptor if rank == 0 else None,
    )
    if backend:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return store


def join(rank: int, world: int, life: int = 0, backend: str = "gloo") -> None:
    """Start the default group over a file, for bodies that run with ``backend=""``.

    Each split opens two connections to torch's TCP store, which look up its host by number: where
    no name server answers, that takes seconds.
    """
    store = dist.PrefixStore(str(life), dist.FileStore(os.environ["STORE_FILE"], world))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _child(
    rank: int,
    world: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    listener: socket.socket,
    directory: str,
    timeout: float,
) -> None:
    gc.freeze()  # a collection would look at all that the parent has, and copy its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    faulthandler.dump_traceback_later(0.9 * timeout)  # a rank that hangs shows where
    os.environ["STORE_FILE"] = f"{directory}/store"
    global _STORE
    try:
        _STORE = store = _start(rank, world, listener, backend)
        try:
            outcome: tuple[str, Any] = ("result", body(rank, *args))
        except BaseException as error:
            outcome = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        Path(directory, f"{rank}.part").write_bytes(pickle.dumps(outcome))
        Path(directory, f"{rank}.part").rename(Path(directory, str(rank)))
        if outcome[0] == "error":
            os._exit(1)
        # A rank that leaves early takes its connections along: wait until all have finished.
        store.add("finished", 1)
        while store.add("finished", 0) < world:
            time.sleep(0.01)
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < world:
            time.sleep(0.01)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
