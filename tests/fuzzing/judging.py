"""Runs one set of arguments with ours and with stock, and says what is the matter."""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import os
import re
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.fuzzing.wild import CHOICES, MARKER, ArgumentSet, Hang, Made, Unspeakable
from tests.parity.breaking import is_nonsense
from tests.parity.recording import Recorder, observed
from tests.parity.repairs import repaired_stocks
from tests.parity.surface import parameters
from tests.support import ROOT
from tests.support.stock import load_stock

SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "local_world_size"),
    *("expert_tensor_parallel_size", "gtp_remat_size", "expert_gtp_remat_size"),
    "num_distributed_optimizer_instances",
)
ENCODER = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
FLAGS = (
    *("use_sharp", "hybrid_context_parallel", "create_gloo_process_groups"),
    "create_all_gather_group",
)
# Beside the arguments themselves, what a message may name as being at fault.
NAMED = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL configuration", "net_name"),
    *CHOICES,
)
_LONGEST_MESSAGE = 1000
_PATIENCE = 20.0  # seconds, for ours
_STOCKS_PATIENCE = 2.0
_LARGEST_WINDOW = 4096  # of which stock, in Python, is done in time


@dataclass
class Outcome:
    """What came of one call: what it raised, what it made, what it left behind."""

    error: BaseException | None = None
    created: Counter[Any] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.error is None:
            return "accepts"
        return f"raises {type(self.error).__name__} ({str(self.error)[:200]})"


@dataclass
class Verdict:
    """``ours`` is what came of the set; ``told`` says how it was compared with stock."""

    ours: Outcome
    complaints: list[str]
    told: str = "as stock"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so many seconds; in the main thread alone."""

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
    """Call ``module.initialize_model_parallel``; of ours also look at what is left afterwards."""
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
        yield "what a value said was run"


def _groups() -> Iterator[str]:
    for group in c10d._world.pg_map:
        if group is not dist.group.WORLD:
            yield f"the group {group.group_desc} is left"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def judge(given: ArgumentSet, candidate: ModuleType) -> Verdict:
    """Run ``given`` with ``candidate`` and with stock.

    A complaint is: a hang; a refusal that is no sentence, or not our own; one that is not of
    stock's type; a refusal of what stock accepts; other groups than stock's; accepting what stock
    refuses; anything left behind by a refusal.
    """
    ours = attempt(candidate, given, ours=True)
    complaints = [f"left behind: {what}" for what in ours.left]
    if isinstance(ours.error, Hang):
        return Verdict(ours, [*complaints, "hang"])
    if ours.error is not None and not _is_callbacks_own(ours.error):
        complaints += words_missing(ours.error, [*parameters(given.release), *NAMED])
    if isinstance(ours.error, ValueError) and str(ours.error).startswith(CHOICES):
        return Verdict(ours, complaints, "no opinion")
    stocks = _stock(given)
    if stocks is None:
        return Verdict(ours, complaints, "no opinion")
    difference = _difference(given, stocks, ours)
    if not difference:
        return Verdict(ours, complaints)
    for told, other in _second_opinions(given, ours):
        if not _difference(given, other, ours):
            return Verdict(ours, complaints, told)
    return Verdict(ours, [*complaints, difference])


def words_missing(error: BaseException, names: Sequence[str]) -> list[str]:
    """What keeps a refusal from being a sentence of ours that says what is at fault."""
    found = []
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames[-1].filename.startswith((f"{ROOT}/compat/", f"{ROOT}/hypergrid/")):
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


def _is_callbacks_own(error: BaseException) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return last.endswith(("tests/fuzzing/wild.py", "tests/parity/configurations.py"))


def _stock(given: ArgumentSet, module: ModuleType | None = None) -> Outcome | None:
    """What stock makes of ``given``; None where it has no opinion."""
    values = given.wild.values()
    if any(isinstance(value, Made) and not value.comparable for value in values):
        return None
    if _index(given.wild.get("nccl_communicator_config_path")) is not None:
        return None  # an open file's number, the interpreter's own among them
    window = _index(given.wild.get("local_world_size"))
    if window is not None and window > _LARGEST_WINDOW:
        return None
    outcome = attempt(module or load_stock(given.release), given)
    text = str(outcome.error)
    if isinstance(outcome.error, Hang | MemoryError) or "Exceeds the limit" in text:
        return None
    if text == Unspeakable.WORDS:
        return None
    repeated = any(isinstance(given.wild.get(name), str | list | tuple | bytes) for name in SIZES)
    if isinstance(outcome.error, OverflowError) and repeated:
        return None  # a text times a huge number
    return outcome


def _difference(given: ArgumentSet, stock: Outcome, ours: Outcome) -> str:
    """In which way ours is not as stock, and should be; empty if it is or need not be."""
    if ours.error is not None and (
        nonsense(given) or any(name in str(ours.error) for name in may_refuse(given))
    ):
        return ""
    if stock.error is None and ours.error is None:
        shares = given.wild.get("share") not in (None, "", "none")
        if shares or stock.created == ours.created:
            return ""
        groups = sorted({made[0] for made in (stock.created - ours.created)})
        groups += sorted({made[0] for made in (ours.created - stock.created)})
        return f"other groups than stock's: {groups}"
    if stock.error is None:
        return f"stock accepts, ours {ours}"
    if ours.error is None:
        return f"stock {stock}, ours accepts"
    kind = next(each for each in type(stock.error).__mro__ if hasattr(builtins, each.__name__))
    return "" if isinstance(ours.error, kind) else f"stock {stock}, ours {ours}"


def _second_opinions(given: ArgumentSet, ours: Outcome) -> Iterator[tuple[str, Outcome]]:
    """Stock with what `tests.fuzzing` allows for."""
    plain = replace(given, wild={name: _plain(name, v) for name, v in given.wild.items()})
    outcome = _stock(plain)
    # Where stock has none about plain values, arrays that overflow before say nothing either.
    yield ("no opinion", ours) if outcome is None else ("plain values", outcome)
    numbers = {n: _index(v) for n, v in plain.wild.items() if isinstance(_index(v), int)}
    order = {n: v for n, v in plain.wild.items() if n == "order" and isinstance(v, str)}
    flags = {n: v for n, v in plain.wild.items() if n == "use_sharp" and isinstance(v, bool)}
    levels = {n: v for n, v in plain.wild.items() if n.startswith("hierarchical") and _whole(v)}
    seen = {**given.config, "kwargs": given.config["kwargs"] | numbers | order | flags | levels}
    for module in repaired_stocks(given.release, seen):
        outcome = _stock(plain, module)
        if outcome is not None:
            yield "repaired stock", outcome
    if ours.error is None:
        return
    for part in (*given.parts(), *plain.parts()):
        outcome = _stock(part)
        if outcome is not None and outcome.error is not None:
            yield "another fault first", outcome


def nonsense(given: ArgumentSet) -> bool:
    """Whether any refusal is right: numbers below what they count, a token twice."""
    wild = given.wild
    levels = wild.get("hierarchical_context_parallel_sizes")
    sizes = list(levels) if isinstance(levels, list | tuple) else []
    sizes += [wild[name] for name in SIZES if name in wild]
    base = {n: v for n, v in given.config["kwargs"].items() if n not in wild}
    if isinstance(wild.get("order"), str):
        base["order"] = wild["order"]
    # In capitals stock gives the order a second gtp_remat.
    order = base.get("order", "")
    capitals = "gtp_remat" in order.lower() and "gtp_remat" not in order.split("-")
    return (
        any(_number(size) < 1 for size in sizes)
        or any(_number(wild.get(name)) < 0 for name in ("rank_offset", *ENCODER))
        or (capitals and "gtp_remat_size" in parameters(given.release))
        or is_nonsense({"kwargs": base})
    )


def may_refuse(given: ArgumentSet) -> list[str]:
    """Arguments that ours may refuse where stock does not look, or has no use for the value."""
    unused = ("virtual_pipeline_model_parallel_size", "rank_offset")
    unused += ("num_distributed_optimizer_instances",)
    return [
        name
        for name, value in given.wild.items()
        if (isinstance(value, Made) and value.refusable)
        or (name in unused and value is not None and _index(value) is None)
        or (name in (*SIZES, *ENCODER) and isinstance(value, np.bool_))
        or (
            name == "high_priority_stream_groups" and isinstance(value, str) and len(value) > 10_000
        )
        or (name.startswith("hierarchical") and isinstance(value, list) and not _levels(value))
        or (name.startswith("hierarchical") and isinstance(value, bytes))
    ]


def _levels(sizes: list[Any]) -> bool:
    return len(sizes) <= 64 and all(_index(size) is not None for size in sizes)


def _whole(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(_index(size) is not None for size in sizes)


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except Exception:
        return None


def _number(value: Any) -> float:
    """A number to compare with; infinite if ``value`` is none."""
    number = _index(value)
    if number is None:
        return float(value) if isinstance(value, float | np.floating) else math.inf
    return max(min(number, 2**60), -(2**60))


def _plain(name: str, value: Any) -> Any:
    """Flags, numbers and lists of numpy and torch as Python's own."""
    if name in FLAGS:
        with contextlib.suppress(Exception):
            return bool(value)
    number = None if name.startswith("hierarchical") else _index(value)
    if number is not None:
        return number
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [each if _index(each) is None else _index(each) for each in value]
    return value
