"""Runs one set of arguments with ours and with stock, and lists what is wrong."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.fuzzing.wild import CHOICES, FLAGS, MARKER, NUMBERS, ArgumentSet, Hang, Made
from tests.parity.breaking import is_nonsense
from tests.parity.recording import Recorder, is_deliberate, observed
from tests.parity.repairs import repaired_stocks
from tests.parity.surface import parameters
from tests.support import OURS
from tests.support.forked import open_groups
from tests.support.stock import load_stock

# What a message may name besides an argument.
NAMED = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL configuration", "net_name", *CHOICES)
_LONGEST_MESSAGE = 1000
_PATIENCE = 20.0  # seconds, for ours
_STOCKS_PATIENCE = 2.0
_LARGEST_WINDOW = 4096  # a larger one takes stock too long


@dataclass
class Outcome:
    """What one call raised, created and left behind."""

    error: BaseException | None = None
    created: Counter[Any] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.error is None:
            return "accepts"
        return f"raises {type(self.error).__name__} ({str(self.error)[:200]})"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so many seconds; only in the main thread."""

    def ring(*_: Any) -> None:
        raise Hang(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(module: ModuleType, given: ArgumentSet, ours: bool = False) -> Outcome:
    """Call ``module.initialize_model_parallel``; of ours also list what is left afterwards."""
    recorder = Recorder(module, given.config, given.rank, given.release)
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder, observed(recorder):
        arguments = given.arguments(Path(folder))
        if not ours:
            arguments = {name: v for name, v in arguments.items() if name not in CHOICES}
        environment, files = dict(os.environ), _open_files()
        try:
            with limited(_PATIENCE if ours else _STOCKS_PATIENCE):
                module.initialize_model_parallel(**arguments)
            outcome.created = Counter(recorder.created)
        except BaseException as error:
            outcome.error = error
        if ours:
            outcome.left = list(_left(module, outcome, environment, files))
        with contextlib.suppress(Exception):
            module.destroy_model_parallel()
    return outcome


def _left(
    module: ModuleType, outcome: Outcome, environment: dict[str, str], files: int
) -> Iterator[str]:
    if outcome.error is not None:
        if dict(os.environ) != environment:
            yield f"the environment differs in {set(os.environ.items()) ^ set(environment.items())}"
        if module.is_initialized():
            yield "it says that it is initialised"
        yield from _groups()
        try:
            with limited(_PATIENCE):
                module.initialize_model_parallel(create_gloo_process_groups=False)
        except (Exception, Hang) as error:
            yield f"a correct initialisation afterwards fails: {error!r}"
    module.destroy_model_parallel()
    yield from _groups()
    if _open_files() > files:
        yield "a file is open"
    if MARKER.exists():
        MARKER.unlink()
        yield "code in a value was run"


def _groups() -> Iterator[str]:
    for group in open_groups():
        if group is not dist.group.WORLD:
            yield f"the group {group.group_desc} is left"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def judge(given: ArgumentSet, candidate: ModuleType) -> tuple[Outcome, list[str]]:
    """What ``candidate`` does with ``given``, and what is wrong with it.

    That is: a hang; anything left behind; a message that is not a sentence of ours which names an
    argument; accepting what stock refuses, refusing what stock accepts; other groups than stock's;
    another type of exception than stock's where stock refuses on purpose.
    """
    ours = attempt(candidate, given, ours=True)
    complaints = [f"left behind: {what}" for what in ours.left]
    if isinstance(ours.error, Hang):
        return ours, [*complaints, "hang"]
    if ours.error is not None and not _is_callers_own(ours.error):
        complaints += words_missing(ours.error, [*parameters(given.release), *NAMED])
    return ours, complaints + _differences(given, ours)


def words_missing(error: BaseException, names: Sequence[str]) -> list[str]:
    """What keeps a message from being a sentence of ours that names what is wrong."""
    found = []
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames[-1].filename.startswith(OURS):
        found.append(f"not our own words: {type(error).__name__} from {frames[-1].filename}")
    if len(text.split()) < 4 or not re.search(r"[.!?]$", text):
        found.append(f"no sentence: {text[:200]!r}")
    if len(text) > _LONGEST_MESSAGE:
        found.append(f"a message of {len(text)} characters")
    if not any(name in text for name in names):
        found.append(f"names no argument: {text[:200]!r}")
    if not text.isprintable():
        found.append(f"unprintable: {text[:200]!r}")
    return found


def _is_callers_own(error: BaseException) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return last.endswith(("tests/fuzzing/wild.py", "tests/parity/configurations.py"))


def _differences(given: ArgumentSet, ours: Outcome) -> list[str]:
    """How ours differs from stock; from stock with the `REPAIRS`, where they apply."""
    wild = {name: _plain(name, value) for name, value in given.wild.items()}
    window = wild.get("local_world_size")
    if isinstance(window, int) and window > _LARGEST_WINDOW:
        return []
    if isinstance(wild.get("nccl_communicator_config_path"), int):
        return []  # stock would close this file of the process
    if any(isinstance(value, Made) and not value.comparable for value in wild.values()):
        return []
    if isinstance(ours.error, ValueError) and str(ours.error).startswith(CHOICES):
        return []
    simple = {name: value for name, value in wild.items() if _is_simple(name, value)}
    seen = given.config | {"kwargs": given.config["kwargs"] | simple}
    first = ""
    for module in chain([load_stock(given.release)], repaired_stocks(given.release, seen)):
        stock = attempt(module, replace(given, wild=wild))
        difference = _difference(given, stock, ours)
        if not difference or isinstance(stock.error, Hang | MemoryError):
            return []
        first = first or difference
    return [first]


def _difference(given: ArgumentSet, stock: Outcome, ours: Outcome) -> str:
    if ours.error is None and stock.error is None:
        shares = given.wild.get("share") not in (None, "", "none")
        if shares or stock.created == ours.created:
            return ""
        groups = sorted({made[0] for made in (stock.created - ours.created)})
        groups += sorted({made[0] for made in (ours.created - stock.created)})
        return f"other groups than stock's: {groups}"
    if ours.error is None:
        return f"stock {stock}, ours accepts"
    if may_refuse(given):
        return ""
    if stock.error is None:
        return f"stock accepts, ours {ours}"
    is_one_fault = len(given.wild) < 2 and given.config["kind"] == "sound"
    if is_one_fault and is_deliberate(stock.error):
        return "" if isinstance(ours.error, type(stock.error)) else f"stock {stock}, ours {ours}"
    return ""


def may_refuse(given: ArgumentSet) -> bool:
    """Whether any refusal is right: a value of the wrong kind, or nonsense as in the parity."""
    wild, kwargs = given.wild, given.config["kwargs"]
    if any(_is_odd(name, value) for name, value in wild.items()):
        return True
    numbers = {n: v for n, v in wild.items() if n in NUMBERS or n == "order"}
    order = {**kwargs, **numbers}.get("order", "")
    # Stock adds a second gtp_remat to an order that names it in capitals.
    capitals = "gtp_remat" in order.lower() and "gtp_remat" not in order.split("-")
    levels = wild.get("hierarchical_context_parallel_sizes") or []
    return (
        (capitals and "gtp_remat_size" in parameters(given.release))
        or any(level < 1 for level in levels)
        or is_nonsense({"kwargs": {**kwargs, **numbers}})
        or any((wild.get(n) or 1) < 1 for n in ("virtual_pipeline_model_parallel_size",))
    )


def _is_odd(name: str, value: Any) -> bool:
    """Whether ``value`` is not of the kind that the argument ``name`` is documented to be."""
    if isinstance(value, Made):
        return value.refusable
    if value is None:
        return name in NUMBERS or name == "order"
    if name in NUMBERS:
        return _index(value) is None
    if name == "hierarchical_context_parallel_sizes":
        return not isinstance(value, list | tuple) or any(_index(each) is None for each in value)
    if name == "high_priority_stream_groups":
        return not isinstance(value, list | tuple)
    if name == "distributed_timeout_minutes":
        return not isinstance(value, int | float)
    if name in FLAGS:
        return not isinstance(_plain(name, value), bool)
    return not isinstance(value, str)


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except Exception:
        return None


def _plain(name: str, value: Any) -> Any:
    """Flags, numbers and lists of numpy and torch as Python's own."""
    if name in FLAGS:
        with contextlib.suppress(Exception):
            return bool(value)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [each if _index(each) is None else _index(each) for each in value]
    return value


def _is_simple(name: str, value: Any) -> bool:
    """Whether the conditions of the `REPAIRS` can be asked of ``value``."""
    if name == "hierarchical_context_parallel_sizes":
        return isinstance(value, list) and all(isinstance(each, int) for each in value)
    return isinstance(value, str if name == "order" else int)
