"""The megatron-core release that ``compat`` follows, and what differs between releases."""

from __future__ import annotations

import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from compat.megatron import installed
from hypergrid.messages import shown

if TYPE_CHECKING:
    from compat.megatron.sources import Source

Version = tuple[int, int]
Span = tuple[Version, Version]  # the first and the last release with a behaviour
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
REQUIRED = inspect.Parameter.empty
F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

# THE LIST of releases: the last one of each line, with which the tests compare. Whatever depends on
# the newest, in scripts and tests too, takes it from here.
PUBLISHED = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
OLDEST: Version = (0, 14)
LAST_WITH_OLDER = "0.1.0"  # the hypergrid that followed releases before OLDEST
NEWEST: Version = (0, 20)  # the branch main of August 2026, whose parallel_state.py is 0.19.2's
# By the checksum of the files that hypergrid replaces: their release. scripts/fetch_megatron prints
# the row of a new one. Another file is read, which takes longer than all else at import.
CHECKSUMS: dict[str, Version] = {
    "e485e654874e9c9d": (0, 14),
    "87a195c9d054f905": (0, 15),
    "01471f08705662d9": (0, 16),
    "929705d00386cddc": (0, 17),
    "11eac7b0a669b9bb": (0, 18),
    "0c110d1bb083d09a": (0, 19),
}
_BRANCH: Version = (1_000, 0)  # for what branches have and no release


# Names that not all releases have: functions, private globals, arguments. "function.argument" is
# the argument of this function alone.
_NAMES: dict[Span, str] = {
    (OLDEST, (0, 16)): "is_unitialized get_data_modulo_expert_parallel_group",
    ((0, 15), NEWEST): """
        update_pg_timeout _global_process_group_list
        get_tensor_and_data_parallel_group.check_initialized
        get_intra_distributed_optimizer_instance_group.check_initialized
        get_inter_distributed_optimizer_instance_group.check_initialized
    """,
    ((0, 16), (0, 16)): """
        _GLOBAL_SYMMETRIC_MEMORY_BUFFER get_global_symmetric_memory_buffer
        destroy_global_symmetric_memory_buffer _set_global_symmetric_memory_buffer
    """,
    ((0, 16), (0, 17)): """
        create_all_gather_group independent_all_gather has_separate_all_gather_group
        _DATA_PARALLEL_GROUP_WITH_CP_AG
    """,
    ((0, 16), NEWEST): """
        hybrid_context_parallel create_hybrid_dp_cp_groups get_hybrid_data_context_parallel_groups
        _HYBRID_DP_CP_GROUPS get_expert_model_parallel_src_rank _EXPERT_MODEL_PARALLEL_RANKS
    """,
    ((0, 17), NEWEST): "rank_offset local_world_size",
    ((0, 18), NEWEST): "create_all_gather_groups",
    ((0, 19), NEWEST): """
        gtp_remat_size expert_gtp_remat_size with_gtp_remat with_egtp_remat
        HyperCommGrid.register_view _inject_gtp_remat_axis
        get_gtp_weight_remat_group get_gtp_weight_remat_global_ranks
        get_gtp_weight_remat_world_size get_gtp_weight_remat_rank
        get_expert_gtp_weight_remat_group get_expert_gtp_weight_remat_global_ranks
        get_expert_gtp_weight_remat_world_size get_expert_gtp_weight_remat_rank
        _GTP_WEIGHT_REMAT_GROUP _GTP_WEIGHT_REMAT_GLOBAL_RANKS
        _EXPERT_GTP_WEIGHT_REMAT_GROUP _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS
        _DATA_PARALLEL_GROUP_WITH_GTP_REMAT _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
        _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
        _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP
    """,
    (_BRANCH, NEWEST): """
        dynamic_context_parallel min_dynamic_context_parallel_size create_dynamic_dp_cp_groups
        get_dynamic_data_context_parallel_groups _DYNAMIC_DP_CP_GROUPS
    """,
}
SPANS: dict[str, Span] = {}
for _span, _text in _NAMES.items():
    SPANS.update(dict.fromkeys(_text.split(), _span))

ASKED = "HYPERGRID_MEGATRON_RELEASE"  # a release that is to be followed whatever is installed


def _is_in(span: Span, release: Version) -> bool:
    return span[0] <= release <= span[1]


def _nearest_known(text: str, origin: str) -> Version:
    """The release of a version number; of a newer one the nearest that is known, with a warning.

    ValueError for one that is older than all that are followed.
    """
    numbers = re.match(r"v?(\d{1,9})\.(\d{1,9})", text)
    if numbers is None:
        raise ValueError(f"{origin}={shown(text)} is not a release: write it as in '0.16.1'.")
    release = (int(numbers[1]), int(numbers[2]))
    oldest = "{}.{}".format(*OLDEST)
    newest = "{}.{}".format(*NEWEST)
    if release < OLDEST:
        raise ValueError(
            f"megatron-core {text} ({origin}) is older than {oldest}, the first release that this "
            f"hypergrid follows. hypergrid-comm {LAST_WITH_OLDER} was the last to follow it: "
            f"install that one, or a newer megatron-core. What needs no Megatron runs with "
            f"{ASKED}={newest}."
        )
    if release > NEWEST:
        warnings.warn(
            f"megatron-core {text} is newer than every release that hypergrid knows: it behaves "
            f"as {newest}. Compare the two releases' parallel_state, or use a hypergrid that "
            f"knows yours; {ASKED}={newest} silences this.",
            stacklevel=3,
        )
    return min(release, NEWEST)


def _most_alike(has_name: Callable[[str], bool], stated: Version) -> Version:
    """The release whose names are the most like those of a file; of equal ones the stated."""

    def likeness(release: Version) -> tuple[int, bool, Version]:
        alike = [has_name(name) == _is_in(span, release) for name, span in SPANS.items()]
        return sum(alike), release == stated, release

    return max([(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)], key=likeness)


def _decide() -> tuple[Version, Source | None, str]:
    """The release to follow, the source whose names count instead of a release's, and why."""
    if text := os.environ.get(ASKED):
        return _nearest_known(text, ASKED), None, ASKED
    core = installed.imported_core()
    text = ""
    if core is not None:
        text = installed.version_of(core)
    origin = "installed"
    if not text:
        from importlib import metadata  # 10 ms, which a source saves

        try:
            text = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            text = PUBLISHED[-1]
            origin = "none installed"
    stated = _nearest_known(text, origin)
    if core is None:
        return stated, None, origin
    published = CHECKSUMS.get(installed.checksum(core))
    if published is not None:
        same = _most_alike(lambda name: _is_in(SPANS[name], published), stated)
        return same, None, origin
    from compat.megatron import sources  # not needed where the checksum is known

    source = sources.read(core)
    if not source.functions:
        return stated, None, origin
    return _most_alike(source.names.__contains__, stated), source, origin


_DECIDED = RELEASE, SOURCE, ORIGIN = _decide()


def has(name: str) -> bool:
    """Whether the release, or the source that decides, has a name that ours has."""
    if name not in SPANS:
        return True
    if SOURCE is not None:
        return name in SOURCE.names
    return _is_in(SPANS[name], RELEASE)


def facts() -> dict[str, bool]:
    """Other behaviour, by name: whether the release has it."""
    return {
        # the expert-parallel group has torch's timeout and not the one asked for
        "plain_ep": RELEASE <= (0, 15),
        # two more axes for weights, also in get_all_ranks() and RankGenerator
        "gtp_remat": has("gtp_remat_size"),
        # HyperCommGrid has views, which copy its shape and names; groups are created from these
        "grid_views": has("HyperCommGrid.register_view"),
    }


RELEASE_HAS = facts()


# Where the public functions are upstream's, and no others but `missing`.
_WITH_UPSTREAMS_FUNCTIONS = (
    "compat.megatron.communicators",
    "compat.megatron.getters.",
    "compat.megatron.helpers",
    "compat.megatron.rank_generator",
)


def is_upstreams(name: str, value: object) -> bool:
    """Whether a function of ``compat.parallel_state`` is one of upstream's."""
    if name.startswith("_") or name == "missing" or not isinstance(value, FunctionType):
        return False
    return value.__module__.startswith(_WITH_UPSTREAMS_FUNCTIONS)


def drop_absent(names: dict[str, Any]) -> None:
    """Remove from a module's names those that the release does not have.

    Also functions that all releases have, and that the source does not mention.
    """
    for name, value in list(names.items()):
        is_gone = False
        if SOURCE is not None and is_upstreams(name, value):
            is_gone = name not in SOURCE.words
        if is_gone or not has(name):
            del names[name]


def follow(text: str | None = None) -> None:
    """Plan as that release, or again as the one found at import. Signatures stay as they are."""
    global RELEASE, SOURCE, ORIGIN
    RELEASE, SOURCE, ORIGIN = _DECIDED
    if text is not None:
        ORIGIN = "--megatron"
        SOURCE = None
        RELEASE = _nearest_known(text, ORIGIN)
    RELEASE_HAS.update(facts())


def _other_defaults(function: str, known_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The constant defaults of the source's initialisation that differ from ours.

    Of initialisation alone: a default of another function may be more than what a caller gets.
    """
    if SOURCE is None or function != "initialize_model_parallel":
        return {}
    from compat.megatron.sources import UNREADABLE

    others = {}
    for name, default in SOURCE.functions.get(function, {}).items():
        if default is UNREADABLE or name not in known_defaults:
            continue
        known = known_defaults[name]
        if (type(known), known) != (type(default), default):  # 1 == True
            others[name] = default
    return others


# Arguments that are None by default in the source, and not in ours: None stands for a value that
# only the body of its initialisation names.
NONE_BY_DEFAULT: set[str] = set()


def take_defaults(fields: type[T]) -> type[T]:
    """Give the fields of a class the constant defaults of the source's initialisation."""
    for name, default in _other_defaults("initialize_model_parallel", vars(fields)).items():
        setattr(fields, name, default)
        if default is None:
            NONE_BY_DEFAULT.add(name)
    return fields


def as_released(function: F) -> F:
    """Give the arguments of ``function`` the positions and defaults that they have in ``RELEASE``.

    The function is written with the arguments of all releases in their common order. Its signature
    shows those of this release, and the others it refuses. One that is written as in this release
    is given back itself.
    """
    name = function.__name__
    parameters = inspect.signature(function).parameters
    positional = [n for n, parameter in parameters.items() if parameter.kind is not KEYWORD_ONLY]
    placed = _placed(name, positional)
    named = [n for n in parameters if n not in positional]  # what only we have
    written = {n: parameter.default for n, parameter in parameters.items()}
    of_source = _other_defaults(name, written)
    released: Any = function
    if of_source:
        defaults = [of_source.get(n, written[n]) for n in positional]
        released.__defaults__ = tuple(default for default in defaults if default is not REQUIRED)
    signature = inspect.signature(function)
    if [*placed, *named] != [*parameters]:
        released = _taking(function, placed, named)
    shown_parameters = [signature.parameters[n] for n in placed]
    released.__signature__ = signature.replace(parameters=shown_parameters)
    return released  # type: ignore[no-any-return]


def _placed(function: str, positional: list[str]) -> list[str]:
    """The arguments that the release has, in its order."""
    if SOURCE is not None and function in SOURCE.functions:
        of_source = [*SOURCE.functions[function]]
        # A source with arguments that are not known is refused elsewhere.
        if {*of_source} <= {*positional}:
            return of_source
    placed = []
    for argument in positional:
        row = f"{function}.{argument}"  # of the argument of this function alone
        if row not in SPANS:
            row = argument
        if has(row):
            placed.append(argument)
    return placed


def _taking(function: Any, placed: list[str], named: list[str]) -> Any:
    """``function`` with the arguments ``placed`` by position or name, and ``named`` by name."""
    arguments = {*placed, *named}

    @functools.wraps(function)
    def released(*args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:  # most calls
            return function()
        if not args and arguments.issuperset(kwargs):  # most others
            return function(**kwargs)
        if len(args) > len(placed) or not arguments.issuperset(kwargs):
            raise TypeError(
                f"{function.__name__}() takes the arguments {', '.join([*placed, *named])}, and "
                f"got {len(args)} by position and by name {', '.join(kwargs) or 'none'}."
            )
        return function(**dict(zip(placed, args, strict=False)), **kwargs)

    return released
