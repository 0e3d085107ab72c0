"""What a release of Megatron offers: its functions, parameters and globals, and calls to try."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tests.support.stock import load_stock, source

Config = dict[str, Any]
Call = str  # in Python, such as "get_tensor_model_parallel_rank()"

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
COMMUNICATORS = [
    *("dp_cp", "dp", "cp", "hcp", "mp", "tp", "pp", "embd", "pos_embd", "tp_dp_cp", "tp_dp"),
    *("tp_cp", "ep", "ep_tp", "tp_ep_mp", "tp_ep_pp", "ep_dp", "intra_dp_cp", "intra_ep_dp"),
    *("inter_ep_dp", "intra_dist_opt_instance", "gtp_remat", "gtp_remat_dp", "gtp_remat_dp_cp"),
    *("expt_gtp_remat", "tp_ep_gtp_remat_pp", "ep_gtp_remat_dp", "nobody"),
]
_VALUES: dict[str, tuple[Any, ...]] = {
    "vp_stage": (None, 0, 1, 2),
    "rank": (None, 0, 1, 2, 3, -1),
    "group_size": (None, 1, 2, 3, 4, 6, 8, 12, 16, 32),
}

_stock = functools.cache(load_stock)


@functools.cache
def parameters(release: str, name: str = "initialize_model_parallel") -> dict[str, Any]:
    """The names and defaults of a function's parameters, in order."""
    signature = inspect.signature(getattr(_stock(release), name))
    return {name: parameter.default for name, parameter in signature.parameters.items()}


@functools.cache
def public_functions(release: str) -> tuple[str, ...]:
    """The public functions that a release defines, in the order of its source."""
    module = _stock(release)
    return tuple(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    )


@functools.cache
def private_globals(release: str) -> tuple[str, ...]:
    """The private module globals that a release assigns at its top or declares in a function."""
    tree = ast.parse(source(release))
    names = {n for node in ast.walk(tree) if isinstance(node, ast.Global) for n in node.names}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return tuple(sorted(name for name in names if name.startswith("_")))


def call(name: str, **kwargs: Any) -> Call:
    """A call to try, as text."""
    shown = [f"{parameter}={value!r}" for parameter, value in kwargs.items()]
    return f"{name}({', '.join(shown)})"


def called(text: Call) -> str:
    """The name of the function that is called."""
    return text.partition("(")[0]


@functools.cache
def getter_calls(release: str) -> tuple[Call, ...]:
    """Every getter and predicate with every sensible set of arguments."""
    calls: list[Call] = []
    for name in public_functions(release):
        is_getter = name.startswith(("get_", "is_", "has_")) or name.endswith("_is_initialized")
        if is_getter and name != "get_nccl_options":
            calls += _calls_of(name, list(parameters(release, name)))
    return tuple(dict.fromkeys(calls))


def _calls_of(name: str, names: list[str]) -> Iterator[Call]:
    """Calls of a function with each combination of values for its parameters ``names``.

    By keyword: their order is that of the release, see `compare_surface`.
    """
    choices = [_VALUES.get(parameter, (False, True)) for parameter in names]
    omitted = object()
    for values in itertools.product(*[(omitted, *values) for values in choices]):
        keywords = {}
        for parameter, value in zip(names, values, strict=True):
            if value is not omitted:
                keywords[parameter] = value
        yield call(name, **keywords)
    for parameter in names:
        # A flag may be any truth.
        if parameter not in _VALUES:
            yield call(name, **{parameter: 1})


@functools.cache
def plain_calls(release: str) -> tuple[Call, ...]:
    """The getters and predicates that give numbers, ranks and strings, without arguments."""
    plain = re.compile(r"\w+_(rank|ranks|size|initialized)\(\)|(is|has)_\w+\(\)")
    return tuple(text for text in getter_calls(release) if plain.fullmatch(text))


@functools.cache
def stage_calls(release: str) -> tuple[Call, ...]:
    """The questions that virtual pipeline stages answer differently, with every argument."""
    staged = ("is_pipeline_first_stage", "is_pipeline_last_stage", "is_rank_in_embedding_group")
    return tuple(text for text in getter_calls(release) if called(text) in staged)


def compare_surface(candidate: ModuleType, release: str) -> list[str]:
    """What `candidate` lacks of `release`, one line each.

    Every public function with the signature of that release, every private global, and the
    refusal to initialise without torch.distributed.
    """
    lines = []
    for name in public_functions(release):
        function = getattr(candidate, name, None)
        if not callable(function):
            lines.append(f"{name}: the candidate has no such function")
            continue
        signature = inspect.signature(function)
        stocks = inspect.signature(getattr(_stock(release), name))
        if _shown_parameters(signature) != _shown_parameters(stocks):
            lines.append(f"{name}: the signature is {signature}, not {stocks}")
    for name in private_globals(release):
        if not hasattr(candidate, name):
            lines.append(f"{name}: the candidate has no such global")
    # Stock asserts that torch.distributed is initialised.
    with contextlib.suppress(AssertionError):
        candidate.initialize_model_parallel()
        lines.append("initialize_model_parallel works without torch.distributed")
    return lines


def _shown_parameters(signature: inspect.Signature) -> str:
    """Names, defaults and kinds; of defaults the text, as each release has classes of its own."""
    parameters = signature.parameters.values()
    return repr([(parameter.name, parameter.default, parameter.kind) for parameter in parameters])
