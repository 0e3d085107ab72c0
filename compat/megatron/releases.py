"""The megatron-core release that ``compat`` follows, and what differs between releases."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import re
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from compat.megatron.sources import UNREADABLE, Source, imported_source
from hypergrid.messages import shown

Version = tuple[int, int]
Span = tuple[Version, Version]  # the first and the last release with a behaviour
F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

# THE LIST of releases: the last one of each line, with which the tests compare. Whatever depends on
# the newest, in scripts and tests too, takes it from here.
PUBLISHED = (
    *("0.12.3", "0.13.1", "0.14.0", "0.15.3"),
    *("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
)
OLDEST: Version = (0, 12)
NEWEST: Version = (0, 20)  # the branch main of August 2026, whose parallel_state.py is 0.19.2's
_BRANCH: Version = (1_000, 0)  # for what branches have and no release


def _until(last: Version) -> Span:
    return OLDEST, last


def _since(first: Version) -> Span:
    return first, NEWEST


# Names that not all releases have: functions, private globals, arguments. "function.argument" is
# the argument of this function alone.
_FIRST: dict[Version, str] = {  # ... and from which release on
    (0, 13): """
        create_hierarchical_groups overwrite_nccl_comm_cfgs high_priority_stream_groups vp_stage
        get_intra_distributed_optimizer_instance_group HAVE_EINOPS
        get_inter_distributed_optimizer_instance_group
        partial_expert_data_parallel get_expert_data_parallel_group.check_initialized
        get_model_parallel_group.check_initialized get_embedding_group.check_initialized
        get_pipeline_model_parallel_group.check_initialized
        get_position_embedding_group.check_initialized
        get_tensor_and_context_parallel_group.check_initialized
        get_expert_tensor_model_pipeline_parallel_group.check_initialized
        _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
        _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
    """,
    (0, 14): "sharp_enabled_group",
    (0, 15): """
        update_pg_timeout _global_process_group_list
        get_tensor_and_data_parallel_group.check_initialized
        get_intra_distributed_optimizer_instance_group.check_initialized
        get_inter_distributed_optimizer_instance_group.check_initialized
    """,
    (0, 16): """
        hybrid_context_parallel create_hybrid_dp_cp_groups get_hybrid_data_context_parallel_groups
        _HYBRID_DP_CP_GROUPS get_expert_model_parallel_src_rank _EXPERT_MODEL_PARALLEL_RANKS
        create_all_gather_group independent_all_gather has_separate_all_gather_group
        _DATA_PARALLEL_GROUP_WITH_CP_AG _GLOBAL_SYMMETRIC_MEMORY_BUFFER
        get_global_symmetric_memory_buffer destroy_global_symmetric_memory_buffer
        _set_global_symmetric_memory_buffer
    """,
    (0, 17): "rank_offset local_world_size",
    (0, 18): "create_all_gather_groups",
    (0, 19): """
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
    _BRANCH: """
        dynamic_context_parallel min_dynamic_context_parallel_size create_dynamic_dp_cp_groups
        get_dynamic_data_context_parallel_groups _DYNAMIC_DP_CP_GROUPS
    """,
}
_LAST: dict[Version, str] = {  # ... and up to which release
    (0, 12): """
        create_hierarchical_parallel_groups get_inter_partial_data_parallel_group
        _INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP get_moe_layer_wise_logging_tracker
        _MOE_LAYER_WISE_LOGGING_TRACKER
    """,
    (0, 13): """
        pipeline_model_parallel_split_rank split_rank encoder_tensor_model_parallel_size
        encoder_pipeline_model_parallel_size is_inside_encoder is_inside_decoder
        is_pipeline_stage_before_split is_pipeline_stage_after_split is_pipeline_stage_at_split
        get_pipeline_model_parallel_split_rank set_pipeline_model_parallel_split_rank
        get_pipeline_model_parallel_decoder_start
        _PIPELINE_MODEL_PARALLEL_SPLIT_RANK _PIPELINE_MODEL_PARALLEL_DECODER_START
    """,
    (0, 16): """
        is_unitialized get_data_modulo_expert_parallel_group _GLOBAL_SYMMETRIC_MEMORY_BUFFER
        get_global_symmetric_memory_buffer destroy_global_symmetric_memory_buffer
        _set_global_symmetric_memory_buffer
    """,
    (0, 17): """
        create_all_gather_group independent_all_gather has_separate_all_gather_group
        _DATA_PARALLEL_GROUP_WITH_CP_AG
    """,
}


def _by_name(table: dict[Version, str]) -> dict[str, Version]:
    return {name: version for version, names in table.items() for name in names.split()}


SPANS: dict[str, Span] = {
    **{name: _since(first) for name, first in _by_name(_FIRST).items()},
    **{name: (_by_name(_FIRST).get(name, OLDEST), last) for name, last in _by_name(_LAST).items()},
}

# Arguments that are written last, since most releases lack them, and what they stand before: the
# signature of most releases then needs no wrapper.
BEFORE = {"with_gtp_remat": "partial_"}

# Defaults that differ from those in parallel_state.py, and in which releases.
DEFAULTS: dict[str, tuple[Span, Any]] = {"ignore_virtual": (_until((0, 12)), False)}

# Other behaviour of releases, by name; or the name above that comes and goes with it.
FACTS: dict[str, Span | str] = {
    # the data-parallel group is created before the one with cp, and without SHARP
    "dp_first": _until((0, 12)),
    # optimizer instances: groups between them are dense (later releases use the experts') ...
    "instances_in_dense": "get_inter_partial_data_parallel_group",
    # ... or the expert grid is split too, and an instance has a group of all its ranks
    "instances_in_expert": "get_intra_distributed_optimizer_instance_group",
    # hierarchical context parallelism: levels have torch's timeout, and are a list when unset
    "plain_levels": "create_hierarchical_parallel_groups",
    # a pipeline's default embedding ranks depend on the stage at which it splits
    "splits": "split_rank",
    # NCCL options that a section leaves out are set for Hopper; priorities are not read
    "nccl_defaults": _until((0, 12)),
    # ranks and sizes come from torch, for which None is the world; later from the group itself
    "numbers_from_torch": _until((0, 12)),
    # the virtual stage is an argument; before, the one that was set last
    "vp_stage": "vp_stage",
    # the stage asks torch for the rank first, which raises its own error without a world
    "stage_asks_torch": _until((0, 13)),
    # ... and later for the stage, which raises an error for a group that torch did not create
    "stage_from_torch": _since((0, 14)),
    # functions about encoder and decoder warn that they are deprecated
    "encoder_deprecated": _since((0, 13)),
    # SHARP's variable is set to 1 and 0; before, use_sharp only set it to 0
    "sharp_switched": "sharp_enabled_group",
    # the expert-parallel group has torch's timeout and not the one asked for
    "plain_ep": _until((0, 15)),
    # two more axes for weights, also in get_all_ranks() and RankGenerator
    "gtp_remat": "gtp_remat_size",
    # HyperCommGrid has views, which copy its shape and names; groups are created from the copies
    "grid_views": "HyperCommGrid.register_view",
}

ASKED = "HYPERGRID_MEGATRON_RELEASE"  # a release that is to be followed whatever is installed
ALL = "HYPERGRID_ALL_RELEASES"  # keep the names and arguments of all releases ...
EVERY = os.environ.get(ALL, "0") != "0"  # ... as this process does


def _is_in(span: Span, release: Version) -> bool:
    return span[0] <= release <= span[1]


def _known(text: str, origin: str) -> Version:
    """The release of a version number, or the nearest that is known, with a warning."""
    found = re.match(r"v?(\d{1,9})\.(\d{1,9})", text)
    if found is None:
        raise ValueError(f"{origin}={shown(text)} is not a release: write it as in '0.16.1'.")
    release = (int(found[1]), int(found[2]))
    known = min(max(release, OLDEST), NEWEST)
    if release != known:
        follows = "{}.{}".format(*known)
        word = "newer" if release > known else "older"
        warnings.warn(
            f"megatron-core {text} is {word} than every release that hypergrid knows: it behaves "
            f"as {follows}. Compare the two releases' parallel_state, or use a hypergrid that "
            f"knows yours; {ASKED}={follows} silences this.",
            stacklevel=3,
        )
    return known


def _nearest(source: Source, stated: Version) -> Version:
    """The release whose names are the most like those of ``source``; of equal ones the stated."""
    releases = [(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]

    def alike(release: Version) -> tuple[int, bool, Version]:
        same = sum((name in source.names) == _is_in(span, release) for name, span in SPANS.items())
        return same, release == stated, release

    return max(releases, key=alike)


def _decide() -> tuple[Version, Source | None, str]:
    """The release to follow, the source whose names count unless one is asked for, and why."""
    if text := os.environ.get(ASKED):
        return _known(text, ASKED), None, ASKED
    source = imported_source()
    text, origin = source.version if source is not None else "", "installed"
    if not text:
        from importlib import metadata  # 10 ms, which a source saves

        try:
            text = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            text, origin = PUBLISHED[-1], "none installed"
    stated = _known(text, origin)
    if source is None or not source.functions:
        return stated, None, origin
    return _nearest(source, stated), source, origin


_FOUND = RELEASE, SOURCE, ORIGIN = _decide()


def present(name: str) -> bool:
    """Whether the release, or the source that decides, has a name of ``SPANS``."""
    return name in SOURCE.names if SOURCE is not None else _is_in(SPANS[name], RELEASE)


def has(name: str) -> bool:
    """Whether ours has a name: as the release, or of all releases where ``ALL`` is set."""
    return name not in SPANS or EVERY or present(name)


def facts() -> dict[str, bool]:
    """Each of ``FACTS`` as it is in the release."""
    return {
        fact: present(where) if isinstance(where, str) else _is_in(where, RELEASE)
        for fact, where in FACTS.items()
    }


RELEASE_HAS = facts()


def in_words() -> str:
    """The release that is followed, and how the source that decides differs from it."""
    said = f"{RELEASE[0]}.{RELEASE[1]}"
    public = {name: _is_in(span, RELEASE) for name, span in SPANS.items() if name[0] != "_"}
    for word, has_it in (("with", True), ("without", False)):
        names = [n for n, usual in public.items() if usual is not has_it and present(n) is has_it]
        said += f", {word} {', '.join(names)}" if names else ""
    return said


def drop_absent(names: dict[str, Any]) -> None:
    """Remove from a module's names those that the release does not have."""
    for name in [name for name in names if not has(name)]:
        del names[name]


def follow(text: str | None = None) -> None:
    """Plan as that release, or again as the one found at import. Signatures stay as they are."""
    global RELEASE, SOURCE, ORIGIN
    asked = "--megatron"
    RELEASE, SOURCE, ORIGIN = _FOUND if text is None else (_known(text, asked), None, asked)
    RELEASE_HAS.update(facts())


def _other_defaults(function: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The constant defaults of the source's initialisation that differ from the ``known`` ones.

    Of initialisation alone: a default of another function may be more than what a caller gets.
    """
    if SOURCE is None or function != "initialize_model_parallel":
        return {}
    return {
        name: default
        for name, default in SOURCE.functions.get(function, {}).items()
        if default is not UNREADABLE and name in known and known[name] != default
    }


def take_defaults(fields: type[T]) -> type[T]:
    """Give the fields of a class the constant defaults of the source's initialisation."""
    for name, default in _other_defaults("initialize_model_parallel", vars(fields)).items():
        setattr(fields, name, default)
    return fields


def as_released(function: F) -> F:
    """Give the arguments of ``function`` the positions and defaults that they have in ``RELEASE``.

    The function is written with the arguments of all releases in their common order. Its signature
    shows those of this release; the others it refuses, or takes by keyword where ``ALL`` is set.
    """
    signature, name = inspect.signature(function), function.__name__
    parameters = signature.parameters
    always = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    placed = [*SOURCE.functions.get(name, [""])] if SOURCE is not None else [""]
    if not {*placed} <= {*always}:
        in_table = {n: f"{name}.{n}" if f"{name}.{n}" in SPANS else n for n in always}
        placed = [n for n, row in in_table.items() if row not in SPANS or present(row)]
        for late in BEFORE.keys() & {*placed}:
            placed.remove(late)
            placed.insert([n.startswith(BEFORE[late]) for n in placed].index(True), late)
    written = {n: p.default for n, p in parameters.items()}
    now = written | {
        n: default
        for n, (span, default) in DEFAULTS.items()
        if n in written and _is_in(span, RELEASE)
    }
    now |= _other_defaults(name, now)
    named = [n for n in parameters if n not in placed and (EVERY or n not in always)]
    released: Any = function
    if now != written or [*placed, *named] != [*parameters]:
        released = _rewritten(function, placed, named, now)
    shown = [parameters[n].replace(default=now[n]) for n in placed]
    released.__signature__ = signature.replace(parameters=shown)
    return released  # type: ignore[no-any-return]


def _rewritten(function: Any, placed: list[str], named: list[str], given: dict[str, Any]) -> Any:
    """``function`` compiled anew: arguments by position and by name alone, the others constants.

    A wrapper would double the cost of a call.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)  # also in a zip
    end = max(line for *_, line in code.co_lines() if line)  # or where its last statement ends
    while end < len(lines) and lines[end][0].isspace():
        end += 1
    first = code.co_firstlineno - 1
    tree = ast.parse("\n" * first + "".join(lines[first:end]))
    written: Any = tree.body[0]
    written.decorator_list, written.returns = [], None
    header = ", ".join([*placed, *(["*", *named] if named else [])])
    constants = [f"{name} = {given[name]!r}" for name in given if name not in (*placed, *named)]
    outline: Any = ast.parse(f"def outline({header}):\n    {'; '.join(constants) or 'pass'}")
    written.args = outline.body[0].args
    written.body[:0] = outline.body[0].body
    compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    name = function.__name__
    new = next(each for each in compiled.co_consts if getattr(each, "co_name", "") == name)
    made = FunctionType(new, function.__globals__, name)
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    have = {name: value for name, value in given.items() if value is not inspect.Parameter.empty}
    made.__defaults__ = tuple(have[name] for name in placed if name in have)
    made.__kwdefaults__ = {name: have[name] for name in named}
    return made
