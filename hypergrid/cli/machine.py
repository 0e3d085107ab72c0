"""This machine: the groups of the installed megatron-core, and what is wrong with the setup."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from compat.planned.job import Job, JobError
from compat.transformer_engine import process as te_process
from hypergrid.messages import install_command

_SLOWEST = 300  # seconds for an import of megatron, on a file system that is slow
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


def compared(job: Job) -> tuple[str, list[tuple[str, str, int, bool]]]:
    """The job's groups compared with those of the installed megatron-core's ``RankGenerator``.

    Returns its release, and for each combination of dims that the job's plan uses: the grid, the
    dims, how many groups, and whether all are equal.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron's, of what else is missing
            from megatron.core import __version__ as release
            from megatron.core.parallel_state import RankGenerator
        from compat.swap.drift import refuse_drift

        refuse_drift("megatron.core.parallel_state")
    except RuntimeError as error:
        raise JobError(str(error)) from None
    except ImportError as error:
        raise JobError(
            f"megatron-core cannot be imported: {error}. {install_command('megatron')}, "
            f"and `hypergrid doctor` says what else is wrong."
        ) from None
    request = job.request()
    rows = []
    for grid in ("decoder", "expert"):
        layout = request.layouts[grid]
        known = ("tp", "ep", "dp", "pp", "cp")
        sizes = {dim: layout.dim_size(dim) for dim in known}
        if layout.dim_size(known) != layout.size:
            raise JobError("remat axes are laid out by newer releases only; leave them out here.")
        stock = RankGenerator(**sizes, order=request.order)
        used = [row.dims for row in job.plan().rows if row.layout == grid]
        for dims in dict.fromkeys(tuple(d for d in dims if d in known) for dims in used):
            if dims:
                ours = layout.groups(dims).tolist()
                theirs = [list(ranks) for ranks in stock.get_ranks("-".join(dims))]
                rows.append((grid, "-".join(dims), len(ours), ours == theirs))
    return str(release), rows


def examined() -> Iterator[tuple[str, str, str]]:
    """The state of this machine: (name, state, remedy); no remedy if all is well."""
    yield "python", f"{platform.python_version()} ({sys.executable})", ""
    own = _installed("hypergrid-comm") or "not installed as a package"
    yield "hypergrid", own + _checkout(Path(__file__).parents[2]), ""
    yield from _torch()
    yield _distribution("numpy")
    yield from _megatron()
    yield from _transformer_engine()
    yield _resiliency()
    for name, extra in (("PyYAML", "megatron"), ("matplotlib", "plot")):
        state = _installed(name)
        yield name, state or f"not installed; {install_command(extra)} if you need it", ""
    yield from _ranks()
    for name, value in sorted(os.environ.items()):
        if name.startswith("HYPERGRID_") or name in ("TORCH_DIST_INIT_BARRIER", "WORLD_SIZE"):
            yield name, value, ""


def _torch() -> Iterator[tuple[str, str, str]]:
    name, state, remedy = _distribution("torch")
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield name, f"{state}, and importing it fails: {error}", "Install a torch that works here."
        return
    device = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"
    yield name, f"{torch.__version__}, {device}", remedy
    there = [b for b in ("nccl", "gloo", "mpi", "ucc") if dist.is_backend_available(b)]
    yield "backends", ", ".join(there) or "none", "" if there else "Install a torch with gloo."
    yield "creation", _creation(), ""
    if "nccl" in there:
        yield from _nccl()
    yield _private_parts()


def _private_parts() -> tuple[str, str, str]:
    from hypergrid import of_torch

    lines = f"{of_torch.OLDEST} to {of_torch.NEWEST}"
    known = f"tested with torch {lines}"
    if lacking := of_torch.lacking():
        return "torch's private parts", "; ".join(lacking), f"Use a torch that is {known}."
    return "torch's private parts", f"all that are used are there; {known}", ""


def _nccl() -> Iterator[tuple[str, str, str]]:
    """How NCCL is set; the watchdog matters where processes are restarted."""
    from hypergrid.groups.closing import SETTINGS, WATCHDOG, unset

    wrong, restarts = unset(), _installed("nvidia-resiliency-ext") is not None
    for name, (wanted, *_) in SETTINGS.items():
        ends = name == WATCHDOG and name in wrong and restarts
        yield name, wrong.get(name, wanted), f"Set it to {wanted} before the job." if ends else ""


def _creation() -> str:
    """How groups would be created here, as seen by one process without a job."""
    import torch.distributed as dist

    from hypergrid.groups.creation import abilities
    from hypergrid.of_torch import fake_store

    if dist.is_initialized():
        can = abilities()
    else:
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=1)
        try:
            can = abilities()
        finally:
            dist.destroy_process_group()
    if can.obstacle:
        return f"everyone: {can.obstacle}"
    lazily = "" if can.can_connect_lazily else "; this torch's gloo cannot connect lazily"
    return (
        f"members: each group by its members alone{lazily}. A default group that is bound to a "
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
    if source is not None and not _is_of_package(source.path):
        state = f"a checkout, {source.path.parents[2]}, which says {source.version or 'no version'}"
    yield "megatron-core", f"{state}; compat speaks as {releases.in_words()}", ""
    other = hiding()
    if other is not None:
        yield "package compat", f"{other} has the same name", "Start with hypergrid-launch."
    yield ("swap", *_trial())


def _is_of_package(path: Path) -> bool:
    """Whether a file is one of the installed megatron-core's, and not of a checkout before it."""
    try:
        files = metadata.distribution("megatron-core").locate_file("megatron/core")
    except metadata.PackageNotFoundError:
        return False
    return path.parent.resolve() == Path(str(files)).resolve()


def _trial() -> tuple[str, str]:
    """The result of importing megatron with our parallel_state, and a remedy."""
    code = _TRIAL
    # `python -c` imports from the current directory, which may be anybody's.
    if not {"", os.getcwd()}.intersection(sys.path):
        code = f"import sys; sys.path = [entry for entry in sys.path if entry]\n{_TRIAL}"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=_SLOWEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing megatron took more than {_SLOWEST} seconds", "Look at the file system."
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = said[-1] if said else ""
    if done.returncode == 0 and not last:
        return "works: megatron.core.parallel_state is ours after compat.install()", ""
    if _EMPTY_TE in done.stderr:
        return f"importing megatron fails: {last}", te_process.remedy()
    return f"fails: {last}", "Fix that import first; `python -c 'import megatron.core'` shows it."


def _transformer_engine() -> Iterator[tuple[str, str, str]]:
    state = _installed("transformer-engine")
    if state is None:
        yield "transformer-engine", "not installed; Megatron runs without it", ""
    elif te_process.empty_meta_package():
        yield "transformer-engine", f"{state}, without its libraries", te_process.remedy()
    else:
        found = te_process.probe()
        said = "can be imported" if found.importable else f"cannot be imported: {found.why}"
        yield "transformer-engine", f"{state}, {said}", "" if found.importable else _REBUILD_TE


def _resiliency() -> tuple[str, str, str]:
    from compat.megatron.releases import RELEASE

    name = "nvidia-resiliency-ext"
    state = _installed(name)
    if state is None:
        return name, "not installed; only restarts inside the process need it", ""
    try:
        asked = hasattr(importlib.import_module("nvidia_resiliency_ext"), "__version__")
    except Exception as error:
        return name, f"{state}, and importing it fails: {error}", "Install what it asks for."
    if asked or RELEASE < (0, 17):
        return name, state, ""
    return (
        name,
        f"{state} has no __version__, and megatron-core {'.'.join(map(str, RELEASE))} asks for it: "
        f"importing megatron.core.dist_checkpointing fails",
        "Use a newer nvidia-resiliency-ext, or megatron-core up to 0.16.",
    )


# By launcher: the variables of a rank, of its place on its host, and of how many the host has.
_LAUNCHERS = {
    "SLURM": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "torchrun": ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "OpenMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}


def _ranks() -> Iterator[tuple[str, str, str]]:
    """Whether a launcher puts neighbouring ranks on different hosts; nothing outside of one."""
    asked = os.environ.get("SLURM_DISTRIBUTION", "").partition(":")[0]
    several = os.environ.get("SLURM_NNODES", "1") != "1"
    why = f"SLURM_DISTRIBUTION={asked}" if several and asked.startswith(("cyclic", "plane")) else ""
    found = bool(asked and several)
    for launcher, names in _LAUNCHERS.items():
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdecimal() and len(value) < 10 for value in values):
            rank, local, many = map(int, values)
            found = found or many > 1
            if not why and many > 1 and rank % many != local:
                why = f"{launcher}'s rank {rank} is number {local} of the {many} on its host"
    if why:
        yield (
            "ranks",
            f"interleaved over hosts ({why}): neighbouring ranks, which are the groups of tp, "
            f"communicate over the network and not inside a host",
            "srun --distribution=block, or a host file that lists each host once.",
        )
    elif found:
        yield "ranks", "consecutive on each host", ""


def _checkout(home: Path) -> str:
    """A note that the import comes from a checkout and no installed package; "" otherwise."""
    return "" if home.name in ("site-packages", "dist-packages") else f", a checkout in {home}"


def _distribution(name: str) -> tuple[str, str, str]:
    state = _installed(name)
    return name, state or "not installed as a package", ""


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
