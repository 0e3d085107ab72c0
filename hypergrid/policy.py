"""How groups are made: shared or not, connected now or later, by whom. Arguments or environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hypergrid.messages import shown

CHOICES = {
    "share": ("none", "singletons", "all"),
    "connect": ("torch", "eager", "lazy"),
    "creation": ("auto", "members", "split", "everyone"),
}

DEFAULT = "the default"

_flags: dict[str, str] = {}


def take_flag(name: str, value: str) -> None:
    """Put what a launcher was given as ``--name value`` into the environment, as its own."""
    os.environ[_variable(name)] = _flags[name] = value


def outermost(name: str, argument: Any = None) -> tuple[Any, str]:
    """What is asked for ``name``, and by whom, in words. *Local*.

    The outermost wins: a launcher's flag, then the environment, then the argument.
    """
    value = os.environ.get(_variable(name))
    if value is not None and value == _flags.get(name):
        return value, f"--{name}"
    if value:
        return value, f"{_variable(name)} in the environment"
    return argument, DEFAULT if argument is None else f"the argument `{name}`"


def _variable(name: str) -> str:
    return f"HYPERGRID_{name.upper()}"


@dataclass(frozen=True)
class Policy:
    """One choice for all groups that are made together.

    Parameters
    ----------
    share : {"none", "singletons", "all"}
        Which names with equal ranks, backend, options, timeout and traffic use one communicator:
        none of them, those of a single rank (whatever their traffic), all but groups that exist to
        be separate. The default group serves no name.
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
        """The choices by ``outermost``: of ``HYPERGRID_SHARE`` and its like, given, by default.

        Raises
        ------
        ValueError
            A choice that does not exist.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            argument = given.get(field.name)
            value: Any = outermost(field.name, argument)[0]
            if value is None or (isinstance(value, str) and not value):
                value = field.default
            source = field.name if value is argument else _variable(field.name)
            if not isinstance(value, str) or value not in CHOICES[field.name]:
                raise ValueError(
                    f"{source}={shown(value)} is invalid: use one of "
                    f"{', '.join(CHOICES[field.name])}."
                )
            values[field.name] = value
        return cls(**values)

    def may_share(self, kind: object, ranks: Sequence[int]) -> bool:
        """Whether a group of ``kind`` (None: it is there to be separate) may serve two names."""
        return kind is not None and (
            self.share == "all" or (self.share == "singletons" and len(ranks) == 1)
        )
