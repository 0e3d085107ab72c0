"""The variables by which torchrun, SLURM or OpenMPI describe this process."""

from __future__ import annotations

import os
from typing import Any

OVERRIDES = (
    "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD",
    "MODULUS_DISTRIBUTED_INITIALIZATION_METHOD",
)
# By method: the argument of DistributedManager.setup() that each of its variables gives.
_VARIABLES = {
    "ENV": {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "addr": "MASTER_ADDR",
        "port": "MASTER_PORT",
    },
    "SLURM": {
        "rank": "SLURM_PROCID",
        "world_size": "SLURM_NPROCS",
        "local_rank": "SLURM_LOCALID",
        "addr": "SLURM_LAUNCH_NODE_IPADDR",
    },
    "OPENMPI": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    },
}
_PER_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def method() -> str | None:
    """The method that the environment asks for, else the first whose variables are set, or None.

    As upstream: "ENV" counts if all its variables are set, the others if that of the rank is.
    Raises RuntimeError on an unknown method.
    """
    for override in OVERRIDES:
        name = os.environ.get(override)
        if name in _VARIABLES:
            return name
        if name:
            raise RuntimeError(
                f"invalid {override}={name!r}; allowed: {', '.join(_VARIABLES)}. Unset it to "
                f"take the first method whose variables are set."
            )
    if not _missing("ENV"):
        return "ENV"
    for name in ("SLURM", "OPENMPI"):
        if _VARIABLES[name]["rank"] in os.environ:
            return name
    return None


def missing() -> str:
    """For each method, which of its variables are not set."""
    return "; ".join(f"{name} lacks {', '.join(_missing(name))}" for name in _VARIABLES)


def arguments(name: str) -> dict[str, Any]:
    """The arguments of ``DistributedManager.setup`` that this method's variables give.

    Raises ValueError if a variable other than LOCAL_RANK is not set, or is not a whole number
    where it should be one.
    """
    for variable in _missing(name):
        raise ValueError(
            f"{variable} is not set, and initialisation by {name} needs it: start the script with "
            f"the launcher that sets it, or choose another method with {OVERRIDES[0]}."
        )
    values: dict[str, Any] = {"method": name.lower()}
    for argument, variable in _VARIABLES[name].items():
        text = os.environ.get(variable)
        if text is None:
            continue
        values[argument] = text
        if argument not in ("addr", "port"):
            try:
                values[argument] = int(text)
            except ValueError:
                raise ValueError(f"{variable}={text!r} is not a whole number.") from None
    return values


def _missing(name: str) -> list[str]:
    # Without LOCAL_RANK the devices of a host are taken in turn.
    present = {"LOCAL_RANK", *os.environ}
    return [variable for variable in _VARIABLES[name].values() if variable not in present]


def ranks_per_host() -> int | None:
    """The number of ranks on each host, if the launcher says it."""
    for variable in _PER_HOST:
        text = os.environ.get(variable, "")
        if text.isdecimal():
            return int(text)
    return None
