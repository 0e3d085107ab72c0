"""ParallelState: the groups and numbers of one model's parallel layout; a job may hold several."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.megatron import caches
from compat.megatron import helpers as group_helpers
from compat.megatron.build import (
    Values,
    build,
    build_extra,
    environment_restored_on_failure,
)
from compat.megatron.communicators import Configs
from compat.megatron.getters import (
    FUNCTIONS,
    SETTERS,
    answer_from,
    answering,
    bind_getters_to,
)
from compat.megatron.releases import ASKED, RELEASE, has
from compat.megatron.request import Request, replaced_functions
from compat.megatron.rows import PlannedRows, aliases
from compat.megatron.table import ALIASES, EXTRA_ALL_GATHER, ROWS, Alias, Row, slots
from compat.transformer_engine import process as te_process
from hypergrid import of_torch
from hypergrid.agreement.store import abortable, raise_if_waits_ended
from hypergrid.groups.abort import after_abort
from hypergrid.groups.grid import HyperCommGrid
from hypergrid.groups.pool import GroupPool, before_closing, live_pools, stop_lending
from hypergrid.groups.suspension import Suspended
from hypergrid.layout import span_of
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan
from hypergrid.policy import outermost

before_closing.add(te_process.release)
_states: WeakSet[ParallelState] = WeakSet()


_rows: list[Row | Alias] = [*ROWS, *ALIASES]
# Once each: a global may be a row's for some requests, and an alias for others.
GROUP_SLOTS = tuple(filter(has, dict.fromkeys(itertools.chain(*map(slots, _rows)))))
RANK_SLOTS = tuple(row.ranks for row in ROWS if row.ranks)
OTHER_SLOTS = (
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_GLOBAL_MEMORY_BUFFER",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    "_global_process_group_list",
)
# Private globals that setters write, and that answer then instead of a group.
OVERRIDE_SLOTS = tuple(
    f"_MPU_{group}_PARALLEL_{number}"
    for group in ("TENSOR_MODEL", "PIPELINE_MODEL", "DATA", "EXPERT_MODEL", "EXPERT_TENSOR")
    for number in ("RANK", "WORLD_SIZE")
)
SLOTS = frozenset(filter(has, (*GROUP_SLOTS, *RANK_SLOTS, *OVERRIDE_SLOTS, *OTHER_SLOTS)))
# What upstream's destroy_model_parallel() leaves: clients read the lists of ranks afterwards.
LEFT_BEHIND = SLOTS.intersection(
    (
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
        "_PIPELINE_GLOBAL_RANKS",
        "_DATA_PARALLEL_GLOBAL_RANKS",
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
        "_MODEL_PARALLEL_GLOBAL_RANKS",
        "_EXPERT_MODEL_PARALLEL_RANKS",
        "_EMBEDDING_GLOBAL_RANKS",
        "_MPU_DATA_PARALLEL_RANK",
        "_MPU_DATA_PARALLEL_WORLD_SIZE",
    )
)
# What an initialisation does not set, and takes over from before it.
TAKEN_OVER = SLOTS.intersection((*OVERRIDE_SLOTS, *OTHER_SLOTS))
_current: Any = None  # the state that compat.parallel_state answers from
_module_values: Values = {"__builtins__": __builtins__}  # where its values are
_activated: list[ParallelState] = []  # by activate(), the innermost last
_last_ended = ""  # the name of the state whose activation ended last
_state_numbers = itertools.count(1)
init_counts = itertools.count(1)  # of the module: a reload does not begin to count anew
_switching = threading.RLock()  # held while the values of one state replace those of another
os.register_at_fork(after_in_child=_switching._at_fork_reinit)  # type: ignore[attr-defined]


def empty_values() -> Values:
    """The values of a state that has no group yet, besides upstream's globals that are None.

    Of the getters' own there are: ``_numbers``, this rank's place in each group and the group's
    size; and ``_absence``, why this rank has no groups, if it is not that none were made yet.
    """
    values: Values = {row.slot: {} for row in ROWS if row.holds == "sizes"}
    values["_numbers"] = {}
    values["_absence"] = ""
    return values


# A state's own among the names of a module: upstream's, and the getters', which are lower case.
_KEPT = SLOTS | frozenset(filter(str.islower, empty_values()))


class ParallelState:
    """The groups and values that one ``initialize_model_parallel`` built.

    It has the getters and setters of ``compat.parallel_state``, and upstream's private globals
    (``_TENSOR_MODEL_PARALLEL_GROUP`` ...) as attributes that may be written, as outside code does:
    the getters see it. A fresh object has no groups; ``create`` gives one that has.

    While it is current its values are those of ``compat.parallel_state``, where outside code may
    write them; else it has names of its own with functions over them, as a module has.

    ``name`` is what messages call it; "state 1" and so on, in the order of creation, if the caller
    gives none.
    """

    grid: HyperCommGrid | None
    """The grid of this state: dense layers as its own dims, expert layers as view "expert"."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.is_destroyed = False
        self._caches: caches.Values = {}  # megatron-core's, while this state is not current
        # Without __name__: torch.compile would ask the module of that name instead.
        self._values: Values = {"__builtins__": __builtins__, **dict.fromkeys(LEFT_BEHIND)}
        self._forget()
        _states.add(self)

    def __getattr__(self, name: str) -> Any:
        if name in SLOTS:
            with _unswitched():
                values = _module_values if self is _current else self._values
                if name in values:
                    return values[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SLOTS:
            self._put({name: value})
        else:
            object.__setattr__(self, name, value)

    def _put(self, values: Values) -> None:
        # A release that lacks one of upstream's private globals has no value of it.
        kept = {name: value for name, value in values.items() if name in _KEPT}
        with _switching:
            self._values.update(kept)
            if self is _current:
                _module_values.update(kept)

    def __delattr__(self, name: str) -> None:
        if name not in SLOTS:
            object.__delattr__(self, name)
            return
        with _switching:
            self._values.pop(name, None)
            if self is _current:
                _module_values.pop(name, None)

    def _bind(self) -> None:
        """Make the getters over this state's values, which answer while it is not current."""
        if "is_initialized" not in self._values:
            bind_getters_to(self._values)

    def _forget(self) -> None:
        self.request: Request | None = None
        self.planned: PlannedRows | None = None
        self.grid = None
        self._global_process_group_list: list[ProcessGroup | None] | None = None
        self._put({**dict.fromkeys(SLOTS - LEFT_BEHIND), **empty_values()})

    @classmethod
    def create(cls, *, name: str = "", **arguments: Any) -> ParallelState:
        """Build the groups for the arguments of ``initialize_model_parallel``.

        ``name`` is what messages call the state; it is of no consequence for the groups.

        *Collective* over the window of ranks. After an error no group is left, and the
        environment is as before.

        Raises
        ------
        As ``compat.parallel_state.initialize_model_parallel``.
        """
        request = request_of(arguments)
        with request.telling_others():
            planned = PlannedRows(request)
        state = cls(name)
        state.initialize(planned)
        return state

    def initialize(self, planned: PlannedRows, becomes_current: bool = False) -> None:
        """Build the planned groups in this fresh state, which then may become the current one.

        *Collective* and all or nothing, as ``create``.
        """
        request = planned.request
        values = empty_values()
        with abortable(), environment_restored_on_failure():
            grid = build(planned, values)
            try:
                self.name = self.name or f"state {next(_state_numbers)}"
                self.request = request
                self.planned = planned
                self.grid = grid
                self.is_destroyed = False
                if grid.pool is None:
                    values["_absence"] = (
                        f"{self.name} has groups on ranks {span_of(planned.participants)} only, "
                        f"and rank {dist.get_rank()} is not one of them."
                    )
                if becomes_current:
                    # Numbers that setters have written stay, as upstream's do.
                    self._put({slot: getattr(_current, slot) for slot in TAKEN_OVER})
                self.take_values(values, request)
                if becomes_current:
                    make_current(self)
                else:
                    self._bind()  # now, since torch.compile cannot trace it in a method
                set_buffer = request.helpers.get("_set_global_memory_buffer")
                if set_buffer is None:
                    set_buffer = self._set_global_memory_buffer
                set_buffer()
                raise_if_waits_ended()
            except BaseException:
                grid.destroy(abort=True)
                raise
        if request.timeout_of_all is not None:
            of_torch.set_timeout(request.timeout_of_all)  # of the default group

    def take_values(self, values: Values, request: Request) -> None:
        """Take over the values that were filled for a request, and those that follow from it."""
        created = values.pop("_global_process_group_list", [None])
        self._put(values)
        if created:  # behind those that create_group made before
            earlier = self._global_process_group_list or [None]
            self._global_process_group_list = [*earlier, *created[1:]]
        stages = request.virtual_pipeline_model_parallel_size
        if stages is not None:
            self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
            self._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = stages

    @property
    def plan(self) -> GroupPlan | None:
        """The groups of this state as data."""
        if self.planned is None:
            return None
        return self.planned.plan

    @property
    def pool(self) -> GroupPool | None:
        """The groups of this state, and how they were created; None outside the window."""
        if self.grid is None:
            return None
        return self.grid.pool

    def __repr__(self) -> str:
        if self.is_destroyed:
            return "ParallelState(destroyed)"
        if self.request is None:
            return "ParallelState(not initialized)"
        rank = -1  # in no layout
        if dist.is_initialized():
            rank = dist.get_rank()
        layout = self.request.decoder
        place = "outside the window"
        if rank in layout:
            place = f"{layout.trimmed.coordinate(rank)}"
        suspended = ", suspended" if self._is_suspended else ""
        return f"ParallelState(rank {rank} at {place} of {layout!r}{suspended})"

    def note_group(self, group: ProcessGroup) -> None:
        """Let ``update_pg_timeout`` reach a group that the caller created and owns."""
        if self._global_process_group_list is None:
            self._global_process_group_list = [None]
        self._global_process_group_list.append(group)

    def destroy(self, abort: bool = False) -> None:
        """Close all groups of this state and forget them; idempotent.

        Lists of ranks stay, as upstream's do. *Local* with ``abort``; else NCCL waits until the
        other members close theirs.

        Parameters
        ----------
        abort : bool
            Wait for no other rank, whatever state the communicators are in: NCCL drops what is
            under way, and gloo's connections are shut.
        """
        with _switching:
            if self is _current:
                self._caches = caches.take()
        caches.free(self._caches, abort)
        if self.grid is not None:
            self.grid.destroy(abort=abort)
        self.is_destroyed = self.is_destroyed or self.request is not None
        self._forget()
        if self.is_destroyed:
            name = self.name or "the state with its groups"
            text = (
                f"{name} was destroyed, and its groups with it. Call initialize_model_parallel() "
                f"or ParallelState.create() for new ones."
            )
            self._put({"_absence": text})

    @contextmanager
    def activate(self) -> Iterator[ParallelState]:
        """Make this the state that ``compat.parallel_state`` answers from, inside. *Local*.

        For the whole process, so that autograd's threads see it too. Megatron's buffers over groups
        change with it. Activations nest: afterwards the previous state is current again, even after
        an error. Threads that need different
        states at the same time call the methods of the states.

        Raises
        ------
        RuntimeError
            The state was destroyed. At the end, if an activation by another thread has not ended
            before this one. At the beginning, if Transformer Engine's expert parallelism is over
            ranks of another state.
        """
        global _last_ended
        if self.is_destroyed:
            raise RuntimeError(
                f"{self.name or 'this state'} cannot be activated, as it was destroyed: create a "
                f"new one by ParallelState.create()."
            )
        caches.check_expert_parallelism(
            self._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP, f"state {self.name!r}"
        )
        before = _current
        make_current(self)
        _activated.append(self)
        try:
            yield self
        except BaseException:
            make_current(before)
            raise
        finally:
            _activated.remove(self)
            _last_ended = self.name
        left = _current
        make_current(before)
        # Another thread has begun an activation inside this one, and is still in it.
        if left is not self:
            raise RuntimeError(
                f"{left!r} was activated after {self!r} and has not ended before it: "
                f"activations must nest. For two states at the same time, call their methods."
            )

    def suspend(self) -> dict[str, Suspended]:
        """Free the device memory of the groups until ``resume``; only between collectives.

        Getters return the same groups, ranks and sizes meanwhile. A group of gloo
        works as before. One that its backend has suspended must not be used,
        wherever the caller has it from (a getter, a model, an optimizer): nothing refuses that.

        *Collective*, result and errors as for ``GroupPool.suspend``.

        Raises
        ------
        RuntimeError
            There are no groups to suspend.
        """
        if self.planned is None or self.grid is None or self.pool is None:
            raise RuntimeError(f"there are no groups to suspend: {self!r}.")
        return self.grid.suspend(self.planned.participants)

    def resume(self) -> None:
        """Let the groups work again, as ``GroupPool.resume``: the same objects.

        Raises
        ------
        RuntimeError
            The state is not suspended, or a backend cannot resume.
        """
        if self.grid is None or not self._is_suspended:
            raise RuntimeError(f"this state is not suspended: {self!r}.")
        self.grid.resume()

    @property
    def _is_suspended(self) -> bool:
        return self.pool is not None and self.pool.suspended is not None

    @property
    def is_in_use(self) -> bool:
        """Whether it has groups or this rank is outside its window; not if all were set to None."""
        # Aliases do not count: some releases lack them. The global that they are the same as does.
        alias_slots: set[str] = set()
        if self.request is not None:
            for alias in aliases(self.request):
                alias_slots.update(slots(alias))
        for slot in GROUP_SLOTS:
            if slot not in alias_slots and getattr(self, slot):
                return True
        return self.request is not None and self.pool is None

    def update_pg_timeout(self, timeout: timedelta, pg: ProcessGroup | None = None) -> None:
        """Set ``timeout`` on ``pg``, or on every group that was made. *Collective* over ``pg``.

        A warning names the groups that share the communicator of ``pg``: theirs changes too.
        """
        labels = []
        for pool in live_pools():
            for pooled in pool.groups:
                if pooled.group is pg:
                    labels.append(f"{pooled.label} of {pool.owner}")
        if len(labels) > 1:
            warnings.warn(
                f"update_pg_timeout({timeout}) changes the timeout of {' and '.join(labels)}: they "
                f"share one communicator. Initialise with share='none' to change one alone.",
                RuntimeWarning,
                stacklevel=3,
            )
        dist.barrier(pg)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        groups = [pg]
        if pg is None:
            groups = self._global_process_group_list or [None]
        for group in groups:
            of_torch.set_timeout(timeout, group)
        stop_lending(groups)

    def set_timeout(self, minutes: float) -> None:
        """Set the timeout of all groups of this state, from the next operation on. *Local*.

        Such as a long one until the first steps are done, and a short one then. An operation that
        has begun keeps its own. What each backend does after the timeout is in docs/failures.md.
        The default group keeps its own: ``update_pg_timeout(timeout)`` changes that too.

        Raises
        ------
        ValueError
            ``minutes`` is not a number above 0.
        RuntimeError
            There are no groups.
        """
        if self.pool is None:
            raise RuntimeError(f"there are no groups to set a timeout of: {self!r}.")
        if not isinstance(minutes, int | float) or not 0 < minutes < float("inf"):
            raise ValueError(f"minutes must be a number above 0, such as 10, got {shown(minutes)}.")
        timeout = timedelta(minutes=minutes)
        groups = [*dict.fromkeys(pooled.group for pooled in self.pool.groups)]
        for group in groups:
            if of_torch.is_registered(group) and group is not of_torch.default_group():
                of_torch.set_timeout(timeout, group)
        stop_lending(groups)

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
        if self.planned is None:
            raise RuntimeError(
                "create_all_gather_groups() needs an initialized state: call "
                "initialize_model_parallel() first."
            )
        if self.pool is None:
            return None, None
        dense_row, expert_row = EXTRA_ALL_GATHER
        arguments = (self.planned, self.pool, self.note_group, timeout, nccl_comm_cfgs or {})
        dense_group = build_extra(dense_row, *arguments)
        if not for_expert_parallelism or self.get_expert_model_parallel_world_size() == 1:
            return dense_group, None
        return dense_group, build_extra(expert_row, *arguments)


def _unswitched() -> AbstractContextManager[Any]:
    """Inside, no state becomes current or ceases to be; compiled code has guards instead."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return _switching


def _method(name: str, function: FunctionType) -> Any:
    """The method of a state: its function, over its values wherever they are."""
    changes = name.startswith(SETTERS)

    @functools.wraps(function)
    def method(self: ParallelState, *args: Any, **kwargs: Any) -> Any:
        if self is not _current and not changes:  # no activation changes these values
            if name not in self._values:
                self._bind()
            return self._values[name](*args, **kwargs)
        with _switching if changes else _unswitched():
            if self is _current:
                return answering[name](*args, **kwargs)
            self._bind()
            return self._values[name](*args, **kwargs)

    signature = inspect.signature(function)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [self_parameter, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


for _name, _function in FUNCTIONS.items():
    setattr(ParallelState, _name, _method(_name, _function))


def _forget_all() -> None:
    for state in [*_states]:
        if state.request is not None and state.pool is None:  # not one that was made meanwhile
            state.destroy(abort=True)


after_abort.add(_forget_all)


def _free_caches(groups: Sequence[ProcessGroup], abort: bool) -> None:
    with _switching:
        caches.free_over(groups, [state._caches for state in [*_states]], abort)


before_closing.add(_free_caches)


def request_of(arguments: dict[str, Any]) -> Request:
    """The request of a state that is not current: with the order and the helpers that count now."""
    helpers = replaced_functions()
    helpers.pop("_set_global_memory_buffer", None)  # that is for the current state
    # A window needs no getter and no global of its own: states over windows work in any release.
    for name in arguments:
        if not has(name) and name not in ("rank_offset", "local_world_size"):
            raise TypeError(
                f"{name} is no argument of megatron-core {RELEASE[0]}.{RELEASE[1]}, which is "
                f"followed here. Leave it out, or set {ASKED} to a release that has it."
            )
    arguments["order"], source = outermost("order", arguments.get("order", Request.order))
    return Request(**arguments, helpers=helpers, order_source=source)


def current() -> ParallelState:
    """The state that ``compat.parallel_state`` answers from; at first one without groups."""
    return _current  # type: ignore[no-any-return]


def activations() -> tuple[bool, str]:
    """Whether an ``activate()`` is open, in any thread; and the state of which one ended last."""
    return bool(_activated), _last_ended


def all_states() -> list[ParallelState]:
    """The states of this process that have an initialisation behind them."""
    return [state for state in [*_states] if state.request is not None]


def namespace() -> Values:
    """Where the values of the current state are: the globals of ``compat.parallel_state``."""
    return _module_values


def make_current(state: ParallelState) -> None:
    """Let ``compat.parallel_state`` answer from ``state``."""
    global _current
    with _switching:
        if _current is not None:
            for name in _KEPT:
                if name in _module_values:  # outside code may have deleted one
                    _current._values[name] = _module_values[name]
            if _current.request is not None:
                _current._bind()  # now, since torch.compile cannot trace it in a method
            _current._caches = caches.take()
        _current = state
        caches.put(state._caches)
        state._caches = {}
        for name in _KEPT:
            _module_values[name] = state._values.get(name)


def publish_into(names: Values) -> None:
    """Move the values of the current state into ``names``, the globals of a module.

    If a module had them before, it was reloaded: the state ends without waiting for anybody, and a
    fresh one is current, as upstream's module begins anew.
    """
    global _module_values
    if "__name__" in _module_values:
        _current.destroy(abort=True)
        make_current(ParallelState())
    with _switching:
        names.update({name: _module_values[name] for name in _KEPT})
        _module_values = names
        answer_from(names)


answer_from(_module_values)
make_current(ParallelState())
group_helpers.note = lambda group: _current.note_group(group)
