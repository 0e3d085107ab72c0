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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from compat.megatron import replaced
from compat.swap import REPLACEMENTS, answers
from compat.swap.answers import VARIABLE as VARIABLE
from compat.swap.answers import is_wanted as is_wanted
from hypergrid.messages import few, shown_apart

_NAME = "megatron.core.parallel_state"
_NCCL_FIELDS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
_GETTERS = ("get_", "is_", "has_", "model_")
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
        record = Record(stock, originals)
        with answers.failure_noted(), record.recorded():
            result = initialize(*args, **kwargs)
        (report or answers.report)(next(_calls), *compare(record, args, kwargs))
        return result

    stock.initialize_model_parallel = compared  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Call:
    """A call of a function that creates groups: its arguments by name, and what it returned."""

    function: str
    arguments: dict[str, Any]
    result: Any = None

    @property
    def label(self) -> str:
        """The description of the group, or else the function's name."""
        return self.arguments.get("group_desc") or self.function

    @property
    def ranks(self) -> list[int]:
        """The group's ranks, in the order of the call."""
        import torch.distributed as dist

        ranks = self.arguments.get("ranks")
        return list(range(dist.get_world_size()) if ranks is None else ranks)

    def __str__(self) -> str:
        return f"{self.label} of ranks [{few(self.ranks)}]"


class Record:
    """What stock's initialisation called on this rank, and how hypergrid's calls differ.

    Functions that create groups or decide ranks run once, for stock. Where hypergrid calls them
    they answer what they answered stock. Calls inside such calls do not count, and neither do those
    for groups of other ranks.
    """

    def __init__(self, stock: ModuleType, originals: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        now = vars(stock)
        present = [name for name in replaced.HELPERS if name in originals]
        self.stock = stock
        self.helpers = {name: now[name] for name in present if now[name] is not originals[name]}
        self.decides_ranks = any(name in self.helpers for name in replaced.GENERATORS)
        creators = [name for name in replaced.CREATORS if name in self.helpers]
        self._signatures = {name: inspect.signature(originals[name]) for name in creators}
        self._signatures["new_group"] = inspect.signature(dist.distributed_c10d.new_group)
        outside = replaced.replaced_functions().get(replaced.NEW_GROUP)
        if outside is not None:
            self.helpers[replaced.NEW_GROUP] = outside
        # Only then the swap creates groups in stock's order.
        self._is_ordered = replaced.creates(self.helpers)
        self._generators: dict[str, Any] = {}
        self._is_inside = False  # a call that counts
        self._calls: list[Call] = []  # of stock
        self._positions: dict[int, None] = {}  # of the calls that hypergrid made too, in its order
        self.new_groups = 0  # calls of torch.distributed.new_group by stock
        self.planned = 0  # groups of hypergrid
        self.differences: list[str] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, stock runs."""
        from hypergrid import of_torch

        before = of_torch.known()
        with self._patched(self.stock, self._recording):
            yield
        results = {id(call.result) for call in self._calls}
        for group in of_torch.known():
            if group not in before and id(group) not in results and not self._is_ordered:
                self.differences.append(
                    f"{_plain(group)}: stock creates it without torch.distributed.new_group"
                )

    @contextmanager
    def replayed(self, ours: ModuleType) -> Iterator[dict[str, Callable[..., Any]]]:
        """Inside, hypergrid is planned; gives the replaced functions that it is to call."""
        with self._patched(ours, self._answering) as stand_ins:
            yield {**self.helpers, **stand_ins}
        for position, call in enumerate(self._calls):
            if position not in self._positions:
                self.differences.append(f"{call}: stock creates it, and hypergrid would not")

    @contextmanager
    def _patched(
        self, module: ModuleType, stand_in: Callable[[str, Any], Any]
    ) -> Iterator[dict[str, Callable[..., Any]]]:
        """Inside, the functions that create groups or decide ranks are replaced."""
        import torch.distributed as dist

        stand_ins: dict[str, Callable[..., Any]] = {}
        with ExitStack() as stack:
            for name in self._signatures:
                holder = dist if name == "new_group" else module
                function = getattr(holder, name)
                stack.callback(setattr, holder, name, function)
                stand_ins[name] = stand_in(name, self.helpers.get(name, function))
                setattr(holder, name, stand_ins[name])
            if self.decides_ranks:
                stack.callback(setattr, module, "RankGenerator", module.RankGenerator)
                make = self.helpers.get("RankGenerator", self.stock.RankGenerator)
                stand_ins["RankGenerator"] = functools.partial(self._generator, make)
                module.RankGenerator = stand_ins["RankGenerator"]  # type: ignore[attr-defined]
            yield stand_ins

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch.distributed as dist

        @functools.wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            self.new_groups += name == "new_group"
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._is_inside = False
            call = Call(name, self._bound(name, args, kwargs), result)
            if dist.get_rank() in call.ranks:
                self._calls.append(call)
            return result

        return record

    def _answering(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch.distributed as dist

        @functools.wraps(function)  # also its marks, as compat.members_only() sets one
        def answer(*args: Any, **kwargs: Any) -> Any:
            call = Call(name, self._bound(name, args, kwargs))
            if dist.get_rank() not in call.ranks:
                return dist.GroupMember.NON_GROUP_MEMBER
            return self._answer(call)

        return answer

    def _answer(self, planned: Call) -> Any:
        """What stock's call with these arguments returned; notes how its arguments differ."""
        self.planned += 1
        for position, call in enumerate(self._calls):
            is_same = call.ranks == planned.ranks and call.label == planned.label
            if is_same and position not in self._positions:
                break
        else:
            self.differences.append(f"{planned}: stock has not created it")
            return object()
        last = max(self._positions, default=0)
        if self._is_ordered and position < last:
            self.differences.append(
                f"{call}: stock creates it before {self._calls[last]}, and hypergrid after it"
            )
        self._positions[position] = None
        for name in call.arguments.keys() | planned.arguments.keys():
            self.note(
                f"{call.label}: {name}", call.arguments.get(name), planned.arguments.get(name)
            )
        return call.result

    def note(self, what: str, theirs: Any, ours: Any) -> None:
        """Note a difference between a value of stock and one of hypergrid, if there is one."""
        plain = _plain(theirs)
        other = _plain(ours)
        if plain != other:
            text, other_text = shown_apart(plain, other)
            self.differences.append(f"{what} is {text} with stock, and would be {other_text}")

    def _bound(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        arguments = _bound(self._signatures[name], args, kwargs)
        arguments["pg_options"] = _options(arguments.get("pg_options"))
        return arguments

    def _generator(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A rank generator, once for the same arguments; it answers the same question once."""
        key = repr((args, sorted(kwargs.items())))
        if key not in self._generators:
            generator = make(*args, **kwargs)
            for method in ("get_ranks", "get_gtp_ranks"):
                with suppress(AttributeError):  # not all releases have both
                    setattr(generator, method, functools.cache(getattr(generator, method)))
            self._generators[key] = generator
        return self._generators[key]


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def compare(
    record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]
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
    try:
        arguments = _bound(inspect.signature(ours.initialize_model_parallel), args, kwargs)
        with record.replayed(ours) as helpers:
            request = Request(**arguments, helpers=helpers)
            request.check()
            ranks = request.participants
            built = build.place(request)
    except Exception as error:
        return ranks, "", [f"hypergrid refuses these arguments, {type(error).__name__}: {error}"]
    for what, theirs, planned in _values(record.stock, built, request):
        record.note(what, theirs, planned)
    summary = (
        f"{record.planned} groups on this one, {record.new_groups} calls of new_group with stock"
    )
    return ranks, summary, record.differences


def _values(stock: ModuleType, built: Any, request: Any) -> Iterator[tuple[str, Any, Any]]:
    """Private globals and the results of getters: their names, of stock, and as planned."""
    from compat.megatron.getters import bind_getters_to, cached_sizes
    from compat.state import GROUP_SLOTS, OTHER_SLOTS, RANK_SLOTS, SLOTS

    for name in (*GROUP_SLOTS, *RANK_SLOTS):
        if hasattr(stock, name):
            yield name, getattr(stock, name), built.slots.get(name)
    others = {name: getattr(stock, name, None) for name in OTHER_SLOTS}
    names = {"__name__": __name__, **dict.fromkeys(SLOTS), **others, **built.slots}
    ours = bind_getters_to({**names, **cached_sizes(built.numbers, request)})
    for name, function in ours.items():
        getter = getattr(stock, name, None)
        if getter is None or not name.startswith(_GETTERS):
            continue
        for arguments in _arguments(getter, request):
            text = ", ".join(f"{flag}={value}" for flag, value in arguments.items())
            yield f"{name}({text})", _result(getter, arguments), _result(function, arguments)


def _arguments(getter: Callable[..., Any], request: Any) -> Iterator[dict[str, Any]]:
    """No arguments, and every combination of flags, virtual stages and sizes of groups."""
    parameters = inspect.signature(getter).parameters.values()
    if any(argument.default is argument.empty for argument in parameters):
        return
    values: dict[str, Sequence[Any]] = {
        "vp_stage": range(request.virtual_pipeline_model_parallel_size or 0),
        "group_size": [p.key for p in request.planned if p.row.holds == "sizes"],
    }
    choices = []
    for argument in parameters:
        flags = [not argument.default] if isinstance(argument.default, bool) else []
        others = values.get(argument.name, flags)
        choices.append([{}, *({argument.name: value} for value in others)])
    for chosen in itertools.product(*choices):
        yield {name: value for choice in chosen for name, value in choice.items()}


def _result(getter: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getter(**arguments)
    except Exception as error:
        return type(error)


def _options(value: Any) -> Any:
    """Options of a backend as values: of NCCL's the fields."""
    if isinstance(value, list):
        return [_options(item) for item in value]
    config = getattr(value, "config", None)
    if value is None or config is None:
        return value and type(value).__name__
    fields = {name: getattr(config, name, None) for name in _NCCL_FIELDS}
    return {"is_high_priority_stream": value.is_high_priority_stream, **fields}


@dataclass(frozen=True)
class _Shown:
    """A value that is compared by its key, and appears in messages as a text."""

    key: Any
    text: str = field(compare=False)

    def __repr__(self) -> str:
        return self.text


def _plain(value: Any) -> Any:
    """A value whose parts can be compared and shown; groups are compared by identity."""
    from torch.distributed import ProcessGroup, get_process_group_ranks

    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, timedelta | type):
        return _Shown(value, str(value))
    if isinstance(value, ProcessGroup):
        ranks = few(get_process_group_ranks(value))
        return _Shown(id(value), f"{value.group_desc} of ranks [{ranks}]")
    is_missing = type(value) is object
    return _Shown(id(value), "a group that stock has not created" if is_missing else repr(value))
