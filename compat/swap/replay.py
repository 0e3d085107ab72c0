"""What stock's initialisation did on this rank, beside what hypergrid would have done.

The second is planned by the code that creates the groups of a swap, with a pool that looks up the
groups of stock. What it has comes from there alone, and from what outside code has written.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup, get_process_group_ranks

from compat import parallel_state
from compat.megatron import build, communicators
from compat.megatron.getters import FUNCTIONS
from compat.megatron.releases import is_upstreams
from compat.megatron.request import (
    CREATORS,
    GENERATORS,
    HELPERS,
    NEW_GROUP,
    Request,
    creates,
    replaced_functions,
)
from compat.megatron.rows import PlannedRows
from compat.state import SLOTS, TAKEN_OVER, ParallelState, empty_values
from compat.swap import REPLACEMENTS
from compat.swap.drift import differences, loaded_definitions, refuse_drift
from hypergrid import of_torch
from hypergrid.messages import few, shown_apart
from hypergrid.policy import Agreement

_GETTERS = ("get_", "is_", "has_", "model_")
_PLAIN = (bool, int, float, str, type, type(None))  # what a text tells completely


class Call(NamedTuple):
    """A call of a function that creates groups: its arguments by name, and what it returned."""

    group: str  # in words
    arguments: dict[str, Any]
    result: Any = None
    live: tuple[str, ...] = ()  # description and timeouts of the group when it was new


class Record:
    """The calls of stock's initialisation on this rank, and how hypergrid's calls differ.

    Functions that create groups or decide ranks run once, for stock. When hypergrid is planned,
    they answer what they answered stock. Calls inside such calls do not count, and neither do calls
    for groups of other ranks.
    """

    def __init__(self, stock: ModuleType, loaded: Mapping[str, Any]) -> None:
        self.stock = stock
        self.loaded = loaded  # the names of stock when it was new
        self._environment = dict(os.environ)
        # What outside code has written. Stock's own values of then may differ from ours.
        self._written: dict[str, Any] = {}
        for name in TAKEN_OVER:
            if getattr(stock, name, None) is not loaded.get(name):
                self._written[name] = getattr(stock, name, None)
        self.helpers = replaced_functions()
        self._signatures = {"new_group": of_torch.new_group_signature()}
        for name in HELPERS:
            if name in loaded and getattr(stock, name, None) is not loaded[name]:
                self.helpers[name] = getattr(stock, name)
                self._signatures[name] = inspect.signature(loaded[name])
        self._is_replaced = creates(self.helpers)
        # One for the same arguments: it runs for stock, and the plan gets what it answered.
        create = getattr(stock, "RankGenerator", None)
        self._generator = functools.cache(functools.partial(_generator, create))
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
        for call in self._calls:
            self.note(f"{call.group}: description and timeout", _live(call.result), call.live)
        # A replaced function may create groups by other means.
        if self._is_replaced:
            return
        created = [call.result for call in self._calls]
        others = {*of_torch.registered_groups()}.difference(earlier_groups, created)
        for group in sorted(map(_text, others)):
            self.differences.append(
                f"{group}: stock creates it without torch.distributed.new_group"
            )

    def planned_state(self, planned_rows: PlannedRows) -> ParallelState:
        """The state that a swap would have, with groups of stock in the place of its own."""
        request = planned_rows.request
        state = ParallelState()
        state._put(self._written)
        values = empty_values()
        pg_options = build.options_of_rows(planned_rows)
        build.prepare_environment(request)
        if dist.get_rank() in planned_rows.participants:
            pool: Any = _Pool()
            build.fill(values, planned_rows, pg_options, pool)
            # Whether outside code's own functions would keep the list is not planned.
            if {*self.helpers}.intersection(CREATORS).difference([NEW_GROUP]):
                values["_global_process_group_list"] = getattr(
                    self.stock, "_global_process_group_list", None
                )
        state.take_values(values, request)
        state._bind()
        if "_set_global_memory_buffer" in self.helpers:
            state._GLOBAL_MEMORY_BUFFER = self.stock._GLOBAL_MEMORY_BUFFER
        else:
            state._set_global_memory_buffer()
        return state

    @contextmanager
    def replayed(self) -> Iterator[dict[str, Callable[..., Any]]]:
        """Inside, hypergrid is planned; gives the replaced functions that it is to call."""
        planned_environment = dict(self._environment)
        # The modules that set variables have an os of their own meanwhile.
        own_os = SimpleNamespace(environ=planned_environment)
        with ExitStack() as stack:
            _replace(stack, build, "os", own_os)
            _replace(stack, communicators, "os", own_os)
            _replace(stack, build, "_barrier", lambda group: None)
            with self._patched(parallel_state, is_plan=True) as stand_ins:
                yield {**self.helpers, **stand_ins}
        for name in sorted({*planned_environment, *os.environ}):
            self.note(f"the variable {name}", os.environ.get(name), planned_environment.get(name))
        for position, call in enumerate(self._calls):
            if position not in self._positions:
                self.differences.append(f"{call.group}: stock creates it, and hypergrid would not")

    @contextmanager
    def _patched(
        self, module: ModuleType, is_plan: bool
    ) -> Iterator[dict[str, Callable[..., Any]]]:
        """Inside, the functions that create groups or decide ranks are replaced."""
        stand_ins: dict[str, Callable[..., Any]] = {}
        with ExitStack() as stack:
            new_group = dist.new_group
            stand_ins["new_group"] = self._stand_in("new_group", new_group, is_plan)
            # Stock may have imported it by name, from one of two modules.
            for home in (*of_torch.HOMES_OF_NEW_GROUP, module):
                for name, value in list(vars(home).items()):
                    if value is new_group:
                        _replace(stack, home, name, stand_ins["new_group"])
            for name in self._signatures:
                if name in CREATORS:
                    stand_ins[name] = self._stand_in(name, getattr(module, name), is_plan)
                    _replace(stack, module, name, stand_ins[name])
            if not self.helpers.keys().isdisjoint(GENERATORS):
                stand_ins["RankGenerator"] = self._generator
                _replace(stack, module, "RankGenerator", self._generator)
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
                self._calls.append(call._replace(result=result, live=_live(result)))
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
        ranks = list(ranks)
        compared = {**arguments, "pg_options": _options(arguments.get("pg_options"))}
        if not self._is_replaced:
            # Torch sorts ranks and knows defaults: outside code alone could tell the difference.
            ranks.sort()
            backend = arguments.get("backend") or dist.get_backend()
            compared["backend"] = backend
            if compared.get("timeout") is None:
                compared["timeout"] = of_torch.default_timeout(backend)
        compared["ranks"] = ranks
        label = arguments.get("group_desc") or name
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
        texts = _text(stock_value), _text(planned_value)
        if texts[0] != texts[1]:
            stock_text, planned_text = shown_apart(*texts)
            self.differences.append(
                f"{name} is {stock_text} with stock, and would be {planned_text}"
            )

    def summary(self, not_taken_over: Sequence[str]) -> str:
        """In words, what hypergrid would have created."""
        groups = len(self._positions)
        # A replaced function is called for every group of the world, as by stock.
        calls = self.new_groups if self._is_replaced else groups
        text = f"{groups} groups on this one, {self.new_groups} -> {calls} calls of new_group"
        if not_taken_over:
            text += f". Not taken over: {', '.join(not_taken_over)}"
        return text


def _generator(create: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank generator that answers the same question once.

    The ``get_ranks`` of a replacement may communicate: all ranks are in the first call only.
    """
    generator = create(*args, **kwargs)
    for method in ("get_ranks", "get_gtp_ranks"):
        with suppress(AttributeError):  # not all releases have both
            setattr(generator, method, functools.cache(getattr(generator, method)))
    return generator


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


class _Pool:
    """In the place of a pool of groups: asks for those of stock, and keeps none."""

    agreement = Agreement("")

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def make(
        self,
        label: str,
        ranks_of: Mapping[str, Sequence[int]],
        everyone: object,
        *,
        dims: object = (),
        kind: object = None,
        **options: Any,
    ) -> list[Any]:
        options.setdefault("group_desc", label)
        return [dist.new_group(list(ranks), **options) for ranks in ranks_of.values()]

    def adopt(self, *arguments: object) -> None:
        """Own a group that outside code created: it stays stock's."""

    def connecting(self) -> AbstractContextManager[None]:
        return nullcontext()


def compare(
    record: Record, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Sequence[int], str, list[str]]:
    """Compare what stock's initialisation left on this rank, and returned, with the plan. *Local*.

    Returns
    -------
    tuple
        The ranks that take part; in words, what hypergrid would have created; and the differences,
        a sentence each.
    """
    ranks: Sequence[int] = range(dist.get_world_size())
    not_taken_over: list[str] = []
    try:
        for module in REPLACEMENTS:
            not_taken_over += refuse_drift(module)
        signature = inspect.signature(parallel_state.initialize_model_parallel)
        arguments = _bound(signature, args, kwargs)
        with record.replayed() as helpers:
            request = Request(**arguments, helpers=helpers)
            planned_rows = PlannedRows(request)
            ranks = planned_rows.participants
            state = record.planned_state(planned_rows)
        record.note("the result of initialize_model_parallel", result, None)
        definitions = loaded_definitions(record.loaded)
        ours = vars(parallel_state)
        record.differences += differences(definitions, ours)
        for name, value in ours.items():
            # A getter of ours runs in several namespaces: what is written says whose it is.
            written = FUNCTIONS.get(name, value)
            if is_upstreams(name, written) and name not in record.loaded:
                record.differences.append(f"stock has no {name}, and hypergrid has")
        for name, stock_value, planned_value in _values(record, state):
            record.note(name, stock_value, planned_value)
    except Exception as error:
        return ranks, "", [f"the swap would refuse, {type(error).__name__}: {error}"]
    return ranks, record.summary(not_taken_over), record.differences


def _values(record: Record, state: ParallelState) -> Iterator[tuple[str, Any, Any]]:
    """Private globals and the results of getters: their names, of stock, and as planned."""
    stock = record.stock
    slots = sorted(SLOTS)
    for name in vars(stock):
        # What was written since stock was loaded, also under a name that nobody knows.
        if name not in record.loaded and not name.startswith("__"):
            slots.append(name)
    for name in slots:
        stock_value = getattr(stock, name, _ABSENT)
        planned_value = state._values.get(name, _ABSENT)
        if (
            name == "_global_process_group_list"
            and type(stock_value) is type(planned_value) is list
        ):
            # Its order is that of creation, which has no effect.
            stock_value = sorted(stock_value, key=id)
            planned_value = sorted(planned_value, key=id)
        yield name, stock_value, planned_value
    for name in FUNCTIONS:
        stock_getter = getattr(stock, name, None)
        if not callable(stock_getter) or not name.startswith(_GETTERS):
            continue
        for arguments in _arguments(stock_getter, state):
            words = [f"{flag}={value}" for flag, value in arguments.items()]
            planned_result = _result(state._values[name], arguments)
            yield f"{name}({', '.join(words)})", _result(stock_getter, arguments), planned_result


def _arguments(getter: Callable[..., Any], state: ParallelState) -> Iterator[dict[str, Any]]:
    """Every combination of flags, virtual stages and sizes of groups.

    Of ``f(group_size, with_cp=False)``: ``{}``, ``{"with_cp": False}``, ``{"group_size": 2}`` ...
    """
    stages = state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE or 0
    live_sizes = [group.size() for group in of_torch.registered_groups()]
    values: dict[str, Sequence[Any]] = {
        "vp_stage": range(max(stages, 2)),
        "group_size": sorted({1, 2, 4, *live_sizes}),
    }
    choices = []
    for name, parameter in inspect.signature(getter).parameters.items():
        if isinstance(parameter.default, bool):
            values[name] = (False, True)
        # Left out, or one of its values.
        ways = [{name: value} for value in values.get(name, ())]
        choices.append([{}, *ways])
    for combination in itertools.product(*choices):
        yield functools.reduce(operator.or_, combination, {})


def _result(getter: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getter(**arguments)
    except Exception as error:
        return type(error)


def _replace(stack: ExitStack, home: Any, name: str, value: Any) -> None:
    """Replace an attribute until the stack is closed."""
    stack.callback(setattr, home, name, getattr(home, name))
    setattr(home, name, value)


def _live(group: Any) -> tuple[str, ...]:
    """The description and the timeouts that a group has now."""
    if not isinstance(group, ProcessGroup):
        return ()
    return (group.group_desc, *map(str, of_torch.timeouts_of(group)))


def _options(value: Any) -> Any:
    """Options of a backend as values: of NCCL's the fields."""
    if isinstance(value, list):
        return [_options(options) for options in value]
    config = getattr(value, "config", None)
    options = [getattr(config, name, getattr(value, name, None)) for name in communicators.OPTIONS]
    return [type(value).__name__, options]


class _Text(str):
    """A text that messages show without quotes."""

    __repr__ = str.__str__


_NOT_CREATED = _Text("a group that stock has not created")
_ABSENT = _Text("absent")


def _text(value: Any) -> _Text:
    """A value as a text that tells types too: 1, 1.0 and True differ, and so do two groups."""
    if isinstance(value, ProcessGroup):
        ranks = few(get_process_group_ranks(value))
        return _Text(f"{value.group_desc} of ranks [{ranks}], {value.group_name} in torch")
    if isinstance(value, timedelta | _Text):
        return _Text(value)
    kind = type(value)
    text = ""  # of a buffer, for example, which each side makes for itself
    if isinstance(value, list | tuple):
        text = repr([_text(part) for part in value])
    elif isinstance(value, dict):
        texts = {_text(key): _text(part) for key, part in value.items()}
        text = repr(dict(sorted(texts.items())))
    elif isinstance(value, _PLAIN):
        text = repr(value)
    # Such as a subclass of int, which equals a number.
    if kind not in (list, dict, *_PLAIN):
        text = f"{kind.__name__} {text}".rstrip()
    return _Text(text)
