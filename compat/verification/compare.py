"""Comparison of a layout's results with those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import combinations
from math import isfinite, prod
from statistics import median
from typing import Any, NamedTuple

import torch

from compat.verification.layout import INSTANCES, Layout
from compat.verification.step import Computed, Piece, Place, whole_tensors
from hypergrid.messages import few

_OWN = "initial value"  # of a weight that the job itself made
_EVEN = "gradient norm of equal gradients"  # which each parameter has
MARGIN = 20  # times what rounding was seen to do
_SMALL = 1e-6  # of the norm of all: what a tensor without a gradient is measured by
_RESOLVED = 1e-5  # of a tensor's weights: a change that float32 resolves
NOISE_FLOOR = 1e-3  # of a tensor's size: where more counts as rounding, nothing is verified
_TINY = 1e-30  # instead of a size of 0
_SAME_FACTOR = 1e-3  # how near two factors are that count as the same
# What is compared of each tensor, and where a step's results hold it.
KINDS = {"gradient": "gradients", "update": "updates", "buffer": "buffers"}


@dataclass(frozen=True)
class Finding:
    """A quantity that differs from what one rank computes."""

    what: str  # "loss", "tokens", "gradient", "gradient norm", "update", "buffer" ...
    name: str  # of the parameter in the whole model; "" for quantities of the whole model
    ranks: tuple[int, ...]  # where it differs
    error: float  # the norm of the difference, relative to the right value's
    factor: float | None = None  # what the right value was multiplied by, if that is all
    meaning: str = ""  # such as "the size of tp"
    step: int = 1

    @property
    def key(self) -> tuple[str, str]:
        return self.what, self.name

    def __str__(self) -> str:
        subject = self.what
        if self.name:
            subject += f" of {self.name}"
        if self.step > 1:
            subject += f" in step {self.step}"
        return f"{subject} {self._difference()}, on ranks {few(self.ranks)}"

    def _difference(self) -> str:
        if self.what == _OWN:
            return self.meaning
        if self.factor == 0:
            return "is 0"
        if self.factor is None or abs(self.factor - 1) < _SAME_FACTOR:
            return f"differs by {self.error:.2g} of its size"
        difference = f"is {self.factor:.4g} times that of one rank"
        if self.meaning:
            difference += f" ({self.meaning})"
        return difference

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether one of the patterns of ``--allow`` is for this finding."""
        quantity = f"{self.what} {self.name}".strip()
        return any(fnmatchcase(quantity, pattern) for pattern in patterns)


class _Difference(NamedTuple):
    error: float
    factor: float | None

    def has(self, factor: float | None) -> bool:
        if self.factor is None or factor is None:
            return False
        return abs(self.factor - factor) <= _SAME_FACTOR * abs(factor)


@dataclass
class Reference:
    """The results of one rank, and how much rounding changes them."""

    computed: Computed
    tolerance: float = 0.0  # of what has none of its own
    tolerances: dict[tuple[str, str], float] = field(default_factory=dict)  # by kind and name

    def __post_init__(self) -> None:
        self.whole: dict[str, dict[str, torch.Tensor]] = {}
        self.scale: dict[str, float] = {}
        for kind in ("initial", *KINDS.values()):
            tensors = whole_tensors(getattr(self.computed, kind))
            self.whole[kind] = tensors
            self.scale[kind] = _norm(tensors.values())
        self.next_step: Reference | None = None
        if self.computed.next_step is not None:
            self.next_step = Reference(self.computed.next_step)

    def measure(self, repeated: Sequence[Computed]) -> None:
        """Take the tolerances from steps that differ from this one by rounding alone."""
        errors: dict[tuple[str, str], float] = {}
        for computed in repeated:
            for kind in KINDS.values():
                for piece in getattr(computed, kind):
                    error = self.difference(kind, piece).error
                    errors[kind, piece.name] = max(error, errors.get((kind, piece.name), 0.0))
        self.tolerance = MARGIN * median(errors.values())
        for key, error in errors.items():
            self.tolerances[key] = max(MARGIN * error, self.tolerance)
        if self.next_step is not None:
            next_steps = [computed.next_step for computed in repeated if computed.next_step]
            self.next_step.measure(next_steps)

    def noise(self) -> str:
        """A quantity whose tolerance is above the noise floor, in words; "" if none is."""
        for (kind, name), tolerance in self.tolerances.items():
            # A gradient that is 0 by mathematics has nothing but rounding: a bias of keys, which
            # adds the same to all scores of a query.
            if tolerance > NOISE_FLOOR and not self._is_zero(kind, name):
                return f"the {kind.removesuffix('s')} of {name} changes by {tolerance / MARGIN:.2g}"
        if self.next_step is None:
            return ""
        return self.next_step.noise()

    def has_gradient(self, name: str) -> bool:
        """Whether a parameter's gradient is more than rounding."""
        return name in self.whole["gradients"] and not self._is_zero("gradients", name)

    def _is_zero(self, kind: str, name: str) -> bool:
        size = float(self.whole[kind][name].norm())
        return size <= _SMALL * self.scale[kind]

    def difference(self, kind: str, piece: Piece) -> _Difference:
        """How much a piece differs from the same part of the right tensor."""
        right = self.whole[kind][piece.name][piece.slices]
        least = _SMALL * self.scale[kind]
        return _difference(piece.value.double(), right.double(), least)

    def limit(self, kind: str, name: str) -> float:
        """How large a difference may be."""
        return self.tolerances.get((kind, name), self.tolerance)


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    square = 0.0
    for tensor in tensors:
        square += float(tensor.norm()) ** 2
    return square**0.5


def _difference(value: torch.Tensor, right: torch.Tensor, least: float) -> _Difference:
    size = float(right.norm())
    error = float((value - right).norm()) / max(size, least, _TINY)
    if not isfinite(error):
        return _Difference(float("inf"), None)
    if size <= least:
        return _Difference(error, None)
    factor = float((value * right).sum()) / size**2
    # Another direction, and not another length alone.
    if float((value - factor * right).norm()) > _SAME_FACTOR * abs(factor) * size:
        return _Difference(error, None)
    return _Difference(error, factor)


def findings(reference: Reference, layout: Layout, ranks: Sequence[Computed]) -> list[Finding]:
    """Every quantity of ``layout`` that differs from the reference by more than rounding does.

    The second step is compared only where the first agrees: it begins with what the first left.
    """
    differing = [*_replicas_that_differ(ranks), *_parts_that_are_equal(ranks)]
    of_first_step = _of_step(reference, layout, ranks)
    differing += of_first_step
    next_results = [computed.next_step for computed in ranks if computed.next_step]
    if next_results and reference.next_step is not None and not of_first_step:
        for finding in _of_step(reference.next_step, layout, next_results):
            differing.append(replace(finding, step=2))
    return differing


def _of_step(reference: Reference, layout: Layout, ranks: Sequence[Computed]) -> list[Finding]:
    differing = list(_whole_model(reference, ranks))
    for what, kind in KINDS.items():
        differing += _parameters(what, kind, reference, ranks)
    wrong_gradients = {finding.name for finding in differing if finding.what == "gradient"}
    kept = []
    for finding in differing:
        # A wrong gradient is one finding, not two.
        if finding.what != "update" or finding.name not in wrong_gradients:
            kept.append(_with_meaning(finding, layout))
    return kept


def _replicas_that_differ(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights that replicas have initialised differently, before they got those of one rank."""
    ranks_of: dict[Place, dict[str, list[int]]] = {}
    for rank, computed in enumerate(ranks):
        for place, value in computed.own_initial.items():
            ranks_with = ranks_of.setdefault(place, {})
            ranks_with.setdefault(value.digest, []).append(rank)
    odd_ranks: dict[str, set[int]] = {}
    for (name, _), ranks_with in ranks_of.items():
        # The ranks that do not have what most have; of as many, the later ones.
        most = max(ranks_with.values(), key=len)
        for member_ranks in ranks_with.values():
            if member_ranks is not most:
                odd_ranks.setdefault(name, set()).update(member_ranks)
    for name, rank_set in odd_ranks.items():
        member_ranks = sorted(rank_set)
        yield Finding(_OWN, name, tuple(member_ranks), 1.0, meaning="differs between replicas")


def _parts_that_are_equal(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Parts of one tensor for which ranks have drawn the same numbers.

    Example: with one seed for all tp ranks, a weight has two equal halves. Experts count as parts
    of one tensor, ``weight[0]`` and ``weight[1]``.
    """
    places_with: dict[tuple[str, str], set[Place]] = {}
    ranks_with: dict[tuple[str, str], set[int]] = {}
    for rank, computed in enumerate(ranks):
        for place, value in computed.own_initial.items():
            if value.is_drawn:
                tensor_name = place[0].partition("[")[0]
                key = (tensor_name, value.digest)
                places_with.setdefault(key, set()).add(place)
                ranks_with.setdefault(key, set()).add(rank)
    for (tensor_name, digest), places in places_with.items():
        if len(places) > 1:
            member_ranks = sorted(ranks_with[tensor_name, digest])
            yield Finding(
                _OWN, tensor_name, tuple(member_ranks), 1.0, meaning="is the same in two parts"
            )


def same_results(first: Computed, second: Computed) -> bool:
    """Whether two runs have the same parameters, losses and gradient norms, to the last bit."""
    first_names = {piece.name for piece in first.gradients}
    second_names = {piece.name for piece in second.gradients}
    if (first_names, first.losses, first.norm) != (second_names, second.losses, second.norm):
        return False
    if first.next_step is None or second.next_step is None:
        return True
    return same_results(first.next_step, second.next_step)


def unmoved(computed: Computed) -> set[str]:
    """Parameters with a gradient that the step changed by a multiple of their weights at most.

    Weight decay alone changes each weight by the same factor.
    """
    updates = {}
    for piece in computed.updates:
        updates[piece.place] = piece.value.double()
    all_weights = {}
    for piece in computed.initial:
        all_weights[piece.place] = piece.value.double()
    names = set()
    for gradient in computed.gradients:
        weights = all_weights[gradient.place]
        update = updates[gradient.place]
        size = float(weights.norm())
        # float32 would lose the change that a smaller gradient makes.
        if not float(gradient.value.norm()) > _RESOLVED * size:
            continue
        decay = 0.0
        if weights.numel() > 1:
            decay = float((update * weights).sum()) / size**2
        if float((update - decay * weights).norm()) < _RESOLVED / 10 * size:
            names.add(gradient.name)
    return names


def _whole_model(reference: Reference, ranks: Sequence[Computed]) -> Iterator[Finding]:
    # Of the gradients as they are, each part counted once: a wrong gradient is no wrong norm.
    parts = {}
    even_squares: dict[Place, float] = {}
    for computed in ranks:
        for piece in computed.gradients:
            parts[piece.place] = piece.value
        even_squares |= computed.even_squares
    norms = [computed.norm for computed in ranks]
    yield from _gradient_norm("gradient norm", _norm(parts.values()), norms, reference)
    if even_squares:
        even_norms = [computed.even_norm for computed in ranks]
        yield from _gradient_norm(_EVEN, sum(even_squares.values()) ** 0.5, even_norms, reference)
    yield from _sums_over_ranks("loss", "total", reference, ranks)
    yield from _sums_over_ranks("tokens", "tokens", reference, ranks)


def _gradient_norm(
    what: str, right: float, norms: Sequence[float], reference: Reference
) -> Iterator[Finding]:
    wrong = {}
    for rank, norm in enumerate(norms):
        # A norm that is no number is wrong too.
        if not abs(norm - right) <= reference.tolerance * abs(right):
            wrong[rank] = norm
    if not wrong:
        return
    worst = max(wrong.values(), key=lambda norm: abs(norm - right))
    factor = None
    is_same_everywhere = len({f"{norm:.5g}" for norm in wrong.values()}) == 1
    if is_same_everywhere and right:
        factor = worst / right
    error = abs(worst - right) / abs(right or 1)
    yield Finding(what, "", tuple(wrong), error, factor)


def _sums_over_ranks(
    what: str, field_name: str, reference: Reference, ranks: Sequence[Computed]
) -> Iterator[Finding]:
    """The loss, or the number of tokens, of each micro batch: the sum over cp ranks."""
    right_sums = {}
    for loss in reference.computed.losses:
        right_sums[loss.micro_batch] = getattr(loss, field_name)
    sums = dict.fromkeys(right_sums, 0.0)
    parts: dict[tuple[int, int], float] = {}
    wrong_ranks = set()
    for rank, computed in enumerate(ranks):
        for loss in computed.losses:
            value = getattr(loss, field_name)
            place = (loss.micro_batch, loss.cp_rank)
            if place not in parts:
                parts[place] = value
                sums[loss.micro_batch] += value
            # Tensor-parallel ranks have the same part.
            elif abs(parts[place] - value) > reference.tolerance * max(abs(value), _TINY):
                wrong_ranks.add(rank)
    total = sum(sums.values())
    right_total = sum(right_sums.values())
    factor = None
    for number, right in right_sums.items():
        if abs(sums[number] - right) > reference.tolerance * abs(right):
            factor = total / (right_total or _TINY)
    if factor is None and not wrong_ranks:
        return
    if not wrong_ranks:
        wrong_ranks = {rank for rank, computed in enumerate(ranks) if computed.losses}
    error = abs(total - right_total) / max(abs(right_total), _TINY)
    yield Finding(what, "", tuple(sorted(wrong_ranks)), error, factor)


def _parameters(
    what: str, kind: str, reference: Reference, ranks: Sequence[Computed]
) -> Iterator[Finding]:
    right_names = reference.whole[kind].keys()
    differences: dict[str, dict[int, _Difference]] = {}
    held_names: set[str] = set()
    for rank, computed in enumerate(ranks):
        for piece in getattr(computed, kind):
            held_names.add(piece.name)
            difference = _Difference(float("inf"), None)
            if piece.name in right_names:
                difference = reference.difference(kind, piece)
            # An error that is no number is above any limit.
            if difference.error <= reference.limit(kind, piece.name):
                continue
            by_rank = differences.setdefault(piece.name, {})
            if rank not in by_rank or difference.error > by_rank[rank].error:
                by_rank[rank] = difference
    for name, by_rank in differences.items():
        worst = max(by_rank.values(), key=lambda difference: difference.error)
        is_common = all(difference.has(worst.factor) for difference in by_rank.values())
        factor = worst.factor if is_common else None
        yield Finding(what, name, tuple(sorted(by_rank)), worst.error, factor)
    all_ranks = tuple(range(len(ranks)))
    for name in right_names - held_names:
        yield Finding(what, name, all_ranks, 1.0, 0.0, "no rank has it")


def _with_meaning(finding: Finding, layout: Layout) -> Finding:
    """The finding with the dims whose size is its factor: 2 under tp=2 is "the size of tp"."""
    if finding.factor is None or finding.factor <= 0 or finding.meaning:
        return finding
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep")}
    sizes["etp"] = layout.etp or 1
    sizes[INSTANCES] = layout.options.get(INSTANCES, 1)
    larger = [name for name, size in sizes.items() if size > 1]
    for names, inverse_names in (("{}", "1/{}"), ("{} x {}", "1/({} x {})")):
        meanings = []
        for dims in combinations(larger, names.count("{}")):
            size = prod(sizes[name] for name in dims)
            for meaning, value in ((names, size), (inverse_names, 1 / size)):
                if abs(finding.factor / value - 1) < _SAME_FACTOR:
                    meanings.append(meaning.format(*dims))
        if meanings:
            return replace(finding, meaning=f"the size of {' or '.join(meanings)}")
    return finding


def describe(differing: Sequence[Finding]) -> list[str]:
    """Findings in words; those of equal kind, ranks and factor in one line, by module."""
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in differing:
        factor = "none"
        if finding.factor is not None:
            factor = f"{finding.factor:.3g}"
        key = (finding.what, finding.ranks, factor, finding.meaning)
        alike.setdefault(key, []).append(finding)
    lines = []
    for group in alike.values():
        worst = max(group, key=lambda finding: finding.error)
        line = str(worst)
        more = ""
        if len(group) == 2:
            more = f", {group[1].name}"
        elif len(group) > 2:
            more = f" and {len(group) - 1} more"
        if more:
            line = line.replace(worst.name, group[0].name + more, 1)
        lines.append(line)
    return lines
