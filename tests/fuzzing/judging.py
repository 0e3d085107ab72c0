"""Runs one set of arguments with ours and with stock, and lists what is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.fuzzing.wild import CHOICES, FLAGS, MARKER, NUMBERS, ArgumentSet, Hang
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


def attempt(module: ModuleType, arguments: ArgumentSet, is_ours: bool = False) -> Outcome:
    """Call ``module.initialize_model_parallel``; of ours also list what is left afterwards."""
    recorder = Recorder(module, arguments.config, arguments.rank, arguments.release)
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder, observed(recorder):
        keywords = arguments.arguments(Path(folder))
        if not is_ours:
            keywords = {name: _plain(name, value) for name, value in keywords.items()}
            for name in CHOICES:
                keywords.pop(name, None)
        environment = dict(os.environ)
        files = _open_files()
        try:
            with limited(_PATIENCE if is_ours else _STOCKS_PATIENCE):
                module.initialize_model_parallel(**keywords)
            outcome.created = Counter(recorder.created)
        except BaseException as error:
            outcome.error = error
        if is_ours:
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


def judge(arguments: ArgumentSet, candidate: ModuleType) -> tuple[Outcome, list[str]]:
    """What ``candidate`` does with ``arguments``, and what is wrong with it.

    That is: a hang; anything left behind; a message that is not a sentence of ours which names an
    argument; accepting what stock refuses, refusing what stock accepts; other groups than stock's;
    another type of exception than stock's where stock refuses on purpose.
    """
    outcome = attempt(candidate, arguments, is_ours=True)
    complaints = [f"left behind: {remainder}" for remainder in outcome.left]
    if isinstance(outcome.error, Hang):
        return outcome, [*complaints, "hang"]
    if outcome.error is not None and not _is_callers_own(outcome.error):
        complaints += words_missing(outcome.error, [*parameters(arguments.release), *NAMED])
    return outcome, complaints + _differences(arguments, outcome)


def words_missing(error: BaseException, names: Sequence[str]) -> list[str]:
    """What keeps a message from being a sentence of ours that names what is wrong."""
    complaints = []
    text = str(error)
    shown = repr(text[:200])
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    if not file.startswith(OURS):
        complaints.append(f"not our own words: {type(error).__name__} from {file}")
    if len(text.split()) < 4 or not re.search(r"[.!?]$", text):
        complaints.append(f"no sentence: {shown}")
    if len(text) > _LONGEST_MESSAGE:
        complaints.append(f"a message of {len(text)} characters")
    if not any(name in text for name in names):
        complaints.append(f"names no argument: {shown}")
    if not text.isprintable():
        complaints.append(f"unprintable: {shown}")
    return complaints


def _is_callers_own(error: BaseException) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return last.endswith(("tests/fuzzing/wild.py", "tests/parity/configurations.py"))


def _differences(arguments: ArgumentSet, outcome: Outcome) -> list[str]:
    """How ours differs from stock, and from stock with any of the `REPAIRS`."""
    if not _can_be_compared(arguments, outcome):
        return []
    first_difference = ""
    for module in chain([load_stock(arguments.release)], repaired_stocks(arguments.release)):
        stock_outcome = attempt(module, arguments)
        difference = _difference(arguments, stock_outcome, outcome)
        if not difference or isinstance(stock_outcome.error, Hang | MemoryError):
            return []
        first_difference = first_difference or difference
    return [first_difference]


def _can_be_compared(arguments: ArgumentSet, outcome: Outcome) -> bool:
    """Whether stock can be given the same arguments."""
    for name, value in arguments.wild.items():
        window = value.make() if name == "local_world_size" else None
        if isinstance(window, int) and window > _LARGEST_WINDOW:
            return False
    if any(value.is_alone for value in arguments.wild.values()):
        return False
    # Stock has none of our choices.
    is_of_choice = str(outcome.error).startswith(CHOICES)
    return not (isinstance(outcome.error, ValueError) and is_of_choice)


def _difference(arguments: ArgumentSet, stock: Outcome, outcome: Outcome) -> str:
    if outcome.error is None and stock.error is None:
        share = arguments.wild.get("share")
        if (share and share.text == '"all"') or stock.created == outcome.created:
            return ""
        groups = sorted({group[0] for group in (stock.created - outcome.created)})
        groups += sorted({group[0] for group in (outcome.created - stock.created)})
        return f"other groups than stock's: {groups}"
    if outcome.error is None:
        return f"stock {stock}, ours accepts"
    if may_refuse(arguments):
        return ""
    if stock.error is None:
        return f"stock accepts, ours {outcome}"
    is_one_fault = len(arguments.wild) < 2 and arguments.config["kind"] == "sound"
    has_stocks_type = isinstance(outcome.error, type(stock.error))
    if is_one_fault and is_deliberate(stock.error) and not has_stocks_type:
        return f"stock {stock}, ours {outcome}"
    return ""


def may_refuse(arguments: ArgumentSet) -> bool:
    """Whether any refusal is right: a value of the wrong kind, or nonsense as in the parity."""
    if any(value.is_odd for value in arguments.wild.values()):
        return True
    keywords = dict(arguments.config["kwargs"])
    for name, value in arguments.wild.items():
        if name in (*NUMBERS, "order", "hierarchical_context_parallel_sizes"):
            keywords[name] = value.make()
    levels = keywords.get("hierarchical_context_parallel_sizes") or []
    stages = keywords.get("virtual_pipeline_model_parallel_size") or 1
    return min([*levels, stages]) < 1 or is_nonsense({"kwargs": keywords})


def _plain(name: str, value: Any) -> Any:
    """Flags, numbers and lists of numpy and torch as Python's own."""
    if name in FLAGS:
        with contextlib.suppress(Exception):
            return bool(value)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [_plain("", part) for part in value]
    return value
