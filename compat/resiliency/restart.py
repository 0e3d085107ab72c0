"""Abort, Initialize and WholeReplicas: arguments of nvidia-resiliency-ext's ``inprocess.Wrapper``.

It notices faults and calls the function again; these free the ranks, choose who goes on, and bring
the ones that go on together.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hypergrid
from compat.resiliency.replicas import NoReplicaError, active_processes
from hypergrid.groups import gloo
from hypergrid.layout import RankLayout
from hypergrid.messages import install_command

try:
    from nvidia_resiliency_ext import inprocess
    from nvidia_resiliency_ext.inprocess.abort import Abort as _Abort
    from nvidia_resiliency_ext.inprocess.exception import RestartAbort
    from nvidia_resiliency_ext.inprocess.initialize import Initialize as _Initialize
    from nvidia_resiliency_ext.inprocess.rank_assignment import (
        MaxActiveWorldSize,
        RankAssignment,
        RankAssignmentCtx,
        RankDiscarded,
    )
except ImportError as missing:
    raise ImportError(
        f"compat.resiliency needs nvidia-resiliency-ext, which cannot be imported: {missing}. "
        f"{install_command('resiliency')}."
    ) from missing

__all__ = ["Abort", "Initialize", "RankLayout", "WholeReplicas"]

_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LIVES = "hypergrid/lives"  # in the store, then the iteration
_PATIENCE = timedelta(seconds=60)  # for other processes


class Abort(_Abort):
    """Frees this rank from every group of hypergrid's and from torch's default group. *Local*.

    Then destroys torch's groups, so that the next iteration can initialise again. Waits for no
    rank; a collective in progress raises torch's error in its thread.

    Warns
    -----
    RuntimeWarning
        There is a GPU, and NCCL's watchdog may end processes that restart.
    """

    def __init__(self) -> None:
        setting = os.environ.get(_WATCHDOG, "3")
        # Without a GPU there is no NCCL, and so no watchdog.
        if setting != "0" and torch.cuda.is_available():
            text = (
                f"{_WATCHDOG} is {setting}, not 0: NCCL's watchdog ends a process whose collective "
                f"exceeds its timeout, also one that is being freed; torchrun sets 1. Set it "
                f"before the job starts."
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        hypergrid.abort(default=True)
        return state


class Initialize(_Initialize):
    """Starts torch's default group of the active ranks in each iteration. *Collective* over them.

    Groups that an abort has left are destroyed before. Ranks in reserve do nothing.

    Parameters
    ----------
    store : torch.distributed.Store, optional
        Shared by all processes, and not served by one that may fail. Default: torchrun's.
    timeout : timedelta
        How long torch waits for the others, also for one that has failed meanwhile.
    **options
        As for ``torch.distributed.init_process_group``, such as ``backend``.

    Raises
    ------
    RuntimeError
        A rank is missing; the wrapper begins the next iteration.
    RestartAbort
        There is no store: torchrun did not start the job, and none was given.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        timeout: timedelta = _PATIENCE,
        **options: Any,
    ) -> None:
        self.store = store
        self.timeout = timeout
        self.options = options

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        # The iteration before may have ended without an abort.
        if dist.is_initialized():
            hypergrid.abort(default=True)
        if self.store is None:
            self.store = _agent_store(self.timeout)
        if state.mode is not inprocess.Mode.ACTIVE:
            return state
        with gloo.connecting():  # reads of the store are batched
            dist.init_process_group(
                store=dist.PrefixStore(f"{_LIVES}/{state.iteration}", self.store),
                rank=state.active_rank,
                world_size=state.active_world_size,
                timeout=self.timeout,
                **self.options,
            )
            gloo.note(dist.group.WORLD)
        return state


class WholeReplicas(RankAssignment):
    """Keeps the largest number of whole model replicas, and the other processes in reserve.

    It assigns ranks and activates them, so it stands alone as ``rank_assignment``. Which process
    has which rank: see ``compat.resiliency.replicas.active_processes``. *Collective* in its first
    call, in which each process tells its host through NVRx's store; else *local*.

    Parameters
    ----------
    layout : RankLayout
        The layout of all active ranks before any loss, with a dim "dp"; other processes are spares.
    accepts : function
        Whether a number of replicas can train; such as ``lambda n: 96 % n == 0``.

    Raises
    ------
    RestartAbort
        Not one whole replica is left.
    """

    def __init__(
        self,
        layout: RankLayout,
        accepts: Callable[[int], bool] = lambda count: True,
    ) -> None:
        if layout.offset or "dp" not in layout.dims:
            raise ValueError(f"{layout} must begin at rank 0 and have a dim 'dp'.")
        self._layout = layout
        self._accepts = accepts

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state = ctx.state
        # The wrapped function begins, and NVRx's ranks are those that the launcher gave.
        if state.mode is inprocess.Mode.INITIALIZED:
            self._hosts = _hosts_of_processes(ctx)
            self._processes = list(range(state.world_size))
        lost = {self._processes[rank] for rank in ctx.terminated_ranks}
        if state.initial_rank in lost:
            raise RankDiscarded(f"process {state.initial_rank} is lost")
        alive = sorted(set(self._processes) - lost)
        try:
            active = active_processes(self._layout, self._hosts, alive, self._accepts)
        except NoReplicaError as error:
            raise RestartAbort(str(error)) from error
        # NVRx's ranks of the next iteration: the active ones first.
        self._processes = active + [process for process in alive if process not in active]
        ctx.state = dataclasses.replace(
            state,
            rank=self._processes.index(state.initial_rank),
            world_size=len(self._processes),
        )
        ctx.terminated_ranks = set()
        return MaxActiveWorldSize(len(active))(ctx)


def _hosts_of_processes(ctx: RankAssignmentCtx) -> list[str]:
    keys = [f"hypergrid/host/{process}" for process in range(ctx.state.world_size)]
    ctx.store.set(keys[ctx.state.rank], socket.gethostname())
    ctx.store.wait(keys, _PATIENCE)
    return [name.decode() for name in ctx.store.multi_get(keys)]


def _agent_store(timeout: timedelta) -> dist.Store:
    """The store of torchrun, which its agent serves."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RestartAbort(
            "compat.resiliency.Initialize has no store. Start the job with torchrun, or pass "
            "Initialize(store), a store of torch that all processes share."
        )
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        wait_for_workers=False,
        timeout=timeout,
    )
