"""Puts the audit into the getters and takes it out again.

A getter keeps its identity, as other modules hold it by name: while something is on, its code is
exchanged for one of the same signature that comes here first. Off, it is the code that it was.
Reads of private globals pass through the class of the module, which is exchanged too.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.audit import owners
from compat.audit.getters import AUDITED, instead_of, slots_behind
from compat.audit.log import Log, file_of, function_of
from compat.audit.owners import UNKNOWN, Place
from compat.megatron.getters import SETTERS
from compat.state import SLOTS, activations, all_states, current, namespace
from hypergrid import of_torch

_MODULE = "compat.parallel_state"
_HOOK = "_hypergrid_audit"  # in the globals of the getters, while something is on
_OUR_PACKAGES = ("compat", "hypergrid")
# Modules and functions that read for their caller, which is the one that lacks a group.
_READ_FOR_CALLERS = frozenset(
    {
        "megatron.core.process_groups_config",
        "megatron.core.utils:get_tensor_model_parallel_group_if_none",
    }
)
_OTHER, _NONE_OPEN, _ENDED = "another state", "no activate() is open", "activate() has ended"


class WrongStateError(RuntimeError):
    """A read of another state than the reader's, under ``strict()``."""


class ForbiddenReadError(RuntimeError):
    """A read that ``forbid()`` does not allow."""


_read_by_thread = threading.local()  # its ``group``: the one behind the read in progress
_logs: list[Log] = []
_rules: list[_Rule] = []
_functions: dict[str, FunctionType] = {}  # the getters
_inner: dict[str, FunctionType] = {}  # as they are without the audit
_lock = threading.RLock()
_warned: set[str] = set()


def _switch() -> None:
    """Put the audit in if something needs it, take it out if nothing does."""
    with _lock:
        wanted = bool(_logs or _rules)
        if wanted and not _inner:
            _put_in()
        elif not wanted and _inner:
            _take_out()


def _put_in() -> None:
    module = importlib.import_module(_MODULE)  # above this package in the order of imports
    names = namespace()
    names[_HOOK] = _read
    for name in AUDITED:
        function = names.get(name)
        if not isinstance(function, FunctionType) or function.__globals__ is not names:
            continue  # outside code has replaced it: what that calls is seen
        own = FunctionType(function.__code__, names, name, function.__defaults__)
        own.__kwdefaults__ = function.__kwdefaults__
        _functions[name], _inner[name] = function, own
        function.__code__ = _detour(function)
    module.__class__ = _Watched
    owners.watch()


def renew() -> None:
    """After a reload of the module, which has other functions: put the audit into these."""
    with _lock:
        if _inner:
            _take_out()
            _put_in()


def _take_out() -> None:
    names = namespace()
    for name, function in _functions.items():
        function.__code__ = _inner[name].__code__
    _functions.clear()
    _inner.clear()
    names.pop(_HOOK, None)
    sys.modules[_MODULE].__class__ = ModuleType
    owners.unwatch()


def _detour(function: FunctionType) -> types.CodeType:
    """Code of the same signature that calls the hook with what it was given."""
    name, code = function.__name__, function.__code__
    placed = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    taken = ", ".join([*placed, *(["*", *named] if named else [])])
    given = ", ".join([*placed, *(f"{each}={each}" for each in named)])
    source = f"def {name}({taken}): return {_HOOK}({name!r}, {given})"
    return next(c for c in compile(source, __file__, "exec").co_consts if hasattr(c, "co_code"))


class _Watched(ModuleType):
    """The module while something is on: also its private globals are seen."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in SLOTS and not torch.compiler.is_dynamo_compiling():
            frame = _caller(sys._getframe().f_back)
            if frame is not None and not _is_guard(frame):
                _refuse(name, frame)
                group = value if isinstance(value, ProcessGroup) else None
                _record(name, False, frame, group)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        frame = _caller(sys._getframe().f_back) if name in SLOTS else None
        if frame is not None:
            _refuse(name, frame)
        super().__setattr__(name, value)
        if frame is not None:
            _record(name, True, frame, value if isinstance(value, ProcessGroup) else None)


def _read(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """The code of every audited getter while something is on."""
    if torch.compiler.is_dynamo_compiling():  # it cannot trace what follows
        return _inner[name](*args, **kwargs)
    frame = _caller(sys._getframe(1).f_back)  # None also where no Python code calls
    if frame is None:  # one function of ours calls another
        result = _inner[name](*args, **kwargs)
        if isinstance(result, ProcessGroup):
            _read_by_thread.group = result
        return result
    _refuse(name, frame)
    _read_by_thread.group = None
    result = None
    try:
        result = _inner[name](*args, **kwargs)
        return result
    finally:
        group = result if isinstance(result, ProcessGroup) else _read_by_thread.group
        _record(name, name.startswith(SETTERS), frame, group)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame that reads; None if it is ours."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        reader = {module, f"{module}:{frame.f_code.co_name}"}
        if not reader & _READ_FOR_CALLERS:
            return None if module.partition(".")[0] in _OUR_PACKAGES else frame
        frame = frame.f_back
    return None


def _is_guard(frame: FrameType) -> bool:
    """Whether torch looks, before it runs compiled code, if a global is as it was."""
    return str(frame.f_globals.get("__name__", "torch")).partition(".")[0] == "torch"


def _open_logs() -> Iterable[Log]:
    """This process's innermost log of each directory, as the files are added up."""
    process = os.getpid()  # not of the process that it was forked from, whose thread had the lock
    return {log.directory: log for log in _logs if log.process == process}.values()


def _is_strict() -> bool:
    return any(rule.is_strict for rule in _rules)


def _refuse(name: str, frame: FrameType) -> None:
    for rule in _rules:
        rule.check(name, frame)


def _record(name: str, changes: bool, frame: FrameType, group: Any) -> None:
    slot = _slot(name, group)
    if slot is not None and group is None:
        group = namespace().get(slot)
        group = group if isinstance(group, ProcessGroup) else None
    place = owners.look_around(frame)
    phase, state = _phase(place), current()
    if _logs:
        use = {
            "module": frame.f_globals.get("__name__", "?"),
            "line": frame.f_lineno,
            "outermost": place.outermost,
            "name": name,
            "writes": changes,
            "phase": phase,
            "state": state.name if state.request is not None else "none",
            "group": slot.lstrip("_") if slot else "",
        }
        for log in _open_logs():
            log.site(frame.f_code, use)
    if not changes and (_logs or _is_strict()):
        _judge(name, slot, group, frame, place, phase)


def _slot(name: str, group: Any) -> str | None:
    """The private global that was answered from; None if it is not one of a group, or not known."""
    slots = slots_behind(name)
    if group is not None:
        names = namespace()
        found = [slot for slot in slots if names.get(slot) is group]
        # Several globals may hold one group: the one that it was created for.
        own = (slot for slot in found if slot.lstrip("_") == group.group_desc)
        return next(own, found[0] if found else None)
    return slots[0] if len(slots) == 1 else None


def _phase(place: Place) -> str:
    if current().request is None and not all_states():
        return "before initialisation"
    if of_torch.in_backward():
        return "backward"
    return place.phase or "elsewhere"


def _judge(
    name: str, slot: str | None, group: Any, frame: FrameType, place: Place, phase: str
) -> None:
    if slot is None:
        return
    owner = place.owner
    given = owner.group(slot) if owner is not None else UNKNOWN
    read = f"read {slot.strip('_').lower().replace('_', ' ')}"
    remedy = f"{instead_of(name, slot)}."
    if owner is not None and given is not UNKNOWN:
        if given is group or not isinstance(given, (ProcessGroup, type(None))):
            return
        source = owners.state_of(group) if group is not None else current()
        built = "given groups of" if owner.was_given else "built under"
        text = (
            f"{type(place.reader).__name__} {built} {owner.name} {read} of {_state_name(source)} "
            f"at {_location(frame)}, by {name}(). Read inside `with state.activate():` of its own "
            f"state, or {remedy}"
        )
        got, wanted = _ranks(group), _ranks(given)
        same = f"got another group of the same ranks {got}"
        _report(_OTHER, text, same if got == wanted else f"got the ranks {got} instead of {wanted}")
        return
    is_open, ended = activations()
    states = all_states()
    if is_open or len(states) < 2:
        return
    kind, when = _NONE_OPEN, "while no activate() is open"
    advice = "Read inside `with state.activate():`"
    if phase == "backward" and ended:
        kind, when = _ENDED, f"in backward, after activate() of {ended!r} has ended"
        advice = "Run forward and backward inside one activate()"
    names = ", ".join(sorted(map(_state_name, states)))
    text = (
        f"{_location(frame)} {read} by {name}() {when}: got that of {_state_name(current())}, of "
        f"the states {names}. {advice}, or {remedy}"
    )
    _report(kind, text, f"got the ranks {_ranks(group)}")


def _state_name(state: Any) -> str:
    return repr(state.name) if state is not None and state.name else "no state"


def _location(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "")
    return f"{file_of(frame.f_code, module)}:{frame.f_lineno}"


def _ranks(group: Any) -> str:
    return str(dist.get_process_group_ranks(group)) if group is not None else "none"


def _report(kind: str, text: str, ranks: str) -> None:
    for log in _open_logs():
        log.problem(kind, text, ranks)
    if _is_strict():
        raise WrongStateError(f"rank {_rank()} {ranks}: {text}")
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"rank {_rank()} {ranks}: {text}", RuntimeWarning, stacklevel=2)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def begin(directory: str | os.PathLike[str]) -> None:
    """Record from now on, to the end of the process; idempotent. *Local*.

    As ``HYPERGRID_AUDIT``. Raises OSError if the directory cannot be written.
    """
    path = Path(directory).absolute()
    if not any(log.directory == path for log in _logs):
        _logs.append(Log(path))
        _switch()


@contextmanager
def recording(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record inside: one file for each process in ``directory``. *Local*.

    ``hypergrid audit DIRECTORY`` reads the files of all ranks. Wrong states are warned of, once
    for each place, with RuntimeWarning. Raises OSError if the directory cannot be written.
    """
    log = Log(Path(directory))
    _logs.append(log)
    _switch()
    try:
        yield
    finally:
        _logs.remove(log)
        _switch()
        log.close()


class _Rule(AbstractContextManager[Any]):
    """Raises at reads from the call on, for the process; as a context manager until its end."""

    def __init__(
        self, patterns: Sequence[str] = (), allow: Sequence[str] = (), is_strict: bool = False
    ) -> None:
        self.patterns, self.allow, self.is_strict = patterns, allow, is_strict
        self.__enter__()

    def __enter__(self) -> Any:
        if self not in _rules:
            _rules.append(self)
            _switch()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Raise no longer; idempotent."""
        if self in _rules:
            _rules.remove(self)
            _switch()

    def check(self, name: str, frame: FrameType) -> None:
        """Refuse a read of ``name`` by ``frame``, if a pattern matches its module."""
        module = frame.f_globals.get("__name__", "")
        rule = next((p for p in self.patterns if fnmatch.fnmatchcase(module, p)), None)
        if rule is None or any(
            fnmatch.fnmatchcase(each, allowed)
            for allowed in self.allow
            for each in (module, name, f"{module}:{name}")
        ):
            return
        called = name if name.startswith("_") else f"{name}()"
        raise ForbiddenReadError(
            f"rank {_rank()}: {module} used {called} of parallel_state at {_location(frame)}, in "
            f"{function_of(frame.f_code)}, which forbid({rule!r}) does not allow. What to do: "
            f"{instead_of(name)}. To allow it for now: forbid({rule!r}, "
            f"allow=[{f'{module}:{name}'!r}])."
        )


def strict() -> _Rule:
    """Raise WrongStateError where a read is of another state than the reader's. *Local*.

    From the call on, for the process; as a context manager, or with ``end()``, until its end.
    """
    return _Rule(is_strict=True)


def forbid(modules: str | Sequence[str], *, allow: str | Sequence[str] = ()) -> _Rule:
    """Raise ForbiddenReadError where a module uses parallel_state. *Local*.

    From the call on, for the process; as a context manager, or with ``end()``, until its end.

    Parameters
    ----------
    modules : str or list of str
        Patterns of modules' names as for the shell: ``"megatron.core.transformer.*"``. A package's
        name alone is its ``__init__.py``.
    allow : str or list of str
        Exceptions: patterns of modules, of functions of parallel_state, or both as
        ``"megatron.core.utils:get_global_memory_buffer"``.

    Raises
    ------
    TypeError
        A pattern is not a string.
    ValueError
        There is no pattern, or one that is no module's name.
    """
    lists: dict[str, list[Any]] = {}
    for name, value in (("modules", modules), ("allow", allow)):
        several = isinstance(value, Iterable) and not isinstance(value, str)
        lists[name] = [*value] if several else [value]
        for each in lists[name]:
            invalid = f"invalid value in {name}: {each!r}"
            allowed = "allowed: patterns of modules' names such as 'megatron.core.transformer.*'."
            if not isinstance(each, str):
                raise TypeError(f"{invalid} is no string; {allowed}")
            if not each or set(each) & set("/\\ " if name == "allow" else "/\\ :"):
                raise ValueError(f"{invalid} matches no module; {allowed}")
    if not lists["modules"]:
        raise ValueError("forbid() needs at least one pattern of modules' names.")
    return _Rule(lists["modules"], lists["allow"])
