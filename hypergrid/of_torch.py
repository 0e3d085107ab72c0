"""All that is private in torch and used here: what each part must do, and what happens without it.

Other files of hypergrid and compat name nothing that is private in torch (a test reads them).
``lacking`` says what the installed torch does not give; ``scripts/torch_lines`` looks for the
names of ``PARTS`` in the sources of each line of torch.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

HOMES_OF_NEW_GROUP = (dist, c10d)  # code may import it by name from either

OLDEST = "2.9"
NEWEST = "2.15"
_CREATE = "_init_process_groups"  # of a DeviceMesh: the names of the groups that it creates
_private = threading.RLock()  # outside code may create groups while it is called to create one


class Part(NamedTuple):
    """A private part of torch: its names, what they do for us, and what happens without them.

    Names are those of ``torch.distributed.distributed_c10d``, or begin with ``torch.``. ``first``
    and ``last`` are the lines of torch where it is looked for, ``built_with`` the backend without
    which there is no such part, and ``works`` looks at more than the names.
    """

    names: tuple[str, ...]
    does: str
    without: str
    first: str = OLDEST
    last: str = ""
    built_with: str = ""
    works: Callable[[], bool] = lambda: True


PARTS = {
    "groups": Part(
        (
            "_world.pg_map",
            "_world.pg_names",
            "_world.pg_to_tag",
            "_world.tags_to_pg",
            "_world.pg_group_ranks",
            "_world.pg_backend_config",
            "_world.pg_coalesce_state",
            "_get_default_group",
            "_get_default_store",
            "_get_default_timeout",
            "ProcessGroup._get_backend",
            "ProcessGroup._device_types",
            "ProcessGroup.bound_device_id",
        ),
        "tell the groups that torch knows, with their names, stores and backends",
        "no group can be created",
    ),
    "coalescing": Part(
        ("_coalescing_manager",),
        "collects collectives that run together, and waits for them",
        "verify does not see that a wait for several collectives is missing",
    ),
    "names": Part(
        ("_world.group_count", "_process_group_name"),
        "new_group turns the running number of groups into the name",
        "every rank takes part in creating every group",
        works=lambda: _number_becomes_name(),
    ),
    "gloo": Part(
        (
            "ProcessGroupGloo._Options._devices",
            "ProcessGroupGloo._Options._threads",
            "ProcessGroupGloo._Options._timeout",
            "ProcessGroupGloo.create_default_device",
            "_ProcessGroupWrapper.wrapped_pg",
        ),
        "gloo takes the devices that it connects through, and connects at once or on first use",
        "gloo groups connect at once, whatever connect= says",
        built_with="gloo",
        works=lambda: "lazy_init" in str(c10d.ProcessGroupGloo.create_device.__doc__),
    ),
    "no color": Part(
        ("ProcessGroupNCCL.perform_nocolor_split",),
        "a backend from which torch splits new groups has it, for ranks outside of the new group",
        "a default group that is bound to a device creates as an unbound one does",
        built_with="nccl",
    ),
    "color": Part(
        ("_process_group_color",),
        "tells the color that the members of a group have when torch splits it",
        "a split creates one group, as two might have the same color",
    ),
    "lazy NCCL": Part(
        (
            "ProcessGroupNCCL2",
            "ProcessGroupNCCL.Options.lazy_init",
            "Backend._plugins",
            "_create_nccl2_process_group",
            "_create_nccl_lazy_process_group",
        ),
        "the NCCL backend that binds the default group by itself creates a group without a split",
        "every rank takes part in creating a group that torch splits from a bound default group",
        first="2.15",
        built_with="nccl",
    ),
    "abort": Part(
        ("ProcessGroup.abort", "_unregister_process_group", "_update_default_pg"),
        "ends a group's operations without waiting for its members, and lets torch forget it",
        "groups cannot be ended while an operation of theirs runs",
    ),
    "timeouts": Part(
        ("_set_pg_timeout",),
        "sets the timeout of a group; torch.distributed.set_timeout does from 2.14 on",
        "groups keep the timeout that they were created with",
        last="2.13",
    ),
    "counts": Part(
        ("ProcessGroup._get_sequence_number_for_group",),
        "tells how many collectives a group has begun",
        "hypergrid.record(after=...) reads the flight recorder also of a rank that goes on",
    ),
    "recorder": Part(
        (
            "torch._C._distributed_c10d._dump_fr_trace",
            "torch._C._distributed_c10d._dump_fr_trace_json",
        ),
        "dump what torch's flight recorder knows; also _dump_nccl_trace where NCCL is built in",
        "hypergrid.record() writes groups and stacks only",
    ),
    "sends and receives": Part(
        ("ProcessGroup.send", "ProcessGroup.recv"),
        "methods in Python that we replace while hypergrid.record(p2p=True) records",
        "sends and receives of gloo are not recorded",
        works=lambda: "dstRank" in str(ProcessGroup.send.__doc__),
    ),
    "torchcomms": Part(
        ("_use_torchcomms_enabled",),
        "tells whether torchcomms creates the groups",
        "torchcomms is not noticed",
        first="2.11",
    ),
    "torchcomms by members": Part(
        ("_create_torchcomms_backend",),
        "new_group creates a group of torchcomms by its members, and splits nothing",
        "with torchcomms every rank takes part in creating every group",
        first="2.15",
    ),
    "flattened meshes": Part(
        ("torch.distributed.device_mesh.DeviceMesh._flatten",),
        "flattens dims of a mesh into one, whose group DeviceMesh._init_process_groups creates",
        "a dim of a grid's DeviceMesh that is flattened has one more group than the grid",
        first="2.13",
        works=lambda: _mesh_takes_groups(),
    ),
    "fake store": Part(
        ("torch.testing._internal.distributed.fake_pg.FakeStore",),
        "a store for a default group of one process, by which doctor tries this torch",
        "doctor does not say how groups are created",
    ),
    "backward": Part(
        ("torch._C._current_graph_task_id",),
        "tells whether a getter is called in a backward pass, for hypergrid audit",
        "hypergrid audit cannot run",
    ),
}


def _line(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def has(part: str) -> bool:
    """Whether the installed torch has this part and it works as here described."""
    try:
        return all(map(_is_there, PARTS[part].names)) and PARTS[part].works()
    except (AttributeError, TypeError, ValueError):
        return False


def needed(version: str) -> dict[str, Part]:
    """The parts that are looked for in this version of torch."""
    line = _line(version)
    parts = {}
    for key, part in PARTS.items():
        if _line(part.first) <= line and (not part.last or line <= _line(part.last)):
            parts[key] = part
    return parts


def lacking() -> list[str]:
    """The parts that the installed torch lacks, in words. *Local*."""
    sentences = []
    for key, part in needed(torch.__version__).items():
        if has(key) or (part.built_with and not dist.is_backend_available(part.built_with)):
            continue
        names = [name for name in part.names if not _is_there(name)]
        if not names:  # they are all there, and do not work as described
            names = [f"part that {part.does}"]
        sentences.append(f"{part.without} (torch {torch.__version__} has no {', '.join(names)})")
    return sentences


def _is_there(name: str) -> bool:
    if not name.startswith("torch."):
        name = f"{c10d.__name__}:{name}"
    try:
        pkgutil.resolve_name(name)
    except AttributeError:
        return False
    return True


def _mesh_takes_groups() -> bool:
    """Whether a mesh asks one function for the names of its groups, and takes what that returns."""
    from torch.distributed.device_mesh import DeviceMesh

    create = inspect.getattr_static(DeviceMesh, _CREATE, None)
    return isinstance(create, staticmethod) and "rank_map" in inspect.signature(create).parameters


# The groups that torch knows.


def default_group() -> ProcessGroup:
    """The default group; ValueError if there is none."""
    return c10d._get_default_group()


def default_store() -> Store:
    """The store of the default group."""
    return c10d._get_default_store()


def default_timeout(backend: str | None = None) -> timedelta:
    """The timeout that torch gives a group of ``backend``; without one that of most backends."""
    if not backend:
        return c10d.default_pg_timeout
    return c10d._get_default_timeout(c10d.Backend(backend))


def new_group_signature() -> inspect.Signature:
    """The arguments of torch's own ``new_group``, even while outside code has replaced it."""
    return inspect.signature(c10d.new_group)


def registered_groups() -> dict[ProcessGroup, str]:
    """The groups that torch knows at this moment, and their names in torch."""
    return dict(c10d._world.pg_names)


def is_registered(group: object) -> bool:
    """Whether torch knows this group: it was neither destroyed nor wrapped by outside code."""
    return group in c10d._world.pg_map


def backend_of(group: ProcessGroup) -> str:
    """The backend that a group was created with, as torch writes it, such as "nccl"."""
    return str(c10d._world.pg_map[group][0])


def devices_of(backend: str) -> dict[str, str]:
    """The backends that torch's name ``backend`` means, by type of device, in lower case."""
    config = c10d.BackendConfig(c10d.Backend(backend))
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def bound_device(group: ProcessGroup) -> torch.device | None:
    """The device that a group is bound to."""
    return getattr(group, "bound_device_id", None)


def device_types(group: object) -> list[str]:
    """The types of device that a group communicates for; empty for what is not torch's."""
    return [device.type for device in getattr(group, "_device_types", [])]


def flatten(mesh: Any, name: str, group: Any) -> None:
    """Let ``mesh._flatten(name)`` give ``group``; without the part torch creates one more."""
    from torch.distributed.device_mesh import DeviceMesh

    if not has("flattened meshes"):
        return
    create = inspect.getattr_static(DeviceMesh, _CREATE)
    with _private:
        setattr(DeviceMesh, _CREATE, staticmethod(lambda *_: [group.group_name]))
        try:
            mesh._flatten(name)
        finally:
            setattr(DeviceMesh, _CREATE, create)


def parts_of(group: ProcessGroup, without: Collection[str] = ()) -> list[Any]:
    """The backends that do a group's work, each once.

    But for what does it on the types of device ``without``.
    """
    parts = {}
    for device in device_types(group):
        if device not in without:
            part = part_of(group, device)
            parts[id(part)] = part
    return list(parts.values())


def part_of(group: ProcessGroup, device: torch.device | str) -> Any:
    """The backend that does a group's work on a type of device; RuntimeError if there is none."""
    return group._get_backend(torch.device(device))


def checked_by(part: Any) -> Any:
    """The part inside the one with which ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` checks calls."""
    while (inner := getattr(part, "wrapped_pg", None)) is not None:
        part = inner
    return part


def set_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
    """Set the timeout of a group, without one that of the default group. *Local*."""
    public = getattr(dist, "set_timeout", None)  # from torch 2.14 on
    (public or c10d._set_pg_timeout)(timeout, group)


def timeouts_of(group: ProcessGroup) -> list[timedelta]:
    """The timeouts that a live group has now, of each of its backends that tells its own."""
    timeouts = []
    for part in parts_of(group):
        timeout = getattr(getattr(checked_by(part), "options", None), "_timeout", None)
        if timeout is not None:
            timeouts.append(timeout)
    return timeouts


# Their names.


@contextmanager
def numbered(number: int | None) -> Iterator[None]:
    """Groups that are created inside have names that count up from ``number``.

    Torch makes the name of a new group from its running number of groups: with ``number=7`` it is
    "7", and that of a second one inside "8". The running number is put back, so that groups of
    outside code keep theirs.
    """
    if number is None:
        yield
        return
    with _private:
        before = c10d._world.group_count
        c10d._world.group_count = number
        try:
            yield
        finally:
            c10d._world.group_count = before


def _number_becomes_name() -> bool:
    with numbered(7):
        return c10d._process_group_name([0], use_hashed_name=False) == "7"


# Splits.


def split_color(ranks: Sequence[int]) -> int | None:
    """The color of ``ranks`` in the split by which torch creates their group; None if unknown."""
    if not has("color"):
        return None
    color: int = c10d._process_group_color(sorted(ranks))
    return color


@contextmanager
def unbound() -> Iterator[None]:
    """Groups that are created inside are not split off the default group, nor connected at once.

    That is what torch does where the default group is bound to no device: it is so meanwhile.
    """
    default = default_group()
    with _private:
        device = default.bound_device_id
        default.bound_device_id = None
        try:
            yield
        finally:
            default.bound_device_id = device


def bind(group: ProcessGroup) -> None:
    """Bind ``group`` to the default group's device, as torch binds what it has split off."""
    if is_registered(group):
        group.bound_device_id = default_group().bound_device_id


# Backends.


def gloo() -> Any:
    """The class of gloo's part of a group; None where torch is built without."""
    return getattr(c10d, "ProcessGroupGloo", None)


def gloo_devices(interfaces: Sequence[str], lazily: bool | None) -> list[Any]:
    """The device that gloo connects through, at once or on first use; None: as torch is set."""
    if not interfaces:
        return [gloo().create_default_device(lazy_init=lazily)]
    return [gloo().create_device(interface=name, lazy_init=lazily) for name in interfaces]


def gloo_options(devices: list[Any], timeout: timedelta | None = None) -> Any:
    """Options of a gloo group as torch sets them, but for its devices."""
    options = gloo()._Options()
    options._devices = devices
    options._threads = 2 * len(devices)
    if timeout is not None:
        options._timeout = timeout
    return options


def set_devices(options: Any, devices: list[Any]) -> None:
    """Let gloo's ``options`` hold other devices."""
    options._devices = devices


def gloo_devices_of(group: ProcessGroup) -> int:
    """How many devices the gloo backends of a group connect through."""
    count = 0
    with suppress(AttributeError, RuntimeError):  # a backend that does not tell
        for part in parts_of(group):
            inner = checked_by(part)
            devices = len(getattr(inner.options, "_devices", []))
            # TORCH_DISTRIBUTED_DEBUG=DETAIL checks the calls of a group through a second one.
            count += devices if inner is part else 2 * devices
    return count


def is_nccl2(part: object) -> bool:
    """Whether it is the NCCL backend that connects at once, unless its options say otherwise."""
    for name in ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):
        if isinstance(part, getattr(c10d, name, ())):
            return True
    return False


def waits_if_asked(name: str) -> bool:
    """Whether torch creates this one backend by a function that reads ``lazy_init``."""
    if not has("lazy NCCL"):
        return False
    devices_of(name)  # torch registers its own backends when their names are first read
    plugin = c10d.Backend._plugins.get(name.upper())
    functions = ("_create_nccl2_process_group", "_create_nccl_lazy_process_group")
    return plugin is not None and plugin.creator_fn in [getattr(c10d, f) for f in functions]


def nccl_options() -> Any:
    """The options that torch gives NCCL's groups."""
    return c10d.ProcessGroupNCCL.Options()


# The end.


def forget(group: ProcessGroup) -> None:
    """Let torch forget ``group``, as ``destroy_process_group`` does, which may wait. *Local*."""
    world = c10d._world
    name = world.pg_names.pop(group, None)
    hooks = getattr(world, "pg_flight_recorder_hooks", {})
    maps = (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    for registered in (*maps, world.pg_coalesce_state, hooks):
        registered.pop(group, None)
    for tag, tagged in [*world.tags_to_pg.items()]:
        if group in tagged:
            tagged.remove(group)
        if not tagged:  # torch leaves an empty list for every past group
            world.tags_to_pg.pop(tag, None)
    if name is not None:
        c10d._unregister_process_group(name)  # type: ignore[attr-defined]
    if group is c10d.GroupMember.WORLD:
        c10d._update_default_pg(None)
        world.group_count = 0


# Torch's recording.


def recorded(stacks: bool) -> list[bytes]:
    """Each flight recorder's dump, pickled: NCCL has one of its own."""
    return [read(True, stacks, False) for read in _recorders("")]


def recorded_calls() -> list[str]:
    """Each flight recorder's dump in JSON, without stacks."""
    return [read(True, False) for read in _recorders("_json")]


def _recorders(ending: str) -> list[Any]:
    functions = []
    for kind in ("nccl", "fr"):
        function = getattr(torch._C._distributed_c10d, f"_dump_{kind}_trace{ending}", None)
        if function is not None:
            functions.append(function)
    return functions


def calls_of(group: Any) -> int | None:
    """How many collectives a group has begun; None if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def wrap_coalescing_manager(wrap: Callable[[Any], Any], importers: Sequence[Any] = ()) -> None:
    """Replace the manager of coalesced collectives, also where ``importers`` have it by name."""
    if not has("coalescing"):
        return
    original = c10d._coalescing_manager
    manager = wrap(original)
    for module in (c10d, dist, *importers):
        if vars(module).get("_coalescing_manager") is original:
            module._coalescing_manager = manager


def in_backward() -> bool:
    """Whether this thread runs a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def fake_store() -> Store:
    """A store for a default group of the backend "fake", which has one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def torchcomms() -> bool:
    """Whether torchcomms creates the groups."""
    return bool(getattr(c10d, "_use_torchcomms_enabled", lambda: False)())
