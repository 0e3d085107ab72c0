"""How groups are made: shared or not, connected now or later, by whom. Arguments or environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hypergrid.words import shown

CHOICES = {
    "share": ("none", "singletons", "all"),
    "connect": ("torch", "eager", "lazy"),
    "creation": ("auto", "members", "split", "everyone"),
}


@dataclass(frozen=True)
class Policy:
    """One choice for all groups that are made together.

    Parameters
    ----------
    share : {"none", "singletons", "all"}
        Which names with equal ranks, backend, options and timeout use one communicator: none of
        them, those of a single rank, all but groups that exist to be separate.
    connect : {"torch", "eager", "lazy"}
        When members connect: as torch does it, gloo at once and NCCL when the group is first
        used; every backend at once, but NCCL not for a rank alone; all on first use, where
        torch's gloo can.
    creation : {"auto", "members", "split", "everyone"}
        Who takes part in creating a group. "auto" takes the first of the others that every rank
        can do; the others insist.
    """

    share: str = "none"
    connect: str = "torch"
    creation: str = "auto"

    @classmethod
    def resolve(cls, **given: str | None) -> Policy:
        """The choices given, those of ``HYPERGRID_SHARE`` and its like, and the defaults.

        Raises
        ------
        ValueError
            A choice that does not exist.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = f"HYPERGRID_{field.name.upper()}"
            value: Any = given.get(field.name)
            if value is None or (isinstance(value, str) and not value):
                value = os.environ.get(variable) or field.default
            if not isinstance(value, str) or value not in CHOICES[field.name]:
                raise ValueError(
                    f"{field.name}={shown(value)} is no choice: use one of "
                    f"{', '.join(CHOICES[field.name])}, as argument or in {variable}."
                )
            values[field.name] = value
        return cls(**values)

    def may_share(self, kind: object, ranks: Sequence[int]) -> bool:
        """Whether a group of ``kind`` (None: it is there to be separate) may serve two names."""
        return kind is not None and (
            self.share == "all" or (self.share == "singletons" and len(ranks) == 1)
        )
