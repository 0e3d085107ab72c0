"""A shadow run: megatron-core's own parallel_state runs the job, and hypergrid plans beside it.

After each ``initialize_model_parallel`` every rank compares what stock created with what hypergrid
would have created from the same arguments, and hypergrid creates nothing: the job, its speed and
its exit status are stock's. This is the first step on a cluster where hypergrid was never tried.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from compat.megatron import replaced
from compat.swap import REPLACEMENTS, answers
from compat.swap.answers import VARIABLE as VARIABLE
from compat.swap.answers import is_wanted as is_wanted
from hypergrid.messages import few

_NAME = "megatron.core.parallel_state"
_NCCL_FIELDS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
_GETTERS = ("get_", "is_", "has_", "model_")
# Upstream's helper creates it with its siblings and returns it to nobody.
_UNREACHABLE = "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L1"
_calls = itertools.count(1)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        # The other finders in their order, as the import system asks them.
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _Watching(spec.loader)
                return spec
        return None


class _Watching(Loader):
    """Loads a module as another loader does, and watches it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        answers.report_at_exit()
        watch(module)


_finder = _Finder()


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
    originals = dict(vars(stock))
    initialize = stock.initialize_model_parallel

    @functools.wraps(initialize)
    def compared(*args: Any, **kwargs: Any) -> Any:
        with answers.failure_noted(), _recorded(stock, originals) as record:
            result = initialize(*args, **kwargs)
        (report or answers.report)(next(_calls), *compare(stock, args, kwargs, record))
        return result

    stock.initialize_model_parallel = compared  # type: ignore[attr-defined]


class Call(NamedTuple):
    """A call of a function that creates groups: its arguments by name, and what it returned."""

    name: str
    arguments: dict[str, Any]
    result: Any

    @property
    def label(self) -> str:
        """The description of the group, or else the function's name."""
        return self.arguments.get("group_desc") or self.name

    @property
    def ranks(self) -> list[int]:
        """The group's ranks, in the order of the call."""
        import torch.distributed as dist

        ranks = self.arguments.get("ranks")
        return list(range(dist.get_world_size()) if ranks is None else ranks)

    def __str__(self) -> str:
        return f"{self.label} of ranks [{few(self.ranks)}]"


@dataclass
class Record:
    """What stock's initialisation called.

    ``helpers`` are the functions that outside code has replaced, ``signatures`` those of stock.
    """

    helpers: Mapping[str, Callable[..., Any]]
    signatures: Mapping[str, inspect.Signature]
    through_helpers: bool = False  # whether the swap would call them for every group of the world
    new_groups: int = 0  # calls of torch.distributed.new_group
    calls: list[Call] = field(default_factory=list)  # of the helpers, or new_group's of this rank
    rank_lists: dict[Any, Any] = field(default_factory=dict)  # of the rank generators
    groups: list[Any] = field(default_factory=list)  # that torch knows, and did not know before


def _is_group(result: Any) -> bool:
    import torch.distributed as dist

    return result is not None and result is not dist.GroupMember.NON_GROUP_MEMBER


@contextmanager
def _recorded(stock: ModuleType, originals: Mapping[str, Any]) -> Iterator[Record]:
    import torch.distributed as dist

    from hypergrid import of_torch

    present = [name for name in replaced.HELPERS if name in originals]
    helpers = {name: vars(stock)[name] for name in present}
    helpers = {name: now for name, now in helpers.items() if now is not originals[name]}
    outside = replaced.replaced_functions().get(replaced.NEW_GROUP)
    if outside is not None:
        helpers[replaced.NEW_GROUP] = outside
    creators = [name for name in replaced.CREATORS if name in originals]
    signatures = {name: inspect.signature(originals[name]) for name in creators}
    signatures["new_group"] = inspect.signature(dist.distributed_c10d.new_group)
    record = Record(helpers, signatures)
    record.through_helpers = replaced.creates(helpers) or replaced.pretended_world() is not None
    depth = 0  # calls of creators inside each other: only the outermost counts

    def recording(name: str, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            is_outermost = depth == 0
            depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                depth -= 1
            record.new_groups += name == "new_group"
            arguments = _bound(signatures[name], args, kwargs)
            if is_outermost and (record.through_helpers or _is_group(result)):
                if not record.through_helpers:
                    arguments["ranks"] = sorted(Call(name, arguments, result).ranks)
                record.calls.append(Call(name, arguments, result))
            return result

        return called

    def generator(*args: Any, **kwargs: Any) -> Any:
        made = helpers.get("RankGenerator", originals["RankGenerator"])(*args, **kwargs)
        _answer_from(made, record.rank_lists, _key(args, kwargs))
        return made

    before = of_torch.known()
    with ExitStack() as stack:

        def patch(holder: ModuleType, name: str, function: Callable[..., Any]) -> None:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, function)

        patch(dist, "new_group", recording("new_group", dist.new_group))
        if record.through_helpers:
            for name in creators:
                patch(stock, name, recording(name, getattr(stock, name)))
        if any(name in helpers for name in replaced.GENERATORS):
            patch(stock, "RankGenerator", generator)
        yield record
    record.groups = [group for group in of_torch.known() if group not in before]


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def compare(
    stock: ModuleType, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record
) -> tuple[Sequence[int], str, list[str]]:
    """Compare stock's groups, private globals and getters on this rank with the plan. *Local*.

    Returns
    -------
    tuple
        The ranks that take part; in words, what hypergrid would have created; and the differences,
        a sentence each.
    """
    import torch.distributed as dist

    from compat.megatron import build
    from compat.megatron.planning import Request
    from compat.swap.drift import refuse_drift

    ranks: Sequence[int] = range(dist.get_world_size())
    ours = import_module("compat.parallel_state")
    try:
        for module, replacement in REPLACEMENTS.items():
            refuse_drift(module, vars(import_module(replacement)))
    except RuntimeError as error:
        return ranks, "", [f"the swap refuses this megatron: {error}"]
    matching = _Matching(record)
    try:
        signature = inspect.signature(ours.initialize_model_parallel)
        arguments = _bound(signature, args, kwargs)
        request = Request(**arguments, helpers=matching.helpers())
        request.check()
        ranks = request.participants
        if record.through_helpers:
            built = build.place_called(request, matching.creators())
        else:
            built = build.place(request, matching.find)
    except Exception as error:
        return ranks, "", [f"hypergrid refuses these arguments, {type(error).__name__}: {error}"]
    called = len(record.calls if record.through_helpers else matching.positions)
    summary = (
        f"{len(built.groups) - 1} groups on this one, {record.new_groups} -> {called} calls of "
        f"{'helpers' if record.through_helpers else 'new_group'}"
    )
    differences = [
        *matching.differences,
        *matching.rest(),
        *_globals(stock, built.slots),
        *_getters(stock, built, request),
    ]
    return ranks, summary, differences


class _Matching:
    """Answers a request for a group with the one that stock has created for it."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._calls = [call for call in record.calls if call.label != _UNREACHABLE]
        self._left = dict(enumerate(self._calls))
        self.positions: list[int] = []  # of the calls that were asked for, in stock's order
        self.differences: list[str] = []

    def find(
        self, label: str, mine: dict[str, tuple[int, ...]], everyone: Any, **wanted: Any
    ) -> list[Any]:
        """This rank's groups of ``label``; arguments as for ``GroupPool.make``."""
        groups = []
        for ranks in mine.values():
            named = {name: wanted[name] for name in ("backend", "timeout", "pg_options")}
            arguments = _bound(
                self._record.signatures["new_group"],
                (),
                {"ranks": sorted(ranks), "group_desc": label, **named},
            )
            groups.append(self._answer(Call("new_group", arguments, None)))
        return groups

    def helpers(self) -> dict[str, Callable[..., Any]]:
        """The functions that outside code has replaced; those that communicate only answer."""
        helpers = {**self._record.helpers}
        for name, function in self.creators().items():
            if name in helpers:
                helpers[name] = function
        if any(name in helpers for name in replaced.GENERATORS):
            helpers["RankGenerator"] = self._generator
        return helpers

    def creators(self) -> dict[str, Callable[..., Any]]:
        """Functions in place of those that create groups: they answer as stock's did."""

        def answering(name: str, signature: inspect.Signature) -> Callable[..., Any]:
            def answer(*args: Any, **kwargs: Any) -> Any:
                return self._answer(Call(name, _bound(signature, args, kwargs), None))

            marks = vars(self._record.helpers.get(name, answer))
            vars(answer).update(marks)  # as compat.members_only() sets one
            return answer

        signatures = self._record.signatures.items()
        return {name: answering(name, row) for name, row in signatures if name != "new_group"}

    def _generator(self, *args: Any, **kwargs: Any) -> Any:
        answers = self._record.rank_lists
        key = _key(args, kwargs)

        class Generator:
            def get_ranks(self, *args: Any) -> Any:
                return answers[key, "get_ranks", args]

            def get_gtp_ranks(self, *args: Any) -> Any:
                return answers[key, "get_gtp_ranks", args]

        return Generator()

    def _answer(self, wanted: Call) -> Any:
        """What stock's call with these arguments returned; notes how its arguments differ."""
        place = wanted.name, wanted.label, wanted.ranks
        same = (n for n, row in self._left.items() if (row.name, row.label, row.ranks) == place)
        position = next(same, None)
        if position is None:
            self.differences.append(f"{wanted}: stock has not created it")
            return object()
        call = self._calls[position]
        del self._left[position]
        # Only helpers are promised stock's order.
        ordered = self._record.through_helpers and self.positions
        if ordered and position < self.positions[-1]:
            before = self._calls[self.positions[-1]]
            self.differences.append(f"{call}: stock creates it before {before}, and ours after it")
        self.positions.append(position)
        for name in call.arguments.keys() | wanted.arguments.keys():
            theirs = _content(call.arguments.get(name))
            ours = _content(wanted.arguments.get(name))
            if theirs != ours:
                self.differences.append(
                    f"{call.label}: {name} is {theirs} with stock, and would be {ours}"
                )
        return call.result

    def rest(self) -> Iterator[str]:
        """What stock created, and hypergrid would not."""
        import torch.distributed as dist

        everyone = self._record.through_helpers and not replaced.by_members(self._record.helpers)
        for call in self._left.values():
            if everyone or dist.get_rank() in call.ranks:
                yield f"{call}: stock creates it, and hypergrid would not"
        if not self._record.through_helpers:
            known = {id(call.result) for call in self._record.calls}
            for group in self._record.groups:
                if id(group) not in known:
                    yield f"{_shown(group)}: stock creates it without torch.distributed.new_group"


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return repr((args, sorted(kwargs.items())))


def _answer_from(generator: Any, answers: dict[Any, Any], key: str) -> None:
    """Let a rank generator note what it answers."""

    def noting(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any) -> Any:
            answers[key, method, args] = function(*args)
            return answers[key, method, args]

        return noted

    for method in ("get_ranks", "get_gtp_ranks"):
        if hasattr(generator, method):
            setattr(generator, method, noting(method, getattr(generator, method)))


def _content(value: Any) -> Any:
    """An argument of ``new_group`` that can be compared: of NCCL's options the fields."""
    if isinstance(value, list | tuple):
        return [_content(one) for one in value]
    if value is None or isinstance(value, str | int | timedelta):
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
            if any(isinstance(one, ProcessGroup) for one in values):
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
        if getter is None or not name.startswith(_GETTERS):
            continue
        for arguments in _arguments(getter, request):
            text = ", ".join(f"{flag}={value}" for flag, value in arguments.items())
            theirs = _result(getter, arguments)
            mine = _result(function, arguments)
            if not _same(theirs, mine):
                shown = f"{_shown(theirs)} with stock, and would return {_shown(mine)}"
                yield f"{name}({text}) returns {shown}"


def _arguments(getter: Callable[..., Any], request: Any) -> Iterator[dict[str, Any]]:
    """No arguments, and every combination of flags, virtual stages and sizes of groups."""
    parameters = inspect.signature(getter).parameters
    if any(row.default is row.empty for row in parameters.values()):
        return
    stages = request.virtual_pipeline_model_parallel_size or 0
    values: dict[str, Sequence[Any]] = {
        "vp_stage": range(stages),
        "group_size": [p.key for p in request.planned if p.row.holds == "sizes"],
    }
    choices = {name: [row.default, *values.get(name, ())] for name, row in parameters.items()}
    for name, row in parameters.items():
        if isinstance(row.default, bool):
            choices[name] = [row.default, not row.default]
    for chosen in itertools.product(*choices.values()):
        named = zip(choices, chosen, strict=True)
        yield {name: value for name, value in named if value is not parameters[name].default}


def _result(getter: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getter(**arguments)
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
