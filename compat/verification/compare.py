"""Comparison of a layout's results with those of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import combinations
from math import isfinite, prod
from statistics import median
from typing import Any, NamedTuple

import torch

from compat.verification.layout import INSTANCES, Layout
from compat.verification.step import Computed, Piece, whole_tensors
from hypergrid.messages import few

_OWN = "initial value"  # of a weight that the job itself made
MARGIN = 20  # times what rounding was seen to do
_SMALL = 1e-6  # of the norm of all: what a tensor without a gradient is measured by
_RESOLVED = 1e-5  # of a tensor's weights: a change that float32 resolves
NOISE_FLOOR = 1e-3  # of a tensor's size: where more counts as rounding, nothing is verified
_TINY = 1e-30  # instead of a size of 0
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
        subject = f"{self.what} of {self.name}" if self.name else self.what
        if self.step > 1:
            subject += f" in step {self.step}"
        if self.what == _OWN:
            difference = "differs between replicas"
        elif self.factor is None or 0 < abs(self.factor - 1) < 1e-3:
            difference = f"differs by {self.error:.2g} of its size"
        elif self.factor == 0:
            difference = "is 0"
        else:
            difference = f"is {self.factor:.4g} times that of one rank"
            if self.meaning:
                difference += f" ({self.meaning})"
        return f"{subject} {difference}, on ranks {few(self.ranks)}"

    def matches(self, patterns: Sequence[str]) -> bool:
        quantity = f"{self.what} {self.name}".strip()
        return any(fnmatchcase(quantity, pattern) for pattern in patterns)


class _Difference(NamedTuple):
    error: float
    factor: float | None


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
        next_step = self.computed.next_step
        self.next_step = None if next_step is None else Reference(next_step)

    def measure(self, repeated: Sequence[Computed]) -> None:
        """Take the tolerances from steps that differ from this one by rounding alone."""
        errors: dict[tuple[str, str], float] = {}
        for computed in repeated:
            for kind in KINDS.values():
                for piece in getattr(computed, kind):
                    error = self.difference(kind, piece).error
                    errors[kind, piece.name] = max(errors.get((kind, piece.name), 0.0), error)
        self.tolerance = MARGIN * median(errors.values())
        for key, error in errors.items():
            self.tolerances[key] = max(MARGIN * error, self.tolerance)
        if self.next_step is not None:
            self.next_step.measure([c.next_step for c in repeated if c.next_step is not None])

    def noise(self) -> str:
        """The quantity whose tolerance is above the noise floor, in words; "" if none is."""
        (kind, name), tolerance = max(self.tolerances.items(), key=lambda entry: entry[1])
        if tolerance > NOISE_FLOOR:
            return f"the {kind.removesuffix('s')} of {name} changes by {tolerance / MARGIN:.2g}"
        return "" if self.next_step is None else self.next_step.noise()

    def has_gradient(self, name: str) -> bool:
        """Whether a parameter's gradient is more than rounding."""
        gradient = self.whole["gradients"].get(name)
        return gradient is not None and float(gradient.norm()) > _SMALL * self.scale["gradients"]

    def difference(self, kind: str, piece: Piece) -> _Difference:
        right = self.whole[kind][piece.name][piece.slices]
        least = _SMALL * self.scale[kind]
        return _difference(piece.value.double(), right.double(), least)

    def limit(self, kind: str, name: str) -> float:
        """How large a difference may be."""
        return self.tolerances.get((kind, name), self.tolerance)


def _norm(tensors: Any) -> float:
    return sum(float(tensor.norm()) ** 2 for tensor in tensors) ** 0.5


def _difference(value: torch.Tensor, right: torch.Tensor, least: float) -> _Difference:
    size = float(right.norm())
    error = float((value - right).norm()) / max(size, least, _TINY)
    if not isfinite(error):
        return _Difference(float("inf"), None)
    if size <= least:
        return _Difference(error, None)
    factor = float((value * right).sum()) / size**2
    # Another direction, and not another length alone.
    if float((value - factor * right).norm()) > 1e-3 * abs(factor) * size:
        return _Difference(error, None)
    return _Difference(error, factor)


def findings(reference: Reference, layout: Layout, ranks: Sequence[Computed]) -> list[Finding]:
    """Every quantity of ``layout`` that differs from the reference by more than rounding does.

    The second step is compared only where the first agrees: it begins with what the first left.
    """
    of_first_step = [*_initial_values(ranks), *_of_step(reference, layout, ranks)]
    next_results = [computed.next_step for computed in ranks if computed.next_step is not None]
    if of_first_step or not next_results or reference.next_step is None:
        return of_first_step
    of_next_step = _of_step(reference.next_step, layout, next_results)
    return [replace(finding, step=2) for finding in of_next_step]


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


def _initial_values(ranks: Sequence[Computed]) -> Iterator[Finding]:
    """Weights that replicas have initialised differently, before they got those of one rank."""
    ranks_of: dict[Any, dict[str, list[int]]] = {}
    for rank, computed in enumerate(ranks):
        for place, digest in computed.own_initial.items():
            ranks_of.setdefault(place, {}).setdefault(digest, []).append(rank)
    odd_ranks: dict[str, set[int]] = {}
    for (name, _), replicas in ranks_of.items():
        # The ranks that do not have what most have; of as many, the later ones.
        most = max(replicas.values(), key=len)
        for member_ranks in replicas.values():
            if member_ranks is not most:
                odd_ranks.setdefault(name, set()).update(member_ranks)
    for name, ranks_of_name in odd_ranks.items():
        yield Finding(_OWN, name, tuple(sorted(ranks_of_name)), 1.0)


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
    update_of = {(piece.name, piece.where): piece.value for piece in computed.updates}
    weights_of = {(piece.name, piece.where): piece.value for piece in computed.initial}
    names = set()
    for name, where, gradient in computed.gradients:
        weights = weights_of[name, where].double()
        update = update_of[name, where].double()
        size = float(weights.norm())
        # float32 would lose the change that a smaller gradient makes.
        if not float(gradient.norm()) > _RESOLVED * size:
            continue
        decay = float((update * weights).sum()) / size**2 if weights.numel() > 1 else 0.0
        if float((update - decay * weights).norm()) < _RESOLVED / 10 * size:
            names.add(name)
    return names


def _whole_model(reference: Reference, ranks: Sequence[Computed]) -> Iterator[Finding]:
    # Of the gradients as they are, each part counted once: a wrong gradient is no wrong norm.
    parts = {}
    for computed in ranks:
        for piece in computed.gradients:
            parts[piece.name, piece.where] = piece.value
    norms = [computed.norm for computed in ranks]
    yield from _gradient_norm(_norm(parts.values()), norms, reference.tolerance)
    for what, field_name in (("loss", "total"), ("tokens", "tokens")):
        yield from _sums_over_ranks(what, field_name, reference, ranks)


def _gradient_norm(right: float, norms: Sequence[float], tolerance: float) -> Iterator[Finding]:
    wrong = {}
    for rank, norm in enumerate(norms):
        # A norm that is no number is wrong too.
        if not abs(norm - right) <= tolerance * abs(right):
            wrong[rank] = norm
    if not wrong:
        return
    worst = max(wrong.values(), key=lambda norm: abs(norm - right))
    is_same = len({f"{norm:.5g}" for norm in wrong.values()}) == 1
    factor = worst / right if is_same and right else None
    yield Finding("gradient norm", "", tuple(wrong), abs(worst - right) / abs(right or 1), factor)


def _sums_over_ranks(
    what: str, field_name: str, reference: Reference, ranks: Sequence[Computed]
) -> Iterator[Finding]:
    """The loss, or the number of tokens, of each micro batch: the sum over cp ranks."""
    tolerance = reference.tolerance
    right_sums = {}
    for loss in reference.computed.losses:
        right_sums[loss.micro_batch] = getattr(loss, field_name)
    parts: dict[int, dict[int, float]] = {}
    wrong_ranks = set()
    for rank, computed in enumerate(ranks):
        for loss in computed.losses:
            value = getattr(loss, field_name)
            # Tensor-parallel ranks have the same part.
            part = parts.setdefault(loss.micro_batch, {}).setdefault(loss.cp_rank, value)
            if abs(part - value) > tolerance * max(abs(part), _TINY):
                wrong_ranks.add(rank)
    sums = {number: sum(parts_of_batch.values()) for number, parts_of_batch in parts.items()}
    wrong_sums = False
    for number, right in right_sums.items():
        wrong_sums |= abs(sums.get(number, 0) - right) > tolerance * abs(right)
    if not wrong_sums and not wrong_ranks:
        return
    if not wrong_ranks:
        wrong_ranks = {rank for rank, computed in enumerate(ranks) if computed.losses}
    total = sum(sums.values())
    right_total = sum(right_sums.values())
    error = abs(total - right_total) / max(abs(right_total), _TINY)
    factor = total / right_total if right_total and wrong_sums else None
    yield Finding(what, "", tuple(sorted(wrong_ranks)), error, factor)


def _parameters(
    what: str, kind: str, reference: Reference, ranks: Sequence[Computed]
) -> Iterator[Finding]:
    right = reference.whole[kind]
    differences: dict[str, dict[int, _Difference]] = {}
    held_names: set[str] = set()
    for rank, computed in enumerate(ranks):
        for piece in getattr(computed, kind):
            held_names.add(piece.name)
            if piece.name in right:
                difference = reference.difference(kind, piece)
            else:
                difference = _Difference(float("inf"), None)
            # An error that is no number is above any limit.
            if difference.error <= reference.limit(kind, piece.name):
                continue
            by_rank = differences.setdefault(piece.name, {})
            if rank not in by_rank or difference.error > by_rank[rank].error:
                by_rank[rank] = difference
    for name, by_rank in differences.items():
        worst = max(by_rank.values(), key=lambda difference: difference.error)
        factors = set()
        for difference in by_rank.values():
            factors.add("" if difference.factor is None else f"{difference.factor:.4g}")
        factor = worst.factor if len(factors) == 1 else None
        yield Finding(what, name, tuple(sorted(by_rank)), worst.error, factor)
    for name in right.keys() - held_names:
        yield Finding(what, name, tuple(range(len(ranks))), 1.0, 0.0, "no rank has it")


def _with_meaning(finding: Finding, layout: Layout) -> Finding:
    """The finding with the dims whose size is its factor: 2 under tp=2 is "the size of tp"."""
    if finding.factor is None or finding.factor <= 0 or finding.meaning:
        return finding
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep")}
    sizes["etp"] = layout.etp or 1
    sizes[INSTANCES] = layout.options.get(INSTANCES, 1)
    larger = {name: size for name, size in sizes.items() if size > 1}
    for count in (1, 2):
        meanings = []
        for names in combinations(larger, count):
            size = prod(larger[name] for name in names)
            product_name = " x ".join(names)
            inverse = f"1/({product_name})" if count > 1 else f"1/{product_name}"
            for meaning, value in ((product_name, size), (inverse, 1 / size)):
                if abs(finding.factor / value - 1) < 1e-3:
                    meanings.append(meaning)
        if meanings:
            return replace(finding, meaning=f"the size of {' or '.join(meanings)}")
    return finding


def describe(differing: Sequence[Finding]) -> list[str]:
    """Findings in words; those of equal kind, ranks and factor in one line, by module."""
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in differing:
        factor = None if finding.factor is None else f"{finding.factor:.3g}"
        key = (finding.what, finding.ranks, factor, finding.meaning)
        alike.setdefault(key, []).append(finding)
    lines = []
    for group in alike.values():
        worst = max(group, key=lambda finding: finding.error)
        line = str(worst)
        if len(group) > 1:
            names = [finding.name for finding in group]
            more = f", {names[1]}" if len(names) == 2 else f" and {len(names) - 1} more"
            line = line.replace(worst.name, f"{names[0]}{more}", 1)
        lines.append(line)
    return lines
