"""Restart inside the process with NVIDIA's nvidia-resiliency-ext: Abort, Initialize, WholeReplicas.

They are arguments of its ``inprocess.Wrapper``. It notices faults and calls the function again;
these free the ranks, choose who goes on, and bring the ones that go on together.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hypergrid
from hypergrid.agreement.survivors import DifferentError, forget_life, meet_survivors
from hypergrid.groups import closing, gloo
from hypergrid.layout import RankLayout
from hypergrid.messages import install_command, shown
from hypergrid.replicas import NoReplicaError, Replicas, any_number
from hypergrid.topology import Hosts, Topology

try:
    from nvidia_resiliency_ext import inprocess
    from nvidia_resiliency_ext.inprocess.abort import Abort as _Abort
    from nvidia_resiliency_ext.inprocess.exception import RestartAbort
    from nvidia_resiliency_ext.inprocess.initialize import Initialize as _Initialize
    from nvidia_resiliency_ext.inprocess.rank_assignment import (
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

_LIVES = "hypergrid/lives"  # in the store, then the iteration
_SERVED = "hypergrid/served"  # why the first process cannot serve the store, or nothing


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
        why = closing.unset().get(closing.WATCHDOG)
        if why is not None and torch.cuda.is_available():
            text = f"{closing.WATCHDOG} is {why}. Set it before the job starts."
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        hypergrid.abort(default=True)
        return state


class Initialize(_Initialize):
    """Starts torch's default group of the active ranks in each iteration. *Collective* over them.

    First the ranks meet in the store: they compare the iteration, the number of ranks and the
    variables ``HYPERGRID_*``, and do not begin to wait in torch for a rank that has failed
    meanwhile. What an abort has left half done is destroyed before. Ranks in reserve do nothing.

    Parameters
    ----------
    store : torch.distributed.Store, optional
        Shared by all processes, and not served by one that may fail. Default: torchrun's, else
        one at MASTER_ADDR and MASTER_PORT, which the first process serves.
    timeout : timedelta
        How long to wait for the others.
    **options
        As for ``torch.distributed.init_process_group``, such as ``backend``.

    Raises
    ------
    AgreementError
        A rank is missing; the wrapper begins the next iteration.
    RestartAbort
        Ranks differ, or NVRx's store has taken MASTER_PORT: another iteration changes neither.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        timeout: timedelta = timedelta(seconds=60),
        **options: Any,
    ) -> None:
        self.store, self.timeout, self.options = store, timeout, options

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        if dist.is_initialized():
            hypergrid.abort(default=True)
        if self.store is None:
            self.store = _own_store(state, self.timeout)
        if state.mode is not inprocess.Mode.ACTIVE:
            return state
        rank, ranks = state.active_rank, range(state.active_world_size)
        here = dist.PrefixStore(f"{_LIVES}/{state.iteration}", self.store)
        choices = {k: v for k, v in os.environ.items() if k.startswith("HYPERGRID_")}
        compared = {"iteration": state.iteration, "ranks": len(ranks), **choices}
        try:
            meet_survivors(here, ranks, rank, compared, self.timeout)
        except DifferentError as error:
            raise RestartAbort(str(error)) from error
        if rank == 0 and state.iteration > 1:  # all have left it
            with suppress(RuntimeError):
                forget_life(self.store, f"{_LIVES}/{state.iteration - 2}/")
        with gloo.connecting():  # reads of the store are batched
            dist.init_process_group(
                store=here, rank=rank, world_size=len(ranks), timeout=self.timeout, **self.options
            )
            gloo.note(dist.group.WORLD)
        return state


class WholeReplicas(RankAssignment):
    """Keeps the largest number of whole model replicas, and the other processes in reserve.

    It assigns ranks and activates them, so it stands alone as ``rank_assignment``. Spares take the
    holes of their host first, see ``hypergrid.replicas.Replicas``. *Collective* in its first call,
    if hosts are not given; else *local*.

    Parameters
    ----------
    layout : RankLayout
        The layout of all active ranks before any loss; other processes are spares.
    hosts : as for Topology, optional
        The hosts of all processes. Default: each process says its own through NVRx's store.
    replicas, together, accepts
        As for ``Replicas``.
    timeout : timedelta
        How long to wait for the hosts of the others.

    Raises
    ------
    RestartAbort
        Not one whole replica is left.
    """

    def __init__(
        self,
        layout: RankLayout,
        hosts: Hosts | None = None,
        *,
        replicas: str = "dp",
        together: Iterable[str] = ("tp", "ep"),
        accepts: Callable[[int], bool] = any_number,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.layout, self.hosts, self.timeout = layout, hosts, timeout
        rules = {"replicas": replicas, "together": tuple(together), "accepts": accepts}
        self._rules: dict[str, Any] = rules
        self.now: Replicas | None = None
        """The replicas of this iteration; None before the first."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state = ctx.state
        try:
            now = self.now
            if state.mode is inprocess.Mode.INITIALIZED or now is None:
                now = self._first(ctx)
                lost, order = {*ctx.terminated_ranks}, tuple(range(state.world_size))
            else:
                order = (*now.active, *now.reserves)
                lost = {order[rank] for rank in ctx.terminated_ranks}
            if state.rank in ctx.terminated_ranks:
                raise RankDiscarded(f"process {order[state.rank]} is among the lost {lost}")
            self.now = now = now.without(lost) if lost else now
        except NoReplicaError as error:
            raise RestartAbort(str(error)) from error
        rank = (*now.active, *now.reserves).index(order[state.rank])
        active = rank < len(now.active)
        ctx.state = dataclasses.replace(
            state,
            rank=rank,
            world_size=len(now.active) + len(now.reserves),
            active_rank=rank if active else None,
            active_world_size=len(now.active),
            mode=inprocess.Mode.ACTIVE if active else inprocess.Mode.INACTIVE,
        )
        ctx.terminated_ranks = set()
        return ctx

    def _first(self, ctx: RankAssignmentCtx) -> Replicas:
        world, hosts = ctx.state.world_size, self.hosts
        if hosts is None:
            hosts = _everyones_host(ctx, self.timeout)
        elif isinstance(hosts, int):  # so many on each, of the spares too
            hosts = [f"host{process // hosts}" for process in range(world)]
        topology = Topology(self.layout, hosts)
        if len(topology.numbers) != world:
            raise RestartAbort(
                f"hosts={shown(hosts)} have {len(topology.numbers)} processes, and there are "
                f"{world}. Give the host of every process, spares included."
            )
        return Replicas.first(topology, **self._rules)


def _everyones_host(ctx: RankAssignmentCtx, timeout: timedelta) -> list[str]:
    store, world = ctx.store, ctx.state.world_size
    keys = [f"hypergrid/host/{process}" for process in range(world)]
    store.set(keys[ctx.state.rank], socket.gethostname())
    store.wait(keys, timeout)
    return [name.decode() for name in store.multi_get(keys)]


def _own_store(state: inprocess.FrozenState, timeout: timedelta) -> Any:
    """The store at MASTER_PORT. Raises RestartAbort on all ranks if the first cannot serve it."""
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves, why = state.initial_rank == 0 and not launched, ""
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timeout}
    try:
        store = dist.TCPStore(address, port, is_master=serves, **options)
    except RuntimeError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        store = dist.TCPStore(address, port, is_master=False, **options)  # to tell the others
        why = (
            f"The store of this job cannot be served at MASTER_PORT ({port}): the port is taken. "
            f"NVRx serves its own store there unless it gets another port: "
            f'inprocess.Wrapper(store_kwargs={{"port": PORT}}, ...).'
        )
    if serves:
        store.set(_SERVED, why)
    elif not launched:
        why = store.get(_SERVED).decode()
    if why:  # another iteration would not change it
        raise RestartAbort(why)
    return store
