"""GroupPool: owns the process groups that were created together, and alone destroys them."""

from __future__ import annotations

import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypergrid import of_torch
from hypergrid.agreement.commit import all_or_none
from hypergrid.agreement.prepare import Agreement, agree, one_thread, telling_others
from hypergrid.agreement.store import abortable, check_timeout, raise_if_waits_ended, settle
from hypergrid.errors import AgreementError, CreationError
from hypergrid.groups import backends, closing, creation, gloo, sockets
from hypergrid.groups.creation import Ranks
from hypergrid.groups.suspension import HOW, Suspended, Suspension, retire
from hypergrid.messages import in_words, shortened, shown, span_of
from hypergrid.plan import GroupPlan, GroupRow, Kind
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
        # The one of the first creation that succeeded; a pool may begin with one of an assembly.
        self.first = agreement if agreement.epoch else None
        self.prefix = ""  # of the labels, where others see them
        self.policy = policy
        self.owner = owner
        self.groups: list[PooledGroup] = []
        self.suspended: Suspension | None = None
        self._owners: dict[tuple[Ranks, Kind], str] = {}
        # The arguments of ``make`` by labels, for ``resume``.
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
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
        if self.prefix:
            proposal = {**proposal, "grid of the assembly": self.prefix.rstrip("/")}
        with _telling(), one_thread(ranks), abortable():
            can = creation.abilities(self.policy)
            self.agreement = agree(ranks, proposal, self.policy, can, timeout, init_count)
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
                self.first = self.first or self.agreement
                settle()
            except BaseException as error:
                if one_device:
                    _forget_locals(error)
                raise

    @contextmanager
    def _rolling_back(self) -> Iterator[None]:
        before, owners, calls = len(self.groups), dict(self._owners), [*self._calls]
        try:
            yield
        except BaseException:
            self.destroy(before, abort=True)  # other ranks may never destroy theirs
            self._owners, self._calls = owners, calls
            raise

    def make_row(
        self, plan: GroupPlan, row: GroupRow, timeout: timedelta | None = None
    ) -> list[ProcessGroup]:
        """``make`` for a row of a plan; the row's own timeout precedes ``timeout``."""
        if row.timeout is not None:
            timeout = timedelta(seconds=row.timeout)
        mine, everyone = plan.mine(row, dist.get_rank()), partial(plan.all, row)
        options: dict[str, Any] = {"backend": row.backend, "timeout": timeout}
        return self.make(row.label, mine, everyone, dims=row.dims, **options)

    def make(
        self,
        label: str,
        mine: Mapping[str, Ranks],
        everyone: Callable[[], Sequence[Ranks]],
        *,
        dims: tuple[str, ...] = (),
        kind: Kind | None = None,
        again: bool = True,
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
        again : bool
            Whether the same call creates them again, for ``suspend(how="recreate")``.
        **options
            As for ``torch.distributed.new_group``; ``dims`` are for ``hypergrid.dump``.

        Raises
        ------
        CreationError
            Torch could not create a group; its own error is the cause.
        """
        call = label, (mine, everyone), {"dims": dims, "kind": kind, **options}
        options.setdefault("group_desc", self.prefix + label)
        before, timeout = len(self.groups), options.get("timeout")
        shorter = backends.creation_timeout(options.get("backend"), timeout)
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
                if again:
                    self._calls.append(call)
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
        return CreationError(
            f"rank {dist.get_rank()} could not create {self.prefix}{label} of ranks {members} "
            f"with {options.get('backend') or dist.get_backend()}: {in_words(error)} One of them "
            f"may have ended, or cannot be reached."
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
        """
        self._drop(self.groups[keep:], abort)
        if not keep:
            self._calls, self.suspended = [], None

    def close(self, groups: Iterable[ProcessGroup], *, abort: bool = False) -> None:
        """Destroy those of ``groups`` that are this pool's, as ``destroy`` does."""
        asked = {id(group) for group in groups}
        self._drop([pooled for pooled in self.groups if id(pooled.group) in asked], abort)

    def suspend(self, ranks: Sequence[int], how: str = "auto") -> dict[str, Suspended]:
        """Free the device memory of the groups until ``resume``.

        *Collective* over ``ranks`` with ``"auto"``, at three round trips to the store per rank;
        over the members of each group where its backend suspends natively or NCCL closes; else
        *local*. Every rank gives the same ``how``.

        Parameters
        ----------
        ranks : sequence of int
            Those that created the groups together.
        how : str
            ``"auto"``: gloo is kept, and others suspend natively if they can (torch 2.12 and
            later, NCCL 2.29.7 and later); if one backend on one rank cannot, as ``"recreate"`` on
            all. ``"native"``: as that, and an error if not. ``"keep"``: nothing happens.
            ``"recreate"``: all groups are destroyed, gloo's too.

        Returns
        -------
        dict
            What was done, by backend.

        Raises
        ------
        ValueError
            Another ``how``.
        RuntimeError
            The groups are suspended already. A backend cannot suspend, or ``resume`` could not
            create a group again: nothing has changed. Or a backend failed after others were
            suspended, and ``resume`` wakes those.
        AgreementError
            With ``"auto"``: another rank raised or did not call this; ``resume`` wakes what is
            suspended.
        """
        if how not in HOW:
            raise ValueError(f"invalid value for how: {shown(how)}; allowed: {', '.join(HOW)}.")
        if self.suspended is not None:
            raise RuntimeError(f"the groups of {self.owner} are suspended already.")
        own = [each for each in self.groups if each.shares is None]
        labels = {each.group: each.label for each in own if of_torch.knows(each.group)}
        self.suspended = found = Suspension([str(each.group.group_name) for each in self.groups])
        try:
            if how == "recreate" or not self._starts(found, labels, ranks, how):
                found.wake()
                self._check_repeatable()
                found.close(labels)
        except BaseException:
            if not found.suspended:
                self.suspended = None
            raise
        if found.is_closed:
            self._close(self.groups, False)
            retire(labels)
        return found.report

    def _starts(
        self, found: Suspension, labels: Mapping[ProcessGroup, str], ranks: Ranks, how: str
    ) -> bool:
        """Whether no group is to be closed: equal on all ranks."""
        if how != "auto" or dist.get_rank() not in ranks:
            return found.start(labels, how)
        proposal = {"groups, suspended": ", ".join(label for label, *_ in self._calls)}
        with _telling(), abortable():
            with telling_others(lambda: ranks):
                # True of a rank that has used no communicator.
                can = replace(creation.abilities(self.policy), suspends=found.start(labels, how))
            return agree(ranks, proposal, self.policy, can).suspends

    def _check_repeatable(self) -> None:
        known = {label for label, *_ in self._calls}
        for each in self.groups:
            if each.label not in known:
                raise RuntimeError(
                    f"rank {dist.get_rank()} cannot suspend {self.owner} with how='recreate': "
                    f"{each.label} was created by outside code or with SHARP, which resume() "
                    f"does not repeat. Destroy the groups, and initialise again."
                )

    def usable(self) -> list[PooledGroup]:
        """The groups that are not suspended."""
        suspended = [group for group, _ in self.suspended.suspended] if self.suspended else []
        return [each for each in self.groups if each.group not in suspended]

    def resume(
        self, ranks: Sequence[int], timeout: timedelta | None = None
    ) -> dict[str, ProcessGroup]:
        """Wake the groups, or create all of them again if they were closed.

        *Collective* over ``ranks`` if they were closed, and they stay suspended if that fails.
        ``timeout`` as for ``agreed``.

        Returns
        -------
        dict
            Each group by the name it had before: the same one, or the new one.

        Raises
        ------
        RuntimeError
            They are not suspended, or a backend could not wake.
        AgreementError, CreationError
            As creation raises.
        """
        suspension = self.suspended
        if suspension is None:
            raise RuntimeError(f"the groups of {self.owner} are not suspended.")
        suspension.wake()
        self.suspended = None
        if suspension.is_closed and self._calls and dist.get_rank() in ranks:
            calls, self._calls = self._calls, []
            proposal = {"groups, again": ", ".join(label for label, *_ in calls)}
            try:
                with self.agreed(ranks, proposal, timeout, one_device=True):
                    for label, arguments, options in calls:
                        self.make(label, *arguments, **options)
            except BaseException:
                self._calls, self.suspended = calls, suspension
                raise
        return {n: each.group for n, each in zip(suspension.names, self.groups, strict=True)}

    def _drop(self, leaving: list[PooledGroup], abort: bool) -> None:
        gone = {each.label for each in leaving}
        self._calls = [call for call in self._calls if call[0] not in gone]
        self._close(leaving, abort)

    def _close(self, leaving: list[PooledGroup], abort: bool) -> None:
        self.groups = [pooled for pooled in self.groups if pooled not in leaving]
        known = of_torch.known()
        ending = {
            each.group: each.label
            for each in leaving
            if each.shares is None and each.group in known
        }
        if abort:  # else gloo waits for its operations in progress when it destroys the group
            sockets.shut(ending)
        for tell in before_closing if leaving else ():
            try:
                tell([*ending], abort)
            except Exception as error:
                _warn(f"{shown(tell)} raised while groups are destroyed: {in_words(error)}")
        for group, why in (closing.abort if abort else closing.close)(ending).items():
            _warn(f"rank {dist.get_rank()} could not destroy {ending[group]}: {why}")


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
    warnings.warn(text, RuntimeWarning, stacklevel=5)  # at the caller of destroy


def live_pools() -> list[GroupPool]:
    """Every pool of this process that has groups, or has closed them until ``resume``."""
    known = of_torch.known()
    for pool in [*_kept]:
        if not any(each.group in known for each in pool.groups):
            _kept.discard(pool)
    while True:
        try:
            return [pool for pool in [*_live] if pool.groups or pool.suspended is not None]
        except RuntimeError:  # another thread has created a pool meanwhile
            continue
