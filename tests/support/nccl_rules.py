"""A backend over gloo that keeps NCCL's rules where our promises depend on them.

gloo connects at once, fails at once and raises in the thread that waits; NCCL does none of that.
``RULES`` says each rule and where it was read; the classes below keep it. Data travels over gloo
on the CPU. A communicator has one stream of kernels; ``DEVICE`` is this process's GPU.

The group is a Python object, as torch has it for backends in Python: torch sees no backends below
it, so one group has one backend here, and ``batch_isend_irecv`` is ``Group.batched``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAME = "nccl_rules"
_C10D = "include/torch/csrc/distributed/c10d"
_OLD, _NCCL2 = f"{_C10D}/ProcessGroupNCCL.hpp", f"{_C10D}/nccl2/ProcessGroupNCCL.hpp"
_COMM, _LAZY = f"{_C10D}/NCCLUtils.hpp", f"{_C10D}/lazy/LazyBackend.hpp"
_PYTHON = "distributed/distributed_c10d.py"
_CPP = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"  # as of torch 2.9 and later
_NCCL_H = "../nvidia/nccl/include/nccl.h"


class Rule(NamedTuple):
    """NCCL's rules, and where each was read.

    ``words`` stand in ``file``, from the folder of an installed torch, ``since`` a release and
    ``until`` another. ``torch/csrc`` is not installed: its words were read.
    """

    says: str
    file: str
    words: str
    since: tuple[int, int] = (2, 9)
    until: tuple[int, int] = (3, 0)


RULES = {
    "created on first use": Rule(
        "A group has no communicator until its first operation, unless it is bound to a device.",
        _OLD,
        "doesn't create any NCCL communicators",
    ),
    "no timeout while connecting": Rule(
        "ncclCommInitRank and ncclCommSplit wait for every rank, without a limit; a nonblocking "
        "communicator ends the wait after TORCH_NCCL_NONBLOCKING_TIMEOUT.",
        _COMM,
        "auto timeout = nccl_nonblocking_timeout();",
    ),
    "a split holds the parent's lock": Rule(
        "initNCCLComm locks the parent's mutex around ncclCommSplit; abortComms takes it too.",
        _CPP,
        "std::lock_guard<std::mutex> lock(options_->split_from->mutex_);",
    ),
    "split is collective": Rule(
        "Every rank of the parent takes part, also with no colour; equal colours, one communicator",
        _PYTHON,
        "call `ncclCommSplit` on *all* ranks in this new group's",
    ),
    "equal colours are one communicator": Rule(
        "ncclCommSplit does not look at which ranks were meant.",
        _NCCL_H,
        "Ranks with the same color will end up in the same communicator.",
    ),
    "a split writes into the options": Rule(
        "ProcessGroup::splitGroup writes name and timeout into the options that it is given, and "
        "without any into the parent's own, which its groups then share; from 2.14 on into copies.",
        _PYTHON,
        "# default pg_options same as the parent process group",
        until=(2, 13),
    ),
    "wait orders the stream": Rule(
        "wait() lets the current stream wait for the kernel; the CPU goes on.",
        _OLD,
        "let current stream wait for the NCCL to finish, this function is",
    ),
    "wait may block": Rule(
        "With TORCH_NCCL_BLOCKING_WAIT=1 wait() blocks the CPU until the kernel is done.",
        _OLD,
        "Control whether or not wait() is blocking or non-blocking.",
    ),
    "aborted kernels end without an error": Rule(
        "ncclCommAbort ends kernels that run; nobody is told, and their output is incomplete.",
        _NCCL_H,
        "aborts any operations that might still be running on the device.",
    ),
    "abort waits for the device": Rule(
        "Aborting one communicator waits until kernels of all others are gone, so several are "
        "aborted at the same time; torch opens a group of NCCL calls for it.",
        _PYTHON,
        "https://github.com/pytorch/pytorch/issues/119797",
    ),
    "abort has a thread": Rule(
        "abort() runs in a new thread, waits for the group's timeout, and raises after that; the "
        "group of NCCL calls that another thread has opened is not seen there.",
        _OLD,
        "static thread_local uint64_t ncclActiveGroupCounter_;",
    ),
    "an aborted group is of no use": Rule(
        "Its communicator stays, and each further operation on it is an error.",
        _CPP.replace("ProcessGroupNCCL", "NCCLUtils"),
        "NCCL communicator was aborted on rank ",
    ),
    "shutdown waits for the members": Rule(
        "shutdown() finalizes: all kernels are done, on all ranks.",
        _CPP,
        "`shutdown()` will wait for all NCCL kernels to finish before destroying",
    ),
    "the watchdog may end the process": Rule(
        "After a timeout with TORCH_NCCL_ASYNC_ERROR_HANDLING=1 or 3, which is the default.",
        _OLD,
        "#define SHOULD_TEAR_DOWN(a) (a != NoHandling && a != CleanUpOnly)",
    ),
    "the watchdog tells": Rule(
        "nccl2 calls abort hooks before it tears down; the old class has none.",
        _NCCL2,
        "Terminates the process (after running the abort hooks) if requested",
        (2, 14),
    ),
    "suspend is collective": Rule(
        "ncclCommSuspend and ncclCommResume wait for all ranks of the communicator: the strict "
        "reading, as nccl.h leaves it open.",
        _NCCL_H,
        "Suspend communicator operations to free resources.",
        (2, 14),
    ),
    "suspend needs a communicator": Rule(
        "A group that was never used raises this first, and then what NCCL is too old for raises.",
        _CPP,
        "NCCL communicator not initialized.",
        (2, 12),
    ),
    "sequence numbers count collectives": Rule(
        "_get_sequence_number_for_group() counts collectives, not sends and receives.",
        _OLD,
        "Counting for the sequential number of NCCL collective call.",
    ),
}


class Sends(NamedTuple):
    """Whose communicator sends and receives of a kind of group use."""

    unbatched: str
    batched: str
    source: Rule


PAIR = "a communicator of the two ranks, connected at their first operation"
OWN = "the group's own, in order with its collectives"
ALL = "the group's own, which all members create at its first operation"
SENDS = {
    "nccl, unbound": Sends(
        PAIR,
        ALL,
        Rule("", _OLD, "The key is a string of my current rank and the peer process rank."),
    ),
    "nccl, bound": Sends(
        OWN,
        OWN,
        Rule("", _OLD, "Control EagerInit P2P serialization warning"),
    ),
    "nccl2": Sends(
        OWN,
        OWN,
        Rule("", _LAZY, "in older versions of c10d's ProcessGroupNCCL, each P2P peer", (2, 14)),
    ),
    "nccl2, lazy_init": Sends(
        ALL,
        ALL,
        Rule("", _NCCL2, "// Creates a lazy_init communicator and checks", (2, 15)),
    ),
    "nccl-lazy": Sends(
        PAIR,
        ALL,
        Rule("", _LAZY, "collectives stay on the primary comm, while P2P traffic", (2, 14)),
    ),
}


def stands_in(rule: Rule, torch_folder: str) -> bool:
    """Whether the words of a rule stand in its file of a torch, without regard to line ends."""
    with open(os.path.join(torch_folder, rule.file)) as file:
        text = " ".join(line.strip().lstrip("/#* ") for line in file)
    return " ".join(rule.words.lstrip("/#* ").split()) in " ".join(text.split())


class Device:
    """This process's GPU: the kernels that run, and what the current stream waits for."""

    def __init__(self) -> None:
        self.running = dict[threading.Event, "Communicator"]()
        self.stream: list[threading.Event] = []

    def wait_for(self, done: threading.Event) -> None:
        self.stream = [event for event in self.stream if not event.is_set()]
        self.stream.append(done)

    def synchronize(self) -> None:
        """As of ``torch.cuda``: wait until all is done that the current stream waits for."""
        for done in self.stream:
            done.wait()

    def is_busy_beside(self, communicator: Communicator) -> bool:
        """Whether kernels of other communicators run."""
        for done, owner in [*self.running.items()]:
            if owner is not communicator and not done.is_set():
                return True
        return False


DEVICE = Device()
SUSPENDS = True  # whether this NCCL is 2.29.7 or later


class Work(dist.Work):
    """An operation whose kernel was launched."""

    def __init__(self, done: threading.Event, timeout: timedelta) -> None:
        super().__init__()
        self.done, self.end = done, time.monotonic() + timeout.total_seconds()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        DEVICE.wait_for(self.done)
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "1":
            self.done.wait()
        return True


class Communicator:
    """ncclComm_t. Its kernels run one after the other, once their inputs are there."""

    def __init__(self, store: Any, key: str, ranks: Sequence[Any], rank: Any) -> None:
        self.store = dist.PrefixStore(key, store)
        self.key = key
        self.aborted = False
        self.size = len(ranks)
        self.rank = ranks.index(rank)
        self._turns = 0
        self._splits = 0
        self.meet("init")
        limit = timedelta(days=1)
        self.gloo = dist.ProcessGroupGloo(self.store, self.rank, self.size, timeout=limit)
        self._last = threading.Event()
        self._last.set()

    def meet(self, operation: str) -> None:
        """Wait for all ranks: without a limit, or as long as a nonblocking one waits."""
        nonblocking = os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") == "1"
        limit = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", 1800))
        start = time.monotonic()
        turn = f"{operation}/{self._turns}"
        self._turns += 1
        self.store.set(f"{turn}/{self.rank}", "")
        while not self.store.check([f"{turn}/{rank}" for rank in range(self.size)]):
            if nonblocking and time.monotonic() - start > limit:
                raise dist.DistBackendError(f"NCCL timeout in: {operation} of {self.key}")
            time.sleep(0.01)

    def launch(self, kernel: Callable[[Any], Any], timeout: timedelta) -> Work:
        if self.aborted:
            raise dist.DistBackendError(f"NCCL communicator {self.key} was aborted on this rank.")
        before, done = [*DEVICE.stream, self._last], threading.Event()
        self._last = done
        DEVICE.running[done] = self

        def run() -> None:
            for event in before:
                while not event.wait(0.005):
                    if self.aborted:
                        break
            ready = threading.Event()
            if not self.aborted:
                work = kernel(self.gloo)
                moves = threading.Thread(target=lambda: work.wait() and ready.set(), daemon=True)
                moves.start()
            while not (self.aborted or ready.wait(0.002)):
                pass
            DEVICE.running.pop(done)
            done.set()

        threading.Thread(target=run, daemon=True).start()
        return Work(done, timeout)

    def abort(self) -> None:
        self.aborted = True
        while DEVICE.is_busy_beside(self):
            time.sleep(0.005)

    def split(self, color: int | None, rank: int) -> Communicator | None:
        """Of this rank's colour; None is no colour."""
        self._splits += 1
        store = dist.PrefixStore(f"split {self._splits}", self.store)
        store.set(str(self.rank), f"{color} {rank}")
        self.meet(f"split {self._splits}")
        if color is None:
            return None
        members = []
        for member in range(self.size):
            member_color, _ = store.get(str(member)).decode().split()
            if member_color == str(color):
                members.append(member)
        return Communicator(store, f"color {color}", members, self.rank)


class Group(dist.ProcessGroup):
    """ProcessGroupNCCL, in one of the kinds of ``SENDS``."""

    supports_splitting = supports_coalescing = True

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, kind: str = "nccl, unbound"
    ) -> None:
        super().__init__(rank, size)
        self.store, self.kind, self.options = store, kind, Options()
        self.timeout = timeout
        self.mutex, self.communicators = threading.Lock(), dict[str, Communicator]()
        self.split_from: Group | None = None
        self.color: int | None = None
        self.bound: torch.device | None = None
        self.sequence, self._batching, self._name, self._desc = 0, False, "", ""
        self.hooks = dict[int, Callable[[], None]]()
        self._works, self._ended = list[Work](), threading.Event()
        threading.Thread(target=self._watchdog, daemon=True).start()

    # What torch asks of a group and of its backend.

    bound_device_id = property(
        lambda self: self.bound, lambda self, device: setattr(self, "bound", device)
    )
    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)
    _device_types = property(lambda self: [torch.device("cpu")])
    timeout = property(
        lambda self: self.options._timeout,
        lambda self, timeout: setattr(self.options, "_timeout", timeout),
    )
    supports_abort_hooks = property(lambda self: self.kind.startswith("nccl2"))

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> Any:
        return self.store

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def _is_initialized(self) -> bool:
        return bool(self.communicators)

    def register_abort_hook(self, number: int, hook: Callable[[], None]) -> None:
        self.hooks[number] = hook

    # Communicators.

    def communicator(self, key: str = "all", ranks: Sequence[int] = ()) -> Communicator:
        with self.mutex:
            communicator = self.communicators.get(key)
        if communicator is not None:
            return communicator
        ranks = ranks or range(self.size())
        parent = self.split_from
        if parent is not None and key == "all":
            with parent.mutex:
                communicator = parent.communicators["all"].split(self.color, self.rank())
            assert communicator is not None
        else:
            communicator = Communicator(self.store, key, ranks, self.rank())
        with self.mutex:
            self.communicators[key] = communicator
        return communicator

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.communicator()

    def perform_nocolor_split(self, device: torch.device) -> None:
        with self.mutex:
            self.communicators["all"].split(None, self.rank())

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """As torch's in C++: members with their colour, the others without one."""
        if self.rank() not in ranks:
            self.perform_nocolor_split(torch.device("cpu"))
            return None
        store, place = dist.PrefixStore(f"{group_name}/", self.store), ranks.index(self.rank())
        options = opts or self.options
        options._timeout, options.group_name = timeout or options._timeout, group_name or ""
        child = Group(store, place, len(ranks), options._timeout, "nccl, bound")
        child.options, child._name, child._desc = options, group_name or "", group_desc or ""
        child.split_from, child.color = self, c10d._process_group_color([*ranks])
        GROUPS.append(child)
        child.communicator()
        return child

    def _pair(self, peer: int) -> tuple[str, Sequence[int]]:
        pairs = SENDS[self.kind].unbatched == PAIR and not self._batching
        low, high = sorted((self.rank(), peer))
        return (f"{low}:{high}", (low, high)) if pairs else ("all", ())

    @contextmanager
    def batched(self) -> Iterator[None]:
        self._batching = True
        try:
            yield
        finally:
            self._batching = False

    # Operations.

    def _collective(self, kernel: Callable[[Any], Any]) -> Work:
        communicator = self.communicator()
        self.sequence += 1
        return self._launch(communicator, kernel)

    def _launch(self, communicator: Communicator, kernel: Callable[[Any], Any]) -> Work:
        work = communicator.launch(kernel, self.timeout)
        self._works.append(work)
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._collective(lambda gloo: gloo.allreduce(tensors))

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        root = 0 if opts is None else opts.rootRank
        return self._collective(lambda gloo: gloo.broadcast(tensors, root))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._collective(lambda gloo: gloo.allgather(outputs, inputs))

    def barrier(self, opts: Any = None) -> Work:
        work = self._collective(lambda gloo: gloo.allreduce([torch.zeros(1)]))
        work.done.wait()  # torch's own barrier blocks the CPU
        return work

    def send(self, tensors: Any, peer: int, tag: int) -> Work:
        return self._sent(peer, lambda gloo, place: gloo.send(tensors, place, 0))

    def recv(self, tensors: Any, peer: int, tag: int) -> Work:
        return self._sent(peer, lambda gloo, place: gloo.recv(tensors, place, 0))

    def _sent(self, peer: int, kernel: Callable[[Any, int], Any]) -> Work:
        key, ranks = self._pair(peer)
        place = ranks.index(peer) if ranks else peer
        return self._launch(self.communicator(key, ranks), lambda gloo: kernel(gloo, place))

    # The end.

    def abort(self) -> None:
        self._ended.set()

        def run() -> None:
            with self.mutex:
                for communicator in self.communicators.values():
                    communicator.aborted = True  # one group of NCCL calls
                for communicator in self.communicators.values():
                    communicator.abort()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.timeout.total_seconds())
        if thread.is_alive():
            thread.join()  # the future's destructor
            raise dist.DistBackendError(f"Future for ProcessGroup abort timed out: {self._name}")

    def shutdown(self) -> None:
        with self.mutex:
            for communicator in self.communicators.values():
                if not communicator.aborted:
                    communicator._last.wait()
                    communicator.meet("finalize")
        self._ended.set()

    def _watchdog(self) -> None:
        while not self._ended.wait(0.05):
            for work in [work for work in self._works if work.is_completed()]:
                self._works.remove(work)
            handling = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3))
            if handling and any(work.end < time.monotonic() for work in [*self._works]):
                for hook in self.hooks.values():
                    hook()
                for communicator in self.communicators.values() if handling != 3 else ():
                    communicator.aborted = True
                if handling != 2:
                    os._exit(134)

    # Memory.

    def suspend(self) -> None:
        self._all_meet("suspend")

    def resume(self) -> None:
        self._all_meet("resume")

    def _all_meet(self, operation: str) -> None:
        if not self.communicators:
            raise RuntimeError("NCCL communicator not initialized.")
        if not SUSPENDS:
            raise RuntimeError("NCCL Suspend failed (requires NCCL 2.29.7+)")
        for communicator in self.communicators.values():
            communicator.meet(operation)

    def memory_stats(self) -> dict[str, int]:
        return {"suspend": 1000, "suspended": 0, "persist": 5, "total": 1005}


class Options:
    """Those of a group that torch writes into."""

    def __init__(self) -> None:
        self._timeout, self.group_name = timedelta(minutes=10), ""
        self.global_ranks_in_group: Iterable[int] = ()


GROUPS: list[Group] = []  # torch keeps them for as long as it knows them, and Python must too


def register(kind: str = "nccl, unbound", name: str = NAME) -> None:
    """Let torch create groups of ``kind`` with ``backend=name``."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
        group = Group(store, rank, size, timeout, kind)
        default = c10d.GroupMember.WORLD
        if isinstance(default, Group) and default.bound is not None:
            group.kind = "nccl, bound"
        GROUPS.append(group)
        return group

    if hasattr(c10d, "_maybe_attach_flight_recorder"):  # which asks C++ for backends: 2.15
        setattr(c10d, "_maybe_attach_flight_recorder", lambda *_: None)  # noqa: B010
    dist.Backend.register_backend(name, create, devices=["cpu"])
