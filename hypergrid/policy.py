"""How groups are created: shared, connected at once, by whom; by argument or environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from hypergrid.errors import AgreementError
from hypergrid.messages import shown

CHOICES = {
    "share": ("none", "all", "states"),
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
    variable = _variable(name)
    value = os.environ.get(variable)
    if value is not None and value == _flags.get(name):
        return value, f"--{name}"
    if value:
        return value, f"{variable} in the environment"
    if argument is None:
        return None, DEFAULT
    return argument, f"the argument `{name}`"


def timeout_of_all() -> timedelta | None:
    """The timeout of all groups, where --timeout or HYPERGRID_TIMEOUT sets it. *Local*.

    ValueError if it is not a number of minutes above 0.
    """
    value, source = outermost("timeout")
    if value is None:
        return None
    try:
        timeout = timedelta(minutes=float(value))
    except (OverflowError, ValueError):
        timeout = timedelta()
    if timeout <= timedelta():
        raise ValueError(
            f"invalid timeout {shown(value)}, from {source}: give a number of minutes above 0, "
            f"such as 30."
        )
    return timeout


def _variable(name: str) -> str:
    return f"HYPERGRID_{name.upper()}"


@dataclass(frozen=True)
class Policy:
    """One choice for all groups that are created together.

    Parameters
    ----------
    share : {"none", "all", "states"}
        Which names with equal ranks, backend, options, timeout and traffic use one communicator:
        none, or all but groups that must be separate. "states" is "all", and each group also uses
        the communicator of an earlier state of the same ranks, if that has an equal one and was
        created with "states": for states of which one works at a time. The default group is never
        shared.
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
    def resolve(cls, **arguments: str | None) -> Policy:
        """The choices of ``HYPERGRID_SHARE`` etc., else the arguments, else the defaults.

        Raises ValueError on an invalid choice.
        """
        values: dict[str, Any] = {}
        for name, choices in CHOICES.items():
            argument = arguments.get(name)
            value, _ = outermost(name, argument)
            if value is None or (isinstance(value, str) and not value):
                value = getattr(cls, name)
            if not isinstance(value, str) or value not in choices:
                source = _variable(name)
                if value is argument:
                    source = name
                allowed = ", ".join(choices)
                raise ValueError(f"{source}={shown(value)} is invalid: use one of {allowed}.")
            values[name] = value
        return cls(**values)


class Kind(NamedTuple):
    """The fields, besides the ranks, that are equal where two names use one communicator."""

    backend: str | None
    timeout: timedelta | None
    options: tuple[tuple[str, Any], ...] | None
    traffic: str = ""
    only: str = ""  # the label, where it shares with the same label of another state only

    def among(self, members: int) -> Kind:
        """The same for a group of that many: in a group of one rank, traffic never waits."""
        if members > 1:
            return self
        return self._replace(traffic="")

    def over(self, ranks: Sequence[int]) -> Communicator:
        """The key of the communicator of ``ranks``."""
        return tuple(ranks), self.among(len(ranks))


Communicator: TypeAlias = tuple[tuple[int, ...], Kind]  # its members, and its kind
Owners: TypeAlias = dict[Communicator, str]  # the label that each was created for


def owner_of(
    owners: Owners, label: str, ranks: Sequence[int], kind: Kind | None, policy: Policy
) -> str | None:
    """The label whose communicator the group uses; None for one of its own, noted in ``owners``."""
    if kind is None or policy.share == "none":
        return None
    # The first label with these ranks and this kind owns the communicator.
    owner = owners.setdefault(kind.over(ranks), label)
    if owner == label:
        return None
    return owner


@dataclass(frozen=True)
class Abilities:
    """The abilities of this process, as ranks report them in phase 1.

    ``obstacle`` says why no group can be created by its members alone; ``bound`` why none that
    torch splits can: the default group is bound to a device, and each of them is split from it.
    """

    obstacle: str | None = None
    bound: str | None = None
    can_connect_lazily: bool = True


class Way(NamedTuple):
    """Who creates a group, and why: where all conditions that are not None hold."""

    creators: str  # the choice of ``creation``
    why: str
    obstacle: bool | None = None  # members alone cannot create any group
    one_rank: bool | None = None
    bound: bool | None = None  # the default group is, and its splits want every rank
    splits: bool | None = None  # torch splits such a group where the default group is bound
    asked: str | None = None  # by ``creation``


# The first row that holds decides, on all ranks alike.
WAYS = (
    Way("everyone", "members alone cannot create a group here", obstacle=True),
    Way("members", "a group of one rank has nobody to connect to", one_rank=True),
    Way(
        "members",
        "torch splits no such group, and nobody else takes part",
        bound=True,
        splits=False,
    ),
    Way("everyone", "creation='everyone'", asked="everyone"),
    Way("split", "creation='split'", splits=True, asked="split"),
    Way("split", "torch splits each such group, with every rank", bound=True),
    Way("members", "nobody else is needed"),
)


@dataclass(frozen=True)
class Agreement:
    """The result on which the ranks of a window have agreed."""

    epoch: str  # part of every group's name; never used twice in the life of the store
    creation: str = "auto"  # as the policy asked
    obstacle: str = ""  # why members alone cannot create any group; empty if they can
    bound: str = ""  # why they cannot create one that torch splits; empty if they can
    lazy: bool = False  # whether gloo connects on first use

    @property
    def way(self) -> str:
        """Who creates groups of several ranks with the default group's backend."""
        return self.way_of(one_rank=False, splits=True)

    @property
    def why(self) -> str:
        """Why members alone cannot create; empty if they can."""
        return self.obstacle or self.bound

    def way_of(self, one_rank: bool, splits: bool) -> str:
        """Who creates a group: the choice of ``creation`` in the first row of ``WAYS`` that holds.

        ``splits`` says whether torch splits such a group where the default group is bound.
        """
        facts = {
            "obstacle": bool(self.obstacle),
            "one_rank": one_rank,
            "bound": bool(self.bound),
            "splits": splits,
            "asked": self.creation,
        }
        for way in WAYS:
            if all(getattr(way, name) in (None, fact) for name, fact in facts.items()):
                return way.creators
        raise AssertionError("the last row holds always")

    def is_as(self, other: Agreement) -> bool:
        """Whether the same ranks take part in creating each group as under ``other``."""
        return replace(self, epoch=other.epoch) == other


def choose(epoch: str, policy: Policy, abilities: Sequence[Abilities]) -> Agreement:
    """The agreement of all ranks; AgreementError where what the policy asks is impossible."""
    obstacle = next(filter(None, (of_rank.obstacle for of_rank in abilities)), "")
    bound = next(filter(None, (of_rank.bound for of_rank in abilities)), "")
    all_can_connect_lazily = all(of_rank.can_connect_lazily for of_rank in abilities)
    agreement = Agreement(
        epoch=epoch,
        creation=policy.creation,
        obstacle=obstacle,
        bound=bound,
        lazy=policy.connect == "lazy" and all_can_connect_lazily,
    )
    if policy.creation not in ("auto", agreement.way):
        raise AgreementError(
            f"creation={policy.creation!r} is not possible here: {agreement.why}. Use 'auto'."
        )
    return agreement
