"""The usual course of ranks, and who left it: compared with earlier steps and with other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hypergrid.hangs.recording import DEFAULT, Call, Recording, Title
from hypergrid.hangs.waiting import pair_of

# Calls that two ranks must have made alike to be compared in the next one, where the first is not
# known; fewer if the recorder is small.
_PAST = 256
_LEAST = 16
_RECENT = 600  # last calls of a rank in which a departure is looked for
_LONG = 4  # calls that must have come before in the same order to expect what followed then


class Departure(NamedTuple):
    """A call in which a rank did not do what was due."""

    rank: int
    at: int  # its place among the rank's calls
    due: Call  # as another rank made it, or the rank itself earlier
    peers: int  # ranks that did the same until then and made the due call
    alike: int  # ranks that did the same until then and departed as this one
    before: bool | None  # whether it made the due call itself, earlier; None: nothing is known

    @property
    def is_outvoted(self) -> bool:
        """Whether more ranks made the due call than departed as this one."""
        return self.peers > self.alike

    @property
    def score(self) -> int:
        """How much speaks against it; the greater, the more."""
        # Its own past weighs more than its peers, which may run another branch of the program.
        of_its_past = {True: 2, False: -1, None: 0}
        return of_its_past[self.before] + self.is_outvoted

    @property
    def weight(self) -> tuple[int, int]:
        """Its score; of equal ones, the later departure holds the job up."""
        return (self.score, self.at)


class _Makers(NamedTuple):
    """The ranks that made one call after the same calls; of one of them, its place there."""

    rank: int
    at: int
    ranks: list[int]


class _Precedent(NamedTuple):
    """Where the same calls came before, for the longest time."""

    at: int  # the place of the call that followed them
    is_repeated: bool  # whether the call was then ever the one that it is now


_Role: TypeAlias = tuple[Any, ...]  # who takes part in a call
_Past: TypeAlias = int | None  # stands for calls; None: too few are known
_Precedents: TypeAlias = dict[int, _Precedent]  # of the calls at some places


class History:
    """The calls of all ranks, each as what any rank of the same role would call.

    A kind stands for a call: its group's label and shape, backend, operation, sizes and dtypes. A
    token is a kind and the call's number. Ranks of one role have equal tokens, whichever groups
    they are in; two that did the same for a while and then part are compared there.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._role_of: dict[Title, _Role] = {}
        self._kind_of: dict[Title, int] = {}
        self._number_kinds()
        # Both are in the order of the recording's titles, to which the rows of calls refer.
        role_of_place = [*self._role_of.values()]
        kind_of_place = np.array([*self._kind_of.values()], np.int64)
        self._roles_of: dict[int, set[_Role]] = {}  # of all calls of a rank
        self._tokens: dict[int, Any] = {}
        # How many ranks made a token, and two tokens one after the other; None is before the first.
        self._makers: Counter[int] = Counter()
        self._pair_makers: Counter[tuple[int | None, int]] = Counter()
        # After a past: who made each token next.
        self._followers: dict[_Past, dict[int, _Makers]] = defaultdict(dict)
        self._precedents_of: dict[int, _Precedents] = {}
        # Ranks with equal tokens are one class: its first rank stands for all of them.
        classes: dict[bytes, list[int]] = defaultdict(list)
        shortest = 3 * _PAST
        for rank, rank_recording in recording.ranks.items():
            calls = rank_recording.calls
            if not rank_recording.whole:
                shortest = min(shortest, len(calls))
            places = calls.rows["title"]
            used_places = np.unique(places)
            self._roles_of[rank] = {role_of_place[place] for place in used_places}
            numbers = calls.rows["seq"] & 0xFFFFFFFF
            # The kind in the upper half, the number of the call in the lower: millions of calls
            # are compared as an array of integers.
            tokens = kind_of_place[places] << 32 | numbers
            self._tokens[rank] = tokens
            classes[tokens.tobytes()].append(rank)
        # Of a recorder that has lost calls, two thirds are left to be compared.
        self._past = max(_LEAST, shortest // 3)
        for ranks in classes.values():
            self._count(ranks)

    def _number_kinds(self) -> None:
        number_of_kind: dict[Any, int] = {}
        for title in self.recording.titles:
            role = self._role(title)
            # Who sends to whom is in the role.
            kind = (role, title.is_on_gloo, title.what._replace(detail=""))
            self._role_of[title] = role
            self._kind_of[title] = number_of_kind.setdefault(kind, len(number_of_kind))

    def _count(self, ranks: list[int]) -> None:
        """Count the calls of a class."""
        rank = ranks[0]
        size = len(ranks)
        tokens = self._tokens[rank].tolist()
        pairs = pairwise((None, *tokens))
        # The figures are of ranks: a rank that repeats a call counts once.
        for token in set(tokens):
            self._makers[token] += size
        for pair in set(pairs):
            self._pair_makers[pair] += size
        pasts = self._pasts(rank)
        for at in self._recent(rank):
            past = pasts[at]
            token = tokens[at]
            # Ranks whose earlier calls are lost may have done something else in them.
            if past is None:
                continue
            followers = self._followers[past]
            makers = followers.setdefault(token, _Makers(rank, at, []))
            makers.ranks.extend(ranks)

    def _recent(self, rank: int) -> range:
        """The places of the calls in which a departure is looked for."""
        count = len(self._tokens[rank])
        return range(max(0, count - _RECENT), count)

    def departures(self, ranks: Iterable[int]) -> list[Departure]:
        """Of each rank the call that was least expected, if it made one; the clearest first.

        By its own past only, where nobody did the same until then.
        """
        clearest = []
        for rank in sorted(self._tokens.keys() & ranks):
            departures = {}
            # Where both are known, what other ranks did counts: it comes last, and replaces.
            for departure in (*self._surprises(rank), *self._partings(rank)):
                departures[departure.at] = departure
            if not departures:
                continue
            # What a rank has queued behind the call that it is in holds nobody up.
            is_done = self.recording.ranks[rank].calls.rows["done"]
            stop = int(is_done.argmin())
            if is_done.all():
                stop = len(is_done)
            clearest.append(
                max(
                    departures.values(),
                    key=lambda departure: (departure.score, departure.at <= stop, departure.at),
                )
            )
        return sorted(clearest, key=lambda departure: departure.weight, reverse=True)

    def is_confirmed(self, rank: int) -> bool:
        """Whether another rank, or the rank itself elsewhere, made its calls in the same order.

        Only the later half of the calls counts: what was wrong before that would have shown.
        """
        tokens = self._tokens[rank].tolist()
        pasts = self._pasts(rank)
        middle = len(tokens) // 2
        for at in range(middle, len(tokens)):
            if self.was_made_before(rank, at):
                continue
            followers = self._followers.get(pasts[at], {})
            makers = followers.get(tokens[at])
            # Its past is not known, or the call is of long ago: no other rank is known there.
            if makers is None:
                return False
            # The only maker is the rank itself.
            if len(makers.ranks) < 2:
                return False
        return bool(tokens)

    def was_made_before(self, rank: int, at: int) -> bool:
        """Whether a rank made a call in the same place of its usual course before."""
        precedent = self._precedents(rank).get(at)
        if precedent is None:
            return False
        return precedent.is_repeated

    def makers(self, rank: int, at: int) -> int:
        """How many ranks made a call that one rank made, each in its own group."""
        token = int(self._tokens[rank][at])
        return self._makers[token]

    def is_due(self, rank: int, call: Call) -> bool:
        """Whether a rank usually makes such a call after its last one."""
        if rank not in self._tokens:
            return False
        next_place = len(self._tokens[rank])
        return self._usual_kind(rank, next_place) == self._kind_of[call.title]

    def is_shared(self, rank: int, at: int) -> bool:
        """Whether another rank made this call after the same one, or as its first."""
        tokens = self._tokens[rank].tolist()
        previous = None
        if at:
            previous = tokens[at - 1]
        return self._pair_makers[previous, tokens[at]] > 1

    def _call(self, rank: int, at: int) -> Call:
        return self.recording.ranks[rank].calls[at]

    def _kinds(self, rank: int) -> Any:
        return self._tokens[rank] >> 32

    def _role(self, title: Title) -> _Role:
        """Who takes part in a call, in words that are equal for all groups of a label."""
        group = self.recording.groups[title.group]
        members = group.ranks
        # A send in the default group names ranks of the job.
        if title.p2p and group.label == DEFAULT:
            world = range(self.recording.world_size)
            pair = pair_of(title.what, members or world)
            if pair:
                place = self._place_of_pair(*pair)
                return (title.what.name, *place)
        # Groups without a label are told apart by their shape: 0, 1 and 2, 3 have the same one.
        step = 0
        if len(members) > 1:
            step = members[1] - members[0]
        return (group.label, len(members), step, title.what.detail)

    def _place_of_pair(self, source: int, target: int) -> tuple[Any, ...]:
        """The smallest group that holds both ranks, and their places in it; else their distance.

        A send in the default group names ranks of the job, which no two pairs have in common: 0 to
        4 and 1 to 5 of two pipelines are both the first to the second of theirs.
        """
        groups = []
        pair = {source, target}
        for group in self.recording.groups.values():
            # The default group holds every pair.
            if group.label == DEFAULT:
                continue
            if pair.issubset(group.ranks):
                groups.append(group)
        if not groups:
            return (target - source,)
        smallest = min(groups, key=lambda group: len(group.ranks))
        place_of = smallest.ranks.index
        return (smallest.label, place_of(source), place_of(target))

    def _pasts(self, rank: int) -> list[_Past]:
        """Before each call, what stands for the calls before it."""
        tokens = self._tokens[rank]
        is_whole = self.recording.ranks[rank].whole
        pasts: list[_Past] = []
        for at in range(len(tokens)):
            # Some of the calls before it are overwritten.
            if not is_whole and at < self._past:
                pasts.append(None)
                continue
            # A limited past lets ranks be compared again after they once differed.
            first = max(0, at - self._past)
            past = tokens[first:at].tobytes()
            pasts.append(hash(past))
        return pasts

    def can_make(self, rank: int, call: Call) -> bool:
        """Whether a rank is of the group of a call, or makes such calls in a group of its own.

        Ranks 1 and 2 have a group of their own, in which they once reduce: what ranks 0 and 3 do
        at that time says nothing about it.
        """
        title = call.title
        members: Sequence[int] = self.recording.groups[title.group].ranks
        if title.p2p:
            world = range(self.recording.world_size)
            members = pair_of(title.what, members or world)
        if rank in members:
            return True
        return self._role_of[title] in self._roles_of[rank]

    def _partings(self, rank: int) -> Iterator[Departure]:
        """Where others did the same until then, and something else next."""
        pasts = self._pasts(rank)
        tokens = self._tokens[rank].tolist()
        for at in self._recent(rank):
            followers = self._followers.get(pasts[at], {})
            departures = []
            for due_token, makers in followers.items():
                if due_token == tokens[at]:
                    continue
                due = self._call(makers.rank, makers.at)
                if not self.can_make(rank, due):
                    continue
                # Only who can make both calls has chosen between them.
                call = self._call(rank, at)
                peers = [member for member in makers.ranks if self.can_make(member, call)]
                makers_alike = followers[tokens[at]].ranks
                alike = [member for member in makers_alike if self.can_make(member, due)]
                before = self._made_before(rank, at, due_token >> 32)
                departure = Departure(rank, at, due, len(peers), len(alike), before)
                departures.append(departure)
            if not departures:
                continue
            # Of several that as many ranks made, the one that was recorded first.
            best = max(departures, key=lambda departure: departure.peers)
            # Where as many ranks did both, its own past decides.
            is_against_past = best.before and best.peers == best.alike
            if best.is_outvoted or is_against_past:
                yield best

    def _made_before(self, rank: int, at: int, due: int) -> bool | None:
        """Whether a rank made the due call in such a place before; None if that is not known."""
        usual_kind = self._usual_kind(rank, at)
        if usual_kind == due:
            return True
        if usual_kind == self._kinds(rank)[at]:
            return False
        return None

    def _usual_kind(self, rank: int, at: int) -> int | None:
        """The kind of call that a rank made last after the same calls as those before a place."""
        precedent = self._precedents(rank).get(at)
        if precedent is None:
            return None
        return int(self._kinds(rank)[precedent.at])

    def _surprises(self, rank: int) -> Iterator[Departure]:
        """Where a rank did otherwise than ever before after the same calls."""
        calls = self.recording.ranks[rank].calls
        for at, precedent in self._precedents(rank).items():
            # Two ranks that do it in the same place have a reason for it.
            if precedent.is_repeated or self.is_shared(rank, at):
                continue
            due = calls[precedent.at]
            yield Departure(rank, at, due, peers=0, alike=1, before=True)

    def _precedents(self, rank: int) -> _Precedents:
        """The precedents of the last calls of a rank, and of the one that it has yet to make."""
        if rank not in self._precedents_of:
            kinds = self._kinds(rank)
            first = max(0, len(kinds) - 2 * _RECENT)
            self._precedents_of[rank] = _find_precedents(kinds, first)
        return self._precedents_of[rank]


def _find_precedents(all_kinds: Any, first: int) -> _Precedents:
    """The precedents from a place on, also of the place after the last call.

    Of A B C D E, A B C D F the last has the precedent E.
    """
    kinds = all_kinds[first:]
    count = len(kinds)
    precedents: _Precedents = {}
    # How many calls before a place are as those before ``now``: of A B C A B it is 2 at the place
    # of C for the place after the last call.
    alike = np.zeros(count, np.int64)
    for now in range(1, count + 1):
        previous = now - 1
        is_same = kinds[:previous] == kinds[previous]
        # Each place inherits the figure of the one before it: one step of the array for each call,
        # instead of a comparison of every two places.
        longer = alike[:previous] + 1
        alike[1:now] = np.where(is_same, longer, 0)
        longest = alike[:now].max()
        # After two or three calls, programs go on in different ways without a fault.
        if longest < _LONG:
            continue
        places = np.flatnonzero(alike[:now] == longest)
        at = first + int(places[-1])
        # The call after the last one is not made yet, and cannot differ.
        is_repeated = True
        if now < count:
            is_repeated = kinds[now] in kinds[places]
        precedents[first + now] = _Precedent(at, is_repeated)
    return precedents
