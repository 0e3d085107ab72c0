"""Verify a launch line of Megatron-LM: its own parser reads it, and the model is made small."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from compat.verification.arguments import BY_HAND, INSTEAD, check, parse
from compat.verification.layout import DIMS, OF_SEVERAL, matches
from compat.verification.ranks import Refused, in_checkout, on_ranks
from compat.verification.search import Report, reports
from compat.verification.small_job import FIELD_OF, SHAPE, SmallJob, small_job
from compat.verification.step import run_variants

# Scripts of Megatron-LM that train another model: a Mamba, a BERT ...
_OTHER_MODELS = (
    "pretrain_mamba",
    "pretrain_hybrid",
    "pretrain_mimo",
    "pretrain_bert",
    "pretrain_t5",
    "pretrain_ict",
    "pretrain_realm",
    "pretrain_vision",
    "pretrain_vlm",
    "pretrain_retro",
)
# How a flag of the line is treated.
VERIFIED = "verified"
STAND_IN = "replaced by a stand-in"
NOT_VERIFIED = "not verified"
# Arguments in place of which the small job has something else: its sizes, layers, data, optimizer.
_REPLACED = (
    *SHAPE[:6],
    *INSTEAD,
    "num_experts",
    "max_position_embeddings",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "bf16",
    "fp16",
    "attention_backend",
    "optimizer",
    "mock_data",
    "data_path",
    "tokenizer_*",
    "seed",
    "lr",
    "min_lr",
    "lr_*",
    "weight_decay",
    "adam_*",
    "clip_grad",
    "init_method_std",
)


def verify_line(
    script: str,
    words: Sequence[str],
    world_size: int,
    checkout: Path,
    *,
    order: str | None = None,
    allow: Sequence[str] = (),
    keep: Sequence[str] = (),
    smallest: bool = True,
    listen: Callable[[str], None] = lambda _: None,
) -> tuple[list[str], Report]:
    """Verify the job that ``script WORDS`` starts on so many ranks: ``pretrain_gpt.py --lr 1``.

    ``checkout`` is one of Megatron-LM: the wheel of megatron-core has no ``megatron.training``.
    ``order`` takes precedence over that of the arguments. Dims in ``keep`` have the job's size.
    Gives what was made smaller or left out, in words, and the report. ``smallest`` searches for the
    smallest layout that differs; ``listen`` is told the verdict before, and how the search goes on.

    Raises
    ------
    ValueError
        ``checkout`` is none, a name in ``keep`` is no dim, Megatron's own parser or its checks
        refuse the arguments, or the script trains another model than a GPT.
    """
    for dim in keep:
        if dim not in DIMS:
            raise ValueError(f"--keep {dim} is no dim; allowed: {', '.join(DIMS)}.")
    name = Path(script).name
    if name.startswith(_OTHER_MODELS):
        raise ValueError(f"{name} trains no GPT: {BY_HAND}")
    if not (checkout / "megatron" / "training" / "arguments.py").is_file():
        raise ValueError(
            f"{checkout} has no megatron/training/arguments.py: give a checkout of Megatron-LM."
        )

    # Megatron's own script for a GPT: its get_batch and loss_func run.
    has_script = name == "pretrain_gpt.py" and (checkout / name).is_file()
    line = Line(tuple(words), world_size, order, tuple(keep), name if has_script else "")
    # Only hypergrid's launcher gives an order: such a job runs hypergrid's parallel_state.
    body = partial(_verified, line, name, tuple(allow), smallest)
    return in_checkout(body, checkout, order is not None, listen)


@dataclass(frozen=True)
class Line:
    """A launch line, and what the command was given beside it."""

    words: tuple[str, ...]
    world_size: int
    order: str | None = None
    keep: tuple[str, ...] = ()
    script: str = ""  # whose get_batch and loss_func run

    def small_job(self, parsed: Any) -> SmallJob:
        """The small job of arguments that Megatron's parser gave and its checks accept."""
        return small_job(check(parsed), self.order, self.keep, self.script)


def _verified(
    line: Line, name: str, allow: Sequence[str], search: bool
) -> tuple[list[str], Report]:
    parsed, parser = parse(line.words, line.world_size)
    job = line.small_job(parsed)
    (report,) = reports(job.task, [job.layout], allow, search)
    # What was not run has verified no flag.
    if not report.refused:
        job.changed.extend(_treatments(line, parsed, parser, job, report.idle))
    if not line.script:
        job.changed.insert(0, "a batch and a loss of ours run, and no get_batch and loss_func")
    if name and not name.startswith("pretrain_gpt"):
        job.changed.insert(0, f"the model is a GPT, whatever {name} has")
    return job.changed, report


def _treatments(
    line: Line,
    parsed: Any,
    parser: argparse.ArgumentParser,
    job: SmallJob,
    idle: Sequence[str],
) -> list[str]:
    """Which flags are verified, replaced by a stand-in, or not verified: one line for each.

    Flags that set ``idle`` options are not verified.
    """
    actions = parser._option_string_actions
    results = results_alone(job)
    flags_of: dict[str, list[str]] = {VERIFIED: [], STAND_IN: [], NOT_VERIFIED: []}
    written = dict.fromkeys(word.partition("=")[0] for word in line.words)
    for flag in written:
        if flag not in actions:
            continue
        name = actions[flag].dest
        # As if the line did not have it.
        without = copy.deepcopy(parsed)
        setattr(without, name, actions[flag].default)
        kind, other = treatment(line, name, job, without)
        has_no_effect = other is not None and not has_effect(other, results)
        # An option that reaches the small model may have no effect on it.
        if has_no_effect or FIELD_OF.get(name, name) in idle:
            kind = NOT_VERIFIED
        flags_of[kind].append(flag)
    return [f"{kind}: {' '.join(flags)}" for kind, flags in flags_of.items() if flags]


def treatment(line: Line, name: str, job: SmallJob, without: Any) -> tuple[str, SmallJob | None]:
    """How the argument ``name`` of a job is treated; ``without`` are the arguments without it.

    With another job, its results decide: the argument is verified if they differ.
    """
    if matches(name, _REPLACED):
        return STAND_IN, None
    layout = job.layout
    # Groups of several ranks were there.
    size = layout.sizes.get(name) or 1
    if size > 1:
        return VERIFIED, None
    # One rank alone would show nothing of it; idle ones are told apart by their collectives.
    option = FIELD_OF.get(name, name)
    if option in OF_SEVERAL and option in layout.options:
        return VERIFIED, None
    try:
        other = line.small_job(without)
    except ValueError:
        # Megatron's checks need this flag for others of the line; the small job may do without.
        other = job._replace(layout=layout.without(name))
    if replace(other.layout, options=layout.options) != layout:
        return VERIFIED, None  # another size or order of dims
    if other.is_same(job):
        return NOT_VERIFIED, None
    return VERIFIED, other


def results_alone(job: SmallJob) -> Any:
    """All that one rank computes of a job, to the last bit."""

    def results(_: int) -> Any:
        (computed,) = run_variants(job.task, job.layout.alone(), None)
        return computed.digests(), computed.norms

    return on_ranks(1, results, 120)[0]


def has_effect(other: SmallJob, results: Any) -> bool:
    """Whether one rank computes something else of this job."""
    try:
        return bool(results_alone(other) != results)
    except Refused:
        return False  # a job that cannot run without a flag shows no effect of it
