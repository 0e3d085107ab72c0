"""Runs an unchanged Megatron script on hypergrid's parallel_state.

torchrun --nproc-per-node 8 -m compat.launch --order tp-cp-pp-dp pretrain_gpt.py ARGS...
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hypergrid
from compat import shadow, swap
from compat.megatron import order
from compat.transformer_engine.process import warn_of_an_empty_package
from hypergrid.policy import CHOICES, take_flag

EPILOG = """\
environment variables, for launchers whose command line is fixed:
  HYPERGRID_ORDER=tp-cp-pp-dp  as --order        HYPERGRID_SWAP=0    as --no-swap
  HYPERGRID_REPORT=1           as --report       HYPERGRID_SHARE=all as --share all, and so on
  HYPERGRID_RECORD=DIR         every rank leaves there what `hypergrid diagnose` reads of a hang
  HYPERGRID_AUDIT=DIR          as --audit DIR    HYPERGRID_SHADOW=1  as --shadow; =strict
  PYTHONPATH=$(python -m compat.launch --startup-path):$PYTHONPATH
                               swaps in every Python that starts, without this launcher
"""


STARTUP = str(Path(swap.__file__).parent / "startup")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n" if order.first_of_host() else None)


def main(argv: list[str] | None = None) -> None:
    """Set up the swap as the flags say and run the script as ``__main__``.

    Invalid flags end the process with exit status 2, and one rank of each host prints why.
    """
    parser = _Parser(
        prog="compat.launch",
        description="Run a Megatron script on hypergrid's parallel_state.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--order", help="order of the dims; overrides the script's")
    parser.add_argument("--no-swap", action="store_true", help="run on megatron's own module")
    parser.add_argument("--report", action="store_true", help="print one line per group at rank 0")
    parser.add_argument(
        "--shadow",
        action="store_true",
        help="run on megatron's own module, and compare its groups with those of hypergrid",
    )
    parser.add_argument(
        "--shadow-strict", action="store_true", help="as --shadow; a difference ends the job"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print the plan of the script's arguments, and end"
    )
    parser.add_argument(
        "--audit", metavar="DIR", help="record who reads parallel_state, for `hypergrid audit DIR`"
    )
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, help=f"as HYPERGRID_{name.upper()}")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "--startup-path", action="store_true", help="print the directory for PYTHONPATH and exit"
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    options = parser.parse_args(argv)
    if options.startup_path:
        print(STARTUP)
        return
    if options.script is None:
        parser.error("name the SCRIPT to run")
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no script {options.script!r}; put it after the launcher's flags")
    off = "--no-swap" if options.no_swap else ""
    if not off and os.environ.get("HYPERGRID_SWAP", "1") == "0":
        off = "HYPERGRID_SWAP=0 in the environment"
    if options.shadow or options.shadow_strict:
        os.environ[shadow.VARIABLE] = "strict" if options.shadow_strict else "1"
    shadowing = shadow.is_wanted()
    if shadowing and off:
        parser.error(f"--shadow runs stock beside a plan, which {off} switches off: remove one")
    if shadowing:
        off = "--shadow"
    given = {name: getattr(options, name) for name in ("order", "audit", *CHOICES)}
    given["report"] = "1" if options.report else None
    for name, value in given.items():
        if value is not None:
            if off:
                parser.error(f"--{name} needs the swap, which {off} switches off: remove one")
            take_flag(name, value)
    if options.plan and off:
        parser.error(f"--plan needs the swap, which {off} switches off: remove one")
    if not off:
        try:
            order.check_choices()
        except ValueError as error:
            parser.error(str(error))
    try:
        if os.environ.get("HYPERGRID_RECORD"):
            hypergrid.record()
        if os.environ.get("HYPERGRID_AUDIT"):
            left = Path(os.environ["HYPERGRID_AUDIT"])
            left.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=left).close()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.plan:
        _plan_alone()
    install = shadow.install if shadowing else None if off else swap.install
    _run(options.script, options.args, options.module, install)


def _plan_alone() -> None:
    """Have the first initialisation print its plan at one rank, and end this process."""
    import torch.distributed as dist

    from compat.megatron.releases import RELEASE
    from compat.state import ParallelState

    def initialize(self: ParallelState, request: Any, *more: Any, **others: Any) -> NoReturn:
        if dist.get_rank() == request.rank_offset:
            beside: dict[str, Any] = {"megatron": ".".join(map(str, RELEASE))}
            if os.environ.get("LOCAL_WORLD_SIZE", "").isdecimal():
                beside["ranks_per_host"] = int(os.environ["LOCAL_WORLD_SIZE"])
            print(json.dumps({**json.loads(request.plan.to_json()), **beside}), flush=True)
        raise SystemExit

    ParallelState.initialize = initialize  # type: ignore[method-assign, assignment]


def _run(script: str, args: list[str], module: bool, install: Callable[[], None] | None) -> None:
    home = Path(__file__).parents[1].resolve()
    first = str(Path.cwd() if module else Path(script).resolve().parent)
    # As `python SCRIPT` does, unless hypergrid itself is imported from sys.path[0].
    if sys.path and Path(sys.path[0] or ".").resolve() != home:
        sys.path[0] = first
    else:
        sys.path.insert(0, first)
    if install is not swap.install:
        os.environ["HYPERGRID_SWAP"] = "0" if install is None else "1"
        warn_of_an_empty_package()
        swap.uninstall()  # what the start-up directory installed
    if install is not None:
        install()
        _swap_in_children()
    sys.argv = [script, *args]
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _swap_in_children() -> None:
    """For ranks that the script starts in new interpreters, as torch.multiprocessing.spawn does."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, *path]))


if __name__ == "__main__":
    main()
