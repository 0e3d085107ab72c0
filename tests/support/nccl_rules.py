"""A backend over gloo that keeps NCCL's rules where our promises depend on them.

gloo connects at once, fails at once and raises in the thread that waits; NCCL does none of that.
``nccl_rules.txt`` says each rule and where it was read; the classes below keep it. Data travels
over gloo on the CPU. A communicator has one stream of kernels; ``DEVICE`` is this process's GPU.

The group is a Python object, as torch has it for backends in Python: torch sees no backends below
it, so one group has one backend here, and in ``batch_isend_irecv`` ``Group.batching`` is set.
"""

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support.forked import join

NAME = "nccl_rules"
# The kinds of groups whose unbatched sends have a communicator of the two ranks; "nccl, bound" and
# "nccl2" use the group's own.
HAVE_PAIRS = ("nccl, unbound", "nccl-lazy")


class Device:
    """This process's GPU: the kernels that run, and what the current stream waits for."""

    def __init__(self):
        self.running = {}
        self.stream = []

    def wait_for(self, done):
        self.stream = [event for event in self.stream if not event.is_set()]
        self.stream.append(done)

    def synchronize(self):
        """As of ``torch.cuda``: wait until all is done that the current stream waits for."""
        for done in self.stream:
            done.wait()

    def is_busy_beside(self, communicator):
        """Whether kernels of other communicators run."""
        return any(owner is not communicator for owner in [*self.running.values()])


DEVICE = Device()


class Work(dist.Work):
    """An operation whose kernel was launched."""

    def __init__(self, done):
        super().__init__()
        self.done = done

    def wait(self, timeout=None):
        DEVICE.wait_for(self.done)
        return True


class Communicator:
    """ncclComm_t. Its kernels run one after the other, once their inputs are there."""

    def __init__(self, store, key, ranks, rank):
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

    def meet(self, operation):
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

    def launch(self, kernel):
        if self.aborted:
            raise dist.DistBackendError(f"NCCL communicator {self.key} was aborted on this rank.")
        before = [*DEVICE.stream, self._last]
        done = threading.Event()
        self._last = done
        DEVICE.running[done] = self

        def run():
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
        return Work(done)

    def abort(self):
        self.aborted = True
        while DEVICE.is_busy_beside(self):
            time.sleep(0.005)

    def split(self, color):
        """Of this rank's colour; None is no colour."""
        self._splits += 1
        store = dist.PrefixStore(f"split {self._splits}", self.store)
        store.set(str(self.rank), str(color))
        self.meet(f"split {self._splits}")
        if color is None:
            return None
        members = []
        for member in range(self.size):
            if store.get(str(member)).decode() == str(color):
                members.append(member)
        return Communicator(store, f"color {color}", members, self.rank)


@dataclass
class Options:
    """Those of a group that torch writes into."""

    _timeout: timedelta = timedelta(minutes=10)
    group_name: str = ""
    global_ranks_in_group: tuple = ()


class Group(dist.ProcessGroup):
    """ProcessGroupNCCL, in one of its kinds: see ``HAVE_PAIRS``."""

    # What torch asks of a group and of its backend.
    supports_splitting = supports_coalescing = True
    supports_abort_hooks = False
    bound_device_id = None
    group_name = ""
    group_desc = ""
    _device_types = (torch.device("cpu"),)

    def __init__(self, store, rank, size, options, kind):
        super().__init__(rank, size)
        self.store = store
        self.options = options
        self.kind = kind
        self.supports_abort_hooks = kind == "nccl2"
        self.mutex = threading.Lock()
        self.communicators = {}
        self.split_from = None
        self.color = None
        self.batching = False
        self.hooks = {}
        GROUPS.append(self)

    def _set_group_name(self, name):
        self.group_name = name

    def _set_group_desc(self, desc):
        self.group_desc = desc

    def _get_backend(self, device):
        return self

    def getBackendName(self):
        return NAME

    def get_group_store(self):
        return self.store

    def _set_sequence_number_for_group(self): ...

    def _set_default_timeout(self, timeout):
        self.options._timeout = timeout

    def register_abort_hook(self, number, hook):
        self.hooks[number] = hook

    # Communicators.

    def communicator(self, key="all", ranks=()):
        with self.mutex:
            communicator = self.communicators.get(key)
        if communicator is not None:
            return communicator
        parent = self.split_from
        if parent is not None and key == "all":
            with parent.mutex:
                communicator = parent.communicators["all"].split(self.color)
            assert communicator is not None
        else:
            ranks = ranks or range(self.size())
            communicator = Communicator(self.store, key, ranks, self.rank())
        with self.mutex:
            self.communicators[key] = communicator
        return communicator

    def eager_connect_single_device(self, device):
        self.communicator()

    def perform_nocolor_split(self, device):
        with self.mutex:
            self.communicators["all"].split(None)

    @property
    def splits(self):
        """How many splits of this group's communicator this rank has taken part in."""
        return self.communicators["all"]._splits

    # Operations.

    def allreduce(self, tensors, opts=None):
        return self.communicator().launch(lambda gloo: gloo.allreduce(tensors))

    def barrier(self, opts=None):
        work = self.allreduce([torch.zeros(1)])
        work.done.wait()  # torch's own barrier blocks the CPU
        return work

    def send(self, tensors, peer, tag):
        return self._sent(peer, lambda gloo, place: gloo.send(tensors, place, 0))

    def recv(self, tensors, peer, tag):
        return self._sent(peer, lambda gloo, place: gloo.recv(tensors, place, 0))

    def _sent(self, peer, kernel):
        key = "all"
        ranks = [*range(self.size())]
        if self.kind in HAVE_PAIRS and not self.batching:
            ranks = sorted((self.rank(), peer))
            key = f"{ranks[0]}:{ranks[1]}"
        place = ranks.index(peer)
        return self.communicator(key, ranks).launch(lambda gloo: kernel(gloo, place))

    # The end.

    def abort(self):
        def run():
            with self.mutex:
                for communicator in self.communicators.values():
                    communicator.aborted = True  # one group of NCCL calls
                for communicator in self.communicators.values():
                    communicator.abort()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.options._timeout.total_seconds())
        if thread.is_alive():
            thread.join()  # the future's destructor
            raise dist.DistBackendError(f"Future for {self.group_name}'s abort timed out")

    def shutdown(self):
        with self.mutex:
            for communicator in self.communicators.values():
                if not communicator.aborted:
                    communicator._last.wait()
                    communicator.meet("finalize")

    def abort_as_the_watchdog_does(self):
        """Where TORCH_NCCL_ASYNC_ERROR_HANDLING=2: the process goes on."""
        for hook in self.hooks.values():
            hook()
        for communicator in self.communicators.values():
            communicator.aborted = True


def total(group, value=1.0):
    """The sum of every rank's ``value`` over the group, when the device has it."""
    summand = torch.tensor(float(value))
    dist.all_reduce(summand, group=group)
    DEVICE.synchronize()
    return summand.item()


GROUPS = []  # torch keeps them for as long as it knows them, and Python must too


def start(rank, world, life=0, kind="nccl, unbound"):
    """Start the default group; it and all others are of ``kind``, and "nccl, bound" connects."""

    def create(given, options):
        options = options or Options()
        # Torch writes into the options that it is given.
        options._timeout = given.timeout
        options.group_name = given.group_id
        options.global_ranks_in_group = tuple(given.global_ranks_in_group)
        group = Group(given.store, given.group_rank, given.group_size, options, kind)
        default = dist.group.WORLD
        if default is not None and default.bound_device_id is not None:
            group.split_from = default
            group.color = c10d._process_group_color(given.global_ranks_in_group)
        return group

    if life == 0:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cuda"])
    if hasattr(c10d, "_maybe_attach_flight_recorder"):  # torch 2.15 asks C++ for backends
        setattr(c10d, "_maybe_attach_flight_recorder", lambda *_: None)  # noqa: B010
        setattr(c10d, "_DistributedBackendOptions", SimpleNamespace)  # noqa: B010
    join(rank, world, life, backend=NAME)
    if kind == "nccl, bound":  # by init_process_group(device_id=...)
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        dist.group.WORLD.eager_connect_single_device(torch.device("cuda", 0))
    return dist.group.WORLD
