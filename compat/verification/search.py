"""Verify layouts, and find the smallest layout that still differs."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from compat.verification.compare import (
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
from hypergrid.messages import install_command

ULP = 2.0**-23  # of float32
SECONDS_FOR_SITES = 30  # in which the results of each collective are left out
NOT_COVERED = (
    "kernels of Transformer Engine and fused kernels (megatron-core's local layers ran instead)",
    "NCCL (gloo ran instead), CUDA, float16, bfloat16 and FP8",
)


@dataclass(frozen=True)
class Report:
    """The verdict on one layout, beside one rank."""

    layout: Layout
    findings: Sequence[Finding] = ()
    allowed: Sequence[Finding] = ()
    smallest: Layout | None = None  # the least of the layout that shows one of the findings
    needed: Mapping[str, str] = field(default_factory=dict)  # in it, and what happens without it
    tolerance: float = 0.0
    refused: str = ""  # why the model cannot have this layout
    not_covered: Sequence[str] = NOT_COVERED
    idle: Sequence[str] = ()  # options of several ranks for which no collective runs

    @property
    def agrees(self) -> bool:
        return not self.findings and not self.refused

    def __str__(self) -> str:
        ranks = f"{self.layout}: {self.layout.world_size} ranks"
        bound = f"{self.tolerance:.1g} relative"
        if self.refused:
            return f"{ranks} cannot be verified: {self.refused}"
        lines = [f"{ranks} compute what one rank computes, to {bound}."]
        if self.findings:
            lines = [f"{ranks} do not compute what one rank computes (above {bound}):"]
            lines += [f"  {text}" for text in describe(self.findings)]
        elif self.allowed:
            lines = [f"{ranks} differ from one rank only where it is allowed, above {bound}."]
        if self.smallest is not None:
            lines.append(f"  smallest layout that differs: {self.smallest}")
            for name, effect in self.needed.items():
                lines.append(f"    without {name}: {effect}")
        if self.allowed:
            lines.append(f"  allowed: {'; '.join(describe(self.allowed))}")
        lines.append(f"  not covered: {'; '.join(self.not_covered)}.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **vars(self),
            "layout": str(self.layout),
            "ranks": self.layout.world_size,
            "agrees": self.agrees,
            "findings": list(map(vars, self.findings)),
            "allowed": list(map(vars, self.allowed)),
            "smallest": self.smallest and str(self.smallest),
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
    layout_list = [layouts] if isinstance(layouts, Layout) else list(layouts)
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
    job = _Job(task, tuple(allow), timeout)
    return [job.report(layout, smallest) for layout in layouts]


def _not_covered() -> tuple[str, ...]:
    """Names what did not run, also because something else ran instead."""
    state = sys.modules["megatron.core.parallel_state"]
    if state.__name__ == "megatron.core.parallel_state":
        return NOT_COVERED
    return (*NOT_COVERED, f"megatron.core.parallel_state ({state.__name__} ran instead)")


def _check(task: Task, layout: Layout) -> None:
    """ValueError for what cannot be verified, or is no option of this release."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    if layout.world_size > MAX_RANKS:
        raise ValueError(
            f"{layout} has {layout.world_size} ranks, and verify runs at most {MAX_RANKS} on one "
            f"machine: make larger dims smaller."
        )
    dims = "dp"
    divisor = layout.dp
    if layout.vp:
        # An interleaved pipeline takes as many micro batches at a time as it has stages.
        dims = "dp x pp"
        divisor *= layout.pp
    if not task.batch or len(task.batch) % divisor:
        raise ValueError(
            f"{layout} needs a multiple of {divisor} micro batches ({dims}), got {len(task.batch)}."
        )
    configurations = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    option_names = {RANDOM_INIT}.union(*(kind.__dataclass_fields__ for kind in configurations))
    is_cut = layout.cp > 1 or layout.options.get("sequence_parallel", False)
    for name, value in layout.options.items():
        if name in FULLY_SHARDED and value:
            raise ValueError(f"{name} is not verified: its code needs CUDA.")
        if value == "sinkhorn" and is_cut:
            raise ValueError(
                f"{name}=sinkhorn is not verified under cp or sequence parallelism: each rank "
                f"balances the tokens of its part, so the layout decides about their experts."
            )
        if name not in option_names:
            raise ValueError(
                f"this megatron-core has no option {name!r} in TransformerConfig, "
                f"DistributedDataParallelConfig or OptimizerConfig."
            )


def _with_dropout(layout: Layout) -> list[Variant]:
    """A step with dropout, if ranks share what it draws for or recompute it; and one that keeps."""
    dropping = Variant(dropout=True, steps=1)
    if "recompute_granularity" in layout.options:
        return [dropping, replace(dropping, recomputes=False)]
    return [dropping] if layout.tp > 1 else []


@dataclass
class _Job:
    """Steps of one task; each reference runs once."""

    task: Task
    allow: tuple[str, ...]
    timeout: float
    _references: dict[Layout, Reference] = field(default_factory=dict)

    def report(self, layout: Layout, search: bool) -> Report:
        start = time.monotonic()
        try:
            ranks, differing = self._compared(layout)
        except Refused as refused:
            return Report(layout, refused=str(refused))
        seconds = time.monotonic() - start
        wrong = self._wrong(differing)
        allowed = [finding for finding in differing if finding not in wrong]
        tolerance = self.reference(layout).tolerance
        report = Report(layout, wrong, allowed, tolerance=tolerance, not_covered=_not_covered())
        if wrong:
            if not search:
                return report
            # The search takes longer than the verdict, which is known already.
            say(f"{report}\nSearching for the smallest layout that differs ...")
            keys = {finding.key for finding in wrong}
            smallest_layout, needed = self._smallest(layout, keys)
            return replace(report, smallest=smallest_layout, needed=needed)
        worthless = self.reference(layout).worthless()
        if worthless:
            return replace(report, refused=worthless)
        not_covered = [*report.not_covered]
        idle = self._idle_options(layout, ranks)
        if idle:
            not_covered.append(f"{', '.join(idle)}: no collective was seen to run for it")
        not_covered += self._uncovered(layout, ranks, seconds, SECONDS_FOR_SITES if search else 0)
        return replace(report, not_covered=not_covered, idle=idle)

    def _wrong(self, differing: Iterable[Finding]) -> list[Finding]:
        """The findings that are not allowed."""
        return [finding for finding in differing if not finding.matches(self.allow)]

    def reference(self, layout: Layout) -> Reference:
        """The results of one rank, and the effect that rounding has on them."""
        alone = layout.alone()
        if alone not in self._references:
            variants = [PLAIN, Variant(backwards=True, jitter=ULP), Variant(jitter=ULP)]

            # Compared in its process, which ends: three times all tensors would fill the memory.
            def measured(_: int) -> Reference:
                computed, *repeated = run_variants(self.task, alone, None, variants)
                return Reference(computed, repeated)

            (self._references[alone],) = on_ranks(1, measured, self.timeout)
        return self._references[alone]

    def _compared(self, layout: Layout) -> tuple[list[Computed], list[Finding]]:
        """The results of each rank, without tensors, and the findings.

        Raises
        ------
        Refused
            The layout cannot run, or one rank cannot repeat the step: any difference would be
            noise.
        """
        reference = self.reference(layout)
        noise = reference.noise()
        if noise:
            raise Refused(
                f"the model, or one of its options, makes the step random or dependent on the "
                f"order of micro batches: on one rank, in reverse order or with weights that "
                f"differ in the last bit, {noise} of its size. A fault cannot be told from that"
            )
        ranks, *dropping = self._run(layout, [PLAIN, *_with_dropout(layout)])
        differing = findings(reference, ranks)
        if dropping:
            differing += draws_that_are_wrong(dropping[0])
        if len(dropping) > 1:
            differing += recomputed_gradients_that_differ(reference, *dropping)
        for computed in ranks:
            # What follows runs the layout again, and needs the memory.
            computed.tensors.clear()
        return ranks, differing

    def _idle_options(self, layout: Layout, ranks: Sequence[Computed]) -> list[str]:
        """Options of several ranks without which these were not seen to call other collectives."""
        calls = [computed.calls for computed in ranks]
        idle = []
        for option in layout.options:
            # Recomputation is compared by itself, and the optimizer's copies talk to nobody.
            if option not in OF_SEVERAL or option in (*RECOMPUTATION, *MIXED_PRECISION):
                continue
            with suppress(Refused):  # then the evidence does not decide
                if self._calls(layout.without(option)) != calls:
                    continue
            idle.append(option)
        return idle

    def _calls(self, layout: Layout) -> list[object]:
        """The collectives of each rank in one step; None for each if all refuse the layout."""
        initial = self.reference(layout).initial

        def calls_of_rank(_: int) -> object:
            try:
                (computed,) = run_variants(self.task, layout, initial, [Variant(steps=1)])
            except (AssertionError, ValueError):
                return None  # Megatron's own check; the others must come to it too, or wait in vain
            return computed.calls

        return on_ranks(layout.world_size, calls_of_rank, self.timeout)

    def _uncovered(
        self, layout: Layout, ranks: Sequence[Computed], seconds_of_run: float, seconds: float
    ) -> Iterator[str]:
        """Collectives of which a lost result would not be seen, or was not tried, in words.

        Each call site is left out on one of its ranks; where nothing differs, on another one.
        """
        ranks_of = defaultdict(list)
        one_way: set[str] = set()
        for rank, computed in enumerate(ranks):
            one_way |= computed.one_way
            for site in {call.site for call in computed.calls}:
                ranks_of[site].append(rank)
        if seconds:
            say(f"{layout} agrees: are lost results of {len(ranks_of)} collectives seen?")
        end = time.monotonic() + seconds
        unseen = []
        untried = []
        for site, site_ranks in sorted(ranks_of.items()):
            for place, steps in ((-1, 1), (0, 2), (-1, 2)):
                if time.monotonic() >= end:
                    untried.append(site)
                    break
                trial = Variant(left_out=site, leaving_out=site_ranks[place], steps=steps)
                # Ranks that wait for each other without an end are ended.
                if self._is_seen(layout, trial, 2 * seconds_of_run):
                    break
            else:
                unseen.append(site)
        if one_way:
            yield f"the backward pass of {', '.join(sorted(one_way))}, which did not run"
        if unseen:
            yield f"lost results of {', '.join(unseen)}: they change nothing that is compared"
        if untried:
            yield f"lost results of {', '.join(untried)}: not tried"

    def _is_seen(self, layout: Layout, trial: Variant, timeout: float) -> bool:
        """Whether something differs where the results of a call site are lost."""
        try:
            (ranks,) = self._run(layout, [trial], timeout)
        except Refused:
            return True  # nobody would miss that
        return bool(self._wrong(findings(self.reference(layout), ranks)))

    def _run(
        self, layout: Layout, variants: Sequence[Variant], timeout: float | None = None
    ) -> list[list[Computed]]:
        """The results of each rank, for each variant, from the initial weights of one rank."""
        initial = self.reference(layout).initial
        by_rank = on_ranks(
            layout.world_size,
            lambda _: run_variants(self.task, layout, initial, variants),
            timeout or self.timeout,
        )
        return [list(ranks) for ranks in zip(*by_rank, strict=True)]

    def _smallest(
        self, layout: Layout, keys: set[tuple[str, str]]
    ) -> tuple[Layout, dict[str, str]]:
        """The smallest layout that shows one of these findings, and what is needed in it."""
        needed: dict[str, str] = {}
        for name, trial in layout.smaller():
            say(f"  {layout}: does it differ without {name}?")
            try:
                _, differing = self._compared(trial)
            except Refused as refused:
                needed[name] = f"refused: {refused}"
                continue
            if keys.isdisjoint(finding.key for finding in differing):
                needed[name] = "agrees"
            elif name != LOSS_PER_TOKEN:
                return self._smallest(trial, keys)
        return layout, needed
