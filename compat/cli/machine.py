"""This machine: what is installed, and what is wrong with the setup."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import hypergrid
from compat.planned.job import JobError
from compat.transformer_engine import process as te_process
from hypergrid.messages import install_command

_SLOWEST = 300  # seconds for an import of megatron, on a file system that is slow
# Packages that not every job needs, and our extra that installs them.
_EXTRAS = {
    "PyYAML": "megatron",
    "matplotlib": "plot",
    "nvidia-resiliency-ext": "resiliency",
    "transformer-engine": "te",
}
_EMPTY_TE = "Found empty `transformer-engine` meta package"

# Imports megatron as the swap does, in a process of its own: it may raise, or print, or hang.
_TRIAL = """
import compat
compat.install()
from megatron.core import parallel_state
from compat import parallel_state as ours
assert parallel_state is ours, "megatron.core.parallel_state is not ours"
"""


class Row(NamedTuple):
    """A part of this machine and its state; no remedy if all is well."""

    name: str
    state: str
    remedy: str = ""


def examined() -> Iterator[Row]:
    """The state of this machine."""
    yield Row("python", f"{platform.python_version()} ({sys.executable})")
    yield Row("hypergrid", f"{hypergrid.__version__} in {Path(__file__).parents[2]}")
    yield from _torch()
    yield from _megatron()
    for name, extra in _EXTRAS.items():
        missing = f"not installed; {install_command(extra)} if you need it"
        yield Row(name, _installed(name) or missing)
    for name, value in sorted(os.environ.items()):
        if name.startswith("HYPERGRID_") or name in ("TORCH_DIST_INIT_BARRIER", "WORLD_SIZE"):
            yield Row(name, value)


def refuse_without_torch() -> None:
    """Raise JobError where torch cannot be imported, as ``hypergrid doctor`` says it."""
    torch_row = next(_torch())
    if torch_row.remedy:
        raise JobError(f"torch: {torch_row.state}. {torch_row.remedy}")


def _torch() -> Iterator[Row]:
    try:
        import torch.distributed
    except Exception as error:
        version = _installed("torch") or "not installed as a package"
        state = f"{version}, and importing it fails: {error}"
        yield Row("torch", state, "Install a torch that works here.")
        return
    from hypergrid import of_torch

    device = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"
    yield Row("torch", f"{torch.__version__}, {device}")
    backends = filter(torch.distributed.is_backend_available, ("nccl", "gloo", "mpi", "ucc"))
    yield Row("backends", ", ".join(backends) or "none")
    yield Row("creation", _creation())
    tested = f"tested with torch {of_torch.OLDEST} to {of_torch.NEWEST}"
    state = f"all that are used are there; {tested}"
    remedy = ""
    lacking = of_torch.lacking()
    if lacking:
        state = "; ".join(lacking)
        remedy = f"Use a torch that is {tested}."
    yield Row("torch's private parts", state, remedy)


def _creation() -> str:
    """The way in which groups would be created here, and why, without a job."""
    import torch.distributed as dist

    from hypergrid.groups.creation import abilities
    from hypergrid.of_torch import fake_store

    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=1)
    obstacle = abilities().obstacle
    dist.destroy_process_group()
    if obstacle:
        return f"everyone: {obstacle}"
    return (
        "members: each group by its members alone. A default group that is bound to a device "
        "(init_process_group(device_id=...)) is split instead."
    )


def _megatron() -> Iterator[Row]:
    from compat.megatron import installed, releases

    core = installed.imported_core()
    if core is None:
        yield Row("megatron-core", "not installed", f"{install_command('megatron')} for the swap.")
        return
    release = ".".join(map(str, releases.RELEASE))
    # A checkout may come before the installed package.
    where = f"{installed.version_of(core) or 'no version'} in {core.parents[1]}"
    yield Row("megatron-core", f"{where}; compat speaks as {release}")
    yield Row("swap", *_trial())


def _trial() -> tuple[str, str]:
    """The result of importing megatron with our parallel_state, and a remedy."""
    # `python -c` would import from the current directory too, which may be anybody's.
    code = f"import sys; sys.path[:] = {sys.path}\n{_TRIAL}"
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=_SLOWEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing megatron took more than {_SLOWEST} seconds", "Look at the file system."
    if process.returncode == 0:
        return "works: megatron.core.parallel_state is ours after compat.install()", ""
    # The last line of a traceback is the error.
    last_line = process.stderr.strip().rpartition("\n")[2]
    if _EMPTY_TE in process.stderr:
        return f"importing megatron fails: {last_line}", te_process.remedy()
    remedy = "Fix that import first; `python -c 'import megatron.core'` shows it."
    return f"fails: {last_line}", remedy


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
