"""What stock's initialisation did on this rank, beside what hypergrid would have done."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup, get_process_group_ranks

from compat import parallel_state
from compat.megatron import build
from compat.megatron.getters import bind_getters_to
from compat.megatron.request import (
    CREATORS,
    GENERATORS,
    HELPERS,
    Request,
    creates,
    replaced_functions,
)
from compat.megatron.rows import PlannedRows
from compat.state import GROUP_SLOTS, OTHER_SLOTS, RANK_SLOTS, SLOTS, empty_values
from compat.swap import REPLACEMENTS
from compat.swap.drift import refuse_drift
from hypergrid import of_torch
from hypergrid.messages import few, shown_apart

_NCCL_FIELDS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
_GETTERS = ("get_", "is_", "has_", "model_")


class Call(NamedTuple):
    """A call of a function that creates groups: its arguments by name, and what it returned."""

    group: str  # in words
    arguments: dict[str, Any]
    result: Any = None


class Record:
    """What stock's initialisation called on this rank, and how hypergrid's calls differ.

    Functions that create groups or decide ranks run once, for stock. When hypergrid is planned,
    they answer what they answered stock. Calls inside such calls do not count, and neither do calls
    for groups of other ranks.
    """

    def __init__(self, stock: ModuleType, originals: Mapping[str, Any]) -> None:
        now = vars(stock)
        names = [n for n in HELPERS if n in originals and now[n] is not originals[n]]
        self.stock = stock
        self.helpers = {**replaced_functions(), **{name: now[name] for name in names}}
        self._is_replaced = creates(self.helpers)
        self._signatures = {name: inspect.signature(originals[name]) for name in names}
        self._signatures["new_group"] = of_torch.new_group_signature()
        self._generators: dict[str, Any] = {}
        self._depth = 0  # of calls inside each other
        self._calls: list[Call] = []  # of stock
        self._positions: list[int] = []  # of those that hypergrid makes too, in its order
        self.new_groups = 0  # calls of torch.distributed.new_group by stock
        self.differences: list[str] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, stock runs."""
        before = of_torch.known()
        with self._patched(self.stock, is_plan=False):
            yield
        results = [id(call.result) for call in self._calls]
        for group in of_torch.known():
            if group not in before and id(group) not in results and not self._is_replaced:
                self.differences.append(
                    f"{_plain(group)}: stock creates it without torch.distributed.new_group"
                )

    @contextmanager
    def replayed(self) -> Iterator[dict[str, Callable[..., Any]]]:
        """Inside, hypergrid is planned; gives the replaced functions that it is to call."""
        with self._patched(parallel_state, is_plan=True) as stand_ins:
            yield {**self.helpers, **stand_ins}
        for position, call in enumerate(self._calls):
            if position not in self._positions:
                self.differences.append(f"{call.group}: stock creates it, and hypergrid would not")
        for before, after in itertools.pairwise(self._positions):
            # Only where outside code takes part, the swap creates groups in stock's order.
            if self._is_replaced and after < before:
                first = self._calls[after].group
                self.differences.append(f"stock creates {first} earlier than hypergrid does")

    @contextmanager
    def _patched(
        self, module: ModuleType, is_plan: bool
    ) -> Iterator[dict[str, Callable[..., Any]]]:
        """Inside, the functions that create groups or decide ranks are replaced."""
        holders = {name: module for name in self._signatures if name in CREATORS}
        holders["new_group"] = dist
        stand_ins = {
            name: self._stand_in(name, getattr(holder, name), is_plan)
            for name, holder in holders.items()
        }
        if any(name in self.helpers for name in GENERATORS):
            holders["RankGenerator"] = module
            make = self.stock.RankGenerator
            stand_ins["RankGenerator"] = functools.partial(self._generator, make)
        with ExitStack() as stack:
            for name, holder in holders.items():
                stack.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, stand_ins[name])
            yield stand_ins

    def _stand_in(
        self, name: str, function: Callable[..., Any], is_plan: bool
    ) -> Callable[..., Any]:
        """Calls a function of stock and notes the call; or answers as that call was answered."""

        # With the marks of the replaced function: compat.members_only() sets one.
        @functools.wraps(self.helpers.get(name, function))
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            call = self._call(name, args, kwargs)
            if is_plan:
                return None if call is None else self._answer(call)
            self._depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._depth -= 1
            self.new_groups += name == "new_group"
            if call is not None and self._depth == 0:
                self._calls.append(call._replace(result=result))
            return result

        return stand_in

    def _call(self, name: str, args: Any, kwargs: Any) -> Call | None:
        """A call for a group of this rank, or else None."""
        try:
            arguments = _bound(self._signatures[name], args, kwargs)
        except TypeError:  # stock's function refuses them by itself
            return None
        ranks = arguments.get("ranks")
        ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
        if dist.get_rank() not in ranks:
            return None
        options = _options(arguments.get("pg_options"))
        label = arguments.get("group_desc") or name
        compared = {**arguments, "ranks": ranks, "pg_options": options}
        return Call(f"{label} of ranks [{few(ranks)}]", compared)

    def _answer(self, planned: Call) -> Any:
        """What stock's call with these arguments returned; notes how its arguments differ."""
        for position, call in enumerate(self._calls):
            if call.group == planned.group and position not in self._positions:
                break
        else:
            self.differences.append(f"{planned.group}: stock has not created it")
            return _NOT_CREATED
        self._positions.append(position)
        for name, value in call.arguments.items():
            self.note(f"{call.group}: {name}", value, planned.arguments[name])
        return call.result

    def note(self, what: str, theirs: Any, ours: Any) -> None:
        """Note a difference between a value of stock and one of hypergrid, if there is one."""
        plain = _plain(theirs)
        other = _plain(ours)
        if plain != other:
            text, other_text = shown_apart(plain, other)
            self.differences.append(f"{what} is {text} with stock, and would be {other_text}")

    def summary(self) -> str:
        """In words, what hypergrid would have created."""
        count = len(self._positions)
        calls = self.new_groups if self._is_replaced else count
        return f"{count} groups on this one, {self.new_groups} -> {calls} calls of new_group"

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
    ranks: Sequence[int] = range(dist.get_world_size())
    try:
        for module in REPLACEMENTS:
            refuse_drift(module)
        arguments = _bound(
            inspect.signature(parallel_state.initialize_model_parallel), args, kwargs
        )
        with record.replayed() as helpers:
            request = Request(**arguments, helpers=helpers)
            request.check()
            planned_rows = PlannedRows(request)
            ranks = planned_rows.participants
            values = empty_values(request)
            build.place(planned_rows, values)
        for what, theirs, planned in _values(record.stock, values, planned_rows):
            record.note(what, theirs, planned)
    except Exception as error:
        return ranks, "", [f"the swap would refuse, {type(error).__name__}: {error}"]
    return ranks, record.summary(), record.differences


def _values(
    stock: ModuleType, values: build.Values, planned_rows: PlannedRows
) -> Iterator[tuple[str, Any, Any]]:
    """Private globals and the results of getters: their names, of stock, and as planned."""
    for name in (*GROUP_SLOTS, *RANK_SLOTS):
        planned = values.get(name)
        yield name, getattr(stock, name, planned), planned
    others = {name: getattr(stock, name, None) for name in OTHER_SLOTS}
    names = {"__name__": __name__, **dict.fromkeys(SLOTS), **others, **values}
    ours = bind_getters_to(names)
    for name, function in ours.items():
        getter = getattr(stock, name, None)
        if getter is None or not name.startswith(_GETTERS):
            continue
        for arguments in _arguments(getter, planned_rows):
            text = ", ".join(f"{flag}={value}" for flag, value in arguments.items())
            yield f"{name}({text})", _result(getter, arguments), _result(function, arguments)


def _arguments(getter: Callable[..., Any], planned_rows: PlannedRows) -> Iterator[dict[str, Any]]:
    """Every combination of flags, virtual stages and sizes of groups."""
    parameters = inspect.signature(getter).parameters
    values: dict[str, Sequence[Any]] = {
        "vp_stage": range(planned_rows.request.virtual_pipeline_model_parallel_size or 0),
        "group_size": [row.key for row in planned_rows.rows if row.table_row.holds == "sizes"],
    }
    choices = []
    for name, argument in parameters.items():
        flags = [not argument.default] if isinstance(argument.default, bool) else []
        others = values.get(name, flags)
        choices.append([{}, *({name: value} for value in others)])
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
    fields = {name: getattr(config, name, None) for name in _NCCL_FIELDS}
    return [type(value).__name__, getattr(value, "is_high_priority_stream", None), fields]


@dataclass(frozen=True)
class _Shown:
    """A value that appears in messages as a text."""

    value: Any
    text: str

    def __repr__(self) -> str:
        return self.text


_NOT_CREATED = _Shown(None, "a group that stock has not created")


def _plain(value: Any) -> Any:
    """A value whose parts can be compared, groups by identity."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, timedelta):
        return _Shown(value, str(value))
    if isinstance(value, ProcessGroup):
        ranks = few(get_process_group_ranks(value))
        return _Shown(value, f"{value.group_desc} of ranks [{ranks}]")
    return value
