"""Comparison of a layout's results with those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

import torch

from compat.verification.step import (
    EVEN_NORM,
    NORM,
    Computed,
    Kind,
    Piece,
    digest,
    whole_tensors,
)
from hypergrid.messages import few

_OWN = "initial value"  # of a weight that the job itself made
_DRAWN = "dropout"  # of one line, called on tp ranks in the same order
_RECOMPUTED = "recomputed gradient"
OF_DROPOUT = (_DRAWN, _RECOMPUTED)
MARGIN = 20  # times what rounding was seen to do
_SMALL = 1e-6  # of the norm of all: what a tensor without a gradient is measured by
NOISE_FLOOR = 1e-3  # of a tensor's size: where more counts as rounding, nothing is verified
_SPREAD = 4  # times the double error of a standard deviation: what chance does not do
_TINY = 1e-30  # instead of a size of 0
_SAME_FACTOR = 1e-3  # how near two factors are that count as the same
_GRADIENT = (1, "gradient")


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


class Reference:
    """The results of one rank, and how much rounding changes them.

    ``repeated`` are results that differ from these by rounding alone.
    """

    def __init__(self, computed: Computed, repeated: Sequence[Computed]) -> None:
        self.computed = computed
        self.initial = whole_tensors(computed.initial)
        self.whole: dict[Kind, dict[str, torch.Tensor]] = {}
        self.scale: dict[Kind, float] = {}
        for kind, pieces in computed.tensors.items():
            tensors = whole_tensors(pieces)
            self.whole[kind] = tensors
            self.scale[kind] = _norm(tensors.values())
        errors: dict[tuple[Kind, str], float] = {}
        for other in repeated:
            for kind, pieces in other.tensors.items():
                for piece in pieces:
                    key = (kind, piece.name)
                    error = self.difference(kind, piece).error
                    largest_error = errors.get(key, 0.0)
                    errors[key] = max(error, largest_error)
        # Rounding does not touch the number of tokens, nor what a step leaves as it is.
        self.tolerance = MARGIN * median(error for error in errors.values() if error > 0)
        self.tolerances: dict[tuple[Kind, str], float] = {}
        for key, error in errors.items():
            tolerance = MARGIN * error
            self.tolerances[key] = max(tolerance, self.tolerance)

    def noise(self) -> str:
        """A quantity whose tolerance is above the noise floor, in words; "" if none is."""
        for (kind, name), tolerance in self.tolerances.items():
            # A gradient that is 0 by mathematics has nothing but rounding: a bias of keys, which
            # adds the same to all scores of a query.
            if tolerance > NOISE_FLOOR and not self._is_zero(kind, name):
                _, quantity = kind
                change = tolerance / MARGIN
                return f"the {quantity} of {name or 'a micro batch'} changes by {change:.2g}"
        return ""

    def has_gradient(self, name: str) -> bool:
        """Whether a parameter's gradient is more than rounding."""
        if name not in self.whole[_GRADIENT]:
            return False
        return not self._is_zero(_GRADIENT, name)

    def unmoved(self) -> list[str]:
        """Parameters with a gradient that the step did not change."""
        names = []
        for name, update in self.whole[1, "update"].items():
            if self.has_gradient(name) and not update.any():
                names.append(name)
        return names

    def _is_zero(self, kind: Kind, name: str) -> bool:
        tensor = self.whole[kind][name]
        size = float(tensor.norm())
        return size <= self._least_size(kind)

    def _least_size(self, kind: Kind) -> float:
        """The size below which a tensor of this kind is nothing but rounding."""
        return _SMALL * self.scale[kind]

    def difference(
        self, kind: Kind, piece: Piece, right: torch.Tensor | None = None
    ) -> _Difference:
        """How much a piece differs from the same part of the right tensor, or from ``right``."""
        if right is None:
            right = self.whole[kind][piece.name][piece.slices]
        return _difference(piece.value.double(), right.double(), self._least_size(kind))

    def limit(self, kind: Kind, name: str) -> float:
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
        *_initial_values_that_are_wrong(ranks),
        *_spreads_that_differ(reference.computed, ranks),
    ]
    for step in (1, 2):
        of_step = _of_step(step, reference, ranks)
        if of_step:
            return differing + of_step
    return differing


def _of_step(step: int, reference: Reference, ranks: Sequence[Computed]) -> list[Finding]:
    differing = list(_norms(step, reference, ranks))
    for kind in reference.whole:
        # A run in which a collective was left out may take one step.
        if kind[0] == step and kind in ranks[0].tensors:
            differing += _tensors(kind, reference, ranks)
    wrong_gradients = set()
    for finding in differing:
        if finding.quantity == "gradient":
            wrong_gradients.add(finding.name)
    kept = []
    for finding in differing:
        # A wrong gradient is one finding, not two.
        if finding.quantity == "update" and finding.name in wrong_gradients:
            continue
        kept.append(replace(finding, step=step))
    return kept


def _initial_values_that_are_wrong(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights as the job itself made them: equal on replicas, unlike in two parts of a tensor.

    Example: with one seed for all tp ranks, a weight has two equal halves. Experts count as parts
    of one tensor, ``weight[0]`` and ``weight[1]``.
    """
    by_place = []
    by_value = []
    for rank, computed in enumerate(ranks):
        for piece in computed.own_initial:
            tensor_name, _, _ = piece.name.partition("[")
            value = digest(piece.value)
            by_place.append((rank, piece.place, value))
            # The weight of a norm is the same number everywhere.
            if piece.value.min() < piece.value.max():
                by_value.append((rank, (tensor_name, value), piece.place))
    yield from _with_several_values(_OWN, by_place, "differs between replicas")
    yield from _with_several_values(_OWN, by_value, "is the same in two parts")


def draws_that_are_wrong(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Dropout for which tp ranks draw the same numbers for unlike inputs, or others for equal ones.

    Example: outside of ``fork()``, all tp ranks drop the same places of their parts of a sequence.
    """
    by_input = []
    by_state = []
    for rank, computed in enumerate(ranks):
        for number, draw in enumerate(computed.draws):
            where = (draw.place, number, computed.tensor_parallel_ranks)
            by_input.append((rank, (*where, draw.input), draw.state))
            by_state.append((rank, (*where, draw.state), draw.input))
    yield from _with_several_values(_DRAWN, by_input, "drops other places on replicas")
    yield from _with_several_values(_DRAWN, by_state, "drops the same places of two parts")


def _with_several_values(
    quantity: str, values: Sequence[tuple[int, tuple[Any, ...], Any]], meaning: str
) -> Iterator[Finding]:
    """A finding for each key that has several values; of each, a rank, the key and the value.

    A key begins with the name of what it stands for.
    """
    values_of_key: dict[tuple[Any, ...], set[Any]] = {}
    for _, key, value in values:
        values_of_key.setdefault(key, set()).add(value)
    ranks_of_name: dict[str, set[int]] = {}
    for rank, key, _ in values:
        if len(values_of_key[key]) > 1:
            ranks_of_name.setdefault(key[0], set()).add(rank)
    for name, rank_set in ranks_of_name.items():
        yield Finding(quantity, name, tuple(sorted(rank_set)), 1.0, meaning=meaning)


def _spreads_that_differ(alone: Computed, ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights that the layout draws from a wider or narrower distribution than one rank does."""
    pieces = []
    for computed in ranks:
        pieces.extend(computed.own_initial)
    right_tensors = whole_tensors(alone.own_initial)
    for name, tensor in whole_tensors(pieces).items():
        size = float(tensor.norm())
        right_size = float(right_tensors[name].norm())
        # Twice the relative error of a standard deviation of so many numbers from a bell curve.
        error = 2 / tensor.numel() ** 0.5
        if abs(size - right_size) > _SPREAD * error * right_size:
            factor = size / right_size
            meaning = f"has {factor:.2g} times the standard deviation of one rank's"
            yield Finding(_OWN, name, tuple(range(len(ranks))), 1.0, meaning=meaning)


def recomputed_gradients_that_differ(
    reference: Reference, recomputing: Sequence[Computed], keeping: Sequence[Computed]
) -> Iterator[Finding]:
    """Gradients of a step with dropout that recomputation changes by more than rounding.

    It adds the parts of a gradient in another order, so the last bits may differ.
    """
    by_name: dict[str, list[tuple[int, _Difference]]] = {}
    for rank, (computed, right) in enumerate(zip(recomputing, keeping, strict=True)):
        right_values = {piece.place: piece.value for piece in right.tensors[_GRADIENT]}
        for piece in computed.tensors[_GRADIENT]:
            right_value = right_values[piece.place]
            # A gradient that nobody computes holds no number.
            if right_value.isnan().all():
                continue
            difference = reference.difference(_GRADIENT, piece, right_value)
            if difference.error > reference.limit(_GRADIENT, piece.name):
                by_name.setdefault(piece.name, []).append((rank, difference))
    for name, differences in by_name.items():
        yield _finding(_RECOMPUTED, name, differences)


def same_results(first: Computed, second: Computed) -> bool:
    """Whether one rank has the same results in two runs, to the last bit."""
    for kind, pieces in first.tensors.items():
        tensors = whole_tensors(pieces)
        others = whole_tensors(second.tensors[kind])
        if tensors.keys() != others.keys():
            return False
        for name, tensor in tensors.items():
            if not torch.equal(tensor, others[name]):
                return False
    return first.norms[1, NORM][0] == second.norms[1, NORM][0]


def _norms(step: int, reference: Reference, ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Gradient norms that are not those of the layout's own gradients.

    A wrong gradient is no wrong norm.
    """
    for quantity in (NORM, EVEN_NORM):
        parts = {}
        norms = []
        for computed in ranks:
            norm, gradients = computed.norms.get((step, quantity), (0.0, []))
            norms.append(torch.tensor(norm, dtype=torch.float64))
            for piece in gradients:
                parts[piece.place] = piece.value.double()
        right_norm = torch.tensor(_norm(parts.values()), dtype=torch.float64)
        differences = []
        for rank, of_rank in enumerate(norms):
            difference = _difference(of_rank, right_norm, 0.0)
            if difference.error > reference.tolerance:
                differences.append((rank, difference))
        if differences:
            yield _finding(quantity, "", differences)


def _tensors(kind: Kind, reference: Reference, ranks: Sequence[Computed]) -> Iterator[Finding]:
    _, quantity = kind
    right_names = reference.whole[kind].keys()
    by_name: dict[str, list[tuple[int, _Difference]]] = {}
    held_names: set[str] = set()
    for rank, computed in enumerate(ranks):
        for piece in computed.tensors[kind]:
            held_names.add(piece.name)
            difference = _Difference(float("inf"), None)
            if piece.name in right_names:
                difference = reference.difference(kind, piece)
            # An error that is no number is above any limit.
            if not difference.error <= reference.limit(kind, piece.name):
                by_name.setdefault(piece.name, []).append((rank, difference))
    for name, differences in by_name.items():
        yield _finding(quantity, name, differences)
    all_ranks = tuple(range(len(ranks)))
    for name in right_names - held_names:
        yield Finding(quantity, name, all_ranks, 1.0, 0.0, "no rank has it")


def _finding(quantity: str, name: str, differences: Sequence[tuple[int, _Difference]]) -> Finding:
    """The finding on all ranks that differ: the largest error, and a factor if all have it."""
    _, worst = max(differences, key=_error)
    factor = worst.factor
    ranks = set()
    for rank, difference in differences:
        ranks.add(rank)
        if not difference.has(worst.factor):
            factor = None
    return Finding(quantity, name, tuple(sorted(ranks)), worst.error, factor)


def _error(of_rank: tuple[int, _Difference]) -> float:
    _, difference = of_rank
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
