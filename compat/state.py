"""ParallelState: the groups and numbers of one model's parallel layout; a job may hold several."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from compat.megatron import helpers as group_helpers
from compat.megatron import replaced
from compat.megatron.buffers import Buffers, release_megatrons
from compat.megatron.build import Built, build, build_extra, environment_restored_on_failure
from compat.megatron.communicators import Configs
from compat.megatron.getters import CACHED, OVERRIDE_SLOTS, Getters, Setters
from compat.megatron.order import asked
from compat.megatron.planning import Request, aliases
from compat.megatron.suspended import SuspendedGroup, exchanged, is_suspended
from compat.megatron.table import ALIASES, EXTRA_ALL_GATHER, ROWS, Alias, Row, slots
from compat.transformer_engine import process as te_process
from hypergrid.groups.abort import after_abort
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool, before_closing
from hypergrid.groups.store import abortable, raise_if_aborted
from hypergrid.plan import GroupPlan

before_closing.add(te_process.release)
_states: WeakSet[ParallelState] = WeakSet()
_HOLDERS: list[Row | Alias] = [*ROWS, *ALIASES]
GROUP_SLOTS = tuple(dict.fromkeys(slot for row in _HOLDERS for slot in slots(row)))
RANK_SLOTS = tuple(row.ranks for row in ROWS if row.ranks)
OTHER_SLOTS = (
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK",
    "_PIPELINE_MODEL_PARALLEL_DECODER_START",
    "_MOE_LAYER_WISE_LOGGING_TRACKER",
    "_GLOBAL_MEMORY_BUFFER",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    "_global_process_group_list",
)
SLOTS = frozenset((*GROUP_SLOTS, *RANK_SLOTS, *OVERRIDE_SLOTS, *OTHER_SLOTS))
_SOURCES = frozenset((*OVERRIDE_SLOTS, *GROUP_SLOTS))


class ParallelState(Getters, Setters, Buffers):
    """What one ``initialize_model_parallel`` built.

    Its attributes are named as upstream's private globals (``_TENSOR_MODEL_PARALLEL_GROUP`` ...)
    and may be written, as outside code does: the getters see it. A fresh object has no groups;
    ``create`` gives one that has.
    """

    # Slots, not a dictionary: a getter is called millions of times.
    __slots__ = (
        *sorted(SLOTS),
        *CACHED,
        *("_numbered", "_grid", "_via", "_extra", "_timeouts", "_names", "request", "__weakref__"),
    )

    if TYPE_CHECKING:
        _global_process_group_list: list[ProcessGroup | None] | None
        _PIPELINE_MODEL_PARALLEL_SPLIT_RANK: int | None
        _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK: int | None
        _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: int | None

    def __init__(self) -> None:
        self._forget()
        _states.add(self)

    def _forget(self) -> None:
        self.request: Request | None = None
        # What create_all_gather_groups was asked for, for resume.
        self._extra: list[tuple[Sequence[Row], timedelta | None, Configs]] = []
        self._timeouts: dict[tuple[str, tuple[int, ...]], timedelta] = {}  # that were changed
        # Of the groups while they are suspended, by label and ranks.
        self._names: dict[tuple[str, tuple[int, ...]], str] | None = None
        self._via = self
        for slot in SLOTS:
            object.__setattr__(self, slot, None)
        self._MOE_LAYER_WISE_LOGGING_TRACKER: dict[str, Any] = {}
        self._take(Built())

    def _take(self, built: Built) -> None:
        self._grid = built.grid
        self._numbered = built.numbers
        for slot, value in built.slots.items():
            object.__setattr__(self, slot, value)
        self._renumber()

    @classmethod
    def create(cls, **arguments: Any) -> ParallelState:
        """Build the groups for the arguments of ``initialize_model_parallel``.

        *Collective* over the window of ranks. After an error no group is left, and the
        environment is as before.

        Raises
        ------
        As ``compat.parallel_state.initialize_model_parallel``.
        """
        helpers = replaced.found()
        helpers.pop("_set_global_memory_buffer", None)  # that is for the current state
        arguments["order"], source = asked(arguments.get("order", Request.order))
        request = Request(**arguments, helpers=helpers, order_source=source)
        with request.telling_others():
            request.check()
        state = cls()
        state.initialize(request)
        return state

    def initialize(self, request: Request) -> None:
        """Build the groups of ``request``, which was checked already, in this fresh state.

        *Collective* and all or nothing, as ``create``.
        """
        with environment_restored_on_failure(), abortable():
            built = build(request)
            try:
                self.request = request
                self._take(built)
                self._global_process_group_list = built.groups or None
                stages = request.virtual_pipeline_model_parallel_size
                if stages is not None:
                    self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
                    self._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = stages
                split = request.pipeline_model_parallel_split_rank
                if split is not None:
                    self._PIPELINE_MODEL_PARALLEL_SPLIT_RANK = split
                if request.encoder is not None:
                    start = request.encoder_pipeline_model_parallel_size
                    self._PIPELINE_MODEL_PARALLEL_DECODER_START = start
                own = self._set_global_memory_buffer
                request.helpers.get("_set_global_memory_buffer", own)()
                raise_if_aborted()
            except BaseException:
                if built.grid is not None:
                    built.grid.destroy(abort=True)
                raise

    @property
    def plan(self) -> GroupPlan | None:
        """The groups of this state as data."""
        return None if self.request is None else self.request.plan

    @property
    def pool(self) -> GroupPool | None:
        """The groups of this state, and how they were created; None outside the window."""
        return None if self._grid is None else self._grid.pool

    @property
    def grid(self) -> HyperCommGrid | None:
        """The grid of this state: dense layers as its own dims, expert layers as view "expert"."""
        return self._grid

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _SOURCES:
            self._renumber()

    def __repr__(self) -> str:
        if self.request is None:
            return "ParallelState(not initialized)"
        rank = dist.get_rank() if dist.is_initialized() else -1
        layout = self.request.decoder
        here = layout.coordinate(rank) if rank in layout else "outside the window"
        if self.request.encoder is not None and rank in self.request.encoder:
            here = f"{self.request.encoder.coordinate(rank)} of the encoder"
        suspended = "" if self._names is None else ", suspended"
        return f"ParallelState(rank {rank} at {here} of {layout!r}{suspended})"

    def take_overrides(self, before: ParallelState) -> None:
        """Keep the values of ``set_*`` from before initialisation, as upstream does."""
        for slot in (*OVERRIDE_SLOTS, "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK"):
            object.__setattr__(self, slot, getattr(before, slot))
        self._MOE_LAYER_WISE_LOGGING_TRACKER = before._MOE_LAYER_WISE_LOGGING_TRACKER
        self._renumber()

    def note_group(self, group: ProcessGroup) -> None:
        """Let ``update_pg_timeout`` reach a group that the caller created and owns."""
        if self._global_process_group_list is None:
            self._global_process_group_list = [None]
        self._global_process_group_list.append(group)

    def destroy(self, abort: bool = False) -> None:
        """Close all groups of this state and forget everything; idempotent.

        *Local* with ``abort``; else NCCL waits until the other members close theirs.

        Parameters
        ----------
        abort : bool
            Wait for no other rank, whatever state the communicators are in: NCCL drops what is
            under way, and gloo's connections are shut.
        """
        release_megatrons(abort)
        if self._grid is not None:
            self._grid.destroy(abort=abort)
        self._forget()

    @contextmanager
    def activate(self) -> Iterator[ParallelState]:
        """Make this the state that ``compat.parallel_state`` answers from, inside. *Local*.

        For the whole process, so that autograd's threads see it too. Activations nest: afterwards
        the previous state is current again, also after an error. Threads that need different
        states at the same time call the methods of the states.

        Raises
        ------
        RuntimeError
            At the end, if an activation by another thread has not ended before this one.
        """
        before = _current
        make_current(self)
        try:
            yield self
        except BaseException:
            make_current(before)
            raise
        inside = _current
        make_current(before)
        if inside is not self:
            raise RuntimeError(
                f"{inside!r} was activated after {self!r} and has not ended before it: "
                f"activations must nest. For two states at the same time, call their methods."
            )

    def suspend(self) -> None:
        """Close every communicator until ``resume``; NCCL waits until all members do.

        Ranks, sizes and the plan stay available. Getters of groups return placeholders, which
        raise on use. References to the old groups elsewhere (a model, an optimizer, a
        ``DeviceMesh``) keep gloo's file descriptors open: delete them first.

        Raises
        ------
        RuntimeError
            There are no groups to suspend.
        """
        if self.pool is None or self._grid is None or self._names is not None:
            raise RuntimeError(f"there are no groups to suspend: {self!r}.")
        pooled = list(self.pool.groups)
        placeholders: dict[Any, Any] = {each.group: SuspendedGroup(each.label) for each in pooled}
        self._names = {(each.label, each.ranks): each.group.group_name for each in pooled}
        was = {slot: getattr(self, slot) for slot in self._numbered}
        for slot in GROUP_SLOTS:
            object.__setattr__(self, slot, exchanged(getattr(self, slot), placeholders))
        groups = self._global_process_group_list or []
        self._global_process_group_list = [g for g in groups if g not in placeholders]
        self._numbered = {
            slot: (getattr(self, slot) if group is was[slot] else group, rank, size)
            for slot, (group, rank, size) in self._numbered.items()
        }
        del pooled, placeholders, groups, was
        self._grid.destroy()
        self._renumber()

    def resume(self) -> dict[str, ProcessGroup]:
        """Create the groups again as planned. *Collective* as the first initialisation.

        Torch cannot reopen a group: these are new ones, with the same ranks, options and
        timeouts, also those of ``update_pg_timeout`` and ``create_all_gather_groups``. Replace
        the old ones wherever they are kept.

        Returns
        -------
        dict
            New group by the name of the old one: ``renewed[old.group_name]``.

        Raises
        ------
        RuntimeError
            The state is not suspended.
        As initialisation does; the state is then still suspended.
        """
        if self.request is None or self._names is None:
            raise RuntimeError(f"this state is not suspended: {self!r}.")
        with environment_restored_on_failure():
            built = build(self.request)
            before = {slot: getattr(self, slot) for slot in GROUP_SLOTS}
            own = [group for group in self._global_process_group_list or [] if group is not None]
            kept = self._grid, self._numbered
            self._take(built)
            try:
                for slot, value in before.items():
                    if not is_suspended(value):  # from outside code
                        object.__setattr__(self, slot, value)
                listed = built.groups or ([None] if own else [])
                self._global_process_group_list = [*listed, *own] or None
                for arguments in self._extra:
                    self._make_extra(*arguments)
                if built.grid is not None and kept[0] is not None:
                    built.grid.renew(kept[0])
                renewed = list(self.pool.groups) if self.pool else []
                for each in renewed:
                    if (each.label, each.ranks) in self._timeouts:
                        changed = self._timeouts[each.label, each.ranks]
                        c10d._set_pg_timeout(changed, each.group)
            except BaseException:
                if built.grid is not None:
                    built.grid.destroy(abort=True)
                self._grid, self._numbered = kept
                for slot, value in before.items():
                    object.__setattr__(self, slot, value)
                self._global_process_group_list = [None, *own]
                raise
        names, self._names = self._names, None
        self._renumber()
        known = {(each.label, each.ranks): each.group for each in renewed}
        return {name: known[key] for key, name in names.items() if key in known}

    @property
    def is_in_use(self) -> bool:
        """Whether it has groups or this rank is outside its window; not if all were set to None."""
        # Aliases do not count: some releases lack them. The global that they are the same as does.
        known = aliases(self.request) if self.request is not None else []
        second = {slot for alias in known for slot in slots(alias)}
        if any(getattr(self, slot) for slot in GROUP_SLOTS if slot not in second):
            return True
        return self.request is not None and self.pool is None

    def ask_via(self, other: Any) -> None:
        """Let getters that are built from other getters ask those of ``other``."""
        self._via = other
        self._renumber()

    def update_pg_timeout(self, timeout: timedelta, pg: ProcessGroup | None = None) -> None:
        """Set ``timeout`` on ``pg``, or on every group that was made. *Collective* over ``pg``.

        A warning names the groups that share the communicator of ``pg``: theirs changes too.
        """
        pool = self.pool.groups if self.pool else []
        served = [pooled.label for pooled in pool if pg is not None and pooled.group is pg]
        if len(served) > 1:
            warnings.warn(
                f"update_pg_timeout({timeout}) changes the timeout of {' and '.join(served)}: they "
                f"share one communicator. Initialise with share='none' to change one alone.",
                RuntimeWarning,
                stacklevel=3,
            )
        dist.barrier(pg)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        groups = [pg] if pg is not None else self._global_process_group_list or [None]
        for group in groups:
            c10d._set_pg_timeout(timeout, group)
        for pooled in pool:
            if pooled.group in groups:
                self._timeouts[pooled.label, pooled.ranks] = timeout

    def create_all_gather_groups(
        self,
        for_expert_parallelism: bool = False,
        timeout: timedelta | None = None,
        nccl_comm_cfgs: Configs | None = None,
    ) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Second groups of data x context parallel ranks, and of expert-data-parallel ranks.

        In the order and window of this state. The second is None without
        ``for_expert_parallelism`` or expert parallelism. *Collective* over the window.
        """
        if self.request is None:
            raise RuntimeError(
                "create_all_gather_groups() needs an initialized state: call "
                "initialize_model_parallel() first."
            )
        if self.pool is None:
            return None, None
        wanted = for_expert_parallelism and self.get_expert_model_parallel_world_size() > 1
        arguments = (EXTRA_ALL_GATHER[: 1 + wanted], timeout, nccl_comm_cfgs or {})
        made = self._make_extra(*arguments)
        self._extra.append(arguments)
        return made[0], made[1] if wanted else None

    def _make_extra(
        self, rows: Sequence[Row], timeout: timedelta | None, configs: Configs
    ) -> list[ProcessGroup | None]:
        assert self.request is not None and self.pool is not None
        known = self.request, self.pool, self.note_group
        return [build_extra(row, *known, timeout, configs) for row in rows]


def _forget_all() -> None:
    for state in [*_states]:
        if state.request is not None and state.pool is None:  # not one that was made meanwhile
            state.destroy(abort=True)


after_abort.add(_forget_all)
_current = ParallelState()  # what compat.parallel_state answers from
_module: dict[str, Any] = {}  # its names: for its functions a global of theirs is the fastest


def current() -> ParallelState:
    """The state that ``compat.parallel_state`` answers from; at first one without groups."""
    return _current


def make_current(state: ParallelState) -> None:
    """Let ``compat.parallel_state`` answer from ``state``, also if its getters are patched."""
    global _current
    before, _current = _current, state
    via = before._via
    before.ask_via(before)
    state.ask_via(state if via is before else via)
    _module["_current"] = state


def speak_through(module: dict[str, Any]) -> None:
    """Keep ``_current`` up to date among the names of a module."""
    global _module
    _module = module
    _module["_current"] = _current


group_helpers.tell.append(lambda group: _current.note_group(group))
