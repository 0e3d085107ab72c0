"""The variables by which torchrun, SLURM or OpenMPI describe this process."""

from __future__ import annotations

import os
from typing import Any

OVERRIDES = (
    "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD",
    "MODULUS_DISTRIBUTED_INITIALIZATION_METHOD",
)
# By method: the variables that decide for it. As upstream, others may be missing then.
_DECIDING = {
    "ENV": {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"},
    "SLURM": {"SLURM_PROCID"},
    "OPENMPI": {"OMPI_COMM_WORLD_RANK"},
}
# By method: the variables of the rank, the world's size and the rank on the host.
_NUMBERS = {
    "ENV": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "SLURM": ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"),
    "OPENMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def method() -> str | None:
    """The method that the environment asks for, else the first whose variables are set, or None.

    Raises RuntimeError on an unknown method.
    """
    for override in OVERRIDES:
        name = os.environ.get(override)
        if name in _NUMBERS:
            return name
        if name:
            raise RuntimeError(
                f"invalid {override}={name!r}; allowed: {', '.join(_NUMBERS)}. Unset it to take "
                f"the first method whose variables are set."
            )
    for name, variables in _DECIDING.items():
        if variables <= os.environ.keys():
            return name
    return None


def required(variable: str) -> str:
    """The value of a variable. ValueError if it is not set."""
    if variable not in os.environ:
        raise ValueError(
            f"{variable} is not set, and this initialisation needs it: start the script with the "
            f"launcher that sets it, or choose another method with {OVERRIDES[0]}."
        )
    return os.environ[variable]


def numbers(method: str) -> dict[str, Any]:
    """The arguments of ``DistributedManager.setup`` that are numbers, as the launcher gives them.

    Raises ValueError if a variable other than LOCAL_RANK is not set, or is no whole number.
    """
    values: dict[str, Any] = {}
    arguments = ("rank", "world_size", "local_rank")
    for argument, variable in zip(arguments, _NUMBERS[method], strict=True):
        # Without LOCAL_RANK the devices of a host are taken in turn.
        if variable == "LOCAL_RANK" and variable not in os.environ:
            continue
        text = required(variable)
        try:
            values[argument] = int(text)
        except ValueError:
            raise ValueError(f"{variable}={text!r} is not a whole number.") from None
    return values
