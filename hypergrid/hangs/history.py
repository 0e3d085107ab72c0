"""The usual course of ranks, and who left it: compared with earlier steps and with other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hypergrid.hangs.reading import DEFAULT, Call, Recording, Title
from hypergrid.hangs.waiting import pair_of

# Calls that two ranks must have made alike to be compared in the next one, where the first is not
# known; fewer if the recorder is small.
_PAST, _LEAST = 256, 16
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
    def weight(self) -> tuple[int, int, int]:
        """How much speaks against it; the greater, the more."""
        own = {True: 2, None: 0, False: -1}[self.before]
        score = own + (self.others > self.alike) + self.is_proven
        return (score, self.at, self.others - self.alike)


class History:
    """The calls of all ranks, each as what any rank of the same role would call.

    A kind stands for a call: its group's label and shape, its operation, sizes and dtypes. A token
    is a kind and the call's number. Ranks of one role have equal tokens, whichever groups they are
    in; two that did the same for a while and then part are compared there.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        number_of: dict[Any, int] = {}
        self._kind_of_title = np.zeros(len(recording.titles), np.int64)
        for place, title in enumerate(recording.titles):
            kind = number_of.setdefault(self._role(title), len(number_of))
            self._kind_of_title[place] = kind
        self._kinds: dict[int, Any] = {}
        self._tokens: dict[int, Any] = {}
        same: dict[bytes, list[int]] = defaultdict(list)
        for rank, rank_recording in recording.ranks.items():
            calls = rank_recording.calls
            if calls:
                self._kinds[rank] = self._kind_of_title[calls.title]
                self._tokens[rank] = self._kinds[rank] << 32 | calls.seq & 0xFFFFFFFF
                same[self._tokens[rank].tobytes()].append(rank)
        # Ranks with equal tokens are one class: its first rank stands for all of them.
        self._size_of = {ranks[0]: len(ranks) for ranks in same.values()}
        self._makers: Counter[int] = Counter()  # how many ranks made a token
        cut = [len(dump.calls) for dump in recording.ranks.values() if not dump.whole]
        self._past = max(_LEAST, min([3 * _PAST, *cut]) // 3)
        # After a past: each token that followed it, the rank that made it, and how many ranks did.
        self._next: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(dict)
        for rank, size in self._size_of.items():
            self._makers.update(dict.fromkeys(np.unique(self._tokens[rank]).tolist(), size))
            tokens = self._tokens[rank].tolist()
            pasts = self._pasts(rank)
            for at in range(max(0, len(tokens) - _RECENT), len(tokens)):
                past = pasts[at]
                if past is not None:
                    self._next[past].setdefault(tokens[at], []).append((rank, size))

    def departures(self, ranks: Iterable[int], *, alone: bool) -> Iterator[Departure]:
        """Of each rank the call that was least expected; none of those that did as always.

        ``alone``: also by its own past only, where nobody did the same until then.
        """
        for rank in ranks:
            if rank not in self._tokens:
                continue
            partings = [*self._partings(rank)]
            if alone and not any(departure.before for departure in partings):
                parted = {departure.at for departure in partings}
                surprises = self._surprises(rank)
                partings += [departure for departure in surprises if departure.at not in parted]
            if partings:
                yield max(partings, key=lambda departure: departure.weight)

    def is_confirmed(self, rank: int) -> bool:
        """Whether another rank, or the rank itself elsewhere, made its calls in the same order.

        Only the later half of the calls counts: what was wrong before that would have shown.
        """
        if rank not in self._tokens:
            return False
        tokens = self._tokens[rank].tolist()
        kinds = self._kinds[rank].tolist()
        pasts = self._pasts(rank)
        contexts = [tuple(kinds[max(0, at - _CONTEXT) : at + 1]) for at in range(len(kinds))]
        repeats = Counter(contexts)
        return all(
            repeats[contexts[at]] > 1 or self._followers(pasts[at], tokens[at]) > 1
            for at in range(len(kinds) // 2, len(kinds))
        )

    def makers(self, rank: int, at: int) -> int:
        """How many ranks made a call that one rank made, each in its own group."""
        return self._makers[int(self._tokens[rank][at])]

    def is_usual(self, rank: int, at: int) -> bool | None:
        """Whether a rank did before what it did there; None if it was never in such a place."""
        kinds = self._kinds[rank]
        due, length = _expected(kinds, at)
        return bool(kinds[due] == kinds[at]) if length >= _LONG else None

    def is_due(self, rank: int, call: Call) -> bool:
        """Whether a rank usually makes such a call after its last one."""
        if rank not in self._kinds:
            return False
        kinds = self._kinds[rank]
        due, length = _expected(kinds, len(kinds))
        title = self.recording.titles.index(call.title)
        return length > 0 and bool(kinds[due] == self._kind_of_title[title])

    def _role(self, title: Title) -> tuple[Any, ...]:
        """The part of a title that is equal in all groups of a label."""
        groups = self.recording.groups
        group = groups[title.group]
        ranks = group.ranks or ()
        if title.p2p and group.label == DEFAULT:
            # A send in the default group names ranks of the job, which no two pairs have in common:
            # it counts as one of the smallest group of both, or by the distance of both.
            pair = pair_of(title.what, ranks or range(self.recording.world_size))
            if pair is not None:
                both = [g for g in groups.values() if g.ranks and {*pair} <= {*g.ranks}]
                small = min(both, key=lambda g: len(g.ranks or ()), default=group)
                where: tuple[Any, ...] = (pair[1] - pair[0],)
                if small.ranks and small.label != DEFAULT:
                    where = (small.label, *map(small.ranks.index, pair))
                return (title.label, title.what.name, *where, title.text.partition("|")[2])
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
        return (group.label or title.group, len(ranks), step, title.p2p, title.text)

    def _pasts(self, rank: int) -> list[int | None]:
        """Before each call, what stands for the calls before it; None where too few are known."""
        tokens = self._tokens[rank].astype(np.uint64) * _FACTOR
        tokens ^= tokens >> np.uint64(29)
        count = len(tokens)
        past = self._past
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(count + 1, _FACTOR), dtype=np.uint64)
            inverses = np.cumprod(np.full(count + 1, _INVERSE), dtype=np.uint64)
            sums = np.concatenate(([np.uint64(0)], np.cumsum(tokens * powers[:count])))[:count]
            hashes = sums.copy()
            if count > past:
                window = sums[past:] - sums[:-past]
                hashes[past:] = window * inverses[: count - past] * _FACTOR
        is_whole = self.recording.ranks[rank].whole
        return [
            value if is_whole or at >= past else None for at, value in enumerate(hashes.tolist())
        ]

    def _followers(self, past: int | None, token: int) -> int:
        """How many ranks made this call after the same calls."""
        if past is None:
            return 0
        return sum(size for _, size in self._next[past].get(token, ()))

    def _partings(self, rank: int) -> Iterator[Departure]:
        """Where others did the same until then, and something else next."""
        pasts = self._pasts(rank)
        tokens = self._tokens[rank].tolist()
        calls = self.recording.ranks[rank].calls
        kinds = self._kinds[rank]
        for at in range(max(0, len(tokens) - _RECENT), len(tokens)):
            past = pasts[at]
            nexts = self._next[past] if past is not None else {}
            if len(nexts) < 2:
                continue
            alike = self._followers(past, tokens[at])
            others, token = max(
                (self._followers(past, token), -place, token)
                for place, token in enumerate(nexts)
                if token != tokens[at]
            )[::2]
            peer = nexts[token][0][0]
            peer_at = int(np.flatnonzero(self._tokens[peer] == token)[-1])
            peer_kinds = self._kinds[peer]
            before = self._made_before(kinds, at, int(peer_kinds[peer_at]))
            if others > alike or (before and others == alike):
                due = self.recording.ranks[peer].calls[peer_at]
                after = calls[at - 1] if at else None
                yield Departure(rank, at, due, after, others, alike, before)

    def _made_before(self, kinds: Any, at: int, due: int) -> bool | None:
        """Whether a rank made the due call in such a place before; None if that is not known."""
        place, length = _expected(kinds, at)
        if length < _LONG or kinds[place] not in (due, kinds[at]):
            return None
        return bool(kinds[place] == due)

    def is_shared(self, rank: int, at: int) -> bool:
        """Whether another rank made the same two calls one after the other."""
        before, now = self._tokens[rank][at - 1 : at + 1]
        makers = 0
        for other, size in self._size_of.items():
            tokens = self._tokens[other]
            if ((tokens[:-1] == before) & (tokens[1:] == now)).any():
                makers += size
        return makers > 1

    def _surprises(self, rank: int) -> Iterator[Departure]:
        """Where a rank did otherwise than ever before after the same calls."""
        calls = self.recording.ranks[rank].calls
        first = max(0, len(calls) - 2 * _RECENT)
        kinds = self._kinds[rank][first:]
        run = np.zeros(len(kinds), np.int64)  # how many calls before a place are as those here
        for at in range(1, len(kinds)):
            run[1:at] = np.where(kinds[: at - 1] == kinds[at - 1], run[: at - 1] + 1, 0)
            longest = int(run[:at].max())
            if first + at < len(calls) - _RECENT or longest < _LONG:
                continue
            due = int(np.flatnonzero(run[:at] == longest)[-1])
            same_runs = run[:at][kinds[:at] == kinds[at]]
            is_known = len(same_runs) and int(same_runs.max()) >= longest
            if kinds[due] == kinds[at] or is_known or self.is_shared(rank, first + at):
                continue
            usual = calls[first + due]
            yield Departure(rank, first + at, usual, calls[first + at - 1], 0, 1, True)


def _expected(kinds: Any, at: int) -> tuple[int, int]:
    """Where the same calls came before as now, for the longest time, and how many they were."""
    places = np.arange(at)
    length = 0
    while at > length:
        longer = places[places > length]
        longer = longer[kinds[longer - length - 1] == kinds[at - length - 1]]
        if not len(longer):
            break
        places = longer
        length += 1
    return (int(places[-1]) if length else 0), length
