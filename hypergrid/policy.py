"""How groups are created: shared, connected at once, by whom; by argument or environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hypergrid.messages import shown

CHOICES = {
    "share": ("none", "all"),
    "connect": ("torch", "eager", "lazy"),
    "creation": ("auto", "members", "split", "everyone"),
}

DEFAULT = "the default"

_flags: dict[str, str] = {}


def take_flag(name: str, value: str) -> None:
    """Put a launcher's ``--name value`` into the environment."""
    os.environ[_variable(name)] = _flags[name] = value


def outermost(name: str, argument: Any = None) -> tuple[Any, str]:
    """The value for ``name``, and in words where it comes from. *Local*.

    A launcher's flag wins over the environment, and that over the argument.
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
    """One choice for all groups that are created together.

    Parameters
    ----------
    share : {"none", "all"}
        Which names with equal ranks, backend, options, timeout and traffic use one communicator:
        none, or all but groups that must be separate. The default group is never shared.
    connect : {"torch", "eager", "lazy"}
        When members connect: as torch does, gloo at once and NCCL on first use; every backend at
        once, but NCCL not for a single rank, nor where an unbatched send has a communicator of
        its two ranks (docs/failures.md); all on first use, if every rank's gloo can.
    creation : {"auto", "members", "split", "everyone"}
        Who takes part in creating a group. "auto" is the first of the others that every rank
        supports; the others raise where they are impossible.
    """

    share: str = "none"
    connect: str = "torch"
    creation: str = "auto"

    @classmethod
    def resolve(cls, **given: str | None) -> Policy:
        """The choices of ``HYPERGRID_SHARE`` etc., else those given, else the defaults.

        Raises ValueError on an invalid choice.
        """
        values: dict[str, Any] = {}
        for name, choices in CHOICES.items():
            argument = given.get(name)
            value: Any = outermost(name, argument)[0]
            if value is None or (isinstance(value, str) and not value):
                value = getattr(cls, name)
            if not isinstance(value, str) or value not in choices:
                source = name if value is argument else _variable(name)
                raise ValueError(
                    f"{source}={shown(value)} is invalid: use one of {', '.join(choices)}."
                )
            values[name] = value
        return cls(**values)

    def may_share(self, kind: object) -> bool:
        """Whether a group of ``kind`` (None: it must be separate) may be used for two names."""
        return kind is not None and self.share == "all"
