"""The usual course of ranks, and who left it: compared with earlier steps and with other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hypergrid.hangs.recording import DEFAULT, Call, Group, Recording, Title
from hypergrid.hangs.waiting import pair_of

# Calls that two ranks must have made alike to be compared in the next one, where the first is not
# known; fewer if the recorder is small.
_PAST = 256
_LEAST = 16
_RECENT = 600  # last calls of a rank in which a departure is looked for
_LONG = 4  # calls that must have come before in the same order to expect what followed then
_CONTEXT = 8  # calls that must have come elsewhere in the same order to confirm the next
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_FACTOR), -1, 1 << 64))


class Departure(NamedTuple):
    """A call in which a rank did not do what was due."""

    rank: int
    at: int  # its place among the rank's calls
    due: Call | None  # as another rank made it, or the rank itself earlier
    after: Call | None  # the call before it
    others: int  # ranks that did the same until then and made the due call
    alike: int  # ranks that did the same until then and departed as this one
    before: bool | None  # whether it made the due call itself, earlier; None: nothing is known

    @property
    def is_proven(self) -> bool:
        """Whether both its past and most of several ranks speak against it."""
        return self.before is True and self.others > max(1, self.alike)

    @property
    def weight(self) -> tuple[int, int]:
        """How much speaks against it; the greater, the more."""
        score = 0
        if self.before is True:
            score = 2
        elif self.before is False:
            score = -1
        if self.others > self.alike:
            score += 1
        # Of departures against which equally much speaks, the later one holds the job up.
        return (score, self.at)


class History:
    """The calls of all ranks, each as what any rank of the same role would call.

    A kind stands for a call: its group's label and shape, its operation, sizes and dtypes. A token
    is a kind and the call's number. Ranks of one role have equal tokens, whichever groups they are
    in; two that did the same for a while and then part are compared there.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._kinds: dict[int, Any] = {}
        self._tokens: dict[int, Any] = {}
        # Ranks with equal tokens are one class: its first rank stands for all of them.
        self._class_sizes: dict[int, int] = {}
        self._makers: Counter[int] = Counter()  # how many ranks made a token
        # After a past: how many ranks made each token next, and the first of them, with the place.
        self._followers: dict[int, Counter[int]] = defaultdict(Counter)
        self._examples: dict[tuple[int, int], tuple[int, int]] = {}
        self._precedents_of: dict[int, dict[int, tuple[int, bool]]] = {}
        self._read_tokens()
        shortest = 3 * _PAST
        for rank_recording in recording.ranks.values():
            if not rank_recording.whole:
                shortest = min(shortest, len(rank_recording.calls))
        self._past = max(_LEAST, shortest // 3)
        for rank, size in self._class_sizes.items():
            self._count_followers(rank, size)

    def _read_tokens(self) -> None:
        number_of_role: dict[Any, int] = {}
        numbers = []
        for title in self.recording.titles:
            numbers.append(number_of_role.setdefault(self._role(title), len(number_of_role)))
        self._kind_of_title = np.array(numbers, np.int64)
        classes: dict[bytes, list[int]] = defaultdict(list)
        for rank, rank_recording in self.recording.ranks.items():
            calls = rank_recording.calls
            if calls:
                kinds = self._kind_of_title[calls.title]
                # The kind in the upper half, the number of the call in the lower.
                tokens = kinds << 32 | calls.seq & 0xFFFFFFFF
                self._kinds[rank] = kinds
                self._tokens[rank] = tokens
                classes[tokens.tobytes()].append(rank)
        for ranks in classes.values():
            self._class_sizes[ranks[0]] = len(ranks)

    def _count_followers(self, rank: int, size: int) -> None:
        tokens = self._tokens[rank].tolist()
        pasts = self._pasts(rank)
        for token in set(tokens):
            self._makers[token] += size
        for at in range(max(0, len(tokens) - _RECENT), len(tokens)):
            past = pasts[at]
            if past is not None:
                self._followers[past][tokens[at]] += size
                self._examples.setdefault((past, tokens[at]), (rank, at))

    def departures(self, ranks: Iterable[int]) -> Iterator[Departure]:
        """Of each rank the call that was least expected; none of those that did as always.

        By its own past only, where nobody did the same until then.
        """
        for rank in ranks:
            if rank not in self._tokens:
                continue
            departures = {departure.at: departure for departure in self._surprises(rank)}
            # What other ranks did is said first.
            departures.update({departure.at: departure for departure in self._partings(rank)})
            if departures:
                yield max(departures.values(), key=lambda departure: departure.weight)

    def is_confirmed(self, rank: int) -> bool:
        """Whether another rank, or the rank itself elsewhere, made its calls in the same order.

        Only the later half of the calls counts: what was wrong before that would have shown.
        """
        if rank not in self._tokens:
            return False
        tokens = self._tokens[rank].tolist()
        kinds = self._kinds[rank].tolist()
        pasts = self._pasts(rank)
        # Each call with the eight before it.
        contexts = []
        for at in range(len(kinds)):
            contexts.append(tuple(kinds[max(0, at - _CONTEXT) : at + 1]))
        repeats = Counter(contexts)
        for at in range(len(kinds) // 2, len(kinds)):
            if repeats[contexts[at]] < 2 and self._followers_of(pasts[at])[tokens[at]] < 2:
                return False
        return True

    def makers(self, rank: int, at: int) -> int:
        """How many ranks made a call that one rank made, each in its own group."""
        return self._makers[int(self._tokens[rank][at])]

    def is_disputed(self, rank: int) -> bool:
        """Whether others that did the same until a call that has not ended made another one."""
        if rank not in self._tokens:
            return False
        pasts = self._pasts(rank)
        for at in np.flatnonzero(~self.recording.ranks[rank].calls.done).tolist():
            if len(self._followers_of(pasts[at])) > 1:
                return True
        return False

    def is_due(self, rank: int, call: Call) -> bool:
        """Whether a rank usually makes such a call after its last one."""
        if rank not in self._kinds:
            return False
        kinds = self._kinds[rank]
        precedent = self._precedents(rank).get(len(kinds))
        if precedent is None:
            return False
        title = self.recording.titles.index(call.title)
        return bool(kinds[precedent[0]] == self._kind_of_title[title])

    def is_shared(self, rank: int, at: int) -> bool:
        """Whether another rank made the same two calls one after the other."""
        first, second = self._tokens[rank][at - 1 : at + 1]
        makers = 0
        for other, size in self._class_sizes.items():
            tokens = self._tokens[other]
            if ((tokens[:-1] == first) & (tokens[1:] == second)).any():
                makers += size
        return makers > 1

    def _role(self, title: Title) -> tuple[Any, ...]:
        """The part of a title that is equal in all groups of a label."""
        group = self.recording.groups[title.group]
        members = group.ranks
        # A send in the default group names ranks of the job.
        pair = None
        if title.p2p and group.label == DEFAULT:
            pair = pair_of(title.what, members or range(self.recording.world_size))
        if pair is None:
            step = members[1] - members[0] if len(members) > 1 else 0
            return (group.label or title.group, len(members), step, title.p2p, title.text)
        shapes = title.text.partition("|")[2]
        return (title.what.name, shapes, *self._place_of_pair(pair))

    def _place_of_pair(self, pair: tuple[int, int]) -> tuple[Any, ...]:
        """The smallest group that holds both ranks, and their places in it; else their distance.

        A send in the default group names ranks of the job, which no two pairs have in common: 0 to
        4 and 1 to 5 of two pipelines are both the first to the second of theirs.
        """
        source, target = pair
        smallest: Group | None = None
        for group in self.recording.groups.values():
            holds_both = source in group.ranks and target in group.ranks
            is_smaller = smallest is None or len(group.ranks) < len(smallest.ranks)
            if holds_both and is_smaller and group.label != DEFAULT:
                smallest = group
        if smallest is None:
            return (target - source,)
        return (smallest.label, smallest.ranks.index(source), smallest.ranks.index(target))

    def _pasts(self, rank: int) -> list[int | None]:
        """Before each call, what stands for the calls before it; None where too few are known."""
        tokens = self._tokens[rank].astype(np.uint64)
        places = np.arange(len(tokens))
        # A sum of the calls since ``starts``, each times a power of a factor for its place; divided
        # by the power of the first place, it is equal for equal calls that begin elsewhere.
        starts = np.maximum(0, places - self._past)
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(len(tokens), _FACTOR), dtype=np.uint64)
            inverses = np.cumprod(np.full(len(tokens), _INVERSE), dtype=np.uint64)
            sums = np.cumsum(tokens * powers) - tokens * powers  # of the calls before each
            hashes = (sums - sums[starts]) * inverses[starts]
        is_known = self.recording.ranks[rank].whole | (places >= self._past)
        pasts: list[int | None] = hashes.tolist()
        for place in np.flatnonzero(~is_known).tolist():
            pasts[place] = None
        return pasts

    def _followers_of(self, past: int | None) -> Counter[int]:
        """How many ranks made each call after the same calls."""
        if past is None or past not in self._followers:
            return Counter()
        return self._followers[past]

    def _partings(self, rank: int) -> Iterator[Departure]:
        """Where others did the same until then, and something else next."""
        pasts = self._pasts(rank)
        tokens = self._tokens[rank].tolist()
        calls = self.recording.ranks[rank].calls
        for at in range(max(0, len(tokens) - _RECENT), len(tokens)):
            past = pasts[at]
            followers = self._followers_of(past)
            rivals = [token for token in followers if token != tokens[at]]
            if past is None or not rivals:
                continue
            # Of several that as many ranks made, the one that was recorded first.
            due_token = max(rivals, key=followers.__getitem__)
            others = followers[due_token]
            alike = followers[tokens[at]]
            before = self._made_before(rank, at, due_token >> 32)
            if others > alike or (before and others == alike):
                peer, peer_at = self._examples[past, due_token]
                due = self.recording.ranks[peer].calls[peer_at]
                after = calls[at - 1] if at else None
                yield Departure(rank, at, due, after, others, alike, before)

    def _made_before(self, rank: int, at: int, due: int) -> bool | None:
        """Whether a rank made the due call in such a place before; None if that is not known."""
        precedent = self._precedents(rank).get(at)
        if precedent is None:
            return None
        kinds = self._kinds[rank]
        earlier_kind = kinds[precedent[0]]
        if earlier_kind not in (due, kinds[at]):
            return None
        return bool(earlier_kind == due)

    def _surprises(self, rank: int) -> Iterator[Departure]:
        """Where a rank did otherwise than ever before after the same calls."""
        calls = self.recording.ranks[rank].calls
        for at, (place, is_known) in self._precedents(rank).items():
            if at == len(calls) or is_known:
                continue
            # Two ranks that do it in the same place have a reason for it.
            if not self.is_shared(rank, at):
                due = calls[place]
                after = calls[at - 1]
                yield Departure(rank, at, due, after, others=0, alike=1, before=True)

    def _precedents(self, rank: int) -> dict[int, tuple[int, bool]]:
        """Of the last places of a rank: where the same calls came before, for the longest time.

        And whether the call was then ever the one that it is now. Of calls A B C D E, A B C D F the
        last has the precedent E.
        """
        if rank in self._precedents_of:
            return self._precedents_of[rank]
        first = max(0, len(self._kinds[rank]) - 2 * _RECENT)
        kinds = self._kinds[rank][first:]
        precedents: dict[int, tuple[int, bool]] = {}
        # How many calls before a place are as those before ``at``: of A B C A B it is 2 at the
        # second place (C) for the place after the last call.
        alike = np.zeros(len(kinds), np.int64)
        for at in range(1, len(kinds) + 1):  # also of the place after the last call
            is_same = kinds[: at - 1] == kinds[at - 1]
            alike[1:at] = np.where(is_same, alike[: at - 1] + 1, 0)
            longest = int(alike[:at].max())
            if longest < _LONG:
                continue
            places = np.flatnonzero(alike[:at] == longest)
            is_known = bool(np.isin(kinds[at : at + 1], kinds[places]).any())
            precedents[first + at] = (first + int(places[-1]), is_known)
        self._precedents_of[rank] = precedents
        return precedents
