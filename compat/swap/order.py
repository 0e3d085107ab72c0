"""The order of dims: where it comes from, and whether it is valid for any job.

With the start-up directory on its path, every Python process imports this file. So it imports
little, and never ``releases``, which would look for megatron before the script sets its path.
"""

from __future__ import annotations

import os
from typing import Any

DIMS = ("tp", "cp", "ep", "dp", "pp", "gtp_remat")  # of all releases


def resolve_order(argument: Any = None) -> tuple[Any, str]:
    """The order to use, from a flag, the environment or ``argument``; and where it comes from."""
    from hypergrid.policy import outermost

    return outermost("order", argument)


def check_choices() -> None:
    """Refuse variables of the environment that are invalid for every job. *Local*; without torch.

    ValueError for an unknown dim, one twice, an unknown choice, or an invalid timeout. Whether an
    order leaves out a dim, or names one that this release does not have, is checked when the sizes
    are known.
    """
    if not any(name.startswith("HYPERGRID_") for name in os.environ):
        return  # saves every other Python process 10 ms
    from hypergrid.layout import LayoutError, dims_of
    from hypergrid.policy import Policy, timeout_of_all

    order, source = resolve_order()
    if order is not None:
        try:
            dims_of(order, DIMS)
        except LayoutError as error:
            raise ValueError(f"{error} The order comes from {source}.") from None
    Policy.resolve()
    timeout_of_all()


def first_of_host() -> bool:
    """Whether this is the rank of its host that prints errors; the others exit silently."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
