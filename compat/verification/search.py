"""Verify layouts, and find the smallest layout that still differs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from compat.verification.compare import (
    MARGIN,
    NOISE_FLOOR,
    OF_DROPOUT,
    Finding,
    Reference,
    describe,
    draws_that_are_wrong,
    findings,
    recomputed_gradients_that_differ,
)
from compat.verification.layout import (
    FULLY_SHARDED,
    LOSS_PER_TOKEN,
    MIXED_PRECISION,
    OF_SEVERAL,
    RECOMPUTATION,
    Layout,
)
from compat.verification.ranks import MAX_RANKS, Refused, in_child, on_ranks, say
from compat.verification.step import (
    PLAIN,
    RANDOM_INIT,
    Build,
    Computed,
    Loss,
    MicroBatch,
    Task,
    Variant,
    run_variants,
)
from hypergrid.messages import few, install_command

ULP = 2.0**-23  # of float32
SECONDS_FOR_SITES = 30  # in which the results of each collective are left out
SECONDS_FOR_OPTIONS = 60  # in which each option is left out
_IDLE = "no collective runs for it"
_AT_ONCE = 6  # of them in one job; it ends where ranks wait for each other without an end
NOT_COVERED = (
    "kernels of Transformer Engine and fused kernels (megatron-core's local layers ran instead)",
    "NCCL (gloo ran instead), CUDA, float16, bfloat16 and FP8",
)


@dataclass(frozen=True)
class Smallest:
    """The least of a layout that still differs."""

    layout: Layout
    findings: list[Finding]
    needed: dict[str, str]  # what may not be taken away, and what happens without it

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layout": str(self.layout),
            "findings": list(map(vars, self.findings)),
            "needed": self.needed,
        }


@dataclass(frozen=True)
class Report:
    """The verdict on one layout, beside one rank."""

    layout: Layout
    findings: Sequence[Finding] = ()
    allowed: Sequence[Finding] = ()
    smallest: Sequence[Smallest] = ()
    tolerance: float = 0.0
    refused: str = ""  # why the model cannot have this layout
    trace: str = ""  # of the rank that refused
    not_covered: tuple[str, ...] = NOT_COVERED
    idle: tuple[str, ...] = ()  # options of several ranks for which no collective runs

    @property
    def agrees(self) -> bool:
        return not self.findings and not self.refused

    def __str__(self) -> str:
        ranks = f"{self.layout}: {self.layout.world_size} ranks"
        bound = f"{self.tolerance:.1g} relative"
        if self.refused:
            return f"{ranks} cannot be verified: {self.refused}"
        lines = []
        if self.findings:
            lines.append(f"{ranks} do not compute what one rank computes")
            lines[0] += f" (differences above {bound}):"
            lines += _indented(describe(self.findings), 2)
        elif self.allowed:
            lines.append(f"{ranks} differ from one rank only where it is allowed, above {bound}.")
        else:
            lines.append(f"{ranks} compute what one rank computes, to {bound}.")
        for least in self.smallest:
            lines.append(f"  smallest layout that differs: {least.layout}")
            lines += _indented(describe(least.findings), 4)
            for name, effect in least.needed.items():
                lines.append(f"    without {name}: {effect}")
        if self.allowed:
            lines.append(f"  allowed: {'; '.join(describe(self.allowed))}")
        lines.append(f"  not covered: {'; '.join(self.not_covered)}.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layout": str(self.layout),
            "ranks": self.layout.world_size,
            "agrees": self.agrees,
            "refused": self.refused,
            "tolerance": self.tolerance,
            "findings": list(map(vars, self.findings)),
            "allowed": list(map(vars, self.allowed)),
            "smallest": list(map(Smallest.as_dict, self.smallest)),
            "not_covered": list(self.not_covered),
        }


def verify(
    build: Build,
    batch: Sequence[MicroBatch],
    layouts: Layout | Iterable[Layout],
    *,
    loss: Loss | None = None,
    seq_length: int | None = None,
    allow: Sequence[str] = (),
    smallest: bool = True,
    timeout: float = 120,
) -> list[Report]:
    """Compare one optimizer step in each layout with the same step on one rank, on this machine.

    Forks up to 16 gloo processes on the CPU, in float32; this process keeps its torch as it is.
    Compared are the loss and the tokens that count, each gradient after ``finalize_model_grads``,
    the gradient norm, and what the step changed in each parameter. Weights go from one rank to the
    layout by megatron-core's ``sharded_state_dict``. What rounding does is measured: one rank
    repeats the step with micro batches in reverse order and with weights changed in their last
    bit, and a quantity differs if it is off by more than twenty times that.

    Parameters
    ----------
    build : function
        ``build(layout, pre_process=, post_process=, vp_stage=)`` gives a model of megatron-core
        (one with ``config`` and ``sharded_state_dict``) for this rank's stage, without dropout.
        It is called on every rank after ``initialize_model_parallel``.
    batch : sequence of mappings
        The micro batches of one global step: what the model's ``forward`` takes, by name, and
        what the loss takes, such as ``loss_mask``. Tensors of two or more dims are (samples,
        length, ...); with context parallelism they are cut along the length. Their number is a
        multiple of dp, and with vp of dp x pp.
    layouts : Layout or iterable of them
        What to verify.
    loss : function, optional
        ``loss(output, micro_batch)`` gives the sum of losses and how many there are. By default
        the output has one loss for each token, and ``loss_mask`` says which count.
    seq_length : int, optional
        Length of what stages send; that of the first tensor with two dims unless given.
    allow : sequence of str
        Patterns of known findings, such as ``"gradient *.linear_fc2.bias"``.
    smallest : bool
        Take dims and options away until the rest agrees; where nothing differs, leave out the
        results of each collective in turn, for 30 seconds.
    timeout : float
        Seconds for one step of one layout.

    Returns
    -------
    list of Report
        One for each layout. ``refused`` says why a model cannot have the layout.

    Raises
    ------
    ValueError
        An option that this megatron-core does not have, more than 16 ranks, a number of micro
        batches that does not fit.
    ModuleNotFoundError
        There is no megatron-core.
    """
    spec = None
    with suppress(ModuleNotFoundError):
        spec = find_spec("megatron.core")
    if spec is None:
        raise ModuleNotFoundError(f"verify needs megatron-core: {install_command('megatron')}.")
    if isinstance(layouts, Layout):
        layouts = [layouts]
    layout_list = list(layouts)
    task = Task(build, list(batch), loss, seq_length)
    return in_child(lambda: reports(task, layout_list, allow, smallest, timeout))


def reports(
    task: Task,
    layouts: Sequence[Layout],
    allow: Sequence[str] = (),
    smallest: bool = True,
    timeout: float = 120,
) -> list[Report]:
    """The reports on several layouts, in a process in which megatron-core runs on the CPU."""
    for layout in layouts:
        _check(task, layout)
        _check_options(layout)
    job = _Job(task, tuple(allow), timeout)
    return [job.report(layout, smallest) for layout in layouts]


def _not_covered() -> tuple[str, ...]:
    """Names what did not run, also because something else ran instead."""
    state = sys.modules["megatron.core.parallel_state"]
    if state.__name__ == "megatron.core.parallel_state":
        return NOT_COVERED
    return (*NOT_COVERED, f"megatron.core.parallel_state ({state.__name__} ran instead)")


def _check(task: Task, layout: Layout) -> None:
    if layout.world_size > MAX_RANKS:
        raise ValueError(
            f"{layout} has {layout.world_size} ranks, and verify runs at most {MAX_RANKS} on one "
            f"machine: make larger dims smaller."
        )
    # An interleaved pipeline takes as many micro batches at a time as it has stages.
    divisor = layout.dp
    dims = "dp"
    if layout.vp:
        divisor *= layout.pp
        dims = "dp x pp"
    if not task.batch or len(task.batch) % divisor:
        raise ValueError(
            f"{layout} needs a multiple of {divisor} micro batches ({dims}), got {len(task.batch)}."
        )


def _check_options(layout: Layout) -> None:
    """ValueError if an option is in none of this release's configurations."""
    import megatron.core
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    option_names = {RANDOM_INIT}
    for kind in (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig):
        option_names.update(kind.__dataclass_fields__)
    for name, value in layout.options.items():
        if name in FULLY_SHARDED and value:
            raise ValueError(f"{name} is not verified: its code needs CUDA.")
        is_cut = layout.cp > 1 or layout.options.get("sequence_parallel", False)
        if value == "sinkhorn" and is_cut:
            raise ValueError(
                f"{name}=sinkhorn is not verified under cp or sequence parallelism: each rank "
                f"balances the tokens of its part, so the layout decides about their experts."
            )
        if name not in option_names:
            raise ValueError(
                f"megatron-core {megatron.core.__version__} has no option {name!r} in "
                f"TransformerConfig, DistributedDataParallelConfig or OptimizerConfig."
            )


def _with_dropout(layout: Layout) -> list[Variant]:
    """A step with dropout, if ranks share what it draws for or recompute it; and one that keeps."""
    recomputes = "recompute_granularity" in layout.options
    dropping = Variant(dropout=True, steps=1)
    if recomputes:
        return [dropping, replace(dropping, recomputes=False)]
    return [dropping] if layout.tp > 1 else []


class _Job:
    """Steps of one task; each reference and each layout runs once."""

    def __init__(self, task: Task, allow: tuple[str, ...], timeout: float) -> None:
        self.task = task
        self.allow = allow
        self.timeout = timeout
        self._references: dict[Layout, Reference] = {}
        self._differing: dict[tuple[Layout, bool], list[Finding] | Refused] = {}
        self._computed: dict[Layout, list[Computed]] = {}  # of each rank
        self._seconds: dict[Layout, float] = {}  # of the first run of each layout

    def report(self, layout: Layout, search: bool) -> Report:
        differing = self.differing(layout)
        not_covered = _not_covered()
        if isinstance(differing, Refused):
            return Report(layout, refused=str(differing), trace=differing.trace)
        wrong, allowed = self._sorted(differing)
        refused = ""
        idle: tuple[str, ...] = ()
        if not wrong:
            refused = self._worthless(layout)
        if not wrong and not refused:
            for why, options in self._idle_options(layout).items():
                not_covered += (f"{', '.join(options)}: {why}",)
                idle += tuple(options)
            seconds = SECONDS_FOR_SITES if search else 0
            not_covered += tuple(self._uncovered(layout, seconds))
        tolerance = self.reference(layout.alone()).tolerance
        report = Report(layout, wrong, allowed, (), tolerance, refused, "", not_covered, idle)
        if search and wrong:
            # The search takes longer than the verdict, which is known already.
            say(f"{report}\nSearching for the smallest layout that differs ...")
            report = replace(report, smallest=list(self._all_smallest(layout, wrong)))
        return report

    def _sorted(self, differing: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """The findings that are wrong, and those that are allowed."""
        wrong: list[Finding] = []
        allowed: list[Finding] = []
        for finding in differing:
            (allowed if finding.matches(self.allow) else wrong).append(finding)
        return wrong, allowed

    def reference(self, alone: Layout) -> Reference:
        """The results of one rank, and the effect that rounding has on them."""
        if alone not in self._references:
            variants = [PLAIN, Variant(backwards=True, jitter=ULP), Variant(jitter=ULP)]
            (results,) = self._run(alone, None, variants)
            self._references[alone] = Reference(results[0], results[1:])
        return self._references[alone]

    def _refuse_noise(self, alone: Layout) -> None:
        """Refused if the step of one rank cannot be repeated: any difference would be noise."""
        noise = self.reference(alone).noise()
        if not noise:
            return
        names = self.reference(alone).initial.keys()
        causes = []
        for option in alone.options:
            # An option that others need cannot be left out: then it is not named.
            with suppress(Refused):
                without = self.reference(alone.without(option))
                # Without experts there is no router either: the model must stay the same.
                if without.initial.keys() == names and not without.noise():
                    causes.append(option)
        cause = " or ".join(causes) or "the model, or several of its options,"
        raise Refused(
            f"{cause} makes the step random or dependent on the order of micro batches: on one "
            f"rank, in reverse order or with weights that differ in the last bit, {noise} of its "
            f"size, and above {NOISE_FLOOR / MARGIN:.0e} a fault cannot be told from that"
        )

    def differing(self, layout: Layout, with_dropout: bool = True) -> list[Finding] | Refused:
        """The findings in this layout; Refused, returned and not raised, if it cannot run."""
        key = (layout, with_dropout)
        if key not in self._differing:
            variants = [PLAIN]
            if with_dropout:
                variants += _with_dropout(layout)
            try:
                self._refuse_noise(layout.alone())
                reference = self.reference(layout.alone())
                ranks, *dropping = self._run_layout(layout, variants)
                self._computed[layout] = ranks
                differing = findings(reference, ranks)
                if dropping:
                    differing += draws_that_are_wrong(dropping[0])
                if len(dropping) > 1:
                    differing += recomputed_gradients_that_differ(reference, *dropping)
                self._differing[key] = differing
            except Refused as refused:
                self._differing[key] = refused
        return self._differing[key]

    def _worthless(self, layout: Layout) -> str:
        """Why agreement in this layout would say nothing; "" if it does say something."""
        reference = self.reference(layout.alone())
        names = reference.unmoved()
        if names:
            return f"the step did not change {few(names)}, which has a gradient"
        if not any(map(reference.has_gradient, reference.initial)):
            return "no parameter has a gradient"
        return ""

    def _idle_options(self, layout: Layout) -> dict[str, list[str]]:
        """Options of several ranks without which these call the same collectives, in words."""
        trials = []
        for option in layout.options:
            # Recomputation is compared by itself, and the optimizer's copies talk to nobody.
            if option in OF_SEVERAL and option not in (*RECOMPUTATION, *MIXED_PRECISION):
                trials.append(Variant(left_out=option, steps=1))
        calls = [computed.calls for computed in self._computed[layout]]
        idle: dict[str, list[str]] = {}
        try:
            by_variant = self._run_layout(layout, trials, SECONDS_FOR_OPTIONS) if trials else []
        except Refused:
            return {"not tried without it": [trial.left_out for trial in trials]}
        for trial, ranks in zip(trials, by_variant, strict=True):
            if calls == [computed.calls for computed in ranks]:
                idle.setdefault(_IDLE, []).append(trial.left_out)
        return idle

    def _uncovered(self, layout: Layout, seconds: float) -> Iterator[str]:
        """Collectives of which a lost result would not be seen, or was not tried, in words.

        Each call site is left out on one of its ranks; where nothing differs, on another one.
        """
        ranks_of: dict[str, list[int]] = {}
        one_way: set[str] = set()
        for rank, computed in enumerate(self._computed[layout]):
            one_way |= computed.one_way
            for site in {call.site for call in computed.calls}:
                ranks_of.setdefault(site, []).append(rank)
        seen: dict[str, bool] = {}
        if seconds:
            say(f"{layout} agrees: are lost results of {len(ranks_of)} collectives seen?")
        end = time.monotonic() + seconds
        for place, steps in ((-1, 1), (0, 2), (-1, 2)):
            trials = []
            for site in sorted(ranks_of):
                if not seen.get(site):
                    trials.append(
                        Variant(left_out=site, leaving_out=ranks_of[site][place], steps=steps)
                    )
            for first in range(0, len(trials), _AT_ONCE):
                seen |= self._seen(layout, trials[first : first + _AT_ONCE], end)
        unseen = [site for site in seen if not seen[site]]
        untried = sorted(ranks_of.keys() - seen.keys())
        if one_way:
            yield f"the backward pass of {', '.join(sorted(one_way))}, which did not run"
        if unseen:
            yield f"lost results of {', '.join(unseen)}: they change nothing that is compared"
        if untried:
            yield f"lost results of {', '.join(untried)}: not tried"

    def _seen(self, layout: Layout, trials: Sequence[Variant], end: float) -> dict[str, bool]:
        """Whether something differs, for each site that was tried before ``end``."""
        seen: dict[str, bool] = {}
        left = end - time.monotonic()
        if not trials or left <= 0:
            return seen
        seconds = self._seconds[layout] * (1 + len(trials))
        try:
            by_variant = self._run_layout(layout, trials, min(left, seconds))
        except Refused:
            if left < seconds:
                return seen
            # A rank ended, or ranks wait for each other without an end: nobody would miss that.
            if len(trials) == 1:
                return {trials[0].left_out: True}
            for trial in trials:
                seen |= self._seen(layout, [trial], end)
            return seen
        for trial, ranks in zip(trials, by_variant, strict=False):
            wrong, _ = self._sorted(findings(self.reference(layout.alone()), ranks))
            seen[trial.left_out] = bool(wrong)
        rest = trials[len(by_variant) :]
        if rest:
            seen[rest[0].left_out] = True  # a rank raised
            seen |= self._seen(layout, rest[1:], end)
        return seen

    def _run_layout(
        self, layout: Layout, variants: Sequence[Variant], timeout: float | None = None
    ) -> list[list[Computed]]:
        """The results of each rank, for each variant, from the initial weights of one rank."""
        initial = self.reference(layout.alone()).initial
        start = time.monotonic()
        by_rank = self._run(layout, initial, variants, timeout)
        self._seconds.setdefault(layout, time.monotonic() - start)
        # Where a rank raised, others have taken the same steps, or one more.
        return [list(ranks) for ranks in zip(*by_rank, strict=False)]

    def _run(
        self,
        layout: Layout,
        initial: Any,
        variants: Sequence[Variant],
        timeout: float | None = None,
    ) -> list[list[Computed]]:
        """The results for each variant, of each rank."""
        return on_ranks(
            layout.world_size,
            lambda _: run_variants(self.task, layout, initial, variants),
            timeout or self.timeout,
        )

    def _all_smallest(self, layout: Layout, wrong: list[Finding]) -> Iterable[Smallest]:
        """A layout for each cause: what the smallest one does not show is searched for again."""
        unexplained = {finding.key for finding in wrong}
        while unexplained:
            least = self._smallest(layout, unexplained)
            yield least
            unexplained = unexplained - {finding.key for finding in least.findings}

    def _smallest(self, layout: Layout, keys: set[tuple[str, str]]) -> Smallest:
        needed: dict[str, str] = {}
        with_dropout = any(quantity in OF_DROPOUT for quantity, _ in keys)
        for name, trial in layout.smaller():
            say(f"  {layout}: does it differ without {name}?")
            differing = self.differing(trial, with_dropout)
            if isinstance(differing, Refused):
                needed[name] = f"refused: {differing}"
            elif keys.isdisjoint(finding.key for finding in differing):
                needed[name] = "agrees"
            elif name != LOSS_PER_TOKEN:
                return self._smallest(trial, keys)
        differing = self.differing(layout, with_dropout)
        assert not isinstance(differing, Refused)
        wrong, _ = self._sorted(differing)
        return Smallest(layout, wrong, needed)


def _indented(lines: Iterable[str], width: int) -> Iterator[str]:
    for line in lines:
        yield " " * width + line
