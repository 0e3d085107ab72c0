"""NCCL communicator options: from the YAML file and the list of high-priority groups."""

from __future__ import annotations

from typing import Any

import torch

Configs = dict[str, dict[str, Any]]

_CONFIG_KEYS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
_NETWORKS = ("ib", "socket")


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Configs) -> Any:
    """``ProcessGroupNCCL.Options`` for the section ``pg_name``, or None where there is none.

    Raises
    ------
    RuntimeError
        ``net_name`` is neither IB nor Socket.
    """
    if pg_name not in nccl_comm_cfgs:
        return None
    section = nccl_comm_cfgs[pg_name]
    check_section(pg_name, section)
    options = torch.distributed.ProcessGroupNCCL.Options(
        is_high_priority_stream=section.get("is_high_priority_stream", False)
    )
    for key in _CONFIG_KEYS:
        if key in section:
            setattr(options.config, key, section[key])
    return options


def check_section(pg_name: str, section: dict[str, Any]) -> None:
    """Refuse, with RuntimeError, a network that NCCL is not told about by name."""
    if "net_name" in section and str(section["net_name"]).lower() not in _NETWORKS:
        raise RuntimeError(
            f"net_name {section['net_name']!r} of {pg_name!r} is not supported: use 'IB' or "
            f"'Socket'."
        )


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: Configs, pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one value in the section ``pg_name``, which is added where it is missing."""
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})[key] = value


def read_configs(path: str | None, high_priority: list[str] | None) -> Configs:
    """The sections of the file at ``path``, with the high-priority groups set on top."""
    configs: Configs = {}
    if path is not None:
        try:
            import yaml
        except ImportError:
            raise RuntimeError(
                f"reading the NCCL configuration {path!r} needs PyYAML: pip install "
                f"'hypergrid[megatron]'."
            ) from None
        with open(path) as stream:
            configs = yaml.safe_load(stream)
        if not isinstance(configs, dict):
            raise TypeError(
                f"the NCCL configuration {path!r} must map names of groups to options, it holds "
                f"a {type(configs).__name__}."
            )
    for name in high_priority or []:
        overwrite_nccl_comm_cfgs(configs, name, ("is_high_priority_stream", True))
    return configs
