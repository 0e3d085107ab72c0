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
from typing import NoReturn

import hypergrid
from compat import swap
from compat.swap import order, shadow
from compat.transformer_engine.process import warn_of_an_empty_package
from hypergrid import logs
from hypergrid.policy import CHOICES, take_flag

EPILOG = """\
environment variables, for launchers whose command line is fixed:
  HYPERGRID_ORDER=tp-cp-pp-dp  as --order        HYPERGRID_SWAP=0    as --no-swap
  HYPERGRID_REPORT=1           as --report       HYPERGRID_SHARE=all as --share all, and so on
  HYPERGRID_RECORD=DIR         every rank leaves there what `hypergrid diagnose` reads of a hang
  HYPERGRID_LOG=INFO           as --log INFO
  HYPERGRID_AUDIT=DIR          as --audit DIR    HYPERGRID_SHADOW=1  as --shadow
  HYPERGRID_TIMEOUT=MINUTES    as --timeout MINUTES
  PYTHONPATH=$(python -m compat.launch --startup-path):$PYTHONPATH
                               swaps in every Python that starts, without this launcher
"""


STARTUP = str(Path(swap.__file__).parent / "startup")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if not order.first_of_host():  # one rank of each host says it
            self.exit(2)
        self.exit(2, f"{self.prog}: {message}\n")


SWITCHES = {
    "no-swap": "run on megatron's own module",
    "report": "print one line per group at rank 0",
    "shadow": "run on megatron's own module, and compare its groups with those of hypergrid",
    "plan": "print the plan of the script's arguments, and end",
    "startup-path": "print the directory for PYTHONPATH and exit",
}


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
    parser.add_argument(
        "--audit", metavar="DIR", help="record who reads parallel_state, for `hypergrid audit DIR`"
    )
    parser.add_argument(
        "--timeout", metavar="MINUTES", help="of all groups, torch's default group included"
    )
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, help=f"as HYPERGRID_{name.upper()}")
    parser.add_argument(
        "--log", choices=logs.LEVELS, help="print phases (INFO), or each group and call (DEBUG)"
    )
    for name, effect in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=effect)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", nargs="?", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    options = parser.parse_args(argv)
    if options.startup_path:
        print(STARTUP)
        return
    try:
        install = _installer(options)
        _open_directories()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.plan:
        _plan_alone()
    _run(options.script, options.args, options.module, install)


def _installer(options: argparse.Namespace) -> Callable[[], None] | None:
    """The call that swaps our module in, if it is wanted; the flags are in the environment then.

    ValueError for flags that are wrong, or contradict each other.
    """
    if options.script is None:
        raise ValueError("name the SCRIPT to run")
    if not options.module and not Path(options.script).is_file():
        raise ValueError(
            f"there is no script {options.script!r}; put it after the launcher's flags"
        )
    switched_off_by = ""
    if options.no_swap:
        switched_off_by = "--no-swap"
    elif os.environ.get("HYPERGRID_SWAP", "1") == "0":
        switched_off_by = "HYPERGRID_SWAP=0 in the environment"
    if options.shadow:
        os.environ[shadow.VARIABLE] = "1"
    is_shadow = shadow.is_wanted()
    if is_shadow and switched_off_by:
        raise ValueError(
            f"--shadow runs stock beside a plan, which {switched_off_by} switches off: remove one"
        )
    if is_shadow:
        switched_off_by = "--shadow"
    for name in ("order", "audit", "log", "timeout", *CHOICES, "report", "plan"):
        value = getattr(options, name)
        if value in (None, False):
            continue
        if switched_off_by:
            raise ValueError(
                f"--{name} needs the swap, which {switched_off_by} switches off: remove one"
            )
        if name != "plan":
            take_flag(name, "1" if value is True else value)
    logs.print_as_set()
    if is_shadow:
        return shadow.install
    if switched_off_by:
        return None
    order.check_choices()
    return swap.install


def _open_directories() -> None:
    """Begin to record, and see that the audit can: OSError or ValueError if they cannot write."""
    if os.environ.get("HYPERGRID_RECORD"):
        hypergrid.record()
    if os.environ.get("HYPERGRID_AUDIT"):
        directory = Path(os.environ["HYPERGRID_AUDIT"])
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()


def _plan_alone() -> None:
    """Have the first initialisation print its plan at one rank, and end this process."""
    import torch.distributed as dist

    from compat.megatron.releases import RELEASE
    from compat.megatron.rows import PlannedRows
    from compat.state import ParallelState

    def initialize(self: ParallelState, planned: PlannedRows, **_: bool) -> NoReturn:
        if dist.get_rank() == planned.request.rank_offset:
            plan = json.loads(planned.plan.to_json())
            plan["megatron"] = ".".join(map(str, RELEASE))
            ranks_per_host = os.environ.get("LOCAL_WORLD_SIZE", "")
            if ranks_per_host.isdecimal():
                plan["ranks_per_host"] = int(ranks_per_host)
            print(json.dumps(plan), flush=True)
        raise SystemExit

    ParallelState.initialize = initialize  # type: ignore[assignment, method-assign]


def _run(script: str, args: list[str], module: bool, install: Callable[[], None] | None) -> None:
    home = Path(__file__).parents[1].resolve()
    directory = Path(script).resolve().parent
    if module:
        directory = Path.cwd()
    # As `python SCRIPT` does, unless hypergrid itself is imported from sys.path[0].
    if sys.path and Path(sys.path[0] or ".").resolve() != home:
        sys.path[0] = str(directory)
    else:
        sys.path.insert(0, str(directory))
    if install is not swap.install:
        # For the processes that the script starts with the start-up directory on their path.
        os.environ["HYPERGRID_SWAP"] = "0" if install is None else "1"
        warn_of_an_empty_package()
        # The start-up directory may have installed the swap in this process.
        swap.uninstall()
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
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, *folders]))


if __name__ == "__main__":
    main()
