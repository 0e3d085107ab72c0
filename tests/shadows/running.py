"""Runs an edited stock with a shadow run or swapped: on four pretended ranks, or with torchrun."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.shadows.dumping import Dump, dump_rank
from tests.support import ROOT
from tests.support.stock import source_dir

WORLD = 4
STAND_INS = {
    "__init__.py": "",
    "inference/__init__.py": "",
    "inference/symmetric_memory.py": (
        "class SymmetricMemoryManager:\n"
        "    @classmethod\n"
        "    def destroy(cls, key=None):\n"
        "        pass\n"
    ),
    "utils.py": (
        "class GlobalMemoryBuffer:\n"
        "    pass\n\n\n"
        "class GlobalSymmetricMemoryBuffer:\n"
        "    pass\n\n\n"
        "def is_torch_min_version(version, check_equality=True):\n"
        "    return True\n"
    ),
    "vendor.py": "def get_router_group():\n    return None\n",
}


class Side(NamedTuple):
    """One run: what each rank dumped, and the differences that a shadow run reported, or None."""

    dumps: list[Dump]
    differences: list[str] | None


def write_tree(folder: Path, release: str, text: str) -> None:
    """A megatron-core whose ``parallel_state`` is ``text``, and which imports fast."""
    core = folder / "megatron" / "core"
    core.joinpath("inference").mkdir(parents=True)
    (folder / "megatron" / "__init__.py").touch()
    for name, stand_in in STAND_INS.items():
        (core / name).write_text(stand_in)
    for name in ("hyper_comm_grid.py", "package_info.py"):
        (core / name).write_text((source_dir(release) / name).read_text())
    (core / "parallel_state.py").write_text(text)


def in_child(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a process that is forked for it; its traceback if it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # A job imports Megatron after the shadow run has begun; other tests have imported it here.
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
            del sys.modules[name]
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            os.kill(child, signal.SIGKILL)
        payload = pipe.read()
    os.waitpid(child, 0)
    if not payload:
        raise RuntimeError(f"{function.__name__} ended without an answer, or not in {seconds} s")
    is_answer, value = pickle.loads(payload)
    if not is_answer:
        raise RuntimeError(value)
    return value


def pretended(
    folder: Path, is_swapped: bool, arguments: dict[str, Any], texts: tuple[str, str]
) -> Side:
    """All ranks of a fake world, one after the other, in processes of their own."""
    return in_child(120, _pretended, folder, is_swapped, arguments, texts)


def _pretended(
    folder: Path, is_swapped: bool, arguments: dict[str, Any], texts: tuple[str, str]
) -> Side:
    sys.path.insert(0, str(folder))
    # The tests' own helpers have imported it, and it follows the release that it finds at import.
    for name in [name for name in sys.modules if name.partition(".")[0] == "compat"]:
        del sys.modules[name]
    for stream in (1, 2):  # stock warns and prints
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    reported: list[Any] = []
    if is_swapped:
        import compat

        compat.install()
    else:
        from compat.swap import answers, shadow

        answers.report = lambda *report: reported.append(report)
        shadow.install()
    try:
        from megatron.core import parallel_state
    except Exception as error:
        refusal = {"import": type(error).__name__, "error": str(error)[:400]}
        return Side([refusal] * WORLD, None)
    dumps = []
    differences: list[str] = []
    is_compared = not is_swapped
    for rank in range(WORLD):
        dump, reports = in_child(
            60, _pretended_rank, rank, parallel_state, arguments, texts, reported
        )
        dumps.append(dump)
        for report in reports:
            differences += [f"rank {rank}: {line}" for line in report]
        is_compared &= bool(reports)
    return Side(dumps, differences if is_compared else None)


def _pretended_rank(
    rank: int, module: Any, arguments: dict[str, Any], texts: tuple[str, str], reported: list[Any]
) -> tuple[Dump, list[list[str]]]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    dump = dump_rank(module, arguments, texts, pretend=True)
    return dump, [list(report[-1]) for report in reported]


NOTHING = "nothing was compared"
SAME = "would have created the same groups on all 4 ranks"


def torchrun(folder: Path, is_swapped: bool, arguments: dict[str, Any], release: str) -> Side:
    """Four ranks of torchrun on gloo, through the launcher."""
    out = folder / ("swapped" if is_swapped else "stock")
    out.mkdir(exist_ok=True)
    flag = [] if is_swapped else ["--shadow"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD), "-m", "compat.launch", *flag]
    command += ["-m", "tests.shadows.job", str(out), json.dumps(arguments), release]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    dumps = []
    for rank in range(WORLD):
        file = out / f"{rank}.pickle"
        if not file.exists():
            raise RuntimeError(done.stdout + done.stderr)
        dumps.append(pickle.loads(file.read_bytes()))
    said = done.stdout + done.stderr
    if is_swapped:
        return Side(dumps, None)
    if NOTHING in said:
        return Side(dumps, None)
    return Side(dumps, [] if SAME in said else [said[-1500:]])
