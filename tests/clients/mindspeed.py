"""As MindSpeed: a patch manager that hangs wrappers on functions; globals taken and forgotten."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist

from tests.clients import Client, Step, generated_groups
from tests.parity.patching import listening
from tests.parity.surface import private_globals

NAME = "megatron.core.parallel_state"
BUFFERS = {"dp": 7, "dp_cp": 11, "tp": 13, "pp": 17, "ep": 19, "tp_cp": 23, "ep_dp": 29}
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def patched(module: ModuleType, wrappers: dict[str, list[Wrapper]]) -> Iterator[None]:
    """Functions of a module wrapped, in every loaded module that has imported them too."""
    replaced = {}
    for name, wrappers_of_name in wrappers.items():
        original = getattr(module, name, None)
        final = functools.reduce(lambda inner, wrap: wrap(inner), wrappers_of_name, original)
        replaced[name] = (original, final)
        setattr(module, name, final)
        _sweep(name, original, final)
    yield
    for name, (original, final) in replaced.items():
        _sweep(name, final, original)


def _sweep(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, name, ...) is old:
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
    module = client.module
    sys.modules[NAME] = module
    importer = sys.modules["a_module_that_imports_by_name"] = ModuleType("by_name")
    originals = {name: getattr(module, name) for name in ("create_group", "get_nccl_options")}
    vars(importer).update(originals)
    heard: list[tuple[str, Any]] = []
    wrappers: dict[str, list[Wrapper]] = {
        "get_nccl_options": [group_names, buffer_sizes],
        "get_data_parallel_group_gloo": [the_group_itself],
        "get_a_group_that_no_release_has": [lambda original: lambda: "answered"],
    }
    for name in ("create_group", "initialize_model_parallel", "destroy_model_parallel"):
        wrappers[name] = [functools.partial(listening, module, name, heard=heard)]
    with patched(module, wrappers):
        client.initialise()
        yield "calls, in order", heard
        is_new = [vars(importer)[name] is vars(module)[name] for name in originals]
        yield "imported by name", is_new
        yield "a function of its own", module.get_a_group_that_no_release_has()
        module.destroy_model_parallel()
        yield "destroyed", heard[-1]
    heard.clear()
    yield "destroyed, all put back", [vars(module)[name] is was for name, was in originals.items()]
    client.initialise()
    yield "initialised anew, without the wrappers", heard


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
    get_nccl_options, create_group = client.module.get_nccl_options, client.module.create_group

    def create(ranks: list[int]) -> Any:
        return create_group(ranks, pg_options=get_nccl_options("cp2", {}), group_desc="CP2")

    return generated_groups(client, "cp", create)
