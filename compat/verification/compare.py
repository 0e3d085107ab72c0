"""Comparison of a layout's results with those of one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, isclose, isfinite
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

import torch

from compat.verification.layout import matches
from compat.verification.step import (
    EVEN_NORM,
    GRADIENT,
    NORM,
    Computed,
    Kind,
    Piece,
    Place,
    Weight,
    whole_tensors,
)
from hypergrid.messages import few

_OWN = "initial value"  # of a weight that the job itself made
_DRAWN = "dropout"  # of one line, called on tp ranks in the same order
_RECOMPUTED = (1, "recomputed gradient")
_MARGIN = 20  # times what rounding was seen to do
_SMALL = 1e-6  # of the norm of all: what a tensor without a gradient is measured by
_NOISE_FLOOR = 1e-3  # of a tensor's size: where more counts as rounding, nothing is verified
_SPREAD = 8  # times 1 / sqrt(n), as a standard deviation of n numbers errs: no chance does that
_TINY = 1e-30  # instead of a size of 0
_SAME_FACTOR = 1e-3  # how near two factors are that count as the same


@dataclass(frozen=True)
class Finding:
    """A quantity that differs from what one rank computes."""

    quantity: str  # "loss", "tokens", "gradient", "gradient norm", "update", "buffer" ...
    name: str  # of the parameter in the whole model; "" for quantities of the whole model
    ranks: tuple[int, ...]  # where it differs
    error: float  # the norm of the difference, relative to the right value's
    factor: float | None = None  # what the right value was multiplied by, if that is all
    meaning: str = ""  # where neither error nor factor says it: "differs between replicas"
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
        difference = f"differs by {self.error:.2g} of its size"
        if self.meaning:
            difference = self.meaning
        elif self.factor is not None and abs(self.factor - 1) > _SAME_FACTOR:
            difference = f"is {self.factor:g} times that of one rank"
        return f"{subject} {difference}, on ranks {few(self.ranks)}"

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether one of the patterns of ``--allow`` is for this finding."""
        return matches(f"{self.quantity} {self.name}".strip(), patterns)


class _Difference(NamedTuple):
    error: float
    factor: float = float("nan")  # where the direction is another one, too


class Reference:
    """The results of one rank, and how much rounding changes them.

    ``repeated`` are results that differ from these by rounding alone.
    """

    def __init__(self, computed: Computed, repeated: Sequence[Computed]) -> None:
        self.own_initial = computed.own_initial
        self.initial = whole_tensors(computed.initial)
        self.whole: dict[Kind, dict[str, torch.Tensor]] = {}
        # The size below which a tensor of this kind is nothing but rounding.
        self.least_size: dict[Kind, float] = {}
        for kind, pieces in computed.tensors.items():
            tensors = whole_tensors(pieces)
            norm_of_all = hypot(*map(torch.norm, tensors.values()))
            self.whole[kind] = tensors
            self.least_size[kind] = _SMALL * norm_of_all
        self.errors: dict[tuple[Kind, str], float] = {}
        for other in repeated:
            for kind, pieces in other.tensors.items():
                for piece in pieces:
                    key = (kind, piece.name)
                    difference = self.difference(kind, piece, self.whole[kind])
                    self.errors[key] = max(difference.error, self.errors.get(key, 0.0))
        # Rounding does not touch the number of tokens, nor what a step leaves as it is: their limit
        # is that of the other quantities.
        errors_of_rounding = [error for error in self.errors.values() if error > 0]
        self.tolerance = _MARGIN * median(errors_of_rounding)

    def noise(self) -> str:
        """A quantity whose limit is above the noise floor, in words; "" if none is."""
        for (kind, name), error in self.errors.items():
            is_noise = self.limit(kind, name) > _NOISE_FLOOR
            # A gradient that is 0 by mathematics has nothing but rounding: a bias of keys, which
            # adds the same to all scores of a query.
            if is_noise and not self._is_zero(kind, name):
                _, quantity = kind
                return f"the {quantity} of {name or 'a micro batch'} changes by {error:.2g}"
        return ""

    def worthless(self) -> str:
        """Why agreement with these results would say nothing; "" if it does say something."""
        updates = self.whole[1, "update"]
        trained = [name for name in updates if not self._is_zero(GRADIENT, name)]
        unmoved = [name for name in trained if not updates[name].any()]
        if unmoved:
            return f"the step did not change {few(unmoved)}, which has a gradient"
        if not trained:
            return "no parameter has a gradient"
        return ""

    def _is_zero(self, kind: Kind, name: str) -> bool:
        size = float(self.whole[kind][name].norm())
        return size <= self.least_size[kind]

    def difference(
        self, kind: Kind, piece: Piece, right: Mapping[str, torch.Tensor]
    ) -> _Difference:
        """How much a piece differs from the same part of the right tensor."""
        if piece.name not in right:
            return _Difference(float("inf"))
        value = piece.value.double()
        right_value = right[piece.name][piece.slices].double()
        size = float(right_value.norm())
        distance = float((value - right_value).norm())
        # A difference from nothing is measured by all tensors of this kind.
        scale = max(size, self.least_size[kind], _TINY)
        error = distance / scale
        if not isfinite(error):
            return _Difference(float("inf"))
        if size <= self.least_size[kind]:
            return _Difference(error)
        # The projection on the right value, and what is left beside it.
        factor = float((value * right_value).sum()) / size**2
        remainder = float((value - factor * right_value).norm())
        size_by_factor = abs(factor) * size
        if remainder > _SAME_FACTOR * size_by_factor:
            return _Difference(error)
        return _Difference(error, factor)

    def limit(self, kind: Kind, name: str) -> float:
        """How large a difference may be."""
        return max(_MARGIN * self.errors.get((kind, name), 0.0), self.tolerance)


def findings(reference: Reference, ranks: Sequence[Computed]) -> list[Finding]:
    """Every quantity of a layout that differs from the reference by more than rounding does.

    The second step is compared only where the first agrees: it begins with what the first left.
    """
    differing = [
        *_initial_values_that_are_wrong(ranks),
        *_spreads_that_differ(reference, ranks),
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
            differing += _tensors(kind, kind, reference.whole[kind], reference, ranks)
    gradients = {finding.name for finding in differing if finding.quantity == "gradient"}
    # A wrong gradient is one finding, not two.
    return [
        finding
        for finding in differing
        if finding.quantity != "update" or finding.name not in gradients
    ]


def _initial_values_that_are_wrong(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights as the job itself made them: equal on replicas, unlike in two parts of a tensor.

    Example: with one seed for all tp ranks, a weight has two equal halves. Experts count as parts
    of one tensor, ``weight[0]`` and ``weight[1]``.
    """
    by_place = []
    by_value = []
    for rank, computed in enumerate(ranks):
        for weight in computed.own_initial:
            name, _ = weight.place
            tensor_name, _, _ = name.partition("[")
            by_place.append((rank, weight.place, weight.digest))
            if not weight.is_constant:
                by_value.append((rank, (tensor_name, weight.digest), weight.place))
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
    values_of = defaultdict(set)
    ranks_of = defaultdict(set)
    for rank, key, value in values:
        values_of[key].add(value)
        ranks_of[key].add(rank)
    ranks_of_name: dict[str, set[int]] = defaultdict(set)
    # One finding for a name, however many of its parts differ.
    for key, ranks in ranks_of.items():
        if len(values_of[key]) > 1:
            ranks_of_name[key[0]] |= ranks
    for name, ranks in ranks_of_name.items():
        yield Finding(quantity, name, tuple(sorted(ranks)), 1.0, meaning=meaning)


def _spreads_that_differ(reference: Reference, ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights that the layout draws from a wider or narrower distribution than one rank does."""
    right_sizes = _whole_norms(reference.own_initial)
    weights = []
    for computed in ranks:
        weights.extend(computed.own_initial)
    for name, size in _whole_norms(weights).items():
        right_size = right_sizes[name]
        numel = reference.initial[name].numel()
        error_by_chance = _SPREAD / numel**0.5
        if abs(size - right_size) > error_by_chance * right_size:
            meaning = "is not 0, as on one rank"
            if right_size:
                meaning = f"has {size / right_size:.2g} times the standard deviation of one rank's"
            yield Finding(_OWN, name, tuple(range(len(ranks))), 1.0, meaning=meaning)


def _whole_norms(weights: Sequence[Weight]) -> dict[str, float]:
    """The norm of each whole weight that the job itself made; replicas count once."""
    norm_of_part = {weight.place: weight.norm for weight in weights}
    norms: dict[str, float] = {}
    for (name, _), norm in norm_of_part.items():
        norms[name] = hypot(norm, norms.get(name, 0.0))
    return norms


def recomputed_gradients_that_differ(
    reference: Reference, recomputing: Sequence[Computed], keeping: Sequence[Computed]
) -> Iterator[Finding]:
    """Gradients of a step with dropout that recomputation changes by more than rounding.

    It adds the parts of a gradient in another order, so the last bits may differ.
    """
    # One rank draws other dropout: only ranks of the same layout can be compared.
    kept = []
    for computed in keeping:
        kept.extend(computed.tensors[GRADIENT])
    yield from _tensors(_RECOMPUTED, GRADIENT, whole_tensors(kept), reference, recomputing)


def _norms(step: int, reference: Reference, ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Gradient norms that are not those of the layout's own gradients.

    A wrong gradient is no wrong norm.
    """
    for quantity in (NORM, EVEN_NORM):
        kind = (step, quantity)
        if kind not in ranks[0].norms:
            continue
        norm_of_part: dict[Place, float] = {}
        for computed in ranks:
            _, norms = computed.norms[kind]
            # Replicas have the same part, which counts once.
            norm_of_part |= norms
        right_norm = hypot(*norm_of_part.values())
        # Where all gradients are 0, the right norm is 0 too.
        scale = max(right_norm, _TINY)
        differences = []
        for rank, computed in enumerate(ranks):
            norm, _ = computed.norms[kind]
            error = abs(norm - right_norm) / scale
            # An error that is no number is above any limit.
            if not error <= reference.tolerance:
                differences.append((rank, _Difference(error, norm / scale)))
        if differences:
            yield _finding(kind, "", differences)


def _tensors(
    kind: Kind,
    compared: Kind,
    right: Mapping[str, torch.Tensor],
    reference: Reference,
    ranks: Sequence[Computed],
) -> Iterator[Finding]:
    """Findings of a kind: where the compared tensors differ from the right ones by too much."""
    by_name: dict[str, list[tuple[int, _Difference]]] = {}
    held_names: set[str] = set()
    for rank, computed in enumerate(ranks):
        for piece in computed.tensors[compared]:
            held_names.add(piece.name)
            difference = reference.difference(compared, piece, right)
            # An error that is no number is above any limit.
            if not difference.error <= reference.limit(compared, piece.name):
                by_name.setdefault(piece.name, []).append((rank, difference))
    for name, differences in by_name.items():
        yield _finding(kind, name, differences)
    all_ranks = tuple(range(len(ranks)))
    step, quantity = kind
    # A layout that lacks a layer has nothing that differs.
    for name in right.keys() - held_names:
        yield Finding(quantity, name, all_ranks, 1.0, 0.0, "is on no rank", step)


def _finding(kind: Kind, name: str, differences: Sequence[tuple[int, _Difference]]) -> Finding:
    """The finding on all ranks that differ: the largest error, and a factor if all have it."""
    _, worst = max(differences, key=lambda of_rank: of_rank[1].error)
    # Equal factors are described in one line.
    factor: float | None = float(f"{worst.factor:.3g}")
    ranks = set()
    for rank, difference in differences:
        ranks.add(rank)
        # A factor that is no number is like none.
        if not isclose(difference.factor, worst.factor, rel_tol=_SAME_FACTOR):
            factor = None
    step, quantity = kind
    return Finding(quantity, name, tuple(sorted(ranks)), worst.error, factor, step=step)


def describe(differing: Sequence[Finding]) -> list[str]:
    """Findings in words; those of equal kind, ranks and factor in one line, by module."""
    alike = defaultdict(list)
    for finding in differing:
        alike[finding.quantity, finding.ranks, finding.factor, finding.meaning].append(finding)
    lines = []
    for group in alike.values():
        worst = max(group, key=attrgetter("error"))
        names = group[0].name
        if len(group) > 1:
            names += f" and {len(group) - 1} more"
        lines.append(str(replace(worst, name=names)))
    return lines
