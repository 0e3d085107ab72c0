"""Transformer Engine in this process: its installation, and what it caches. No torch."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from hypergrid.messages import in_words

_CORES = [f"transformer-engine-cu{major}" for major in range(11, 20)]
_CACHED = ("get_distributed_world_size", "get_distributed_rank")


class Installation(NamedTuple):
    """The installed release, whether it can be imported, and why not."""

    version: str | None
    importable: bool
    why: str


def probe() -> Installation:
    """Try to import ``transformer_engine.pytorch``. *Local*; never raises.

    Catches what a broken installation raises: ``ImportError``, ``RuntimeError``, ``OSError`` or
    ``AssertionError``. What a failed import leaves in ``sys.modules`` is removed.
    """
    version = _version("transformer-engine")
    loaded_before = set(sys.modules)
    try:
        # Torch loads the NCCL that Transformer Engine links to.
        import_module("torch")
        import_module("transformer_engine.pytorch")
    except Exception as error:
        for name in set(sys.modules) - loaded_before:
            if name.partition(".")[0].startswith("transformer_engine"):
                del sys.modules[name]
        return Installation(version, False, in_words(error))
    return Installation(version, True, "")


def empty_meta_package() -> bool:
    """Whether Transformer Engine is installed without its libraries. *Local*; imports nothing.

    ``pip install transformer-engine`` installs its Python files only. Importing them raises
    ``RuntimeError``, which megatron-core does not expect.
    """
    if not PathFinder.find_spec("transformer_engine") or not _version("transformer-engine"):
        return False
    # With these variables Transformer Engine itself does not check.
    if "NVTE_PROJECT_BUILDING" in os.environ and os.environ.get("NVTE_RELEASE_BUILD", "0") == "0":
        return False
    from importlib import metadata

    wheel = metadata.distribution("transformer-engine").read_text("WHEEL") or ""
    # A build from source has its libraries, and its wheel is not pure.
    is_pure = "root-is-purelib: true" in wheel.lower()
    return is_pure and not any(map(_version, _CORES))


def warn_of_an_empty_package() -> None:
    """Warn before ``import megatron.core`` fails because of such an installation."""
    if "transformer_engine" not in sys.modules and empty_meta_package():
        warnings.warn(
            f"transformer-engine {_version('transformer-engine')} is installed without its "
            f"libraries, as by `pip install transformer-engine`: `import megatron.core` "
            f"will raise RuntimeError. {remedy()}",
            stacklevel=3,
        )


def remedy() -> str:
    """A sentence: how to repair an empty installation."""
    return (
        f"Either uninstall it (pip uninstall transformer-engine), or install all of it (pip "
        f"install --no-build-isolation 'transformer-engine[pytorch]=="
        f"{_version('transformer-engine')}', on a machine with CUDA), or put "
        f"sys.modules['transformer_engine'] = None before megatron is imported."
    )


def release(groups: Sequence[Any], abort: bool = False) -> None:
    """Make Transformer Engine forget ``groups``, which are about to be destroyed.

    Clears its cached sizes and ranks of groups. Ends its expert parallelism if that uses one of
    ``groups``: by ``ep_finalize()``, which may wait for other ranks, or with ``abort`` by
    forgetting it. Does nothing, and imports nothing, if Transformer Engine is not loaded.
    """
    ep: Any = sys.modules.get("transformer_engine.pytorch.ep")
    group: Any = getattr(ep, "_EP_GROUP", None)
    if group in groups:
        try:
            if abort:
                ep._EP_GROUP = None
                ep._BOOTSTRAPPED = False
            else:
                ep.ep_finalize()
        except Exception as error:  # the groups are destroyed all the same
            warnings.warn(
                f"Transformer Engine could not end its expert parallelism over "
                f"{group.group_name}, which is destroyed now: {in_words(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
    forget_sizes()


def forget_sizes() -> None:
    """Clear the sizes and ranks of groups, also of the world, that Transformer Engine caches."""
    cached = sys.modules.get("transformer_engine.pytorch.distributed")
    for name in _CACHED:
        with suppress(AttributeError):
            getattr(cached, name).cache_clear()


def _version(name: str) -> str | None:
    from importlib import metadata  # here: 20 ms, at each start of Python

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None
