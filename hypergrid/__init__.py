"""hypergrid: which ranks of a distributed job communicate with each other.

``RankLayout``, ``GroupPlan`` and ``Topology`` are arithmetic and need no torch; the rest loads on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypergrid.errors import AbortedError as AbortedError
    from hypergrid.errors import AgreementError as AgreementError
    from hypergrid.errors import CreationError as CreationError
    from hypergrid.groups.abort import abort as abort
    from hypergrid.groups.abort import raise_if_aborted as raise_if_aborted
    from hypergrid.groups.grid import HyperCommGrid as HyperCommGrid
    from hypergrid.groups.validate import validate_grids as validate_grids
    from hypergrid.hangs.dump import dump as dump
    from hypergrid.hangs.record import record as record
    from hypergrid.layout import LayoutError as LayoutError
    from hypergrid.layout import RankLayout as RankLayout
    from hypergrid.plan import GroupPlan as GroupPlan
    from hypergrid.plan import GroupRow as GroupRow
    from hypergrid.topology import Topology as Topology

__version__ = "0.2.0"

_HOMES = {
    "AbortedError": "errors",
    "AgreementError": "errors",
    "CreationError": "errors",
    "GroupPlan": "plan",
    "GroupRow": "plan",
    "HyperCommGrid": "groups.grid",
    "LayoutError": "layout",
    "RankLayout": "layout",
    "Topology": "topology",
    "abort": "groups.abort",
    "dump": "hangs.dump",
    "raise_if_aborted": "groups.abort",
    "record": "hangs.record",
    "validate_grids": "groups.validate",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"hypergrid.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hypergrid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
