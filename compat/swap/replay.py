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
    """The calls of stock's initialisation on this rank, and how hypergrid's calls differ.

    Functions that create groups or decide ranks run once, for stock. When hypergrid is planned,
    they answer what they answered stock. Calls inside such calls do not count, and neither do calls
    for groups of other ranks.
    """

    def __init__(self, stock: ModuleType, originals: Mapping[str, Any]) -> None:
        self.stock = stock
        self.helpers = replaced_functions()
        self._signatures = {"new_group": of_torch.new_group_signature()}
        for name in HELPERS:
            if name in originals and getattr(stock, name) is not originals[name]:
                self.helpers[name] = getattr(stock, name)
                self._signatures[name] = inspect.signature(originals[name])
        self._is_replaced = creates(self.helpers)
        self._generators: dict[str, Any] = {}
        self._depth = 0  # of calls inside each other
        self._calls: list[Call] = []  # of stock
        # In hypergrid's order, the positions in ``_calls`` of those that it makes too.
        self._positions: list[int] = []
        self.new_groups = 0  # calls of torch.distributed.new_group by stock
        self.differences: list[str] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, stock runs."""
        earlier_groups = of_torch.registered_groups()
        with self._patched(self.stock, is_plan=False):
            yield
        # A replaced function may create groups by other means.
        if self._is_replaced:
            return
        results = [call.result for call in self._calls]
        for group in of_torch.registered_groups():
            is_seen = any(result is group for result in results)
            if group not in earlier_groups and not is_seen:
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
        stand_ins = {}
        with ExitStack() as stack:

            def replace(home: ModuleType, name: str, stand_in: Callable[..., Any]) -> None:
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, stand_in)
                stand_ins[name] = stand_in

            replace(dist, "new_group", self._stand_in("new_group", dist.new_group, is_plan))
            for name in self._signatures:
                if name in CREATORS:
                    replace(module, name, self._stand_in(name, getattr(module, name), is_plan))
            if any(name in self.helpers for name in GENERATORS):
                create = self.stock.RankGenerator
                replace(module, "RankGenerator", functools.partial(self._generator, create))
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
                if call is None:
                    return None
                return self._answer(call)
            self._depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._depth -= 1
            if name == "new_group":
                self.new_groups += 1
            # Of calls inside each other the outermost counts.
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
        if ranks is None:
            ranks = range(dist.get_world_size())
        if dist.get_rank() not in ranks:
            return None
        options = _options(arguments.get("pg_options"))
        label = arguments.get("group_desc") or name
        compared = {**arguments, "ranks": list(ranks), "pg_options": options}
        return Call(f"{label} of ranks [{few(ranks)}]", compared)

    def _answer(self, planned: Call) -> Any:
        """Return the result of stock's call with these arguments; notes how they differ."""
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

    def note(self, name: str, stock_value: Any, planned_value: Any) -> None:
        """Note a difference between a value of stock and one of hypergrid, if there is one."""
        of_stock = _plain(stock_value)
        planned = _plain(planned_value)
        if of_stock != planned:
            stock_text, planned_text = shown_apart(of_stock, planned)
            self.differences.append(
                f"{name} is {stock_text} with stock, and would be {planned_text}"
            )

    def summary(self) -> str:
        """In words, what hypergrid would have created."""
        groups = len(self._positions)
        # A replaced function is called for every group of the world, as by stock.
        calls = self.new_groups if self._is_replaced else groups
        return f"{groups} groups on this one, {self.new_groups} -> {calls} calls of new_group"

    def _generator(self, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A rank generator, once for the same arguments; it answers the same question once.

        The ``get_ranks`` of a replacement may communicate: all ranks are in the first call only.
        """
        key = repr((args, sorted(kwargs.items())))
        if key not in self._generators:
            generator = create(*args, **kwargs)
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
        signature = inspect.signature(parallel_state.initialize_model_parallel)
        arguments = _bound(signature, args, kwargs)
        with record.replayed() as helpers:
            request = Request(**arguments, helpers=helpers)
            request.check()
            planned_rows = PlannedRows(request)
            ranks = planned_rows.participants
            values = empty_values(request)
            build.place(planned_rows, values)
        for name, stock_value, planned_value in _values(record.stock, values, planned_rows):
            record.note(name, stock_value, planned_value)
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
    planned_globals: dict[str, Any] = {"__name__": __name__, **dict.fromkeys(SLOTS)}
    # Those that are no groups and no ranks, such as buffers: as stock has them.
    for name in OTHER_SLOTS:
        planned_globals[name] = getattr(stock, name, None)
    planned_globals.update(values)
    for name, getter in bind_getters_to(planned_globals).items():
        stock_getter = getattr(stock, name, None)
        if stock_getter is None or not name.startswith(_GETTERS):
            continue
        for arguments in _arguments(stock_getter, planned_rows):
            text = ", ".join(f"{flag}={value}" for flag, value in arguments.items())
            yield f"{name}({text})", _result(stock_getter, arguments), _result(getter, arguments)


def _arguments(getter: Callable[..., Any], planned_rows: PlannedRows) -> Iterator[dict[str, Any]]:
    """Every combination of flags, virtual stages and sizes of groups.

    Of ``f(group_size, with_cp=False)``: ``{}``, ``{"with_cp": True}``, ``{"group_size": 2}`` ...
    """
    parameters = inspect.signature(getter).parameters
    values: dict[str, Sequence[Any]] = {
        "vp_stage": range(planned_rows.request.virtual_pipeline_model_parallel_size or 0),
        "group_size": [row.key for row in planned_rows.rows if row.table_row.holds == "sizes"],
    }
    choices = []
    for name, parameter in parameters.items():
        if isinstance(parameter.default, bool):
            values[name] = [not parameter.default]
        choices.append([{}, *({name: value} for value in values.get(name, ()))])
    for combination in itertools.product(*choices):
        arguments = {}
        for choice in combination:
            arguments.update(choice)
        yield arguments


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
        return [_options(options) for options in value]
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
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, timedelta):
        return _Shown(value, str(value))
    if isinstance(value, ProcessGroup):
        ranks = few(get_process_group_ranks(value))
        return _Shown(value, f"{value.group_desc} of ranks [{ranks}]")
    return value
