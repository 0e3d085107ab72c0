"""Which megatron-core release ``compat`` speaks as, and what differs between releases."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from hypergrid.words import shown

Version = tuple[int, int]
F = TypeVar("F", bound=Callable[..., object])

NEWEST: Version = (0, 19)
_LONGEST = 1 << 16  # characters of a package_info.py, which has some hundred

# Arguments that came or went: (first, last) release in which they have a place in the positional
# order. Outside of it they are still taken by keyword.
ARGUMENTS: dict[str, tuple[Version, Version]] = {
    "hybrid_context_parallel": ((0, 16), NEWEST),
    "gtp_remat_size": ((0, 19), NEWEST),
    "expert_gtp_remat_size": ((0, 19), NEWEST),
    "with_gtp_remat": ((0, 19), NEWEST),
    "create_all_gather_group": ((0, 16), (0, 17)),
    "independent_all_gather": ((0, 16), (0, 17)),
    "rank_offset": ((0, 17), NEWEST),
    "local_world_size": ((0, 17), NEWEST),
}


def _checkout() -> str | None:
    """The version that ``import megatron.core`` would find on the path, without importing it."""
    for entry in sys.path:
        file = Path(entry or ".") / "megatron" / "core" / "package_info.py"
        if file.is_file():
            with file.open(errors="replace") as stream:
                text = stream.read(_LONGEST)
            numbers = dict(re.findall(r"^(MAJOR|MINOR)\s*=\s*(\d{1,9})", text, re.M))
            if len(numbers) == 2:
                return f"{numbers['MAJOR']}.{numbers['MINOR']}"
    return None


def _read_release() -> Version:
    text = os.environ.get("HYPERGRID_MEGATRON_RELEASE") or _checkout()
    if text is None:
        try:
            text = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            return NEWEST
    found = re.match(r"(\d{1,9})\.(\d{1,9})", text)
    if found is None:
        raise ValueError(
            f"HYPERGRID_MEGATRON_RELEASE={shown(text)} is no release: write it as in '0.16.1'."
        )
    return min((int(found[1]), int(found[2])), NEWEST)


RELEASE: Version = _read_release()
HAS_GTP_REMAT: bool = RELEASE >= (0, 19)


def as_released(function: F) -> F:
    """Give positional arguments of ``function`` the meaning that they have in ``RELEASE``.

    The signature lists the arguments of all releases in their common order; those without a place
    in this release's order are taken by keyword only.
    """
    parameters = inspect.signature(function).parameters
    always = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    placed = [n for n in always if _in(RELEASE, *ARGUMENTS.get(n, ((0, 0), NEWEST)))]
    if placed == list(parameters)[: len(placed)]:
        return function
    # Written as source, as dataclasses do: a wrapper that sorts its arguments costs ten times it.
    keyword_only = [n for n in parameters if n not in placed]
    order = [f"{n}=defaults[{n!r}]" for n in placed]
    order += ["*"] + [f"{n}=defaults[{n!r}]" for n in keyword_only]
    passed = [n if n in always else f"{n}={n}" for n in parameters]
    call = f"lambda {', '.join(order)}: function({', '.join(passed)})"
    defaults = {n: p.default for n, p in parameters.items()}
    reordered = eval(call, {"function": function, "defaults": defaults})
    functools.update_wrapper(reordered, function)
    del reordered.__wrapped__  # or inspect.signature would show the other order
    return reordered  # type: ignore[no-any-return]


def _in(release: Version, first: Version, last: Version) -> bool:
    return first <= release <= last
