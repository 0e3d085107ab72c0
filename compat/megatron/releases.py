"""The megatron-core release that ``compat`` follows, and what differs between releases."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from hypergrid.messages import shown

Version = tuple[int, int]
Span = tuple[Version, Version]  # the first and the last release with a behaviour
F = TypeVar("F", bound=Callable[..., object])

OLDEST: Version = (0, 12)
NEWEST: Version = (0, 19)


def _until(last: Version) -> Span:
    return OLDEST, last


def _since(first: Version) -> Span:
    return first, NEWEST


# Arguments that were added or removed, and the releases that have them. In other releases they are
# accepted by keyword only, and signatures do not show them. "function.argument": only there.
ARGUMENTS: dict[str, Span] = {
    "pipeline_model_parallel_split_rank": _until((0, 13)),
    "encoder_tensor_model_parallel_size": _until((0, 13)),
    "encoder_pipeline_model_parallel_size": _until((0, 13)),
    "split_rank": _until((0, 13)),
    "vp_stage": _since((0, 13)),
    "high_priority_stream_groups": _since((0, 13)),
    "partial_expert_data_parallel": _since((0, 13)),
    **{
        f"get_{group}_group.check_initialized": _since((0, 13))
        for group in (
            *("model_parallel", "pipeline_model_parallel", "embedding", "position_embedding"),
            *("tensor_and_context_parallel", "expert_tensor_model_pipeline_parallel"),
            "expert_data_parallel",
        )
    },
    "sharp_enabled_group": _since((0, 14)),
    "get_tensor_and_data_parallel_group.check_initialized": _since((0, 15)),
    "get_intra_distributed_optimizer_instance_group.check_initialized": _since((0, 15)),
    "get_inter_distributed_optimizer_instance_group.check_initialized": _since((0, 15)),
    "hybrid_context_parallel": _since((0, 16)),
    "create_all_gather_group": ((0, 16), (0, 17)),
    "independent_all_gather": ((0, 16), (0, 17)),
    "rank_offset": _since((0, 17)),
    "local_world_size": _since((0, 17)),
    "gtp_remat_size": _since((0, 19)),
    "expert_gtp_remat_size": _since((0, 19)),
    "with_gtp_remat": _since((0, 19)),
    "with_egtp_remat": _since((0, 19)),
}

# Arguments that are written last, since most releases lack them, and what they stand before: the
# signature of most releases then needs no wrapper.
BEFORE = {"with_gtp_remat": "partial_"}

# Defaults that differ from those in parallel_state.py, and in which releases.
DEFAULTS: dict[str, tuple[Span, Any]] = {"ignore_virtual": (_until((0, 12)), False)}

# Other behaviour of releases, by name.
FACTS: dict[str, Span] = {
    # the data-parallel group is created before the one with cp, and without SHARP
    "dp_first": _until((0, 12)),
    # optimizer instances: groups between them are dense (later releases use the experts') ...
    "instances_in_dense": _until((0, 12)),
    # ... or the expert grid is split too, and an instance has a group of all its ranks
    "instances_in_expert": _since((0, 13)),
    # hierarchical context parallelism: levels have torch's timeout, and are a list when unset
    "plain_levels": _until((0, 12)),
    # a pipeline's default embedding ranks depend on the stage at which it splits
    "splits": _until((0, 13)),
    # NCCL options that a section leaves out are set for Hopper; priorities are not read
    "nccl_defaults": _until((0, 12)),
    # ranks and sizes come from torch, for which None is the world; later from the group itself
    "numbers_from_torch": _until((0, 12)),
    # the virtual stage is an argument; before, the one that was set last
    "vp_stage": _since((0, 13)),
    # the stage asks torch for the rank first, which raises its own error without a world
    "stage_asks_torch": _until((0, 13)),
    # ... and later for the stage, which raises an error for a group that torch did not create
    "stage_from_torch": _since((0, 14)),
    # functions about encoder and decoder warn that they are deprecated
    "encoder_deprecated": _since((0, 13)),
    # SHARP's variable is set to 1 and 0; before, use_sharp only set it to 0
    "sharp_switched": _since((0, 14)),
    # the expert-parallel group has torch's timeout and not the one asked for
    "plain_ep": _until((0, 15)),
    # two more axes for weights, also in get_all_ranks() and RankGenerator
    "gtp_remat": _since((0, 19)),
    # HyperCommGrid has views, which copy its shape and names; groups are created from the copies
    "grid_views": _since((0, 19)),
}


def _checkout() -> str | None:
    """The version that ``import megatron.core`` would find on the path, without importing it."""
    for entry in sys.path:
        file = Path(entry or ".") / "megatron" / "core" / "package_info.py"
        if file.is_file():
            text = file.read_text(errors="replace")
            numbers = dict(re.findall(r"^(MAJOR|MINOR)\s*=\s*(\d{1,9})", text, re.M))
            if len(numbers) == 2:
                return f"{numbers['MAJOR']}.{numbers['MINOR']}"
    return None


_VARIABLE = "HYPERGRID_MEGATRON_RELEASE"


def _read_release(text: str | None = None, source: str = "--megatron") -> tuple[Version, str]:
    """The release that is followed, and where it comes from: ``text`` first."""
    if text is None:
        text, source = os.environ.get(_VARIABLE) or _checkout(), "installed"
        source = _VARIABLE if os.environ.get(_VARIABLE) else source
    if text is None:
        try:
            text = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            return NEWEST, "none installed"
    found = re.match(r"v?(\d{1,9})\.(\d{1,9})", text)
    if found is None:
        raise ValueError(f"{source}={shown(text)} is not a release: write it as in '0.16.1'.")
    release = (int(found[1]), int(found[2]))
    known = min(max(release, OLDEST), NEWEST)
    if release != known:
        end = "newer than {}.{}, the newest" if known == NEWEST else "older than {}.{}, the oldest"
        warnings.warn(
            f"megatron-core {text} is {end.format(*known)} release that hypergrid knows: it "
            "behaves as {}.{}. Compare the two releases' parallel_state, or use a hypergrid that "
            "knows yours; HYPERGRID_MEGATRON_RELEASE={}.{} silences this.".format(*known, *known),
            stacklevel=2,
        )
    return known, source


RELEASE, SOURCE = _read_release()
_FOUND = RELEASE, SOURCE


def _now(span: Span) -> bool:
    return span[0] <= RELEASE <= span[1]


HAS: dict[str, bool] = {fact: _now(span) for fact, span in FACTS.items()}


def follow(text: str | None = None) -> None:
    """Plan as that release, or again as the one found at import. Signatures stay as they are."""
    global RELEASE, SOURCE
    RELEASE, SOURCE = _FOUND if text is None else _read_release(text)
    HAS.update({fact: _now(span) for fact, span in FACTS.items()})


def as_released(function: F) -> F:
    """Give the arguments of ``function`` the positions and defaults that they have in ``RELEASE``.

    The function is written with the arguments of all releases in their common order. Those that
    this release does not have are keyword-only, and its signature does not show them.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    always = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    spans = {n: ARGUMENTS.get(f"{function.__name__}.{n}", ARGUMENTS.get(n)) for n in always}
    placed = [n for n, span in spans.items() if span is None or _now(span)]
    for late in BEFORE.keys() & {*placed}:
        placed.remove(late)
        placed.insert([n.startswith(BEFORE[late]) for n in placed].index(True), late)
    written = {n: p.default for n, p in parameters.items()}
    other = {n: default for n, (span, default) in DEFAULTS.items() if n in written and _now(span)}
    released: Any = function
    if other or placed != list(parameters)[: len(placed)]:
        # Generated source, as in dataclasses: a wrapper that sorts its arguments costs ten times
        # as much.
        keyword_only = [n for n in parameters if n not in placed]
        own = f"_{function.__name__}_as_written"
        order = [*placed, *["*"] * bool(keyword_only), *keyword_only]
        passed = [n if n in always else f"{n}={n}" for n in parameters]
        # Both in the globals of the function, so that getters can be given others.
        function.__globals__[own] = function
        call = f"lambda {', '.join(order)}: {own}({', '.join(passed)})"
        released = eval(call, function.__globals__)
        functools.update_wrapper(released, function)
        del released.__wrapped__  # or inspect.signature would show the other order
        given = {n: value for n, value in (written | other).items() if value is not signature.empty}
        released.__defaults__ = tuple(given[n] for n in placed if n in given)
        released.__kwdefaults__ = {n: given[n] for n in keyword_only}
    shown = [parameters[n].replace(default=(written | other)[n]) for n in placed]
    released.__signature__ = signature.replace(parameters=shown)
    return released  # type: ignore[no-any-return]
