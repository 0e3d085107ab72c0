"""This machine: what is installed, and what is wrong with the setup."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import hypergrid
from compat.planned.job import JobError
from compat.transformer_engine import process as te_process
from hypergrid.messages import install_command

_SLOWEST = 300  # seconds for an import of megatron, on a file system that is slow
_EXTRAS = {"PyYAML": "megatron", "matplotlib": "plot", "nvidia-resiliency-ext": "resiliency"}
_REBUILD_TE = "Build it against this torch and CUDA: see its own documentation."
_EMPTY_TE = "Found empty `transformer-engine` meta package"

# Imports megatron as the swap does, in a process of its own: it may raise, or print, or hang.
_TRIAL = """
import compat
compat.install()
from megatron.core import parallel_state
from compat import parallel_state as ours
print("" if parallel_state is ours else "megatron.core.parallel_state is not ours")
"""


def examined() -> Iterator[tuple[str, str, str]]:
    """The state of this machine: (name, state, remedy); no remedy if all is well."""
    yield "python", f"{platform.python_version()} ({sys.executable})", ""
    checkout = _checkout(Path(__file__).parents[2])
    yield "hypergrid", f"{hypergrid.__version__}{checkout}", ""
    yield from _torch()
    yield from _megatron()
    yield from _transformer_engine()
    for name, extra in _EXTRAS.items():
        state = _installed(name)
        yield name, state or f"not installed; {install_command(extra)} if you need it", ""
    for name, value in sorted(os.environ.items()):
        if name.startswith("HYPERGRID_") or name in ("TORCH_DIST_INIT_BARRIER", "WORLD_SIZE"):
            yield name, value, ""


def refuse_without_torch() -> None:
    """Raise JobError where torch cannot be imported, as ``hypergrid doctor`` says it."""
    for name, state, remedy in _torch_failure():
        raise JobError(f"{name}: {state}. {remedy}")


def _torch_failure() -> Iterator[tuple[str, str, str]]:
    """A row, if torch cannot be imported."""
    name = "torch"
    try:
        import torch.distributed  # noqa: F401
    except Exception as error:
        state = _installed(name) or "not installed as a package"
        yield name, f"{state}, and importing it fails: {error}", "Install a torch that works here."


def _torch() -> Iterator[tuple[str, str, str]]:
    failure = list(_torch_failure())
    if failure:
        yield from failure
        return
    import torch
    import torch.distributed as dist

    name = "torch"
    device = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"
    yield name, f"{torch.__version__}, {device}", ""
    backends = [name for name in ("nccl", "gloo", "mpi", "ucc") if dist.is_backend_available(name)]
    if backends:
        yield "backends", ", ".join(backends), ""
    else:
        yield "backends", "none", "Install a torch with gloo."
    yield "creation", _creation(), ""
    yield _private_parts()


def _private_parts() -> tuple[str, str, str]:
    from hypergrid import of_torch

    name = "torch's private parts"
    tested = f"tested with torch {of_torch.OLDEST} to {of_torch.NEWEST}"
    lacking = of_torch.lacking()
    if lacking:
        return name, "; ".join(lacking), f"Use a torch that is {tested}."
    return name, f"all that are used are there; {tested}", ""


def _creation() -> str:
    """How groups would be created here, as seen by one process without a job."""
    import torch.distributed as dist

    from hypergrid.groups.creation import abilities
    from hypergrid.of_torch import fake_store

    if dist.is_initialized():
        proposal = abilities()
    else:
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=1)
        try:
            proposal = abilities()
        finally:
            dist.destroy_process_group()
    if proposal.obstacle:
        return f"everyone: {proposal.obstacle}"
    gloo = "" if proposal.can_connect_lazily else "; this torch's gloo cannot connect lazily"
    return (
        f"members: each group by its members alone{gloo}. A default group that is bound to a "
        f"device (init_process_group(device_id=...)) is split instead."
    )


def _megatron() -> Iterator[tuple[str, str, str]]:
    from compat.megatron import releases, sources
    from compat.swap import hiding

    state = _installed("megatron-core")
    if importlib.util.find_spec("megatron") is None:
        yield "megatron-core", "not installed", f"{install_command('megatron')} for the swap."
        return
    source = sources.imported_source()
    if source is not None:
        # A checkout may come before the installed package.
        state = f"{source.version or 'no version'} in {source.path.parents[2]}"
    release = ".".join(map(str, releases.RELEASE))
    yield "megatron-core", f"{state}; compat speaks as {release}", ""
    hiding_package = hiding()
    if hiding_package is not None:
        state = f"{hiding_package} has the same name"
        yield "package compat", state, "Start with hypergrid-launch."
    yield ("swap", *_trial())


def _trial() -> tuple[str, str]:
    """The result of importing megatron with our parallel_state, and a remedy."""
    code = _TRIAL
    # `python -c` imports from the current directory, which may be anybody's.
    if not {"", os.getcwd()}.intersection(sys.path):
        code = f"import sys; sys.path = [path for path in sys.path if path]\n{_TRIAL}"
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
    output = process.stdout if process.returncode == 0 else process.stderr
    # The last line of a traceback is the error.
    last_line = output.strip().rpartition("\n")[2]
    if process.returncode == 0 and not last_line:
        return "works: megatron.core.parallel_state is ours after compat.install()", ""
    if _EMPTY_TE in process.stderr:
        return f"importing megatron fails: {last_line}", te_process.remedy()
    return (
        f"fails: {last_line}",
        "Fix that import first; `python -c 'import megatron.core'` shows it.",
    )


def _transformer_engine() -> Iterator[tuple[str, str, str]]:
    name = "transformer-engine"
    state = _installed(name)
    if state is None:
        yield name, "not installed; Megatron runs without it", ""
        return
    if te_process.empty_meta_package():
        yield name, f"{state}, without its libraries", te_process.remedy()
        return
    probe = te_process.probe()
    if probe.importable:
        yield name, f"{state}, can be imported", ""
    else:
        yield name, f"{state}, cannot be imported: {probe.why}", _REBUILD_TE


def _checkout(home: Path) -> str:
    """A note that the import comes from a checkout and no installed package; "" otherwise."""
    return "" if home.name in ("site-packages", "dist-packages") else f", a checkout in {home}"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
