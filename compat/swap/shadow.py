"""A shadow run: megatron-core's own parallel_state runs the job, and hypergrid plans beside it.

After each ``initialize_model_parallel`` every rank compares what stock created with what hypergrid
would have created from the same arguments, and hypergrid creates nothing: the job, its speed and
its exit status are stock's. This is the first step on a cluster where hypergrid was never tried.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, NamedTuple

from hypergrid.messages import few

VARIABLE = "HYPERGRID_SHADOW"
_NAME = "megatron.core.parallel_state"
_LINES_OF_A_RANK, _LINES_IN_ALL = 8, 20
_ANSWERS = timedelta(seconds=60)  # how long the first rank waits for what the others found
_NCCL_FIELDS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
_calls = itertools.count(1)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _NAME else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Watched(fullname, spec.origin)
        return spec


class _Watched(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        watch(module)


_finder = _Finder()


def is_wanted() -> bool:
    """Whether the environment asks for a shadow run."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def install() -> None:
    """Compare in this process from the next import of ``megatron.core.parallel_state`` on. *Local*.

    ``HYPERGRID_SHADOW=strict`` in the environment ends the job on a difference. RuntimeError if
    that module is imported already.
    """
    if _NAME in sys.modules:
        raise RuntimeError(
            f"the shadow run begins too late: {_NAME} is already imported, and other modules may "
            f"hold its functions. Start the script with `python -m compat.launch --shadow SCRIPT`."
        )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def watch(stock: ModuleType, report: Callable[..., None] | None = None) -> None:
    """Let ``stock.initialize_model_parallel`` compare what it has created. *Local*.

    ``report`` takes the number of the initialisation and what ``compare`` returns; by default the
    first rank prints what all have found.
    """
    initialize = stock.initialize_model_parallel

    @functools.wraps(initialize)
    def compared(*args: Any, **kwargs: Any) -> Any:
        with _recorded() as created:
            result = initialize(*args, **kwargs)
        bound = inspect.signature(initialize).bind(*args, **kwargs)
        bound.apply_defaults()
        (report or _report)(next(_calls), *compare(stock, bound.arguments, created))
        return result

    stock.initialize_model_parallel = compared  # type: ignore[attr-defined]


class Created(NamedTuple):
    """A call of ``torch.distributed.new_group`` that returned a group of this rank."""

    label: str
    ranks: tuple[int, ...]
    arguments: dict[str, Any]
    group: Any


@dataclass
class Record:
    """The calls of stock's initialisation: how many there were, and this rank's groups."""

    calls: int = 0
    groups: list[Created] = field(default_factory=list)


@contextmanager
def _recorded() -> Iterator[Record]:
    import torch.distributed as dist

    record, new_group = Record(), dist.new_group
    signature = inspect.signature(new_group)

    @functools.wraps(new_group)
    def listening(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        record.calls += 1
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            members = given.get("ranks")
            ranks = range(dist.get_world_size()) if members is None else sorted(members)
            label = given.get("group_desc") or ""
            record.groups.append(Created(label, tuple(ranks), given, group))
        return group

    dist.new_group = listening
    try:
        yield record
    finally:
        dist.new_group = new_group


def compare(
    stock: ModuleType, arguments: dict[str, Any], record: Record
) -> tuple[Sequence[int], str, list[str]]:
    """Compare stock's groups, private globals and getters on this rank with the plan. *Local*.

    Returns
    -------
    tuple
        The ranks that take part; in words, what hypergrid would have created; and the differences,
        a sentence each.
    """
    import torch.distributed as dist

    from compat.megatron.build import place
    from compat.megatron.planning import Request

    ranks: Sequence[int] = range(dist.get_world_size())
    try:
        request = Request(**arguments)
        request.check()
        ranks = request.participants
        matching = _Matching(record.groups)
        built = place(request, matching.find)
    except Exception as error:
        return ranks, "", [f"hypergrid refuses these arguments, {type(error).__name__}: {error}"]
    many = len(matching.found)
    summary = f"{many} groups on this one, {record.calls} -> {many} calls of new_group"
    told = [*matching.differences, *_globals(stock, built.slots), *_getters(stock, built, request)]
    return ranks, summary, told


class _Matching:
    """Answers a request for a group with the one that stock has created for it."""

    def __init__(self, groups: Sequence[Created]) -> None:
        self._left = list(groups)
        self.found: list[Created] = []
        self.differences: list[str] = []

    def find(
        self, label: str, mine: dict[str, tuple[int, ...]], everyone: Any, **asked: Any
    ) -> list[Any]:
        """This rank's groups of ``label``; arguments as for ``GroupPool.make``."""
        return [self._one(label, tuple(sorted(ranks)), asked) for ranks in mine.values()]

    def _one(self, label: str, ranks: tuple[int, ...], asked: dict[str, Any]) -> Any:
        same = (each for each in self._left if (each.label, each.ranks) == (label, ranks))
        created = next(same, None)
        if created is None:
            self.differences.append(f"{label} of ranks [{few(ranks)}]: stock has not created it")
            return object()
        self._left.remove(created)
        self.found.append(created)
        for name in ("backend", "timeout", "pg_options"):
            stocks, ours = _content(created.arguments.get(name)), _content(asked[name])
            if stocks != ours:
                self.differences.append(
                    f"{label}: {name} is {stocks} with stock, and would be {ours}"
                )
        return created.group


def _content(value: Any) -> Any:
    """An argument of ``new_group`` that can be compared: of NCCL's options the fields."""
    if value is None or isinstance(value, str | timedelta):
        return value
    config = getattr(value, "config", None)
    if config is None:
        return type(value).__name__
    fields = {name: getattr(config, name, None) for name in _NCCL_FIELDS}
    return {"is_high_priority_stream": value.is_high_priority_stream, **fields}


def _globals(stock: ModuleType, ours: dict[str, Any]) -> Iterator[str]:
    from torch.distributed import ProcessGroup

    from compat.state import GROUP_SLOTS, RANK_SLOTS, SLOTS

    for name in (*GROUP_SLOTS, *RANK_SLOTS):
        theirs = getattr(stock, name, None)
        if hasattr(stock, name) and not _same(theirs, ours.get(name)):
            yield f"{name} is {_shown(theirs)} with stock, and would be {_shown(ours.get(name))}"
    for name, value in vars(stock).items():
        if name.startswith("_") and name not in SLOTS:
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, dict | list | tuple) else [value]
            if any(isinstance(each, ProcessGroup) for each in values):
                yield f"{name} of stock holds groups, and hypergrid does not have it"


def _getters(stock: ModuleType, built: Any, request: Any) -> Iterator[str]:
    """Differences between what stock's getters return and what ours return for the same groups."""
    from compat.megatron.getters import bind_getters_to, cached_sizes
    from compat.state import OTHER_SLOTS, SLOTS

    others = {name: getattr(stock, name, None) for name in OTHER_SLOTS}
    names = {"__name__": __name__, **dict.fromkeys(SLOTS), **others, **built.slots}
    ours = bind_getters_to({**names, **cached_sizes(built.numbers, request)})
    for name, function in ours.items():
        getter = getattr(stock, name, None)
        if getter is None or not name.startswith(("get_", "is_", "has_", "model_")):
            continue
        for flags in _flags(function, getter):
            given = ", ".join(f"{flag}={value}" for flag, value in flags.items())
            pair = [_answer(each, flags) for each in (getter, function)]
            if not _same(*pair):
                theirs, mine = map(_shown, pair)
                yield f"{name}({given}) returns {theirs} with stock, and would return {mine}"


def _flags(function: Callable[..., Any], getter: Callable[..., Any]) -> Iterator[dict[str, bool]]:
    """No arguments, then each flag that both have the other way; nothing for other functions."""
    theirs = inspect.signature(getter).parameters
    if any(each.default is each.empty for each in theirs.values()):
        return
    yield {}
    for name in inspect.signature(function).parameters:
        if name in theirs and isinstance(theirs[name].default, bool):
            yield {name: not theirs[name].default}


def _answer(getter: Callable[..., Any], flags: dict[str, bool]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getter(**flags)
    except Exception as error:
        return type(error)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one is other or (isinstance(one, int | str) and one == other)


def _shown(value: Any) -> str:
    from torch.distributed import ProcessGroup, get_process_group_ranks

    if isinstance(value, ProcessGroup):
        return f"{value.group_desc} of ranks [{few(get_process_group_ranks(value))}]"
    if isinstance(value, list | tuple):
        return f"[{few([*map(_shown, value)])}]"
    if isinstance(value, dict):
        return f"groups of sizes {[*value]}"
    if isinstance(value, type):
        return f"a {value.__name__}"
    return "a group that stock has not created" if type(value) is object else repr(value)


def _report(call: int, ranks: Sequence[int], summary: str, differences: list[str]) -> None:
    """Print at the first rank what all ranks found; end the job if it is strict. *Collective*.

    Only the first rank waits for the others, and all do if differences end the job.
    """
    import torch.distributed as dist

    from hypergrid.agreement import store as stores

    rank, strict = dist.get_rank(), os.environ.get(VARIABLE) == "strict"
    mine = [f"rank {rank}: {each}." for each in differences[:_LINES_OF_A_RANK]]
    shared = stores.shared_store()
    answered, wrong, lines = 1, int(bool(differences)), mine
    if shared is not None:
        key = f"hypergrid/shadow/{call}/{ranks[0]}"
        if differences:
            for line in mine:
                stores.append(shared, f"{key}/lines", line)
            shared.add(f"{key}/different", 1)
        if shared.add(f"{key}/ranks", 1) == len(ranks):
            shared.set(f"{key}/all", "")
        if rank != ranks[0] and not strict:
            return
        with suppress(RuntimeError):  # then those that have answered are counted
            stores.wait(shared, [f"{key}/all"], _ANSWERS, len(ranks))
        answered = shared.add(f"{key}/ranks", 0)
        wrong = shared.add(f"{key}/different", 0)
        lines = stores.lines(shared, f"{key}/lines") if wrong else []
    heard = f"{answered} ranks"
    if answered < len(ranks):
        heard += f" that answered, of {len(ranks)}"
    said = [f"hypergrid (shadow): would have created the same groups on all {heard}: {summary}."]
    if wrong:
        more = len(lines) - _LINES_IN_ALL
        said = [
            f"hypergrid (shadow): would differ from stock on {wrong} of {heard}. "
            f"Stock's groups are used.",
            *lines[:_LINES_IN_ALL],
            *([f"and {more} more."] if more > 0 else []),
        ]
    if rank == ranks[0]:
        print("\n".join(said), flush=True)
    if wrong and strict:
        raise RuntimeError(
            f"rank {rank} ends the job, as {VARIABLE}=strict asks: hypergrid differs from "
            f"stock on {wrong} of {len(ranks)} ranks. {lines[0]}"
        )
