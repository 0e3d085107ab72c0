"""All programs on one release, stock and the replacement: ``{program: [what differs]}``."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from compat import parallel_state
from tests.clients import Client, Program
from tests.clients.programs import PROGRAMS, REAL
from tests.parity.comparing import Snapshot, compare
from tests.parity.recording import raised
from tests.parity.surface import getter_calls
from tests.parity.watching import follow, watch
from tests.support.forked import run_ranks
from tests.support.stock import load_stock


def main(release: str, on_real_ranks: bool) -> None:
    differences_of: dict[str, list[str]] = {}
    with contextlib.suppress(ImportError):  # seconds, which every process would spend otherwise
        import megatron.core.utils  # noqa: F401
    programs = REAL if on_real_ranks else PROGRAMS
    see = seen_by_ranks if on_real_ranks else seen_in_a_fake_world
    for name, program in programs.items():
        lines = []
        try:
            on_stock = see(program, functools.partial(load_stock, release), release)
            on_ours = see(program, lambda: parallel_state, release)
        except Exception:
            differences_of[name] = [traceback.format_exc()]
            continue
        for rank, stock in on_stock.items():
            if stock["outcome"] != "ok":
                lines.append(f"rank {rank}: stock itself: {stock['outcome']}")
            lines += compare(stock, on_ours[rank], f"rank {rank}: ", is_written_to=True)
        differences_of[name] = lines
    print(json.dumps(differences_of))


def seen_in_a_fake_world(
    program: Program, load: Callable[[], ModuleType], release: str
) -> dict[int, Snapshot]:
    """What two ranks of a world that is not there see, each in a process of its own."""

    def body(rank: int, _: int) -> Snapshot:
        return watch(program.run, load(), program.config(), rank, release)

    ranks = sorted({0, program.world * 5 // 6})
    return {rank: run_ranks(1, functools.partial(body, rank), backend="")[0] for rank in ranks}


def seen_by_ranks(
    program: Program, load: Callable[[], ModuleType], release: str
) -> dict[int, Snapshot]:
    """What the ranks of a gloo world see, who communicate over every group that they are given."""
    body = functools.partial(_communicating, program, load, release)
    return dict(enumerate(run_ranks(program.world, body)))


def _communicating(
    program: Program, load: Callable[[], ModuleType], release: str, rank: int
) -> Snapshot:
    module = load()

    def restart() -> None:
        raise NotImplementedError("a real world is begun once")

    def ask_all() -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for text in getter_calls(release):
            # Without arguments, and with each one by keyword.
            if not re.fullmatch(r"\w+(_group|_gloo)\((\w+=\w+)?\)", text):
                continue
            try:
                answer = eval(text, vars(module))
            except Exception as error:
                shown[text] = raised(error)
                continue
            groups = answer if isinstance(answer, list) else [answer]
            shown[text] = [_described(group, rank, program) for group in groups]
        return shown

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = Client(module, program.config(), release, restart)
        return follow(program.run(client), ask_all)


def _described(group: Any, rank: int, program: Program) -> Any:
    """A group's members, who took part in a sum over it, its description and its timeout."""
    if not isinstance(group, dist.ProcessGroup):
        return repr(group)
    presence = torch.zeros(program.world)
    presence[rank] = 1
    if program.meet:
        dist.all_reduce(presence, group=group)
    present = presence.nonzero().flatten().tolist()
    group = getattr(group, "group", group)  # a client's wrapper
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return dist.get_process_group_ranks(group), present, group.group_desc, str(timeout)


if __name__ == "__main__":
    main(sys.argv[1], "--real" in sys.argv[2:])
