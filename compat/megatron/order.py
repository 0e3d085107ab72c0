"""The order of dims that is laid out: who asked for it, and whether any job could have it.

Every Python reads this file where the start-up directory is on its path. It imports next to
nothing, and never ``releases``, which would look for megatron before the script says where.
"""

from __future__ import annotations

import os
from typing import Any

ARGUMENT = "the argument `order`"
DIMS = ("tp", "cp", "ep", "dp", "pp", "gtp_remat")  # of all releases


def asked(argument: Any = None) -> tuple[Any, str]:
    """The order to lay out instead of ``argument``, or that; and where it comes from."""
    from hypergrid.policy import outermost

    return outermost("order", argument)


def check_choices() -> None:
    """Refuse what the environment chooses if no job could have it. *Local*; without torch.

    Whether an order leaves out a dim, or names one that this release has not, is known when the
    sizes are.

    Raises
    ------
    ValueError
        An order with a name that is no dim, or with one twice; a choice that does not exist.
    """
    if not any(name.startswith("HYPERGRID_") for name in os.environ):
        return  # 10 ms, which every other Python is spared
    from hypergrid.layout import LayoutError, dims_of
    from hypergrid.policy import Policy

    order, source = asked()
    if order is not None:
        try:
            dims_of(order, DIMS)
        except LayoutError as error:
            raise ValueError(f"{error} The order comes from {source}.") from None
    Policy.resolve()


def first_of_host() -> bool:
    """Whether no other rank of this host says the same: the others refuse without a word."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
