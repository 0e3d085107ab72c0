"""Every flag of Megatron's parser: has it an effect on the small job, or why has it none?

A flag is added to two lines, with each of a few values, until one changes what is verified.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from compat.verification.arguments import parse
from compat.verification.launch import NOT_VERIFIED, Line, has_effect, results_alone, treatment
from compat.verification.ranks import in_checkout
from compat.verification.small_job import SmallJob

TABLE = Path(__file__).with_name("verify_flags.csv")
REASONS = Path(__file__).with_name("flag_reasons.txt")  # a reason, and below it patterns
_COMMON = """--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64
--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1
--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --tensor-model-parallel-size 2
--sequence-parallel --use-distributed-optimizer"""
DENSE = f"{_COMMON} --pipeline-model-parallel-size 2 --position-embedding-type rope"
EXPERTS = f"""{_COMMON} --num-experts 4 --expert-model-parallel-size 2 --swiglu
--disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"""
LINES = {"dense": DENSE, "experts": EXPERTS}
WORLD_SIZE = 8
NONE = "none"


def outcomes(checkout: Path, only: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """The outcome of each flag of a checkout's parser, or of some, and the flag's group."""
    return in_checkout(partial(_outcomes, tuple(only)), checkout)


def flags_of(checkout: Path) -> list[str]:
    """The flags of the parser of a checkout."""
    return in_checkout(_all_flags, checkout)


def _all_flags() -> list[str]:
    _, parser = parse(DENSE.split(), WORLD_SIZE)
    return [flag for flag, _, _ in _flags(parser)]


def _outcomes(only: Sequence[str]) -> dict[str, tuple[str, str]]:
    result: dict[str, tuple[str, str]] = {}
    for text in LINES.values():
        line = Line(tuple(text.split()), WORLD_SIZE)
        parsed, parser = parse(line.words, WORLD_SIZE)
        base = line.small_job(parsed)
        jobs: dict[str, SmallJob] = {}
        for flag, action, group in _flags(parser):
            known = result.get(flag, (NONE, ""))[0]
            # The second line is for flags without an effect on the first.
            if (only and flag not in only) or not (known == NONE or known.startswith("refused")):
                continue
            kind, others = _kind(line, action, base, parsed)
            # A line that takes the flag says more than one that refuses it.
            if not (kind.startswith("refused") and flag in result):
                result[flag] = (kind, group)
            for number, other in enumerate(others):
                jobs[f"{flag} {number}"] = other
        results = results_alone(base)
        for name, job in jobs.items():
            if has_effect(job, results):
                flag = name.split()[0]
                result[flag] = ("effect", result[flag][1])
    return result


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action, str]]:
    """The first long name of each flag, and the title of its group."""
    for group in parser._action_groups:
        for action in group._group_actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            if names and action.dest != "help":
                yield names[0], action, str(group.title)


def _kind(
    line: Line, action: argparse.Action, base: SmallJob, parsed: Any
) -> tuple[str, list[SmallJob]]:
    """The outcome, as far as it needs no step, and the jobs that decide otherwise."""
    refusal = ""
    for value in _values(action):
        with_flag = copy.deepcopy(parsed)
        setattr(with_flag, action.dest, value)
        try:
            job = line.small_job(with_flag)
        except Exception as error:
            refusal = f"refused: {error}"
            continue
        kind, other = treatment(line, action.dest, job, parsed)
        if other is not None:
            return NONE, [job]
        if kind != NOT_VERIFIED:
            return ("layout" if kind == "verified" else "stand-in"), []
    return refusal[:120] or NONE, []


def _values(action: argparse.Action) -> Iterable[Any]:
    """A few values other than the default."""
    if action.nargs == 0:
        return [action.const]
    if action.choices is not None:
        return [choice for choice in action.choices if choice != action.default][:3]
    if action.type is int:
        default = action.default if isinstance(action.default, int) else 1
        return [2 * default + 2, default + 1]
    if action.type is float:
        default = action.default if isinstance(action.default, int | float) else 0.5
        return [default / 2 + 0.01]
    return ["1"]


def reason_of(flag: str, kind: str, group: str) -> str:
    """Why a flag has no effect; "" where it has one, or where nobody knows."""
    if kind.startswith("refused"):
        return kind.partition(": ")[2].replace("\n", " ")
    if kind != NONE:
        return ""
    for name in (f"group: {group}", flag):
        reason = ""
        for line in REASONS.read_text().splitlines():
            patterns = re.split(" {2,}", line.strip())
            if not line.startswith(" "):
                reason = line
            elif any(fnmatchcase(name, pattern) for pattern in patterns):
                return reason
    return ""
