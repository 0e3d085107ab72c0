"""Run every command and every documented import of the hypergrid that is installed.

    python -I scripts/dev/try_installed.py

scripts/dev/extras runs it in an environment that has the wheel and no checkout, in an empty folder.
The checkout is only read: what its pages import, and from nowhere else may hypergrid come.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from compat.cli.app import app
from compat.megatron.releases import has  # pages have the names of all releases

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    # Rank 3 comes four seconds late: long enough for the others to be recorded.
    "train.py": """
import time, torch, torch.distributed as dist
from megatron.core import parallel_state
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(2)
total, rank = torch.ones(1), dist.get_rank()
time.sleep(4 * (rank == 3))
dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
assert total == 2 and parallel_state.__name__ == "compat.parallel_state"
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
"""
}
SIZES = "--world-size 4 --tp 2"
LAUNCH = "torchrun --nproc-per-node 4 --no-python hypergrid-launch"
STEPS = (  # a command line, what it must print, its exit status
    ("HYPERGRID_AUDIT=empty python -c 'import compat.parallel_state'", "", 0),
    (
        f"HYPERGRID_RECORD=left HYPERGRID_RECORD_AFTER=1 {LAUNCH} --report --audit reads train.py",
        "TENSOR_MODEL_PARALLEL_GROUP",
        0,
    ),
    ("PYTHONPATH=$(hypergrid-launch --startup-path) torchrun --nproc-per-node 4 train.py", "", 0),
    ("hypergrid-launch nowhere.py", "there is no script 'nowhere.py'", 2),
    (f"hypergrid plan {SIZES} --json > plan.json; hypergrid plan {SIZES}", "DATA_PARALLEL", 0),
    (f"hypergrid show {SIZES} --png a.png --svg a.svg --html a.html", "wrote a.html", 0),
    (
        f"hypergrid check --suggest {SIZES} --gpus-per-node 2",
        "No order of 2 is better than yours",
        0,
    ),
    (f"hypergrid diff plan.json '{SIZES}'", "No differences.", 0),
    ("hypergrid diagnose left --html b.html", "rank 3", 1),
    ("hypergrid audit reads", "train.py", 0),
    (
        "hypergrid verify --checkout nowhere --from-args 'torchrun pretrain_gpt.py'",
        "give a checkout of Megatron-LM",
        2,
    ),
    ("hypergrid doctor", "works: megatron.core.parallel_state is ours", 0),
    ('hypergrid doctor | grep -E "^hypergrid +$(hypergrid --version)"', "", 0),
    ("test -s a.png -a -s a.svg -a -s a.html -a -s b.html", "", 0),
)


def documented() -> Iterator[str]:
    """Dotted names of ours that a page imports or describes."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        yield from re.findall(r"^::: (\S+)", text, re.M)
        for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.M | re.S):
            for node in ast.walk(ast.parse(textwrap.dedent(block))):
                if isinstance(node, ast.ImportFrom):
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)
                elif isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("hypergrid", "compat")


def main() -> None:
    """Try all; SystemExit says what fails."""
    names = {name for name in documented() if is_ours(name) and has(name.rpartition(".")[2])}
    for name in sorted(names):
        pkgutil.resolve_name(name)
    for name, module in list(sys.modules.items()):
        if is_ours(name):
            assert str(module.__file__).startswith(sys.prefix), f"not from the wheel: {module}"
    for file, text in FILES.items():
        Path(file).write_text(text)
    commands = [f"hypergrid {name}" for name in app.commands]
    run("hypergrid --help", "usage: ", 0)
    for command in ("hypergrid-launch", *commands):
        is_tried = any(f"{command} " in f"{line} " for line, *_ in STEPS)
        assert is_tried, f"nothing tries `{command}`"
        run(f"{command} --help", "usage: ", 0)
    for line, expected, status in STEPS:
        run(line, expected, status)
    print(f"{len(names)} imports, {len(commands)} commands and the launcher")


def run(command: str, expected: str, status: int) -> None:
    """Run a line of shell; SystemExit with what it printed if that is not as it should be."""
    done = subprocess.run(
        ["bash", "-uc", command], capture_output=True, text=True, timeout=180, check=False
    )
    printed = done.stdout + done.stderr
    is_right = done.returncode == status and expected.lower() in printed.lower()
    if not is_right or "Traceback" in printed:
        sys.exit(f"{command}: status {done.returncode}, not {status} and {expected!r}:\n{printed}")


if __name__ == "__main__":
    main()
