"""As MindSpeed: a patch manager that hangs wrappers on functions; globals taken and forgotten."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist

from tests.clients import Client, Step
from tests.parity.recording import options_content
from tests.parity.surface import private_globals

NAME = "megatron.core.parallel_state"
BUFFERS = {"dp": 7, "dp_cp": 11, "tp": 13, "pp": 17, "ep": 19, "tp_cp": 23, "ep_dp": 29}
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patches:
    """Wraps functions of a module, in every loaded module that has imported them too."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.wrappers: dict[str, list[Wrapper]] = {}
        self.replaced: dict[str, tuple[Any, Any]] = {}

    def register(self, name: str, wrapper: Wrapper) -> None:
        self.wrappers.setdefault(name, []).append(wrapper)

    def apply(self) -> None:
        for name, wrappers in self.wrappers.items():
            if not hasattr(self.module, name):
                setattr(self.module, name, None)
            original = getattr(self.module, name)
            final = functools.reduce(lambda inner, wrap: wrap(inner), wrappers, original)
            self.replaced[name] = (original, final)
            setattr(self.module, name, final)
            self._sweep(name, original, final)

    def remove(self) -> None:
        for name, (original, final) in self.replaced.items():
            self._sweep(name, final, original)

    def _sweep(self, name: str, old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if hasattr(module, name) and getattr(module, name) is old:
                setattr(module, name, new)


def group_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """For a profiler: options for every group, which carry Megatron's name of its kind."""

    @functools.wraps(original)
    def wrapper(pg_name: str, nccl_comm_cfgs: Any) -> Any:
        options = original(pg_name, nccl_comm_cfgs)
        if options is None:
            options = dist.ProcessGroupNCCL.Options()
        options.config.net_name = pg_name
        return options

    return wrapper


def buffer_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Options of its own for the kinds in a table; the others are the original's."""

    @functools.wraps(original)
    def wrapper(pg_name: str, nccl_comm_cfgs: Any) -> Any:
        if pg_name not in BUFFERS:
            return original(pg_name, nccl_comm_cfgs)
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = BUFFERS[pg_name]
        return options

    return wrapper


def passed_on(heard: list[Any], name: str) -> Wrapper:
    """A wrapper that notes that it was called and changes nothing."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            heard.append(name)
            return original(*args, **kwargs)

        return wrapper

    return wrap


def calls_noted(heard: list[Any]) -> Wrapper:
    """A wrapper of ``create_group`` that notes all arguments, by name and in order."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            shown = dict(bound.arguments)
            shown["pg_options"] = options_content(shown["pg_options"])
            heard.append({name: repr(value) for name, value in shown.items()})
            return original(*args, **kwargs)

        return wrapper

    return wrap


def the_group_itself(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a gloo getter, where no gloo groups are wanted: the group beside it."""
    module = sys.modules[NAME]

    def without_gloo(*args: Any, **kwargs: Any) -> Any:
        return (
            module._DATA_PARALLEL_GROUP_WITH_CP if args or kwargs else module._DATA_PARALLEL_GROUP
        )

    return without_gloo


def six_functions_wrapped(client: Client) -> Iterator[Step]:
    """Options by name, notes of calls, and another getter; then everything is undone."""
    sys.modules[NAME] = client.module
    importer = sys.modules["a_module_that_imports_by_name"] = ModuleType("by_name")
    vars(importer).update(
        {name: getattr(client.module, name) for name in ("get_nccl_options", "create_group")}
    )
    before = {name: getattr(client.module, name) for name in ("create_group", "get_nccl_options")}
    calls: list[Any] = []
    heard: list[str] = []
    patches = Patches(client.module)
    patches.register("get_nccl_options", group_names)
    patches.register("get_nccl_options", buffer_sizes)
    patches.register("create_group", calls_noted(calls))
    for name in ("initialize_model_parallel", "destroy_model_parallel"):
        patches.register(name, passed_on(heard, name))
    patches.register("get_data_parallel_group_gloo", the_group_itself)
    patches.register("get_a_group_that_no_release_has", lambda original: lambda: "answered")
    patches.apply()
    client.initialise()
    yield "calls of create_group, in order", calls
    yield (
        "imported by name",
        [getattr(importer, name) is getattr(client.module, name) for name in sorted(before)],
    )
    yield "a function of its own", client.module.get_a_group_that_no_release_has()
    client.module.destroy_model_parallel()
    yield "destroyed, and these were called", heard
    patches.remove()
    calls.clear()
    same = [getattr(client.module, name) is was for name, was in before.items()]
    yield "destroyed, all put back", same
    client.initialise()
    yield "initialised anew, without the wrappers", calls


def forgotten_by_hand(client: Client) -> Iterator[Step]:
    """Close every group through torch, write None to every global, and initialise anew."""
    client.initialise()
    yield "initialised", None
    module = client.module
    names = private_globals(client.release)
    groups = {id(g): g for name in names for g in _groups(getattr(module, name))}
    for group in groups.values():
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)
    for name in names:
        value = getattr(module, name)
        many = name.endswith("_GROUPS") and value is not None
        setattr(module, name, type(value)() if many else None)
    yield "forgotten", None
    changed = {"tensor_model_parallel_size": 4, "context_parallel_size": 1}
    module.initialize_model_parallel(**client.sizes | changed)
    yield "initialised anew", None


def _groups(value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, dist.ProcessGroup) and v is not dist.group.WORLD]


def options_set_afterwards(client: Client) -> Iterator[Step]:
    """Groups of its own beside Megatron's, with Megatron's helpers imported by name."""
    client.initialise()
    get_nccl_options, create_group = client.module.get_nccl_options, client.module.create_group
    ranks_of_groups = []
    generator = client.module.RankGenerator(2, 1, 2, 2, 2, "tp-cp-ep-dp-pp")
    for ranks in generator.get_ranks("cp"):
        group = create_group(ranks, pg_options=get_nccl_options("cp2", {}), group_desc="CP2")
        if dist.get_rank() in ranks:
            ranks_of_groups.append(dist.get_process_group_ranks(group))
    yield "its groups", ranks_of_groups
