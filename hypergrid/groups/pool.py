"""GroupPool: owns the process groups that were created together, and alone destroys them."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.commit import (
    all_or_none,
    at_label,
    creating,
    prepare,
    telling_others,
)
from hypergrid.agreement.store import raise_if_waits_ended, settle
from hypergrid.errors import AgreementError, CreationError
from hypergrid.groups import closing, creation, gloo
from hypergrid.groups.creation import Ranks
from hypergrid.groups.suspension import Suspended, Suspension
from hypergrid.layout import span_of
from hypergrid.messages import in_words, shortened, shown
from hypergrid.policy import Agreement, Kind, Owners, Policy, owner_of

DEFAULT = "the default group"
_log = logging.getLogger(__name__)
# For code that uses groups of a pool: called with those that are about to be destroyed, and
# whether it must not wait for other ranks.
before_closing: set[Callable[[Sequence[ProcessGroup], bool], None]] = set()
# Called with each AgreementError and CreationError, before it leaves the pool.
after_failure: set[Callable[[BaseException], None]] = set()
_live: weakref.WeakSet[GroupPool] = weakref.WeakSet()
_kept: set[GroupPool] = set()  # kept alive: torch still has groups of theirs


@dataclass(frozen=True)
class PooledGroup:
    """A label's group: its global ranks, torch's group, its dims, and whose communicator it is.

    ``shares`` is None for a group created for this label; else the label that it was created for,
    with the owner's name if it is another pool's, or ``DEFAULT`` where outside code returned the
    default group.
    """

    label: str
    ranks: tuple[int, ...]
    group: ProcessGroup
    dims: tuple[str, ...] = ()
    shares: str | None = None


class _Contents(NamedTuple):
    """The contents of a pool before a creation, to which it is rolled back after a failure."""

    groups: int
    owners: Owners
    labels: int


class GroupPool:
    """Live groups of this process in the order of creation; ``owner`` is for messages."""

    def __init__(self, policy: Policy, owner: str = "") -> None:
        self.agreement = Agreement("")  # the last one; none yet where its epoch is empty
        self.policy = policy
        self.owner = owner
        self.groups: list[PooledGroup] = []
        self.suspended: Suspension | None = None
        self._owners: Owners = {}
        # One for each call of ``make``: equal on all ranks, also on those outside of the group.
        self._labels: list[str] = []
        self._timeout: timedelta | None = None  # with which the groups were created
        self._ranks: Sequence[int] = ()  # that created them together
        self._lenders: list[GroupPool] = []  # whose communicators are used while groups are created
        self.lends = policy.share == "states"  # whether later pools may use its communicators
        self.holder: Callable[[], Any] = weakref.ref(self)  # whose destroy() is all of it
        live_pools()  # lets go of those whose groups outside code has destroyed
        _live.add(self)

    @contextmanager
    def two_phase_commit(
        self,
        ranks: Sequence[int],
        proposal: Mapping[str, Any],
        timeout: timedelta | None = None,
        init_count: int | None = None,
        one_device: bool = False,
        call: str = "creating groups",
    ) -> Iterator[None]:
        """Create groups inside: on all ranks, or on none. *Collective* over ``ranks``.

        Arguments as for ``hypergrid.agreement.commit.prepare``; each call has an epoch of its own.
        ``one_device`` lets gloo groups that connect at once share a device, see
        ``gloo.one_device``: then the caller holds none of the groups when this raises. ``call`` is
        the name of what all ranks call, for messages of one that waits.

        Raises
        ------
        AbortedError
            ``hypergrid.abort()`` was called meanwhile.
        AgreementError
            The ranks were asked for different groups, or one of them refused or did not arrive.
        CreationError
            A rank could not create its group; all have rolled back.
        """
        if self.suspended is not None:
            raise RuntimeError(
                f"rank {dist.get_rank()} cannot create groups: those of {self.owner} are "
                f"suspended. Call resume() first, on every rank."
            )
        if not isinstance(timeout, timedelta | None):
            raise TypeError(f"timeout must be a datetime.timedelta, got {shown(timeout)}.")
        call = f"{call} of {self.owner}"
        with _reporting_failures(), creating(ranks, timeout) as store:
            abilities = creation.abilities(self.policy)
            lenders = self._possible_lenders(ranks)
            if lenders:
                epochs = [lender.agreement.epoch for lender in lenders]
                proposal = {**proposal, "states to share with, by epoch": ", ".join(epochs)}
            self.agreement = prepare(
                store, ranks, proposal, self.policy, abilities, timeout, life=init_count, call=call
            )
            self._timeout = timeout
            self._ranks = ranks
            self._lenders = [lender for lender in lenders if lender.agreement.is_as(self.agreement)]
            before = self._contents()
            try:
                with (
                    all_or_none(store, self.agreement.epoch, ranks, timeout, call),
                    gloo.one_device() if one_device else nullcontext(),
                ):
                    gloo.note_default()
                    begin = time.monotonic()
                    yield
                    created = self.groups[before.groups :]
                    _log.info(
                        "%s: created %d groups on %d communicators in %.3f s, by %s",
                        call,
                        len(created),
                        sum(pooled.shares is None for pooled in created),
                        time.monotonic() - begin,
                        self.agreement.way,
                    )
                    raise_if_waits_ended()
                settle()
            except BaseException as error:
                self._roll_back(before)
                if one_device:
                    _forget_locals(error)
                raise
            finally:
                self._lenders = []

    def _possible_lenders(self, ranks: Sequence[int]) -> list[GroupPool]:
        """Earlier pools of the same ranks and choices that lend; equal on all ranks, or refused."""
        if self.policy.share != "states":
            return []
        registered = of_torch.registered_groups()
        lenders = []
        for pool in self._others():
            if not pool.lends or pool.suspended:
                continue
            if pool.policy != self.policy or pool._ranks != ranks:
                continue
            # Outside code may have destroyed some of its groups, on this rank or on another.
            if all(pooled.group in registered for pooled in pool.groups):
                lenders.append(pool)
        return sorted(lenders, key=lambda pool: pool.agreement.epoch)

    def _existing(
        self, label: str, ranks: Ranks, kind: Kind | None
    ) -> tuple[GroupPool, str] | None:
        """The pool and the label whose communicator a group uses; None for one of its own."""
        if kind is None or self.policy.share == "none":
            return None
        owner = owner_of(self._owners, label, ranks, kind, self.policy)
        if owner is not None:
            return self, owner
        for lender in self._lenders:
            owner = lender._owners.get(kind.over(ranks))
            if owner is not None:
                return lender, owner
        return None

    def _contents(self) -> _Contents:
        return _Contents(len(self.groups), dict(self._owners), len(self._labels))

    def _roll_back(self, before: _Contents) -> None:
        self.destroy(before.groups, abort=True)  # other ranks may never destroy theirs
        self._owners = before.owners
        del self._labels[before.labels :]

    def make(
        self,
        label: str,
        ranks_of: Mapping[str, Ranks],
        everyone: Callable[[], Sequence[Ranks]],
        *,
        dims: tuple[str, ...] = (),
        kind: Kind | None = None,
        **options: Any,
    ) -> list[ProcessGroup]:
        """Create the groups of one label; returns those of this rank, often one or none.

        *Collective* over the members of each group, or over the world where the agreement says
        that members alone cannot create. A failed call rolls back.

        Parameters
        ----------
        label : str
            The name; also the description, unless ``group_desc`` is given.
        ranks_of : mapping of name to ranks
            The groups that this rank belongs to, as ``{"TENSOR": (2, 3)}`` on rank 3; the name is
            equal on all members.
        everyone : function
            Returns all groups of the label, as ``[(0, 1), (2, 3)]``; called only where members
            alone cannot create.
        kind : Kind, optional
            What must be equal, besides the ranks, to share a communicator; None: never shared.
        **options
            As for ``torch.distributed.new_group``; ``dims`` are for ``hypergrid.dump``.

        Raises
        ------
        CreationError
            Torch could not create a group; its own error is the cause.
        """
        before = self._contents()
        begin = time.monotonic()
        at_label(label)
        options.setdefault("group_desc", label)
        backend = options.get("backend")
        timeout = options.get("timeout")
        # Some groups of Megatron have a longer timeout than the one with which all are created.
        shorter = creation.creation_timeout(backend, timeout, self._timeout)
        if shorter is not None:
            options["timeout"] = shorter
        try:
            with self.connecting():
                for pooled in self._create_each(label, ranks_of, everyone, dims, kind, options):
                    # Before any other call: a failure in it destroys what is in this list.
                    self.groups.append(pooled)
                    self._take_into_use(pooled, timeout)
                    # It fails in time while it connects, and has its own timeout from now on.
                    if shorter is not None and pooled.shares is None:
                        of_torch.set_timeout(timeout or of_torch.default_timeout(), pooled.group)
                self._labels.append(label)
                if _log.isEnabledFor(logging.DEBUG):
                    self._log_groups(before.groups, backend, time.monotonic() - begin)
        except BaseException as error:
            self._roll_back(before)
            # Torch may have groups that this pool has not: a Ctrl-C came in between, or the world
            # has created several, and the first could not be taken into use.
            in_pool = [pooled.group for pooled in self.groups]
            named = creation.named_groups(label, ranks_of, self.agreement.epoch)
            closing.abort(group for group in named if group not in in_pool)
            if type(error) is RuntimeError or isinstance(error, dist.DistError):
                raise self._failure(label, ranks_of.values(), backend, error) from error
            raise
        return [pooled.group for pooled in self.groups[before.groups :]]

    def _create_each(
        self,
        label: str,
        ranks_of: Mapping[str, Ranks],
        everyone: Callable[[], Sequence[Ranks]],
        dims: tuple[str, ...],
        kind: Kind | None,
        options: dict[str, Any],
    ) -> Iterator[PooledGroup]:
        """Create this rank's groups of a label, each when the caller asks for the next one.

        One that shares no communicator is created by whom the ranks have agreed on.
        """
        agreement = self.agreement
        backend = options.get("backend")
        lazy = self.policy.connect == "lazy"
        way = way_of_one_rank = creation.way_of(agreement, backend, dist.get_world_size())
        if way != "members":  # a rank may create a group of its own without the others
            way_of_one_rank = creation.way_of(agreement, backend, 1)

        def is_by_members(ranks: Ranks) -> bool:
            return (way_of_one_rank if len(ranks) == 1 else way) == "members"

        of_this_rank: list[ProcessGroup] = []
        if way != "members":
            # Every rank leaves out the same groups, including those that it is not in.
            missing = []
            for ranks in everyone():
                if not is_by_members(ranks) and self._existing(label, ranks, kind) is None:
                    missing.append(ranks)
            of_this_rank = creation.by_world(way, label, missing, agreement.epoch, **options)
        for name, ranks in ranks_of.items():
            shares = None
            existing = self._existing(label, ranks, kind)
            if existing is not None:
                owner, shares = existing
                group = owner._shared(ranks, shares)
                if owner is not self:
                    shares = f"{shares} of an earlier {owner.owner}"
            elif is_by_members(ranks):
                group = creation.by_members(name, ranks, agreement.epoch, lazy, **options)
            else:
                # by_world returns this rank's groups in the order of ranks_of.
                group = of_this_rank.pop(0)
            yield PooledGroup(label, tuple(ranks), group, dims, shares)

    def _log_groups(self, first: int, backend: str | None, seconds: float) -> None:
        for pooled in self.groups[first:]:
            way = creation.way_of(self.agreement, backend, len(pooled.ranks))
            how = f"created by {way}"
            if pooled.shares is not None:
                how = f"shares {pooled.shares}"
            _log.debug(
                "%s of ranks %s: %s, %.1f ms with all groups of this label",
                pooled.label,
                span_of(pooled.ranks),
                how,
                1000 * seconds,
            )

    def adopt(self, label: str, ranks: Ranks, group: Any, dims: tuple[str, ...] = ()) -> None:
        """Own from now on a group that outside code created for ``label``.

        A group that it has returned before, or torch's default group, is shared.
        """
        if not isinstance(group, ProcessGroup):
            return
        labels = [pooled.label for pooled in self.groups if pooled.group is group]
        shares = next(iter(labels), None)
        if group is of_torch.default_group():
            shares = DEFAULT
        adopted = PooledGroup(label, tuple(ranks), group, dims, shares)
        self.groups.append(adopted)
        self._take_into_use(adopted)

    def _take_into_use(self, pooled: PooledGroup, timeout: timedelta | None = None) -> None:
        _kept.add(self)
        if pooled.shares is None:
            gloo.note(pooled.group)
            closing.watch(pooled.group)
            raise_if_waits_ended()
            self._connect(pooled, timeout)

    def _connect(self, pooled: PooledGroup, timeout: timedelta | None) -> None:
        # A wrapper by outside code is none of torch's groups.
        if self.policy.connect != "eager" or not of_torch.is_registered(pooled.group):
            return
        if not creation.is_lazy(pooled.group):
            return
        backend = dist.get_backend(pooled.group)
        try:
            creation.connect(pooled.group, timeout or of_torch.default_timeout(backend))
        except RuntimeError as error:
            raise self._failure(pooled.label, [pooled.ranks], backend, error) from error

    def connecting(self) -> AbstractContextManager[None]:
        """Inside, gloo groups connect at once or on first use, as the ranks have agreed."""
        lazily = None  # as torch is set
        if self.agreement.lazy:
            lazily = True
        elif self.policy.connect == "eager":
            lazily = False
        return gloo.connecting(lazily)

    def _failure(
        self, label: str, groups: Iterable[Ranks], backend: str | None, error: BaseException
    ) -> CreationError:
        spans = " or ".join(map(span_of, groups))
        members = shortened(spans or "other ranks", 80)
        reason = "One of them may have ended, is unreachable or waits."
        if isinstance(error, dist.DistNetworkError):  # torch's stores raise it, and no backend
            reason = (
                "The store through which ranks connect is lost: the process or the host that "
                "serves it has ended, or the network to it is cut."
            )
        rank = dist.get_rank()
        backend = backend or dist.get_backend()
        return CreationError(
            f"rank {rank} could not create {label} of ranks {members} with {backend}: "
            f"{in_words(error)} {reason}"
        )

    def _shared(self, ranks: Ranks, owner: str) -> ProcessGroup:
        for pooled in self.groups:
            if pooled.label == owner and pooled.ranks == tuple(ranks):
                return pooled.group
        raise LookupError(f"{owner} has no group of {shown(ranks)}")

    def destroy(self, keep: int = 0, *, abort: bool = False) -> None:
        """Destroy every group but the first ``keep``.

        *Local* with ``abort``; else NCCL waits until the other members destroy the group too. A
        group that torch cannot destroy, and a function of ``before_closing`` that raises, cause a
        warning, and the other groups are destroyed.
        With ``abort`` NCCL drops operations in progress, and gloo's connections are shut.
        In a forked child the groups of its parent are only forgotten.
        """
        self._drop(self.groups[keep:], abort)
        if not keep:
            self._labels = []
            self._owners = {}
            self.suspended = None

    def close(self, groups: Iterable[ProcessGroup | None], *, abort: bool = False) -> None:
        """Destroy those of ``groups`` that are this pool's, as ``destroy`` does."""
        self.lends = False  # not all that it created is there any more
        # By identity: outside code may have wrapped a group in an object with an __eq__ of its own.
        identities = {id(group) for group in groups}
        leaving = [pooled for pooled in self.groups if id(pooled.group) in identities]
        self._drop(leaving, abort)

    def suspend(self, ranks: Sequence[int]) -> dict[str, Suspended]:
        """Free the device memory of the groups until ``resume``: on all ranks, or on none.

        *Collective* over ``ranks``, at four round trips to the store per rank, and only between
        collectives. The ranks agree before the first group is suspended and after the last. The
        groups stay the same objects. One that its backend has suspended must not be used until
        ``resume``: neither torch nor this pool refuses a collective over it. No group can be
        created in this pool meanwhile. A group that another pool uses too is suspended with the
        last of them, and awake with the first that resumes.

        Parameters
        ----------
        ranks : sequence of int
            The ranks that created the groups together.

        Returns
        -------
        dict
            What was done, by backend: NCCL frees its memory from 2.29.7 and torch 2.12 on; gloo
            has none, and its groups are kept.

        Raises
        ------
        RuntimeError
            The groups are suspended already, or a backend of this rank cannot suspend.
        AgreementError
            Another rank raised, has other groups, or did not call this.
            After an error all groups are awake, on every rank.
        """
        call = f"suspend of {self.owner}"
        timeout = self._timeout
        with _reporting_failures(), creating(ranks, timeout) as store:
            with telling_others(lambda: ranks):
                if self.suspended is not None:
                    raise RuntimeError(
                        f"the groups of {self.owner} are suspended already: call resume() first."
                    )
            proposal = {
                "groups": ", ".join(self._labels),
                "epoch": self.agreement.epoch,
            }
            # NCCL waits for all members: a rank that will not suspend must be known before.
            prepare(store, ranks, proposal, timeout=timeout, call=call)
            suspension = Suspension()
            self.suspended = suspension
            try:
                begin = time.monotonic()
                with telling_others(lambda: ranks):
                    awake_pools = [pool for pool in self._others() if pool.suspended is None]
                    suspension.start(label_of(self.groups, awake_pools))
                seconds = time.monotonic() - begin
                _log.info("%s: suspended in %.3f s: %s", call, seconds, suspension.report)
                suspended = {**proposal, "suspended": True}
                prepare(store, ranks, suspended, timeout=timeout, call=call)
            except BaseException:
                # abort() may have destroyed the groups meanwhile.
                if self.suspended is suspension:
                    self.resume()
                raise
        return suspension.report

    def resume(self) -> None:
        """Let suspended groups work again: the same objects.

        *Collective* over the members of each group that its backend has suspended, else *local*.
        RuntimeError if the groups are not suspended, or a backend cannot resume; a further call
        then goes on with that group.
        """
        if self.suspended is None:
            raise RuntimeError(f"the groups of {self.owner} are not suspended.")
        begin = time.monotonic()
        groups = [pooled.group for pooled in self.groups]
        for pool in [*self._others(), self]:
            if pool.suspended is not None:
                pool.suspended.wake(groups)
        self.suspended = None
        _log.info("resume of %s: done in %.3f s", self.owner, time.monotonic() - begin)

    def _drop(self, leaving: list[PooledGroup], abort: bool) -> None:
        before = self.groups
        self.groups = [pooled for pooled in before if pooled not in leaving]
        try:
            self._close(leaving, abort)
        except BaseException:
            # Ctrl-C in the middle: the next call destroys what torch still has.
            self.groups = [
                pooled
                for pooled in before
                if pooled not in leaving or of_torch.is_registered(pooled.group)
            ]
            raise

    def _others(self) -> list[GroupPool]:
        return [pool for pool in live_pools() if pool is not self]

    def _uses(self, group: ProcessGroup) -> bool:
        return any(pooled.group is group for pooled in self.groups)

    def _close(self, leaving: list[PooledGroup], abort: bool) -> None:
        users = [self]
        if self.policy.share == "states":
            users += self._others()
        labels = label_of(leaving, users)
        if not closing.inherited.isdisjoint(labels):
            abort = True  # the groups are those of the parent process: they are only forgotten
        if abort:  # else gloo waits for its operations in progress when it destroys the group
            gloo.shut(labels)
        functions = before_closing if leaving else ()
        for function in functions:
            try:
                function([*labels], abort)
            except Exception as error:
                _warn(f"{shown(function)} raised while groups are destroyed: {in_words(error)}")
        begin = time.monotonic()
        reasons = closing.abort(labels) if abort else closing.close(labels)
        _log.info(
            "%s %d groups of %s in %.3f s",
            "aborted" if abort else "destroyed",
            len(labels),
            self.owner,
            time.monotonic() - begin,
        )
        for group, reason in reasons.items():
            _warn(f"rank {dist.get_rank()} could not destroy {labels[group]}: {reason}")


def label_of(
    groups: Iterable[PooledGroup], users: Iterable[GroupPool] = ()
) -> dict[ProcessGroup, str]:
    """Torch's groups among these that none of ``users`` has, with their labels.

    The label of each is the one that it was created for, or else its first among these.
    """
    registered = of_torch.registered_groups()
    used = set[int]()
    for pool in users:
        used.update(id(pooled.group) for pooled in pool.groups)
    labels: dict[ProcessGroup, str] = {}
    for pooled in groups:
        # Outside code may have destroyed a group, or returned another object for it.
        if pooled.shares == DEFAULT or pooled.group not in registered:
            continue
        if id(pooled.group) in used:
            continue
        labels.setdefault(pooled.group, pooled.label)
        if pooled.shares is None:
            labels[pooled.group] = pooled.label
    return labels


def _forget_locals(error: BaseException | None) -> None:
    """Let go of what the error's traceback holds, and those of its causes: groups on one device."""
    cleared = set[int]()  # errors may be each other's context
    while error is not None and id(error) not in cleared:
        cleared.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def _reporting_failures() -> Iterator[None]:
    try:
        yield
    except (AgreementError, CreationError) as error:
        for function in after_failure:
            function(error)
        raise


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)  # at the caller of destroy


def live_pools() -> list[GroupPool]:
    """Every pool of this process that has groups, or is suspended."""
    registered = of_torch.registered_groups()
    for pool in [*_kept]:
        if not any(pooled.group in registered for pooled in pool.groups):
            _kept.discard(pool)
    while True:
        try:
            return [pool for pool in [*_live] if pool.groups or pool.suspended is not None]
        except RuntimeError:  # another thread has created a pool meanwhile
            continue


def stop_lending(groups: Sequence[ProcessGroup | None]) -> None:
    """Let no later pool use the communicators of the pools that have one of ``groups``: changed."""
    for pool in live_pools():
        if any(group is not None and pool._uses(group) for group in groups):
            pool.lends = False
