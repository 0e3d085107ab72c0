"""A recorder in the place of torch's group calls: what a module makes and answers, as data."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat.state import ParallelState, make_current
from tests.parity.surface import (
    Call,
    Config,
    called,
    getter_calls,
    private_globals,
    public_functions,
)


class _Config:
    """NCCL's settings, with the types that torch insists on."""

    def __setattr__(self, name: str, value: Any) -> None:
        number = isinstance(value, int) and abs(value) < 2**31
        if not (isinstance(value, str) if name == "net_name" else number):
            raise TypeError(f"incompatible function arguments: {name}={value!r}")
        super().__setattr__(name, value)


class _Options:
    """Stands in for ``ProcessGroupNCCL.Options``, which a CPU build of torch lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        if not isinstance(is_high_priority_stream, int | float | None):
            raise TypeError(f"incompatible constructor arguments: {is_high_priority_stream!r}")
        self.is_high_priority_stream = bool(is_high_priority_stream)
        self.config = _Config()


class _ProcessGroupNCCL:
    Options = _Options


def options_content(options: Any) -> Any:
    if options is None:
        return None
    if isinstance(options, _Options):
        config = tuple(sorted(vars(options.config).items()))
        return ("options", options.is_high_priority_stream, config)
    return type(options).__name__


class Recorder:
    """Takes the place of torch's group calls, and names what `module` answers as `rank`.

    A group is named by the first answer that showed it, so that two modules agree on which
    answers are the very same object exactly when they agree on the names.
    """

    def __init__(self, module: ModuleType, config: Config, rank: int, release: str) -> None:
        self.module, self.config, self.rank, self.release = module, config, rank, release
        if hasattr(module, "current_state"):  # ours: lists of ranks outlive a destroy
            make_current(ParallelState())
        self.world: int = config["world_size"]
        self.created: list[tuple[Any, ...]] = []
        self.barriers: list[Any] = []
        self.timeouts: list[Any] = []
        self.names: dict[int, str] = {}
        self.details: dict[str, Any] = {}
        self._requested: dict[int, tuple[Any, ...]] = {}
        self._alive: list[Any] = []  # a name belongs to an id, which must not be used again
        self._new_group = c10d.new_group

    def new_group(
        self,
        ranks: Any = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        **more: Any,
    ) -> Any:
        members = list(range(self.world)) if ranks is None else list(ranks)
        if self.rank not in members:
            if len(set(members)) != len(members):
                raise ValueError(f"ranks repeat in {members}")
            if members and (min(members) < 0 or max(members) >= self.world):
                raise ValueError(f"ranks beyond the world of {self.world} in {members}")
            if use_local_synchronization:
                return None
            c10d._world.group_count += 1
            return dist.GroupMember.NON_GROUP_MEMBER
        group = self._new_group(
            ranks=ranks,
            timeout=timeout,
            backend="fake",
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
            **more,
        )
        requested = self._requested[id(group)] = (
            *(backend, str(timeout), options_content(pg_options)),
            os.environ.get("NCCL_COLLNET_ENABLE"),
        )
        self._alive.append(group)
        self.created.append((group_desc, tuple(sorted(members)), *requested))
        return group

    new_group.__hypergrid_members_only__ = True  # type: ignore[attr-defined]  # it only listens

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.barriers.append((tuple(ranks), tuple(device_ids or ())))

    def set_timeout(self, timeout: timedelta, group: Any = None) -> None:
        self.timeouts += [(str(timeout), kind) for kind in self.kinds([group])]

    @staticmethod
    def kinds(groups: Sequence[Any]) -> list[str]:
        """Description and ranks of each live group; None stands for the default group."""
        kinds = []
        for group in groups:
            if not group:
                kinds.append(repr(group))
            elif group in c10d._world.pg_map:
                kinds.append(repr((group.group_desc, tuple(dist.get_process_group_ranks(group)))))
        return sorted(kinds)

    def show(self, value: Any, label: str) -> Any:
        """`value` as plain data that can be compared and printed."""
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        if value is dist.GroupMember.NON_GROUP_MEMBER:
            return "<not a member>"
        if isinstance(value, dist.ProcessGroup):
            name = self.names.get(id(value))
            if name is None:
                name = self.names[id(value)] = label
                self._alive.append(value)
                self.details[name] = self._detail(value)
            return f"group of {name}"
        if isinstance(value, list | tuple):
            if all(type(part) is int for part in value):
                return repr(value)
            shown = [self.show(part, f"{label}[{i}]") for i, part in enumerate(value)]
            return [type(value).__name__, *shown]
        if isinstance(value, dict):
            keys = sorted(value, key=repr)
            return {repr(key): self.show(value[key], f"{label}[{key!r}]") for key in keys}
        if isinstance(value, _Options):
            return list(map(repr, options_content(value)))
        return f"<{type(value).__name__}>"

    def _detail(self, group: Any) -> Any:
        if group is dist.group.WORLD:
            return "the default group"
        if group not in c10d._world.pg_group_ranks:
            return "a closed group"
        ranks = dist.get_process_group_ranks(group)
        requested = self._requested.get(id(group), ("not made through new_group",))
        return [group.group_desc, ranks, *requested, group.rank(), group.size()]

    def call(self, text: Call, **names: Any) -> Any:
        """What a call answers, or the classes of what it raises."""
        try:
            value = eval(_compiled(text), vars(self.module), names)
        except Exception as error:
            return raised(error)
        return self.show(value, text)

    def ask(self, calls: Iterable[Call], **names: Any) -> dict[str, Any]:
        """The answers to `calls` by their text; a function that stock lacks is not asked.

        The calls use functions of the module, and `names`.
        """
        functions = set(public_functions(self.release))
        return {text: self.call(text, **names) for text in calls if called(text) in functions}

    def ask_all(self) -> dict[str, Any]:
        """The answers of all getters, and all private globals."""
        shown = self.ask(getter_calls(self.release))
        for name in private_globals(self.release):
            try:
                value = getattr(self.module, name)
            except AttributeError as error:
                shown[name] = raised(error)
                continue
            is_listed = name == "_global_process_group_list" and value is not None
            shown[name] = self.kinds(value) if is_listed else self.show(value, name)
        return shown


@functools.cache
def _compiled(text: Call) -> CodeType:
    return compile(text, "<call>", "eval")


def raised(error: BaseException) -> dict[str, Any]:
    """An exception as data: the names of its classes, the most special first."""
    names = [base.__name__ for base in type(error).__mro__[:-1]]
    return {"raises": names, "deliberate": is_deliberate(error)}


def is_deliberate(error: BaseException) -> bool:
    """Whether an ``assert`` or ``raise`` in Megatron's source made this error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    is_raised = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return is_raised and code.co_filename.startswith("<megatron-core")


@contextlib.contextmanager
def observed(recorder: Recorder) -> Iterator[None]:
    """torch as one rank of a world that is not there; everything as before on leaving."""
    rank, world = recorder.rank, recorder.world
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("NCCL_COLLNET_ENABLE", None)
        os.environ.update(recorder.config["environment"])
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        patches = [
            (dist, "new_group", recorder.new_group),
            (c10d, "new_group", recorder.new_group),
            (dist, "barrier", recorder.barrier),
            (c10d, "barrier", recorder.barrier),
            (dist, "ProcessGroupNCCL", _ProcessGroupNCCL),
            (c10d, "ProcessGroupNCCL", _ProcessGroupNCCL),
            (c10d, "_set_pg_timeout", recorder.set_timeout),
            (dist, "set_timeout", recorder.set_timeout),  # torch 2.14 and later
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "synchronize", lambda *_: None),
        ]
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield
