"""The usual course of ranks, and who left it: compared with earlier steps and with other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hypergrid.hangs.reading import DEFAULT, Call, Recording

# Calls that two ranks must have made alike to be compared in the next one, where the first is not
# known; fewer if the recorder is small.
_PAST, _LEAST = 256, 16
_RECENT = 600  # last calls of a rank in which a departure is looked for
_LONG = 4  # calls that must have come before in the same order to expect what followed then
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_ODD = pow(int(_FACTOR), -1, 1 << 64)


class Departure(NamedTuple):
    """A call in which a rank did not do what was due."""

    rank: int
    at: int  # its place among the rank's calls
    due: Call | None  # as another rank made it, or the rank itself earlier
    after: Call | None  # the call before it
    how: str  # "skipped", "added", "swapped" or "" if one call was made in place of another
    others: int  # ranks that did the same until then and made the due call
    alike: int  # ranks that did the same until then and departed as this one
    before: bool | None  # whether it made the due call itself, earlier; None: nothing is known
    is_new: bool = False  # it never made such a call before, and ranks of another role do

    @property
    def is_proven(self) -> bool:
        """Whether both its past and most of several ranks speak against it."""
        return self.before is True and self.others > max(1, self.alike) and not self.is_new

    @property
    def weight(self) -> tuple[int, int, int]:
        """How much speaks against it; the greater, the more."""
        own = {True: 2, None: 0, False: -1}[self.before]
        score = own + (self.others > self.alike) + self.is_proven - self.is_new
        return (score, self.at, self.others - self.alike)


class Steps(NamedTuple):
    """The steps of a job, told by a call of all ranks that comes once in each."""

    call: Call
    done: dict[int, int]  # how many of them each rank has finished


class History:
    """The calls of all ranks, each as what any rank of the same role would call.

    A token stands for one call: its group's label and shape, its operation, sizes, dtypes and
    number. Ranks of one role have equal tokens, whichever groups they are in; two that did the
    same for a while and then part are compared there.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        kinds: dict[Any, int] = {}
        self._kind = np.zeros(len(recording.titles), np.int64)
        for at in {at for mine in recording.ranks.values() for at in {*mine.calls.title.tolist()}}:
            self._kind[at] = kinds.setdefault(self._role(at), len(kinds))
        self._tokens: dict[int, Any] = {}
        same: dict[bytes, list[int]] = defaultdict(list)
        for rank, mine in recording.ranks.items():
            calls = mine.calls
            if calls:
                self._tokens[rank] = self._kind[calls.title] << 32 | calls.seq & 0xFFFFFFFF
                same[self._tokens[rank].tobytes()].append(rank)
        self._alike = [*same.values()]
        self._makers: Counter[int] = Counter()  # how many ranks make a call of a kind
        for ranks in self._alike:
            made = self._kind[np.unique(recording.ranks[ranks[0]].calls.title)]
            self._makers.update(dict.fromkeys(made.tolist(), len(ranks)))
        cut = [len(mine.calls) for mine in recording.ranks.values() if not mine.whole]
        self._past = max(_LEAST, min([3 * _PAST, *cut]) // 3)
        self._next: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(dict)
        for ranks in self._alike:
            past, tokens = self._pasts(ranks[0]), self._tokens[ranks[0]].tolist()
            for at in range(max(0, len(tokens) - _RECENT), len(tokens)):
                key = past[at]
                if key is not None:
                    there = self._next[key].setdefault(tokens[at], [])
                    there.append((ranks[0], len(ranks)))

    def departures(self, ranks: Iterable[int], *, alone: bool) -> list[Departure]:
        """Of each rank the call that was least expected; none of those that did as always.

        ``alone``: also by its own past only, where nobody did the same until then.
        """
        found = []
        for rank in ranks:
            if rank in self._tokens:
                mine = [*self._partings(rank)]
                if alone and not any(each.before for each in mine):
                    parted = {each.at for each in mine}
                    mine += [each for each in self._surprises(rank) if each.at not in parted]
                found += [max(mine, key=lambda each: each.weight)] if mine else []
        return found

    def makers(self, rank: int, at: int) -> int:
        """How many ranks made a call that one rank made, each in its own group."""
        return self._made[int(self._tokens[rank][at])]

    @cached_property
    def _made(self) -> Counter[int]:
        made: Counter[int] = Counter()
        for ranks in self._alike:
            for token in {*self._tokens[ranks[0]].tolist()}:
                made[token] += len(ranks)
        return made

    def is_usual(self, rank: int, at: int) -> bool | None:
        """Whether a rank did before what it did there; None if it was never in such a place."""
        kinds = self._kind[self.recording.ranks[rank].calls.title]
        due, length = _expected(kinds, at)
        return bool(kinds[due] == kinds[at]) if length >= _LONG else None

    def is_due(self, rank: int, call: Call) -> bool:
        """Whether a rank usually makes such a call after its last one."""
        if rank not in self._tokens:
            return False
        mine = self.recording.ranks[rank].calls
        due, length = _expected(self._kind[mine.title], len(mine))
        now = self.recording.titles.index(call.title)
        return length > 0 and self._role(int(mine.title[due])) == self._role(now)

    def steps(self) -> Steps | None:
        """The steps that all ranks end with the same call, if there is one at equal distances."""
        ranks = self.recording.ranks
        best: tuple[int, int] | None = None
        for rank in [*self._tokens][:_LONG]:  # one of them may have left the order
            titles = ranks[rank].calls.title
            for title in np.unique(titles).tolist():
                every = np.diff(np.flatnonzero(titles == title))
                group = self.recording.groups[self.recording.titles[title].group]
                world = group.label == DEFAULT or len(group.ranks or ()) == len(ranks)
                regular = len(every) > 1 and (every == np.median(every)).mean() > 2 / 3
                if world and regular and (best is None or every.max() > best[0]):
                    best = (int(every.max()), title)
        if best is None:
            return None
        of = {r: mine.calls.at(mine.calls.title == best[1]) for r, mine in ranks.items()}
        seqs = np.unique(np.concatenate([calls.seq[calls.done] for calls in of.values()]))
        done = {r: int(np.isin(seqs, calls.seq[calls.done]).sum()) for r, calls in of.items()}
        call = next(calls[0] for calls in of.values() if calls)
        return Steps(call, done)

    def _role(self, at: int) -> tuple[Any, ...]:
        """The numbers that are equal in all groups of a label."""
        title = self.recording.titles[at]
        group = self.recording.groups[title.group]
        ranks = group.ranks or ()
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
        return (group.label or title.group, len(ranks), step, title.p2p, title.text)

    def _pasts(self, rank: int) -> list[int | None]:
        """Before each call, what stands for the calls before it; None where too few are known."""
        tokens = self._tokens[rank].astype(np.uint64) * _FACTOR
        tokens ^= tokens >> np.uint64(29)
        many = len(tokens)
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(many + 1, _FACTOR), dtype=np.uint64)
            back = np.cumprod(np.full(many + 1, np.uint64(_ODD)), dtype=np.uint64)
            sums = np.concatenate(([np.uint64(0)], np.cumsum(tokens * powers[:many])))[:many]
            found = sums.copy()
            far = self._past
            if many > far:
                found[far:] = (sums[far:] - sums[:-far]) * back[: many - far] * _FACTOR
        whole = self.recording.ranks[rank].whole
        return [past if whole or at >= far else None for at, past in enumerate(found.tolist())]

    def _partings(self, rank: int) -> Iterable[Departure]:
        """Where others did the same until then, and something else next."""
        past, tokens = self._pasts(rank), self._tokens[rank].tolist()
        calls = self.recording.ranks[rank].calls
        kinds = self._kind[calls.title]
        for at in range(max(0, len(tokens) - _RECENT), len(tokens)):
            key = past[at]
            nexts = self._next[key] if key is not None else {}
            if len(nexts) < 2:
                continue
            alike = sum(many for _, many in nexts[tokens[at]])
            others = {t: sum(many for _, many in of) for t, of in nexts.items() if t != tokens[at]}
            token = max(others, key=lambda each: others[each])
            peer = nexts[token][0][0]
            there = int(np.flatnonzero(self._tokens[peer] == token)[-1])
            due, length = _expected(kinds, at)
            theirs = self._kind[self.recording.ranks[peer].calls.title]
            before = None
            if length >= _LONG:
                before = bool(kinds[due] == theirs[there])
                if not before and kinds[due] != kinds[at]:
                    before = None
            if (before and others[token] >= alike) or others[token] > alike:
                how = _how(kinds[at : at + 2].tolist(), theirs[there : there + 2].tolist())
                call = self.recording.ranks[peer].calls[there]
                new = kinds[at] not in kinds[:at] and self._makers[int(kinds[at])] > alike
                after = calls[at - 1] if at else None
                yield Departure(rank, at, call, after, how, others[token], alike, before, new)

    def _is_shared(self, rank: int, at: int) -> bool:
        """Whether another rank made the same two calls one after the other."""
        before, now = self._tokens[rank][at - 1 : at + 1]
        makers = 0
        for ranks in self._alike:
            tokens = self._tokens[ranks[0]]
            if ((tokens[:-1] == before) & (tokens[1:] == now)).any():
                makers += len(ranks)
        return makers > 1

    def _surprises(self, rank: int) -> Iterable[Departure]:
        """Where a rank did otherwise than ever before after the same calls."""
        calls = self.recording.ranks[rank].calls
        first = max(0, len(calls) - 2 * _RECENT)
        kinds = self._kind[calls.title[first:]]
        run = np.zeros(len(kinds), np.int64)  # how many calls before a place are as those here
        for at in range(1, len(kinds)):
            run[1:at] = np.where(kinds[: at - 1] == kinds[at - 1], run[: at - 1] + 1, 0)
            if first + at < len(calls) - _RECENT:
                continue
            longest = int(run[:at].max())
            if longest < _LONG:
                continue
            due = int(np.flatnonzero(run[:at] == longest)[-1])
            seen = run[:at][kinds[:at] == kinds[at]]
            known = len(seen) and int(seen.max()) >= longest
            if kinds[due] != kinds[at] and not known and not self._is_shared(rank, first + at):
                how = _how(kinds[at : at + 2].tolist(), kinds[due : due + 2].tolist())
                usual, after = calls[first + due], calls[first + at - 1]
                yield Departure(rank, first + at, usual, after, how, 0, 1, True)


def _expected(kinds: Any, at: int) -> tuple[int, int]:
    """Where the same calls came before as now, for the longest time, and how many they were."""
    places = np.arange(at)
    length = 0
    while True:
        kept = places[places > length]
        kept = kept[kinds[kept - length - 1] == kinds[at - length - 1]] if at > length else kept[:0]
        if not len(kept):
            return (int(places[-1]) if length else 0), length
        places, length = kept, length + 1


def _how(mine: list[int], due: list[int]) -> str:
    skipped = len(due) > 1 and mine[0] == due[1]
    added = len(mine) > 1 and mine[1] == due[0]
    return "swapped" if skipped and added else "skipped" if skipped else "added" if added else ""
