"""Comparison of a layout's results with those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import combinations
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

import torch

from compat.verification.step import Computed, Piece, Place, whole_tensors
from hypergrid.messages import few

_OWN = "initial value"  # of a weight that the job itself made
_DRAWN = "dropout"  # of one line, called on tp ranks in the same order
_RECOMPUTED = "recomputed gradient"
OF_DROPOUT = (_DRAWN, _RECOMPUTED)
_EVEN = "gradient norm of equal gradients"  # which each parameter has
MARGIN = 20  # times what rounding was seen to do
_SMALL = 1e-6  # of the norm of all: what a tensor without a gradient is measured by
_RESOLVED = 1e-5  # of a tensor's weights: a change that float32 resolves
NOISE_FLOOR = 1e-3  # of a tensor's size: where more counts as rounding, nothing is verified
_SPREAD = 4  # times the double error of a standard deviation: what chance does not do
_TINY = 1e-30  # instead of a size of 0
_SAME_FACTOR = 1e-3  # how near two factors are that count as the same
# What is compared of each tensor, and where a step's results hold it.
KINDS = {"gradient": "gradients", "update": "updates", "buffer": "buffers"}


@dataclass(frozen=True)
class Finding:
    """A quantity that differs from what one rank computes."""

    quantity: str  # "loss", "tokens", "gradient", "gradient norm", "update", "buffer" ...
    name: str  # of the parameter in the whole model; "" for quantities of the whole model
    ranks: tuple[int, ...]  # where it differs
    error: float  # the norm of the difference, relative to the right value's
    factor: float | None = None  # what the right value was multiplied by, if that is all
    meaning: str = ""  # such as "differs between replicas"
    step: int = 1

    @property
    def key(self) -> tuple[str, str]:
        return self.quantity, self.name

    def __str__(self) -> str:
        subject = self.quantity
        if self.name:
            subject += f" of {self.name}"
        if self.step > 1:
            subject += f" in step {self.step}"
        return f"{subject} {self._difference()}, on ranks {few(self.ranks)}"

    def _difference(self) -> str:
        if self.quantity in (_OWN, _DRAWN):
            return self.meaning
        if self.factor == 0:
            return "is 0"
        if self.factor is None or abs(self.factor - 1) < _SAME_FACTOR:
            return f"differs by {self.error:.2g} of its size"
        return f"is {self.factor:.4g} times that of one rank"

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether one of the patterns of ``--allow`` is for this finding."""
        text = f"{self.quantity} {self.name}".strip()
        return any(fnmatchcase(text, pattern) for pattern in patterns)


class _Difference(NamedTuple):
    error: float
    factor: float | None

    def has(self, factor: float | None) -> bool:
        if self.factor is None or factor is None:
            return False
        return _are_near(self.factor, factor)


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
            pieces = getattr(self.computed, kind)
            tensors = whole_tensors(pieces)
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
                    key = (kind, piece.name)
                    error = self.difference(kind, piece).error
                    largest_error = errors.get(key, 0.0)
                    errors[key] = max(error, largest_error)
        self.tolerance = MARGIN * median(errors.values())
        for key, error in errors.items():
            tolerance = MARGIN * error
            self.tolerances[key] = max(tolerance, self.tolerance)
        if self.next_step is None:
            return
        next_steps = []
        for computed in repeated:
            if computed.next_step is not None:
                next_steps.append(computed.next_step)
        self.next_step.measure(next_steps)

    def noise(self) -> str:
        """A quantity whose tolerance is above the noise floor, in words; "" if none is."""
        for (kind, name), tolerance in self.tolerances.items():
            # A gradient that is 0 by mathematics has nothing but rounding: a bias of keys, which
            # adds the same to all scores of a query.
            if tolerance > NOISE_FLOOR and not self._is_zero(kind, name):
                quantity = kind.removesuffix("s")
                change = tolerance / MARGIN
                return f"the {quantity} of {name} changes by {change:.2g}"
        if self.next_step is None:
            return ""
        return self.next_step.noise()

    def has_gradient(self, name: str) -> bool:
        """Whether a parameter's gradient is more than rounding."""
        if name not in self.whole["gradients"]:
            return False
        return not self._is_zero("gradients", name)

    def _is_zero(self, kind: str, name: str) -> bool:
        tensor = self.whole[kind][name]
        size = float(tensor.norm())
        return size <= self._least_size(kind)

    def _least_size(self, kind: str) -> float:
        """The size below which a tensor of this kind is nothing but rounding."""
        return _SMALL * self.scale[kind]

    def difference(self, kind: str, piece: Piece, right: torch.Tensor | None = None) -> _Difference:
        """How much a piece differs from the same part of the right tensor, or from ``right``."""
        if right is None:
            right = self.whole[kind][piece.name][piece.slices]
        return _difference(piece.value.double(), right.double(), self._least_size(kind))

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
    distance = float((value - right).norm())
    error = distance / max(size, least, _TINY)
    if not isfinite(error):
        return _Difference(float("inf"), None)
    if size <= least:
        return _Difference(error, None)
    factor = float((value * right).sum()) / size**2
    remainder = float((value - factor * right).norm())
    # Another direction, and not another length alone.
    if remainder > _SAME_FACTOR * abs(factor) * size:
        return _Difference(error, None)
    return _Difference(error, factor)


def findings(reference: Reference, ranks: Sequence[Computed]) -> list[Finding]:
    """Every quantity of a layout that differs from the reference by more than rounding does.

    The second step is compared only where the first agrees: it begins with what the first left.
    """
    differing = [
        *_replicas_that_differ(ranks),
        *_parts_that_are_equal(ranks),
        *_spreads_that_differ(reference.computed, ranks),
    ]
    first_step = _of_step(reference, ranks)
    if first_step or reference.next_step is None:
        return differing + first_step
    next_results = []
    for computed in ranks:
        # A run in which a collective was left out may take one step.
        if computed.next_step is None:
            return differing
        next_results.append(computed.next_step)
    for finding in _of_step(reference.next_step, next_results):
        differing.append(replace(finding, step=2))
    return differing


def _of_step(reference: Reference, ranks: Sequence[Computed]) -> list[Finding]:
    differing = list(_whole_model(reference, ranks))
    for quantity in KINDS:
        differing += _parameters(quantity, reference, ranks)
    wrong_gradients = set()
    for finding in differing:
        if finding.quantity == "gradient":
            wrong_gradients.add(finding.name)
    kept = []
    for finding in differing:
        # A wrong gradient is one finding, not two.
        if finding.quantity == "update" and finding.name in wrong_gradients:
            continue
        kept.append(finding)
    return kept


def _replicas_that_differ(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights that replicas have initialised differently, before they got those of one rank."""
    holders: dict[Place, dict[str, set[int]]] = {}
    for rank, computed in enumerate(ranks):
        for place, value in computed.own_initial.items():
            holders.setdefault(place, {}).setdefault(value.digest, set()).add(rank)
    odd_ranks: dict[str, set[int]] = {}
    for (name, _), by_digest in holders.items():
        # The ranks that do not have what most have; of as many, the later ones.
        majority = max(by_digest.values(), key=len)
        odd = set().union(*by_digest.values()) - majority
        if odd:
            odd_ranks.setdefault(name, set()).update(odd)
    for name, rank_set in odd_ranks.items():
        yield _initial_value(name, rank_set, "differs between replicas")


def _parts_that_are_equal(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Parts of one tensor for which ranks have drawn the same numbers.

    Example: with one seed for all tp ranks, a weight has two equal halves. Experts count as parts
    of one tensor, ``weight[0]`` and ``weight[1]``.
    """
    places: dict[tuple[str, str], set[Place]] = {}
    holders: dict[tuple[str, str], set[int]] = {}
    for rank, computed in enumerate(ranks):
        for place, value in computed.own_initial.items():
            if not value.is_drawn:
                continue
            name, _ = place
            tensor_name, _, _ = name.partition("[")
            key = (tensor_name, value.digest)
            places.setdefault(key, set()).add(place)
            holders.setdefault(key, set()).add(rank)
    for key, equal_places in places.items():
        if len(equal_places) > 1:
            tensor_name, _ = key
            yield _initial_value(tensor_name, holders[key], "is the same in two parts")


def _spreads_that_differ(alone: Computed, ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights that the layout draws from a wider or narrower distribution than one rank does."""
    right_squares = _squares([alone])
    for name, (square, count) in _squares(ranks).items():
        right_square, right_count = right_squares.get(name, (0.0, 0))
        if min(square, right_square) == 0:
            continue
        # Twice the relative error of a standard deviation of so many numbers from a bell curve.
        error = (2 / count + 2 / right_count) ** 0.5
        factor = (square / count * right_count / right_square) ** 0.5
        if abs(factor - 1) > _SPREAD * error:
            meaning = f"has {factor:.2g} times the standard deviation of one rank's"
            yield _initial_value(name, set(range(len(ranks))), meaning)


def _squares(ranks: Sequence[Computed]) -> dict[str, tuple[float, int]]:
    """The sum of squares of each drawn tensor and the count of its numbers, each part once."""
    parts = {}
    for computed in ranks:
        for place, value in computed.own_initial.items():
            if value.is_drawn:
                parts[place] = value
    squares: dict[str, tuple[float, int]] = {}
    for (name, _), value in parts.items():
        square, count = squares.get(name, (0.0, 0))
        squares[name] = square + value.square, count + value.numel
    return squares


def _initial_value(name: str, ranks: set[int], meaning: str) -> Finding:
    return Finding(_OWN, name, tuple(sorted(ranks)), 1.0, meaning=meaning)


def draws_that_are_wrong(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Dropout for which tp ranks draw the same numbers for unlike inputs, or others for equal ones.

    Example: outside of ``fork()``, all tp ranks drop the same places of their parts of a sequence.
    """
    wrong_ranks: dict[tuple[str, str], set[int]] = {}
    for group in sorted({computed.tensor_parallel_ranks for computed in ranks}):
        if len({len(ranks[rank].draws) for rank in group}) > 1:
            yield Finding(_DRAWN, "", group, 1.0, meaning="is not as frequent on each of them")
        for draws in zip(*(ranks[rank].draws for rank in group), strict=False):
            for (rank, draw), (other_rank, other) in combinations(
                zip(group, draws, strict=True), 2
            ):
                is_replica = draw.input == other.input
                if is_replica == (draw.state == other.state):
                    continue
                meaning = "drops the same places of two parts"
                if is_replica:
                    meaning = "drops other places on replicas"
                wrong_ranks.setdefault((draw.place, meaning), set()).update((rank, other_rank))
    for (place, meaning), rank_set in wrong_ranks.items():
        yield Finding(_DRAWN, place, tuple(sorted(rank_set)), 1.0, meaning=meaning)


def recomputed_gradients_that_differ(
    reference: Reference, recomputing: Sequence[Computed], keeping: Sequence[Computed]
) -> Iterator[Finding]:
    """Gradients of a step with dropout that recomputation changes by more than rounding.

    It adds the parts of a gradient in another order, so the last bits may differ.
    """
    by_name: dict[str, dict[int, _Difference]] = {}
    for rank, (computed, right) in enumerate(zip(recomputing, keeping, strict=True)):
        right_values = {piece.place: piece.value for piece in right.gradients}
        for piece in computed.gradients:
            right_value = right_values[piece.place]
            # A gradient that nobody computes holds no number.
            if right_value.isnan().all():
                continue
            difference = reference.difference("gradients", piece, right_value)
            if difference.error > reference.limit("gradients", piece.name):
                by_name.setdefault(piece.name, {})[rank] = difference
    for name, by_rank in by_name.items():
        yield _finding(_RECOMPUTED, name, by_rank)


def same_results(first: Computed, second: Computed) -> bool:
    """Whether two runs have the same parameters, losses and gradient norms, to the last bit."""
    first_names = {piece.name for piece in first.gradients}
    second_names = {piece.name for piece in second.gradients}
    if first_names != second_names:
        return False
    if first.losses != second.losses or first.norm != second.norm:
        return False
    if first.next_step is None or second.next_step is None:
        return True
    return same_results(first.next_step, second.next_step)


def unmoved(computed: Computed) -> set[str]:
    """Parameters with a gradient that the step changed by a multiple of their weights at most.

    Weight decay alone changes each weight by the same factor.
    """
    updates = {piece.place: piece.value.double() for piece in computed.updates}
    all_weights = {piece.place: piece.value.double() for piece in computed.initial}
    names = set()
    for gradient in computed.gradients:
        weights = all_weights[gradient.place]
        update = updates[gradient.place]
        size = float(weights.norm())
        gradient_size = float(gradient.value.norm())
        # float32 would lose the change that a smaller gradient makes.
        if not gradient_size > _RESOLVED * size:
            continue
        decay = 0.0
        # A single weight is a multiple of any other, and weights of size 0 have no decay.
        if weights.numel() > 1 and size > 0:
            decay = float((update * weights).sum()) / size**2
        change = float((update - decay * weights).norm())
        if change <= _RESOLVED / 10 * size:
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
    right_norm = _norm(parts.values())
    norms = [computed.norm for computed in ranks]
    yield from _gradient_norm("gradient norm", right_norm, norms, reference.tolerance)
    if even_squares:
        right_norm = sum(even_squares.values()) ** 0.5
        norms = [computed.even_norm for computed in ranks]
        yield from _gradient_norm(_EVEN, right_norm, norms, reference.tolerance)
    yield from _sums_over_ranks("loss", "total", reference, ranks)
    yield from _sums_over_ranks("tokens", "tokens", reference, ranks)


def _gradient_norm(
    quantity: str, right: float, norms: Sequence[float], tolerance: float
) -> Iterator[Finding]:
    right_norm = torch.tensor(right, dtype=torch.float64)
    by_rank: dict[int, _Difference] = {}
    for rank, norm in enumerate(norms):
        difference = _difference(torch.tensor(norm, dtype=torch.float64), right_norm, 0.0)
        if difference.error > tolerance:
            by_rank[rank] = difference
    if by_rank:
        yield _finding(quantity, "", by_rank)


def _sums_over_ranks(
    quantity: str, field_name: str, reference: Reference, ranks: Sequence[Computed]
) -> Iterator[Finding]:
    """The loss, or the number of tokens, of each micro batch: the sum over cp ranks."""
    right_sums = {}
    for loss in reference.computed.losses:
        right_sums[loss.micro_batch] = getattr(loss, field_name)
    sums = dict.fromkeys(right_sums, 0.0)
    parts: dict[tuple[int, int], float] = {}
    last_stage_ranks = []
    wrong_ranks = []
    for rank, computed in enumerate(ranks):
        is_wrong = False
        for loss in computed.losses:
            value = getattr(loss, field_name)
            place = (loss.micro_batch, loss.cp_rank)
            if place not in parts:
                parts[place] = value
                sums[loss.micro_batch] += value
            # Tensor-parallel ranks have the same part.
            elif abs(parts[place] - value) > reference.tolerance * max(abs(value), _TINY):
                is_wrong = True
        if computed.losses:
            last_stage_ranks.append(rank)
        if is_wrong:
            wrong_ranks.append(rank)
    is_sum_wrong = False
    for number, right in right_sums.items():
        if abs(sums[number] - right) > reference.tolerance * abs(right):
            is_sum_wrong = True
    if not is_sum_wrong and not wrong_ranks:
        return
    total = sum(sums.values())
    right_total = sum(right_sums.values())
    error = abs(total - right_total) / max(abs(right_total), _TINY)
    factor = None
    if is_sum_wrong:
        factor = total / (right_total or _TINY)
    yield Finding(quantity, "", tuple(wrong_ranks or last_stage_ranks), error, factor)


def _parameters(
    quantity: str, reference: Reference, ranks: Sequence[Computed]
) -> Iterator[Finding]:
    kind = KINDS[quantity]
    right_names = reference.whole[kind].keys()
    # By name and rank; of the pieces that a rank has of one tensor, the worst.
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
            worst = by_rank.get(rank, difference)
            by_rank[rank] = max(worst, difference, key=_error)
    for name, by_rank in differences.items():
        yield _finding(quantity, name, by_rank)
    all_ranks = tuple(range(len(ranks)))
    for name in right_names - held_names:
        yield Finding(quantity, name, all_ranks, 1.0, 0.0, "no rank has it")


def _finding(quantity: str, name: str, by_rank: dict[int, _Difference]) -> Finding:
    """The finding on all ranks that differ: the largest error, and a factor if it is one."""
    worst = max(by_rank.values(), key=_error)
    factor = worst.factor
    for difference in by_rank.values():
        if not difference.has(worst.factor):
            factor = None
    return Finding(quantity, name, tuple(sorted(by_rank)), worst.error, factor)


def _error(difference: _Difference) -> float:
    return difference.error


def _are_near(factor: float, right: float) -> bool:
    # Both may be 0: nothing is divided by them.
    return abs(factor - right) <= _SAME_FACTOR * abs(right)


def describe(differing: Sequence[Finding]) -> list[str]:
    """Findings in words; those of equal kind, ranks and factor in one line, by module."""
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in differing:
        factor = "none"
        if finding.factor is not None:
            factor = f"{finding.factor:.3g}"
        key = (finding.quantity, finding.ranks, factor, finding.meaning)
        alike.setdefault(key, []).append(finding)
    lines = []
    for group in alike.values():
        worst = max(group, key=lambda finding: finding.error)
        names = group[0].name
        if len(group) == 2:
            names += f", {group[1].name}"
        elif len(group) > 2:
            names += f" and {len(group) - 1} more"
        lines.append(str(replace(worst, name=names)))
    return lines
