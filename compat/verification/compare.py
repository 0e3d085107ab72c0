"""Comparison of a layout's results with those of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import combinations, product
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


@dataclass(frozen=True)
class Finding:
    """A quantity that differs from what one rank computes."""

    what: str  # "loss", "tokens", "gradient", "gradient norm", "update" or "weights"
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
            said = "differs between replicas"
        elif self.factor is None or 0 < abs(self.factor - 1) < 1e-3:
            said = f"differs by {self.error:.2g} of its size"
        elif self.factor == 0:
            said = "is 0"
        else:
            said = f"is {self.factor:.4g} times that of one rank"
            said += f" ({self.meaning})" if self.meaning else ""
        return f"{subject} {said}, on ranks {few(self.ranks)}"

    def matches(self, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(f"{self.what} {self.name}".strip(), each) for each in patterns)


# What is compared of each tensor, and where a step's results hold it.
KINDS = {"gradient": "gradients", "update": "updates", "buffer": "buffers"}


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
        self.whole = {
            kind: whole_tensors(getattr(self.computed, kind))
            for kind in ("initial", *KINDS.values())
        }
        after = self.computed.next_step
        self.next_step = None if after is None else Reference(after)
        self.scale = {
            kind: sum(float(each.norm()) ** 2 for each in values.values()) ** 0.5
            for kind, values in self.whole.items()
        }

    def measure(self, again: Sequence[Computed]) -> None:
        """Take the tolerances from steps that differ from this one by rounding alone."""
        errors: dict[tuple[str, str], float] = {}
        for kind, computed in product(KINDS.values(), again):
            for piece in getattr(computed, kind):
                error = self.difference(kind, piece).error
                errors[kind, piece.name] = max(errors.get((kind, piece.name), 0.0), error)
        self.tolerance = MARGIN * median(errors.values())
        self.tolerances = {key: max(MARGIN * e, self.tolerance) for key, e in errors.items()}
        if self.next_step is not None:
            self.next_step.measure([each.next_step for each in again if each.next_step])

    def noise(self) -> str:
        """The quantity whose tolerance is above the noise floor, in words; "" if none is."""
        (kind, name), tolerance = max(self.tolerances.items(), key=lambda entry: entry[1])
        if tolerance <= NOISE_FLOOR:
            return "" if self.next_step is None else self.next_step.noise()
        return f"the {kind.removesuffix('s')} of {name} changes by {tolerance / MARGIN:.2g}"

    def has_gradient(self, name: str) -> bool:
        """Whether a parameter's gradient is more than rounding."""
        gradient = self.whole["gradients"].get(name)
        return gradient is not None and float(gradient.norm()) > _SMALL * self.scale["gradients"]

    def difference(self, kind: str, piece: Piece) -> _Difference:
        right = self.whole[kind][piece.name][piece.slices]
        least = _SMALL * self.scale[kind]
        return _difference(piece.value.double(), right.double(), least)


def _difference(value: torch.Tensor, right: torch.Tensor, least: float) -> _Difference:
    size = float(right.norm())
    error = float((value - right).norm()) / max(size, least, 1e-30)
    if not isfinite(error):
        return _Difference(float("inf"), None)
    factor = float((value * right).sum()) / size**2 if size > least else None
    if factor is not None and float((value - factor * right).norm()) > 1e-3 * abs(factor) * size:
        factor = None
    return _Difference(error, factor)


def findings(reference: Reference, layout: Layout, ranks: Sequence[Computed]) -> list[Finding]:
    """Every quantity of ``layout`` that differs from the reference by more than rounding does.

    The second step is compared only where the first agrees: it begins with what the first left.
    """
    found = [*_initial_values(ranks), *_of_step(reference, layout, ranks)]
    next_results = [computed.next_step for computed in ranks if computed.next_step is not None]
    if found or not next_results or reference.next_step is None:
        return found
    return [
        replace(finding, step=2) for finding in _of_step(reference.next_step, layout, next_results)
    ]


def _of_step(reference: Reference, layout: Layout, ranks: Sequence[Computed]) -> list[Finding]:
    found = list(_whole_model(reference, ranks))
    for what, kind in KINDS.items():
        found += _parameters(what, kind, reference, ranks)
    wrong = {finding.name for finding in found if finding.what == "gradient"}
    kept = []
    for finding in found:
        # A wrong gradient is one finding, not two.
        if finding.what != "update" or finding.name not in wrong:
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
    for name, member_ranks_of_name in odd_ranks.items():
        yield Finding(_OWN, name, tuple(sorted(member_ranks_of_name)), 1.0)


def same_results(first: Computed, second: Computed) -> bool:
    """Whether two steps have the same parameters, losses and gradient norm, to the last bit."""
    names = [{piece.name for piece in computed.gradients} for computed in (first, second)]
    is_same_model = names[0] == names[1]
    return is_same_model and first.losses == second.losses and first.norm == second.norm


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


def _norm(ranks: Sequence[Computed]) -> float:
    """The norm of the gradients that the ranks hold, each part of the model counted once."""
    parts = {(piece.name, piece.where): piece for each in ranks for piece in each.gradients}
    return sum(float(piece.value.norm()) ** 2 for piece in parts.values()) ** 0.5


def _whole_model(reference: Reference, ranks: Sequence[Computed]) -> Iterator[Finding]:
    right = reference.computed
    # Of the gradients as they are: a wrong gradient is not a wrong norm too.
    norms = [each.norm for each in ranks]
    yield from _scalar("gradient norm", _norm(ranks), norms, reference.tolerance)
    for what, at in (("loss", 2), ("tokens", 3)):
        wanted = {each.micro_batch: each[at] for each in right.losses}
        sums: dict[int, dict[int, float]] = {}
        wrong: set[int] = set()
        for rank, each in enumerate(ranks):
            for loss in each.losses:
                parts = sums.setdefault(loss.micro_batch, {})
                before = parts.setdefault(loss.cp_rank, loss[at])  # another tensor rank's
                if abs(before - loss[at]) > reference.tolerance * max(abs(before), 1e-30):
                    wrong.add(rank)
        got = {number: sum(parts.values()) for number, parts in sums.items()}
        total, expected = sum(got.values()), sum(wanted.values())
        tolerance = reference.tolerance
        off = [n for n in wanted if abs(got.get(n, 0) - wanted[n]) > tolerance * abs(wanted[n])]
        if off or wrong:
            last = tuple(sorted(wrong)) or tuple(r for r, e in enumerate(ranks) if e.losses)
            error = abs(total - expected) / max(abs(expected), 1e-30)
            yield Finding(what, "", last, error, total / expected if expected and off else None)


def _scalar(
    what: str, right: float, values: Sequence[float], tolerance: float
) -> Iterator[Finding]:
    off = {
        rank: value
        for rank, value in enumerate(values)
        if not abs(value - right) <= tolerance * abs(right)
    }
    if off:
        worst = max(off.values(), key=lambda value: abs(value - right))
        same = len({f"{value:.5g}" for value in off.values()}) == 1 and right
        factor = worst / right if same else None
        yield Finding(what, "", tuple(off), abs(worst - right) / abs(right or 1), factor)


def _parameters(
    what: str, kind: str, reference: Reference, ranks: Sequence[Computed]
) -> Iterator[Finding]:
    right = reference.whole[kind]
    off: dict[str, dict[int, _Difference]] = {}
    held: set[str] = set()
    for rank, computed in enumerate(ranks):
        for piece in getattr(computed, kind):
            held.add(piece.name)
            if piece.name not in right:
                off.setdefault(piece.name, {})[rank] = _Difference(float("inf"), None)
                continue
            told = reference.difference(kind, piece)
            limit = reference.tolerances.get((kind, piece.name), reference.tolerance)
            if not told.error <= limit:
                before = off.setdefault(piece.name, {}).get(rank)
                if before is None or told.error > before.error:
                    off[piece.name][rank] = told
    for name, by_rank in off.items():
        worst = max(by_rank.values())
        factors = {f"{each.factor:.4g}" for each in by_rank.values() if each.factor is not None}
        same = len(factors) == 1 and all(each.factor is not None for each in by_rank.values())
        factor = worst.factor if same else None
        yield Finding(what, name, tuple(sorted(by_rank)), worst.error, factor)
    for name in right.keys() - held:
        yield Finding(what, name, tuple(range(len(ranks))), 1.0, 0.0, "no rank has it")


def _with_meaning(found: Finding, layout: Layout) -> Finding:
    if found.factor is None or found.factor <= 0 or found.meaning:
        return found
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep")}
    sizes |= {"etp": layout.etp or 1}
    sizes |= {INSTANCES: layout.options.get(INSTANCES, 1)}
    larger = {name: size for name, size in sizes.items() if size > 1}
    fits: list[str] = []
    for many in (1, 2):
        for names in combinations(larger, many):
            size = prod(larger[name] for name in names)
            for text, value in ((" x ".join(names), size), (f"1/({' x '.join(names)})", 1 / size)):
                if abs(found.factor / value - 1) < 1e-3:
                    fits.append(text if many > 1 or value > 1 else f"1/{names[0]}")
        if fits:
            break
    if not fits:
        return found
    given: dict[str, Any] = {**vars(found), "meaning": f"the size of {' or '.join(fits)}"}
    return Finding(**given)


def describe(found: Sequence[Finding]) -> list[str]:
    """Findings in words; those of equal kind, ranks and factor in one line, by module."""
    lines: dict[tuple[Any, ...], list[Finding]] = {}
    for each in found:
        factor = None if each.factor is None else f"{each.factor:.3g}"
        lines.setdefault((each.what, each.ranks, factor, each.meaning), []).append(each)
    said = []
    for group in lines.values():
        worst = max(group, key=lambda each: each.error)
        if len(group) > 1:
            names = [each.name for each in group]
            more = f", {names[1]}" if len(names) == 2 else f" and {len(names) - 1} more"
            said.append(str(worst).replace(worst.name, f"{names[0]}{more}", 1))
        else:
            said.append(str(worst))
    return said
