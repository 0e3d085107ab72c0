"""Runs a client's program on a module, and tells what it saw, as data."""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.clients import Client, Program
from tests.parity.patching import agree
from tests.parity.recording import Recorder, observed, raised
from tests.parity.surface import Call, getter_calls, private_globals
from tests.support.forked import run_ranks
from tests.support.stock import load_stock

Answers = dict[str, Any]
BEFORE = "before"


@functools.cache
def calls(release: str) -> tuple[Call, ...]:
    """Every getter, without arguments and with each one by keyword."""
    return tuple(c for c in getter_calls(release) if not c[2] and len(c[3]) < 2)


def ours() -> ModuleType:
    """The replacement, as the release that this process speaks as."""
    from compat import parallel_state

    return parallel_state


def watch(program: Program, load: Callable[[], ModuleType], release: str, rank: int) -> Answers:
    """What one rank of a world that is not there sees; in a process of its own."""
    (observed_by_rank,) = run_ranks(
        1, functools.partial(_watched, program, load, release, rank), backend=""
    )
    return observed_by_rank  # type: ignore[no-any-return]


def _watched(
    program: Program, load: Callable[[], ModuleType], release: str, rank: int, _: int
) -> Answers:
    world = program.world
    config = {"world_size": world, "environment": {}, "kwargs": program.sizes}
    recorder = Recorder(load(), config, rank, release)

    def restart() -> None:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    def ask_all() -> Answers:
        shown = recorder.ask(calls(release))
        for name in private_globals(release):
            value = getattr(recorder.module, name)
            if name == "_global_process_group_list" and value is not None:
                shown[name] = recorder.kinds([g for g in value if not g or g in c10d._world.pg_map])
            else:
                shown[name] = recorder.show(value, name)
        return shown

    client = Client(recorder.module, release, program.sizes, restart)
    with observed(recorder) if world else warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = _steps(program, client, ask_all)
        answers["created"] = Counter(recorder.created)
        answers["groups"] = recorder.details
    return answers


def watch_ranks(program: Program, load: Callable[[], ModuleType], release: str) -> list[Answers]:
    """What the ranks of a gloo world see, who communicate over every group that they are given."""
    return run_ranks(program.world, functools.partial(_communicating, program, load, release))


def _communicating(
    program: Program, load: Callable[[], ModuleType], release: str, rank: int
) -> Answers:
    module = load()

    def restart() -> None:
        raise NotImplementedError("a real world is begun once")

    def ask_all() -> Answers:
        shown: Answers = {}
        for label, name, args, kwargs in calls(release):
            if not name.endswith(("_group", "_gloo")):
                continue
            try:
                answer = getattr(module, name)(*args, **kwargs)
            except Exception as error:
                shown[label] = raised(error)
                continue
            groups = answer if isinstance(answer, list) else [answer]
            shown[label] = [_described(group, rank, program) for group in groups]
        return shown

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _steps(program, Client(module, release, program.sizes, restart), ask_all)


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


def _steps(program: Program, client: Client, ask_all: Callable[[], Answers]) -> Answers:
    answers: Answers = {"outcome": "ok", BEFORE: ask_all()}
    running: Iterator[Any] = program.run(client)
    with contextlib.closing(running):  # type: ignore[type-var]
        try:
            for step, value in running:
                answers[step] = {"its own value": copy.deepcopy(value)} | ask_all()
        except Exception as error:
            place = traceback.format_exc().splitlines()[-3].strip()
            answers["outcome"] = raised(error) | {"message": f"{error} ({place})"}
    return answers


def differences(stock: Answers, candidate: Answers) -> list[str]:
    """What the candidate's client sees otherwise, one line each."""
    lines = []
    for step, value in stock.items():
        candidate_value = candidate.get(step)
        if candidate_value is None:
            lines.append(f"{step}: the candidate's program never came to this")
        elif step == "created":
            missing = (value - candidate_value).elements()
            additional = (candidate_value - value).elements()
            lines += [f"not created: {group}" for group in missing]
            lines += [f"created, not by stock: {group}" for group in additional]
        elif step == "outcome":
            if value != candidate_value:
                lines.append(f"outcome: stock {value}, candidate {candidate_value}")
        else:
            for label, answer in value.items():
                candidate_answer = candidate_value.get(label, "<no answer>")
                # What stock still holds after a destroy, a candidate may have forgotten.
                forgotten = stock[BEFORE].get(label) if "destroyed" in step else answer
                if not agree(answer, candidate_answer) and not agree(forgotten, candidate_answer):
                    text = f"stock {answer}, candidate {candidate_answer}"
                    lines.append(f"{step}: {label}: {text}")
    return lines


def stock(release: str) -> Callable[[], ModuleType]:
    """Loads a fresh copy of a release."""
    return functools.partial(load_stock, release)
