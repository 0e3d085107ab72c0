"""What communicators are told: NCCL's options, from the YAML file and the list of high-priority
groups, and UCC's environment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from compat.megatron.refusals import ArgumentError
from compat.megatron.releases import HAS
from hypergrid.messages import retold, shown

Configs = dict[str, dict[str, Any]]

# What a section may say, in the order in which torch is told, and what torch takes for it.
_PRIORITY, _NETWORK = "is_high_priority_stream", "net_name"
_TAKES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    _PRIORITY: ("true or false", lambda value: value is None or isinstance(value, int | float)),
    **dict.fromkeys(
        ("cga_cluster_size", "max_ctas", "min_ctas"),
        ("a whole number", lambda value: isinstance(value, int) and abs(value) < 2**31),
    ),
    _NETWORK: ("'IB' or 'Socket'", lambda value: isinstance(value, str)),
}
_NETWORKS = ("ib", "socket")
_HOPPER = {"cga_cluster_size": 4, "max_ctas": 32, "min_ctas": 1}


class _Asked(int):
    """A priority that an argument asked for, where those of the file are not read."""


# Bounds of the file, far above what thirty groups need: whoever can write it, and could make the
# reader spin or fill the memory, cannot.
MOST_NAMES = 10_000
_LONGEST_FILE = 1 << 20
_MOST_VALUES = 20_000
_LONGEST_VALUE = 4096


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Configs) -> Any:
    """``ProcessGroupNCCL.Options`` for the section ``pg_name``, or None where there is none.

    Raises
    ------
    RuntimeError
        ``net_name`` is neither IB nor Socket.
    ArgumentError
        The section is no mapping, or holds a value of a kind that torch does not take.
    AttributeError
        This torch was built without NCCL.
    """
    said = section(pg_name, nccl_comm_cfgs)
    if said is None:
        return None
    import torch  # here, for plans on machines without torch

    if not hasattr(torch.distributed, "ProcessGroupNCCL"):
        raise AttributeError(
            f"NCCL options for {shown(pg_name)} need a torch that was built with NCCL. Leave out "
            f"nccl_communicator_config_path and high_priority_stream_groups here."
        )
    priority = said.pop(_PRIORITY, False)
    options = torch.distributed.ProcessGroupNCCL.Options(
        is_high_priority_stream=bool(priority) if isinstance(priority, _Asked) else priority
    )
    for key, value in said.items():
        setattr(options.config, key, value)
    return options


def section(pg_name: str, configs: Configs) -> dict[str, Any] | None:
    """What ``configs`` says of the group ``pg_name``, known keys only; None if it has no section.

    Refuses what ``get_nccl_options`` does.
    """
    if pg_name not in configs:
        return None
    given = _mapping(pg_name, configs)
    said = {key: given[key] for key in _TAKES if key in given}
    if HAS["nccl_defaults"]:
        if not isinstance(said.get(_PRIORITY), _Asked):
            said.pop(_PRIORITY, None)
        said = _HOPPER | said
    for key, value in said.items():
        what, is_taken = _TAKES[key]
        if not is_taken(value):
            raise ArgumentError(
                f"{key} of {shown(pg_name)} in the NCCL configuration must be {what}, got "
                f"{shown(value)}."
            )
    if _NETWORK in said and said[_NETWORK].lower() not in _NETWORKS:
        raise RuntimeError(
            f"net_name {shown(said[_NETWORK])} of {shown(pg_name)} is not supported: use 'IB' or "
            f"'Socket'."
        )
    return said


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: Configs, pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one value in the section ``pg_name``, which is added where it is missing."""
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})
    _mapping(pg_name, nccl_comm_cfgs)[key] = value


def _mapping(pg_name: str, configs: Configs) -> dict[str, Any]:
    if not isinstance(configs[pg_name], dict):
        raise ArgumentError(
            f"the NCCL configuration's section {shown(pg_name)} must map options to values, such "
            f"as 'max_ctas: 8', it holds {shown(configs[pg_name])}."
        )
    return configs[pg_name]


def read_configs(
    path: str | None,
    high_priority: list[str] | None,
    overwrite: Callable[..., object] = overwrite_nccl_comm_cfgs,
) -> Configs:
    """The sections of the file at ``path``, with the high-priority groups set on top."""
    configs = {} if path is None else _read(path)
    for name in _names(high_priority):
        overwrite(configs, name, (_PRIORITY, _Asked(1) if HAS["nccl_defaults"] else True))
    return configs


def _names(given: Any) -> list[Any]:
    with suppress(Exception):
        names = [name for name in given or () if hash(name) is not None]
        if len(names) <= MOST_NAMES:
            return names
    raise ArgumentError(
        f"high_priority_stream_groups must be a list of names of groups, such as ['dp_cp'], got "
        f"{shown(given)}."
    )


def _read(path: str) -> Configs:
    try:
        import yaml
    except ImportError:
        raise RuntimeError(
            f"reading the NCCL configuration {shown(path)} needs PyYAML: pip install "
            f"'hypergrid[megatron]'."
        ) from None
    named = f"nccl_communicator_config_path={shown(path)}"
    if not isinstance(path, str):
        raise ArgumentError(f"{named} must be the path of a YAML file.")
    try:
        configs = _load(yaml, _text(path))
    except Exception as error:
        raise retold(
            error,
            f"{named} cannot be read: {_reason(error)}. Give a YAML file that maps names of groups "
            f"to options.",
        ) from None
    if not isinstance(configs, dict):
        raise ArgumentError(
            f"{named} must map names of groups to options, it holds {shown(configs)}."
        )
    return configs


def _reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}: "
    text = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error)
    return where + " ".join(text[:200].split())


def _text(path: str) -> str:
    """The text of a regular file of bounded length; never waits as for a pipe."""
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("it is no regular file")
        text = stream.read(_LONGEST_FILE + 1)
    if len(text) > _LONGEST_FILE:
        raise ValueError(f"it is longer than {_LONGEST_FILE} characters")
    return text


def _load(yaml: Any, text: str) -> Any:
    """``yaml.safe_load``, which alone bounds neither time nor what aliases expand to."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(text)
            self.sizes: dict[int, int] = {}  # values in a node, by its id, aliases expanded

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if not is_alias:
                self.sizes[id(node)] = self.size(node)
            elif id(node) not in self.sizes:
                raise ValueError("a value holds itself")
            if len(self.sizes) > _MOST_VALUES or self.sizes[id(node)] > _MOST_VALUES:
                raise ValueError(f"it holds more than {_MOST_VALUES} values")
            return node

        def size(self, node: Any) -> int:
            if isinstance(node, yaml.ScalarNode):
                if len(node.value) > _LONGEST_VALUE:
                    raise ValueError(f"a value is longer than {_LONGEST_VALUE} characters")
                return 1
            inner = node.value
            if isinstance(node, yaml.MappingNode):
                inner = [each for pair in node.value for each in pair]
            return 1 + sum(self.sizes[id(each)] for each in inner)

    loader = Loader()
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


# Variable: the value it needs, and whether the user's own wins.
UCC_ENVIRONMENT = {
    "TORCH_UCC_BLOCKING_WAIT": ("none", True),
    "UCC_EC_CUDA_STREAM_TASK_MODE": ("driver", True),
    "UCX_TLS": ("ib,cuda_copy", True),
    "NSYS_UCP_COMM_PARAMS": ("1", False),
    "UCX_RNDV_THRESH": ("0", False),
    "UCX_NET_DEVICES": ("all", False),
    "UCC_CL_BASIC_TLS": ("^sharp,nccl", False),
}


def check_ucc() -> None:
    """Refuse the one setting under which UCC cannot overlap: AssertionError, as upstream."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise AssertionError(
            "the UCC backend needs CUDA_DEVICE_MAX_CONNECTIONS larger than 1, it is 1: with one "
            "connection its communication cannot overlap. Unset it or raise it."
        )


def prepare_ucc() -> None:
    """Set the environment that UCC needs."""
    for name, (value, users_wins) in UCC_ENVIRONMENT.items():
        os.environ[name] = os.environ.get(name, value) if users_wins else value
