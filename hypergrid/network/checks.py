"""Findings about a layout on its hosts: what is expensive, why, and which order avoids it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hypergrid.network.traffic import Layouts

Severity: TypeAlias = Literal["error", "warning", "note"]
_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """The finding of one rule.

    An "error" will not run as asked, or runs many times slower; a "warning" costs time; a "note"
    may be intended.
    """

    rule: str
    severity: Severity
    what: str
    cost: str  # what is expensive about it
    remedy: str
    order: str | None = None  # one that avoids it


def findings(
    check: Callable[[Layouts], Iterable[Finding]],
    layouts: Layouts,
    better: Iterable[tuple[str, Layouts]] = (),
) -> list[Finding]:
    """The findings of ``check`` in ``layouts``, one for each rule at most, the most severe first.

    ``better`` are other orders with their layouts, the best first. Where one of them avoids a
    finding, the first such order is its remedy.
    """
    found = {each.rule: each for each in check(layouts)}
    for order, others in better:
        if all(each.order for each in found.values()):
            break
        still = {each.rule for each in check(others)}
        for rule, each in found.items():
            if rule not in still and each.order is None:
                found[rule] = replace(each, remedy=f"order={order} avoids it.", order=order)
    return by_severity(found.values())


def by_severity(found: Iterable[Finding]) -> list[Finding]:
    """The most severe first."""
    return sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity))
