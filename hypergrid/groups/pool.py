"""GroupPool: owns the process groups that were created together, and alone destroys them."""

from __future__ import annotations

import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.commit import all_or_none
from hypergrid.agreement.prepare import Abilities, Agreement, agree, one_thread, telling_others
from hypergrid.agreement.store import abortable, check_timeout, raise_if_waits_ended, settle
from hypergrid.errors import AgreementError, CreationError
from hypergrid.groups import backends, closing, creation, gloo, sockets
from hypergrid.groups.creation import Ranks
from hypergrid.groups.suspension import HOW, Suspended, Suspension
from hypergrid.messages import in_words, shortened, shown, span_of
from hypergrid.plan import Kind
from hypergrid.policy import Policy

DEFAULT = "the default group"
# For code that uses groups of a pool: called with those that are about to be destroyed, and
# whether it must not wait for other ranks.
before_closing: set[Callable[[Sequence[ProcessGroup], bool], None]] = set()
# Called with each AgreementError and CreationError, before it leaves the pool.
after_failure: set[Callable[[BaseException], None]] = set()
_live: weakref.WeakSet[GroupPool] = weakref.WeakSet()
_kept: set[GroupPool] = set()  # whoever holds them: torch keeps groups of theirs


@dataclass(frozen=True)
class PooledGroup:
    """A label's group: its global ranks, torch's group, its dims, and whose communicator it is.

    ``shares`` is None for a group created for this label; else the label that it was created for,
    or ``DEFAULT`` where outside code returned the default group.
    """

    label: str
    ranks: tuple[int, ...]
    group: ProcessGroup
    dims: tuple[str, ...] = ()
    shares: str | None = None


class GroupPool:
    """Live groups of this process in the order of creation; ``owner`` is for messages."""

    def __init__(self, agreement: Agreement, policy: Policy, owner: str = "") -> None:
        self.agreement = agreement
        self.policy = policy
        self.owner = owner
        self.groups: list[PooledGroup] = []
        self.suspended: Suspension | None = None
        self._owners: dict[tuple[Ranks, Kind], str] = {}
        # One for each call of ``make``: equal on all ranks, also on those outside of the group.
        self._labels: list[str] = []
        self._timeout: timedelta | None = None  # with which the groups were created
        self.holder: Callable[[], Any] = weakref.ref(self)  # whose destroy() is all of it
        live_pools()  # lets go of those whose groups outside code has destroyed
        _live.add(self)

    @contextmanager
    def agreed(
        self,
        ranks: Sequence[int],
        proposal: Mapping[str, Any],
        timeout: timedelta | None = None,
        init_count: int | None = None,
        one_device: bool = False,
    ) -> Iterator[None]:
        """Create groups inside by a two-phase commit: all ranks or none. *Collective* over them.

        Arguments as for ``hypergrid.agreement.prepare.agree``; each call has an epoch of its own.
        ``one_device`` lets gloo groups that connect at once share a device, see
        ``gloo.one_device``: then the caller holds none of the groups when this raises.

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
        check_timeout(timeout)
        with _telling(), one_thread(ranks), abortable():
            can = creation.abilities(self.policy)
            self.agreement = agree(ranks, proposal, self.policy, can, timeout, init_count)
            self._timeout = timeout
            timeout = timeout or of_torch.default_timeout()
            try:
                with (
                    self._rolling_back(),
                    all_or_none(self.agreement.epoch, ranks, timeout),
                    gloo.one_device() if one_device else nullcontext(),
                ):
                    sockets.note_default()
                    yield
                    raise_if_waits_ended()
                settle()
            except BaseException as error:
                if one_device:
                    _forget_locals(error)
                raise

    @contextmanager
    def _rolling_back(self) -> Iterator[None]:
        before, owners, labels = len(self.groups), dict(self._owners), [*self._labels]
        try:
            yield
        except BaseException:
            self.destroy(before, abort=True)  # other ranks may never destroy theirs
            self._owners, self._labels = owners, labels
            raise

    def make(
        self,
        label: str,
        mine: Mapping[str, Ranks],
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
        mine : mapping of name to ranks
            The groups that this rank belongs to; the name is equal on all members.
        everyone : function
            Returns all groups of the label; called only where members alone cannot create.
        kind : Kind, optional
            What must be equal, besides the ranks, to share a communicator; None: never shared.
        **options
            As for ``torch.distributed.new_group``; ``dims`` are for ``hypergrid.dump``.

        Raises
        ------
        CreationError
            Torch could not create a group; its own error is the cause.
        """
        options.setdefault("group_desc", label)
        before, timeout = len(self.groups), options.get("timeout")
        # Some groups of Megatron have a longer timeout than the one with which all are created.
        limit = timeout or of_torch.default_timeout()
        if self._timeout is not None:
            limit = min(limit, self._timeout)
        shorter = backends.creation_timeout(options.get("backend"), limit)
        if shorter is not None:
            options["timeout"] = shorter
        try:
            with self._rolling_back(), self.connecting():
                if creation.way_of(self.agreement, options.get("backend")) == "members":
                    made = self._make_mine(label, mine, kind, options)
                else:
                    made = self._make_all(label, mine, everyone(), kind, options)
                for ranks, group, shares in made:
                    self.groups.append(PooledGroup(label, tuple(ranks), group, dims, shares))
                    _kept.add(self)
                    gloo.note(group)
                    closing.watch(group)
                    raise_if_waits_ended()
                    self._connect(self.groups[-1], timeout)
                    if shorter is not None and shares is None:
                        of_torch.set_timeout(timeout or of_torch.default_timeout(), group)
                self._labels.append(label)
        except BaseException as error:
            if type(error) is RuntimeError or isinstance(error, dist.DistError):
                raise self._failure(label, mine, options, error) from error
            raise
        return [pooled.group for pooled in self.groups[before:]]

    def adopt(self, label: str, ranks: Ranks, group: Any, dims: tuple[str, ...] = ()) -> None:
        """Own from now on a group that outside code created for ``label``.

        A group that it has returned before, or torch's default group, is shared.
        """
        if isinstance(group, ProcessGroup):
            shares = DEFAULT if group is of_torch.default_group() else None
            before = (pooled.label for pooled in self.groups if pooled.group is group)
            shares = shares or next(before, None)
            self.groups.append(PooledGroup(label, tuple(ranks), group, dims, shares))
            if shares is None:
                gloo.note(group)
            self._connect(self.groups[-1])

    def _connect(self, pooled: PooledGroup, timeout: timedelta | None = None) -> None:
        eager = self.policy.connect == "eager" and pooled.shares is None
        eager = eager and of_torch.knows(pooled.group)  # not a wrapper by outside code
        if not eager or not backends.connects_later(pooled.group):
            return
        backend = dist.get_backend(pooled.group)
        try:
            creation.connect(pooled.group, timeout or of_torch.default_timeout(backend))
        except RuntimeError as error:
            mine, options = {pooled.label: pooled.ranks}, {"backend": backend}
            raise self._failure(pooled.label, mine, options, error) from error

    def connecting(self) -> AbstractContextManager[None]:
        """Inside, gloo groups connect at once or on first use, as the ranks have agreed."""
        lazily = None
        if self.agreement.lazy:
            lazily = True
        elif self.policy.connect == "eager":
            lazily = False
        return gloo.connecting(lazily)

    def _make_mine(
        self, label: str, mine: Mapping[str, Ranks], kind: Kind | None, options: dict[str, Any]
    ) -> Iterator[tuple[Ranks, ProcessGroup, str | None]]:
        for name, ranks in mine.items():
            owner = self._owner(label, ranks, kind)
            if owner is None:
                waits = self.policy.connect == "lazy"
                group = creation.by_members(name, ranks, self.agreement.epoch, waits, **options)
            else:
                group = self._shared(ranks, owner)
            yield ranks, group, owner

    def _make_all(
        self,
        label: str,
        mine: Mapping[str, Ranks],
        groups: Sequence[Ranks],
        kind: Kind | None,
        options: dict[str, Any],
    ) -> Iterator[tuple[Ranks, ProcessGroup, str | None]]:
        # Every rank leaves out the same groups, including those that it is not in.
        owners = {tuple(ranks): self._owner(label, ranks, kind) for ranks in groups}
        missing = [ranks for ranks in groups if owners[tuple(ranks)] is None]
        way = creation.way_of(self.agreement, options.get("backend"))
        fresh = creation.by_world(way, label, missing, self.agreement.epoch, **options)
        for ranks in mine.values():
            owner = owners[tuple(ranks)]
            yield ranks, fresh.pop(0) if owner is None else self._shared(ranks, owner), owner

    def _failure(
        self, label: str, mine: Mapping[str, Ranks], options: dict[str, Any], error: BaseException
    ) -> CreationError:
        members = shortened(" or ".join(map(span_of, mine.values())) or "other ranks", 80)
        reason = "One of them may have ended, or cannot be reached."
        if isinstance(error, dist.DistNetworkError):  # torch's stores raise it, and no backend
            reason = (
                "The store through which ranks connect is lost: the process or the host that "
                "serves it has ended, or the network to it is cut."
            )
        return CreationError(
            f"rank {dist.get_rank()} could not create {label} of ranks {members} "
            f"with {options.get('backend') or dist.get_backend()}: {in_words(error)} {reason}"
        )

    def _owner(self, label: str, ranks: Ranks, kind: Kind | None) -> str | None:
        """Whose communicator ``ranks`` use; None for a new one, which is then the label's."""
        if kind is None or not self.policy.may_share(kind):
            return None
        owner = self._owners.setdefault((tuple(ranks), kind.among(len(ranks))), label)
        return None if owner == label else owner

    def _shared(self, ranks: Ranks, owner: str) -> ProcessGroup:
        members = tuple(ranks)
        (group,) = (g.group for g in self.groups if g.label == owner and g.ranks == members)
        return group

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
            self.suspended = None

    def close(self, groups: Iterable[ProcessGroup], *, abort: bool = False) -> None:
        """Destroy those of ``groups`` that are this pool's, as ``destroy`` does."""
        asked = {id(group) for group in groups}
        self._drop([pooled for pooled in self.groups if id(pooled.group) in asked], abort)

    def suspend(self, ranks: Sequence[int], how: str = "native") -> dict[str, Suspended]:
        """Free the device memory of the groups until ``resume``: on all ranks, or on none.

        *Collective* over ``ranks``, at six round trips to the store per rank, and only between
        collectives. The ranks agree before the first group is suspended and after the last. The
        groups stay the same objects. One that its backend has suspended must not be used until
        ``resume``: neither torch nor this pool refuses a collective over it. No group can be
        created in this pool meanwhile.

        Parameters
        ----------
        ranks : sequence of int
            The ranks that created the groups together.
        how : str
            ``"native"``: each backend frees the memory of its groups, as NCCL does from 2.29.7 and
            torch 2.12 on; gloo has no device memory, and its groups are kept. ``"keep"``: all
            groups are kept, and nothing happens to them.

        Returns
        -------
        dict
            What was done, by backend.

        Raises
        ------
        ValueError
            Another ``how``.
        RuntimeError
            The groups are suspended already, or a backend of this rank cannot suspend.
        AgreementError
            Another rank raised, has other groups or another ``how``, or did not call this.
            After an error all groups are awake, on every rank.
        """
        with _telling(), abortable():
            with telling_others(lambda: ranks):
                self._check_suspend(how)
            proposal = {
                "suspend": how,
                "groups": ", ".join(self._labels),
                "epoch": self.agreement.epoch,
            }
            # NCCL waits for all members: a rank that will not suspend must be known before.
            agree(ranks, proposal, Policy(), Abilities(), self._timeout)
            suspension = Suspension()
            self.suspended = suspension
            try:
                with telling_others(lambda: ranks):
                    suspension.start(self._label_of_own_groups(), how)
                suspended = {**proposal, "suspended": True}
                agree(ranks, suspended, Policy(), Abilities(), self._timeout)
            except BaseException:
                # abort() may have destroyed the groups meanwhile.
                if self.suspended is suspension:
                    self.resume()
                raise
        return suspension.report

    def _check_suspend(self, how: str) -> None:
        if how not in HOW:
            raise ValueError(
                f"invalid value for how: {shown(how)}; allowed: {', '.join(HOW)}. To free all that "
                f"groups hold, destroy them, and initialise again when they are needed."
            )
        if self.suspended is not None:
            raise RuntimeError(
                f"the groups of {self.owner} are suspended already: call resume() first."
            )

    def _label_of_own_groups(self) -> dict[ProcessGroup, str]:
        label_of = {}
        for pooled in self.groups:
            # A shared communicator is suspended by the label that it was created for. Outside code
            # may have destroyed a group, or returned another object for it.
            if pooled.shares is None and of_torch.knows(pooled.group):
                label_of[pooled.group] = pooled.label
        return label_of

    def resume(self) -> None:
        """Let suspended groups work again: the same objects.

        *Collective* over the members of each group that its backend has suspended, else *local*.
        RuntimeError if the groups are not suspended, or a backend cannot resume; a further call
        then goes on with that group.
        """
        if self.suspended is None:
            raise RuntimeError(f"the groups of {self.owner} are not suspended.")
        self.suspended.wake()
        self.suspended = None

    def _drop(self, leaving: list[PooledGroup], abort: bool) -> None:
        before = self.groups
        self.groups = [pooled for pooled in before if pooled not in leaving]
        try:
            self._close(leaving, abort)
        except BaseException:
            # Ctrl-C in the middle: the next call destroys what torch still has.
            self.groups = [
                pooled for pooled in before if pooled not in leaving or of_torch.knows(pooled.group)
            ]
            raise

    def _close(self, leaving: list[PooledGroup], abort: bool) -> None:
        known = of_torch.known()
        label_of = {}
        for pooled in leaving:
            # A shared communicator is closed by the label that it was created for. Outside code
            # may have destroyed it already.
            if pooled.shares is None and pooled.group in known:
                label_of[pooled.group] = pooled.label
        if not closing.inherited.isdisjoint(label_of):
            abort = True  # the groups are those of the parent process: they are only forgotten
        if abort:  # else gloo waits for its operations in progress when it destroys the group
            sockets.shut(label_of)
        for tell in before_closing if leaving else ():
            try:
                tell([*label_of], abort)
            except Exception as error:
                _warn(f"{shown(tell)} raised while groups are destroyed: {in_words(error)}")
        failed = closing.abort(label_of) if abort else closing.close(label_of)
        for group, why in failed.items():
            _warn(f"rank {dist.get_rank()} could not destroy {label_of[group]}: {why}")


def _forget_locals(error: BaseException | None) -> None:
    seen = set[int]()  # errors may be each other's context
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except (AgreementError, CreationError) as error:
        for tell in after_failure:
            tell(error)
        raise


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)  # at the caller of destroy


def live_pools() -> list[GroupPool]:
    """Every pool of this process that has groups, or is suspended."""
    known = of_torch.known()
    for pool in [*_kept]:
        if not any(each.group in known for each in pool.groups):
            _kept.discard(pool)
    while True:
        try:
            return [pool for pool in [*_live] if pool.groups or pool.suspended is not None]
        except RuntimeError:  # another thread has created a pool meanwhile
            continue
