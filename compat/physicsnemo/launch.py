"""The variables by which torchrun, SLURM or OpenMPI describe this process."""

from __future__ import annotations

import os
from typing import Any

OVERRIDES = (
    "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD",
    "MODULUS_DISTRIBUTED_INITIALIZATION_METHOD",
)
# The variables of each method, for these arguments of DistributedManager.setup() in this order.
_ARGUMENTS = ("rank", "world_size", "local_rank", "addr", "port")
_VARIABLES = {
    "ENV": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "SLURM": ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID", "SLURM_LAUNCH_NODE_IPADDR"),
    "OPENMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
_PER_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def method() -> str | None:
    """The method that the environment asks for, else the first whose variables are set, or None.

    As upstream: "ENV" counts if all its variables are set, the others if that of the rank is.
    Raises RuntimeError on an unknown method.
    """
    for override in OVERRIDES:
        asked = os.environ.get(override)
        if asked in _VARIABLES:
            return asked
        if asked:
            raise RuntimeError(
                f"invalid {override}={asked!r}; allowed: {', '.join(_VARIABLES)}. Unset it to "
                f"take the first method whose variables are set."
            )
    for name, variables in _VARIABLES.items():
        if not _missing(name) or (name != "ENV" and variables[0] in os.environ):
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
    found: dict[str, Any] = {"method": name.lower()}
    for argument, variable in zip(_ARGUMENTS, _VARIABLES[name], strict=False):
        text = os.environ.get(variable)
        try:
            if text is not None:
                found[argument] = text if argument in ("addr", "port") else int(text)
        except ValueError:
            raise ValueError(f"{variable}={text!r} is not a whole number.") from None
    return found


def _missing(name: str) -> list[str]:
    return [each for each in _VARIABLES[name] if each != "LOCAL_RANK" and each not in os.environ]


def ranks_per_host() -> int | None:
    """The number of ranks on each host, if the launcher says it."""
    told = (os.environ.get(variable, "") for variable in _PER_HOST)
    return next((int(text) for text in told if text.isdecimal()), None)
