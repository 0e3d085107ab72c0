"""What the launcher says about this process: the variables of torchrun, SLURM or OpenMPI."""

from __future__ import annotations

import os
from typing import Any

from compat.megatron.refusals import ArgumentError

OVERRIDES = (
    "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD",
    "MODULUS_DISTRIBUTED_INITIALIZATION_METHOD",
)
# For each method: argument of DistributedManager.setup(), and the variable that it needs.
_VARIABLES = {
    "ENV": {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
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
        asked = os.environ.get(override)
        if asked:
            if asked not in _VARIABLES:
                raise RuntimeError(
                    f"invalid {override}={asked!r}; allowed: {', '.join(_VARIABLES)}. Unset it to "
                    f"take the first method whose variables are set."
                )
            return asked
    for name, variables in _VARIABLES.items():
        decisive = variables.values() if name == "ENV" else [variables["rank"]]
        if os.environ.keys() >= {*decisive}:
            return name
    return None


def missing() -> str:
    """For each method, which of its variables are not set."""
    return "; ".join(
        f"{name} lacks {', '.join(v for v in variables.values() if v not in os.environ)}"
        for name, variables in _VARIABLES.items()
    )


def arguments(name: str) -> dict[str, Any]:
    """The arguments of ``DistributedManager.setup`` that this method's variables give.

    Without LOCAL_RANK, "ENV" gives no local rank. Raises ArgumentError if a variable is not set,
    or is not a whole number where it should be one.
    """
    variables, found = dict(_VARIABLES[name]), dict[str, Any](method=name.lower())
    if name == "ENV" and "LOCAL_RANK" in os.environ:
        variables["local_rank"] = "LOCAL_RANK"
    for argument, variable in variables.items():
        text = os.environ.get(variable)
        if text is None:
            raise ArgumentError(
                f"{variable} is not set, and initialisation by {name} needs it: start the script "
                f"with the launcher that sets it, or choose another method with {OVERRIDES[0]}."
            )
        try:
            found[argument] = text if argument in ("addr", "port") else int(text)
        except ValueError:
            raise ArgumentError(f"{variable}={text!r} is not a whole number.") from None
    return found


def ranks_per_host() -> int | None:
    """The number of ranks on each host, if the launcher says it."""
    told = (os.environ.get(variable, "") for variable in _PER_HOST)
    return next((int(text) for text in told if text.isdecimal()), None)
