"""Checks of a layout on its hosts: what is expensive, why, and which order avoids it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hypergrid.analysis.traffic import Layouts, Ranked
from hypergrid.layout import RankLayout
from hypergrid.topology import Topology

Severity: TypeAlias = Literal["error", "warning", "note"]
TopologyOf: TypeAlias = Callable[[RankLayout], Topology]


@dataclass(frozen=True)
class Finding:
    """What one rule found.

    An "error" will not run as asked, or runs many times slower; a "warning" costs time; a "note"
    may be intended.
    """

    rule: str
    severity: Severity
    what: str
    cost: str  # what is expensive about it
    remedy: str
    order: str | None = None  # one that avoids it


@dataclass(frozen=True)
class Rule:
    """One check. ``finds`` says in words what is found in layouts on their hosts, or None.

    It is also asked about other orders, to find one that avoids it; ``otherwise`` is the remedy
    where none does. With ``of_racks`` the topology is that of racks.
    """

    name: str
    severity: Severity
    cost: str
    finds: Callable[[Layouts, Topology], str | None]
    otherwise: str
    of_racks: bool = False


def findings(
    rules: Iterable[Rule],
    layouts: Layouts,
    topology_of: TopologyOf,
    better: Sequence[tuple[Ranked, Layouts]] = (),
    *,
    racks_of: TopologyOf | None = None,
) -> list[Finding]:
    """What ``rules`` find in ``layouts`` (all over the same ranks), the most severe first.

    ``topology_of`` and ``racks_of`` return the hosts and the racks under a layout. ``better`` are
    the orders that send no more between hosts, the best first: remedies are looked for in them.
    """
    found = []
    for rule in rules:
        place = racks_of if rule.of_racks else topology_of
        if place is None:
            continue
        what = _found(rule, layouts, place)
        if what is not None:
            avoiding = (each.order for each, other in better if _found(rule, other, place) is None)
            order = next(avoiding, None)
            remedy = rule.otherwise if order is None else f"order={order} avoids it."
            found.append(Finding(rule.name, rule.severity, what, rule.cost, remedy, order))
    severities = ("error", "warning", "note")
    return sorted(found, key=lambda finding: severities.index(finding.severity))


def _found(rule: Rule, layouts: Layouts, place: TopologyOf) -> str | None:
    return rule.finds(layouts, place(next(iter(layouts.values()))))
