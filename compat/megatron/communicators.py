"""Options of NCCL communicators, from the YAML file and the list of high-priority groups; the
environment of UCC.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from hypergrid.files import check_yaml
from hypergrid.messages import install_command, shown

Configs = dict[str, dict[str, Any]]
FILE = "nccl_communicator_config_path"

# The options of a section, in the order in which torch gets them, and the values torch takes.
_PRIORITY = "is_high_priority_stream"
_NETWORK = "net_name"
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    _PRIORITY: ("true or false", lambda value: value is None or isinstance(value, int | float)),
    **dict.fromkeys(
        ("cga_cluster_size", "max_ctas", "min_ctas"),
        ("a whole number", lambda value: isinstance(value, int) and abs(value) < 2**31),
    ),
    _NETWORK: ("'IB' or 'Socket'", lambda value: isinstance(value, str)),
}
OPTIONS = tuple(_ALLOWED)

# Limits against YAML bombs. There are about thirty groups of five options.
_LONGEST = 1 << 20  # characters
_MOST_ALIASES = 40


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Configs) -> Any:
    """``ProcessGroupNCCL.Options`` for the section ``pg_name``, or None where there is none.

    Raises
    ------
    RuntimeError
        ``net_name`` is neither IB nor Socket.
    ValueError
        The section is not a mapping, or has a value that torch does not take.
    AttributeError
        This torch was built without NCCL.
    """
    values = section(pg_name, nccl_comm_cfgs)
    if values is None:
        return None
    import torch  # here, for plans on machines without torch

    if not hasattr(torch.distributed, "ProcessGroupNCCL"):
        raise AttributeError(
            f"NCCL options for {shown(pg_name)} need a torch that was built with NCCL. Leave out "
            f"nccl_communicator_config_path and high_priority_stream_groups."
        )
    priority = values.pop(_PRIORITY, False)
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
    for key, value in values.items():
        setattr(options.config, key, value)
    return options


def section(pg_name: str, configs: Configs) -> dict[str, Any] | None:
    """The known options of the group ``pg_name``; None if it has no section."""
    if pg_name not in configs:
        return None
    written = _mapping(pg_name, configs)
    values = {key: written[key] for key in _ALLOWED if key in written}
    for key, value in values.items():
        kind, is_allowed = _ALLOWED[key]
        if not is_allowed(value):
            raise ValueError(
                f"{key} of {shown(pg_name)} in the NCCL configuration must be {kind}, got "
                f"{shown(value)}."
            )
    if _NETWORK in values and values[_NETWORK].lower() not in ("ib", "socket"):
        raise RuntimeError(
            f"net_name {shown(values[_NETWORK])} of {shown(pg_name)} is not supported: use 'IB' or "
            f"'Socket'."
        )
    return values


def unread(configs: Configs, groups: Collection[str]) -> Iterator[str]:
    """Sections of no group, and options that are not read, such as ``collnet_enable``; in words."""
    for name in configs:
        if name not in groups:
            yield f"the section {shown(name)}"
            continue
        for key in _mapping(name, configs):
            if key not in _ALLOWED:
                yield f"{shown(key)} of {shown(name)}"


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: Configs, pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one value in the section ``pg_name``, which is added if it is missing."""
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})
    _mapping(pg_name, nccl_comm_cfgs)[key] = value


def _mapping(pg_name: str, configs: Configs) -> dict[str, Any]:
    if not isinstance(configs[pg_name], dict):
        raise ValueError(
            f"the NCCL configuration's section {shown(pg_name)} must map options to values, such "
            f"as 'max_ctas: 8', got {shown(configs[pg_name])}."
        )
    return configs[pg_name]


def read_configs(
    path: str | None,
    high_priority: list[str] | None,
    overwrite: Callable[..., object] = overwrite_nccl_comm_cfgs,
) -> Configs:
    """The options in the file at ``path``, with the high-priority groups set on top."""
    configs = {}
    if path is not None:
        configs = _read(path)
    if not isinstance(configs, dict):
        raise ValueError(
            f"nccl_communicator_config_path={shown(path)} must map names of groups to options, "
            f"got {shown(configs)}."
        )
    for name in high_priority or ():
        overwrite(configs, name, (_PRIORITY, True))
    return configs


def _read(path: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise RuntimeError(
            f"reading the NCCL configuration {shown(path)} needs PyYAML: "
            f"{install_command('megatron')}."
        ) from None
    try:
        file = Path(path)
        # A pipe would keep the reader waiting.
        if file.exists() and not file.is_file():
            raise OSError("not a regular file")
        with file.open() as stream:
            text = stream.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"longer than {_LONGEST} characters")
        check_yaml(text, _MOST_ALIASES)
        return yaml.safe_load(text)
    except Exception as error:
        kind = type(error) if isinstance(error, OSError) else ValueError
        text = getattr(error, "strerror", None) or str(error)
        reason = " ".join(text.split())  # YAML's has several lines
        raise kind(
            f"nccl_communicator_config_path={shown(path)} cannot be read: {reason[:200]}. Give a "
            f"YAML file that maps names of groups to options."
        ) from error


# Variable: the value that UCC needs, and whether a value that the user has set is kept.
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
    """Refuse the setting with which UCC cannot overlap: AssertionError, as upstream."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise AssertionError(
            "the UCC backend needs CUDA_DEVICE_MAX_CONNECTIONS larger than 1, got 1: with one "
            "connection its communication cannot overlap. Unset it or raise it."
        )


def prepare_ucc() -> None:
    """Set the environment that UCC needs."""
    for name, (value, is_kept) in UCC_ENVIRONMENT.items():
        if not is_kept or name not in os.environ:
            os.environ[name] = value
