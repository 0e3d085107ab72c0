"""Puts the audit into the getters and takes it out again.

A getter keeps its identity, as other modules hold it by name: while something is on, its code is
exchanged for one of the same signature that comes here first. Off, it is the code that it was.
Reads of private globals pass through the class of the module, which is exchanged too.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat.audit import owners
from compat.audit.getters import AUDITED, instead_of, slots_behind
from compat.audit.log import Log, file_of, function_of
from compat.audit.owners import UNKNOWN, Owner
from compat.megatron.getters import SETTERS, answering
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
        "compat.megatron.releases:released",
    }
)


class WrongStateError(RuntimeError):
    """A read of another state than the reader's, under ``strict()``."""


class ForbiddenReadError(RuntimeError):
    """A read that ``forbid()`` does not allow."""


_read_by_thread = threading.local()  # its ``group``: the one behind the read in progress
_log: Log | None = None  # of the innermost recording
_rules: list[_Rule] = []
# Those whose code is exchanged, each with a function of the code that it had.
_getters: dict[str, tuple[FunctionType, FunctionType]] = {}
_lock = threading.RLock()
_warned: set[str] = set()


def _switch() -> None:
    """Put the audit in if something needs it, take it out if nothing does."""
    with _lock:
        is_needed = bool(_log or _rules)
        if is_needed and not _getters:
            _put_in()
        elif _getters and not is_needed:
            _take_out()


def _put_in() -> None:
    # By name, since parallel_state is above this package in the order of imports.
    module = importlib.import_module(_MODULE)
    names = namespace()
    names[_HOOK] = _read
    for name in AUDITED:
        # Outside code may have replaced the getter. Then reads by the replacement are seen.
        if name not in names or names[name] is not answering.get(name):
            continue
        # A wrapper that takes the arguments of the release stays around it.
        getter = cast(FunctionType, inspect.unwrap(names[name]))
        original = FunctionType(getter.__code__, names, name, getter.__defaults__)
        _getters[name] = (getter, original)
        getter.__code__ = _detour(getter)
    module.__class__ = _Watched
    owners.watch()


def renew() -> None:
    """After a reload of the module, which has other functions: put the audit into these."""
    with _lock:
        if _getters:
            _take_out()
            _put_in()


def _take_out() -> None:
    for getter, original in _getters.values():
        getter.__code__ = original.__code__
    _getters.clear()
    namespace().pop(_HOOK, None)
    sys.modules[_MODULE].__class__ = ModuleType
    owners.unwatch()


def _detour(getter: FunctionType) -> CodeType:
    """Code of the same signature that passes its arguments to the hook.

    For ``get_rank(group, stage)`` it is that of
    ``def get_rank(group, stage): return _hypergrid_audit("get_rank", group, stage)``.
    """
    name = getter.__name__
    code = getter.__code__
    parameters = code.co_varnames[: code.co_argcount]
    arguments = ", ".join([repr(name), *parameters])
    source = f"def {name}({', '.join(parameters)}): return {_HOOK}({arguments})"
    defined: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), defined)
    return defined[name].__code__


class _Watched(ModuleType):
    """The module while something is on: also its private globals are seen."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in SLOTS and not torch.compiler.is_dynamo_compiling():
            frame = _reader(sys._getframe().f_back)
            if frame is not None and not _is_guard(frame):
                _refuse(name, frame)
                _record(name, False, frame, _group_or_none(value))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        frame = None
        if name in SLOTS:
            frame = _reader(sys._getframe().f_back)
        if frame is not None:
            _refuse(name, frame)
        super().__setattr__(name, value)
        if frame is not None:
            _record(name, True, frame, _group_or_none(value))


def _read(name: str, *arguments: Any) -> Any:
    """The code of every audited getter while something is on."""
    _, getter = _getters[name]
    # The compiler cannot trace what follows.
    if torch.compiler.is_dynamo_compiling():
        return getter(*arguments)
    frame = _reader(sys._getframe(1).f_back)
    if frame is None:
        # One function of ours calls another, or no Python code calls. The outer read, if there is
        # one, is answered from this group: get_tensor_model_parallel_rank() asks for its group.
        result = getter(*arguments)
        if isinstance(result, ProcessGroup):
            _read_by_thread.group = result
        return result
    _refuse(name, frame)
    _read_by_thread.group = None
    group = None
    try:
        result = getter(*arguments)
        group = _group_or_none(result)
        return result
    finally:  # a read that fails counts too
        changes = name.startswith(SETTERS)
        _record(name, changes, frame, group or _read_by_thread.group)


def _group_or_none(value: Any) -> ProcessGroup | None:
    if isinstance(value, ProcessGroup):
        return value
    return None


def _reader(frame: FrameType | None) -> FrameType | None:
    """The frame that reads; None if it is ours."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        function = f"{module}:{frame.f_code.co_name}"
        if module not in _READ_FOR_CALLERS and function not in _READ_FOR_CALLERS:
            if _package(module) in _OUR_PACKAGES:
                return None
            return frame
        frame = frame.f_back
    return None


def _is_guard(frame: FrameType) -> bool:
    """Whether torch looks, before it runs compiled code, if a global is as it was."""
    return _package(str(frame.f_globals.get("__name__", "torch"))) == "torch"


def _package(module: str) -> str:
    return module.partition(".")[0]


def _open_log() -> Log | None:
    """The log; None in a forked process, whose parent's it is: perhaps a lost thread locks it."""
    if _log is not None and _log.process == os.getpid():
        return _log
    return None


def _is_strict() -> bool:
    return any(rule.is_strict for rule in _rules)


def _refuse(name: str, frame: FrameType) -> None:
    for rule in _rules:
        rule.check(name, frame)


def _record(name: str, changes: bool, frame: FrameType, group: ProcessGroup | None) -> None:
    slot = _slot(name, group)
    if slot is not None and group is None:
        group = _group_or_none(namespace().get(slot))
    log = _open_log()
    if log is not None:
        state = current()
        use = {
            "module": frame.f_globals.get("__name__", "?"),
            "line": frame.f_lineno,
            "name": name,
            "writes": changes,
            "state": state.name if state.request is not None else "none",
            "group": slot.lstrip("_") if slot else "",
        }
        log.site(frame.f_code, use)
    # A private global that is no group, and a write, are of no wrong state.
    if changes or slot is None:
        return
    if log is not None or _is_strict():
        _judge(_Read(name, slot, group, frame))


def _slot(name: str, group: ProcessGroup | None) -> str | None:
    """The private global that was answered from; None if it is not one of a group, or not known."""
    slots = slots_behind(name)
    if group is not None:
        names = namespace()
        slots = tuple(slot for slot in slots if names.get(slot) is group)
        # Several globals may hold one group: the one that it was created for.
        for slot in slots:
            if slot.lstrip("_") == group.group_desc:
                return slot
    # A getter that answers from one of several globals, and not with a group, does not say which.
    elif len(slots) > 1:
        return None
    return next(iter(slots), None)


class _Read(NamedTuple):
    """A read of a private global that holds a group."""

    name: str  # of the getter, or the global itself
    slot: str
    group: ProcessGroup | None  # that the reader gets
    frame: FrameType

    @property
    def verb(self) -> str:
        """``_DATA_PARALLEL_GROUP`` is "read data parallel group"."""
        return f"read {self.slot.strip('_').lower().replace('_', ' ')}"

    @property
    def remedy(self) -> str:
        """The end of an advice."""
        return f"or {instead_of(self.name, self.slot)}."


def _judge(read: _Read) -> None:
    """Report a read of another state than the reader's, or of whatever state is current."""
    reader, owner = owners.reader_of(read.frame)
    expected = owner.group(read.slot)
    if expected is UNKNOWN:
        _judge_activation(read)
    # Some globals hold lists of groups, which are not compared.
    elif expected is not read.group and isinstance(expected, (ProcessGroup, NoneType)):
        _report_other_state(read, reader, owner, expected)


def _report_other_state(
    read: _Read, reader: Any, owner: Owner, expected: ProcessGroup | None
) -> None:
    built = "given groups of" if owner.was_given else "built under"
    text = (
        f"{type(reader).__name__} {built} {_state_name(owner.state)} {read.verb} of "
        f"{_state_name(current())} at {_location(read.frame)}, by {read.name}(). Read inside `with "
        f"state.activate():` of its own state, {read.remedy}"
    )
    ranks = _ranks(read.group)
    expected_ranks = _ranks(expected)
    example = f"got the ranks {ranks} instead of {expected_ranks}"
    if ranks == expected_ranks:
        example = f"got another group of the same ranks {ranks}"
    _report("another state", text, example)


def _judge_activation(read: _Read) -> None:
    """Report a read by code that holds no groups, if several states might be meant."""
    is_open, ended = activations()
    states = all_states()
    if is_open or len(states) < 2:
        return
    kind = "no activate() is open"
    when = "while no activate() is open"
    advice = "Read inside `with state.activate():`"
    if ended and of_torch.in_backward():
        kind = "activate() has ended"
        when = f"in backward, after activate() of {ended!r} has ended"
        advice = "Run forward and backward inside one activate()"
    names = ", ".join(sorted(map(_state_name, states)))
    text = (
        f"{_location(read.frame)} {read.verb} by {read.name}() {when}: got that of "
        f"{_state_name(current())}, of the states {names}. {advice}, {read.remedy}"
    )
    _report(kind, text, f"got the ranks {_ranks(read.group)}")


def _state_name(state: Any) -> str:
    if state is None or not state.name:
        return "no state"
    return repr(state.name)


def _location(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "")
    return f"{file_of(frame.f_code, module)}:{frame.f_lineno}"


def _ranks(group: ProcessGroup | None) -> str:
    if group is None:
        return "none"
    return str(dist.get_process_group_ranks(group))


def _report(kind: str, text: str, example: str) -> None:
    log = _open_log()
    if log is not None:
        log.problem(kind, text, example)
    message = f"rank {_rank()} {example}: {text}"
    if _is_strict():
        raise WrongStateError(message)
    if text not in _warned:
        _warned.add(text)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def begin(directory: str | os.PathLike[str]) -> None:
    """Record from now on, to the end of the process; idempotent. *Local*.

    As ``HYPERGRID_AUDIT``. Raises OSError if the directory cannot be written.
    """
    global _log
    path = Path(directory).absolute()
    if _log is None or _log.directory != path:
        _log = Log(path)
        _switch()


@contextmanager
def recording(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record inside: one file for each process in ``directory``. *Local*.

    ``hypergrid audit DIRECTORY`` reads the files of all ranks. Wrong states are warned of, once
    for each place, with RuntimeWarning. A recording around this one counts no read meanwhile.
    Raises OSError if the directory cannot be written.
    """
    global _log
    outer = _log
    _log = log = Log(Path(directory))
    _switch()
    try:
        yield
    finally:
        _log = outer
        _switch()
        log.close()


@dataclass(eq=False)
class _Rule:
    """Raises at reads from the call on, for the process; as a context manager until its end."""

    patterns: Sequence[str] = ()
    allow: Sequence[str] = ()
    is_strict: bool = False

    def __post_init__(self) -> None:
        _rules.append(self)
        _switch()

    def __enter__(self) -> _Rule:
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
        read = f"{module}:{name}"
        exceptions = product((module, name, read), self.allow)
        if any(fnmatchcase(text, pattern) for text, pattern in exceptions):
            return
        for pattern in self.patterns:
            if fnmatchcase(module, pattern):
                raise ForbiddenReadError(
                    f"rank {_rank()}: {module} used {name} of parallel_state at "
                    f"{_location(frame)}, in {function_of(frame.f_code)}, which "
                    f"forbid({pattern!r}) does not allow. What to do: {instead_of(name)}. To "
                    f"allow it for now: forbid({pattern!r}, allow=[{read!r}])."
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
    ValueError
        There is no pattern, or one that is no module's name.
    """
    patterns = _checked_patterns(modules, "/\\ :")
    if not patterns:
        raise ValueError("forbid() needs at least one pattern of modules' names.")
    return _Rule(patterns, _checked_patterns(allow, "/\\ "))


def _checked_patterns(value: str | Sequence[str], never: str) -> list[str]:
    """The patterns in ``value``, one or several, which have none of the characters ``never``."""
    patterns = [value] if isinstance(value, str) else list(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern or set(pattern) & set(never):
            raise ValueError(
                f"{pattern!r} matches no module; allowed: patterns of modules' names such as "
                f"'megatron.core.transformer.*'."
            )
    return patterns
