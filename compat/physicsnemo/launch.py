"""How this process was launched, from the variables of torchrun, SLURM or OpenMPI."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

OVERRIDES = (
    "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD",
    "MODULUS_DISTRIBUTED_INITIALIZATION_METHOD",
)
_NEEDED = {
    "ENV": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "SLURM": ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID", "SLURM_LAUNCH_NODE_IPADDR"),
    "OPENMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
_PER_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


class Launch(NamedTuple):
    """Rank, sizes and devices of this process, and the address of rank 0."""

    rank: int
    world_size: int
    local_rank: int
    addr: str
    port: str
    method: str


def method() -> str | None:
    """The method that the environment asks for, or the first available one, or None.

    As upstream: torchrun's is available if it is complete, the others if their rank is set.
    Raises RuntimeError for an unknown method.
    """
    for variable in OVERRIDES:
        asked = os.environ.get(variable)
        if asked:
            if asked not in _NEEDED:
                raise RuntimeError(
                    f"invalid {variable}={asked!r}; allowed: {', '.join(_NEEDED)}, or unset it to "
                    f"use the first that is available."
                )
            return asked
    for name, needed in _NEEDED.items():
        telling = needed if name == "ENV" else needed[:1]
        if all(variable in os.environ for variable in telling):
            return name
    return None


def missing() -> str:
    """A text: the variables that each method lacks."""
    lacks = {
        name: [variable for variable in needed if variable not in os.environ]
        for name, needed in _NEEDED.items()
    }
    return "; ".join(f"{name} lacks {', '.join(each)}" for name, each in lacks.items() if each)


def from_env() -> Launch:
    """As torchrun sets it; without LOCAL_RANK, devices are assigned round robin."""
    rank, world_size = _whole("RANK"), _whole("WORLD_SIZE")
    given = "LOCAL_RANK" in os.environ
    local_rank = _whole("LOCAL_RANK") if given else default_local_rank(rank)
    return Launch(rank, world_size, local_rank, _read("MASTER_ADDR"), _read("MASTER_PORT"), "env")


def from_slurm(port: str) -> Launch:
    """As srun sets it."""
    rank, world_size, local_rank, addr = _NEEDED["SLURM"]
    numbers = _whole(rank), _whole(world_size), _whole(local_rank)
    return Launch(*numbers, _read(addr), port, "slurm")


def from_open_mpi(addr: str, port: str) -> Launch:
    """As mpirun sets it."""
    rank, world_size, local_rank = _NEEDED["OPENMPI"]
    return Launch(_whole(rank), _whole(world_size), _whole(local_rank), addr, port, "openmpi")


def default_local_rank(rank: int) -> int:
    """The device by round robin; 0 without devices."""
    return rank % max(torch.cuda.device_count(), 1)


def ranks_per_host() -> int | None:
    """Ranks per host, if the launcher sets it."""
    told = (os.environ.get(variable, "") for variable in _PER_HOST)
    return next((int(text) for text in told if text.isdecimal()), None)


def _read(variable: str) -> str:
    if variable not in os.environ:
        raise ValueError(
            f"{variable} is not set, which this method of initialisation needs: start the script "
            f"with the launcher that sets it, or choose another one by {OVERRIDES[0]}."
        )
    return os.environ[variable]


def _whole(variable: str) -> int:
    text = _read(variable)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} is not a whole number.") from None
