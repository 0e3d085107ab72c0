"""RankGenerator and the functions around it, as megatron-core has them, on ``RankLayout``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import prod

from compat.megatron.releases import RELEASE_HAS, has
from compat.megatron.request import lay_out, now
from hypergrid.layout import RankLayout


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """The groups over the dims that ``mask`` picks from sizes ``parallel_size``, fastest first.

    >>> generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [True, False, True])
    [[0, 1, 4, 5], [2, 3, 6, 7]]

    Raises
    ------
    AssertionError
        ``world_size`` is larger than the product of the sizes.
    """
    dims = tuple(map(str, range(len(parallel_size))))
    layout = RankLayout(dims, tuple(parallel_size))
    group_dims = [dim for dim, is_picked in zip(dims, mask, strict=True) if is_picked]
    groups: list[list[int]] = layout.groups(group_dims).tolist()
    count = world_size // layout.dim_size(group_dims)
    if count > len(groups):
        raise AssertionError(
            f"world size {world_size} is larger than {' x '.join(map(str, parallel_size))} = "
            f"{layout.size}. Make them equal."
        )
    return groups[:count]


class RankGenerator:
    """Rank groups for one factorisation of the world, as megatron-core's class of this name.

    Raises
    ------
    AssertionError
        Both ep and cp larger than 1: they belong to different grids.
    RuntimeError, LayoutError
        See ``lay_out``.
    """

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        if ep != 1 and cp != 1:
            raise AssertionError(
                f"one rank generator has ep={ep} and cp={cp}: ep belongs to the expert grid and cp "
                f"to the decoder grid. Set one of them to 1."
            )
        self.tp = tp
        self.ep = ep
        self.dp = dp
        self.pp = pp
        self.cp = cp
        self.gtp_remat = gtp_remat
        self.rank_offset = rank_offset
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        if RELEASE_HAS["gtp_remat"]:
            self.name_to_size["gtp_remat"] = gtp_remat
        self.world_size = prod(self.name_to_size.values())
        layout = lay_out(order, self.name_to_size, max(rank_offset, 0))
        tokens = order.lower().split("-")
        tokens += [name for name in layout.dims if name not in tokens]
        self.order = "-".join(tokens)
        self.ordered_size = [self.name_to_size[name] for name in tokens]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """The dims of ``order`` that are in ``token``, such as ``"tp-dp"``, as a mask."""
        dims = order.split("-")
        mask = [False] * len(dims)
        for name in token.split("-"):
            if name not in dims:
                raise ValueError(f"{name!r} is not in the order {order!r}.")
            mask[dims.index(name)] = True
        return mask

    def get_ranks(self, token: str) -> list[list[int]]:
        """All groups over the dims of ``token``, such as ``"tp-dp"``, as lists of ranks."""
        # Each value as it is now: subclasses and outside code change them.
        generate = now(generate_masked_orthogonal_rank_groups)
        mask = self.get_mask(self.order, token)
        groups = generate(self.world_size, self.ordered_size, mask)
        if self.rank_offset <= 0:
            return groups
        return [[rank + self.rank_offset for rank in ranks] for ranks in groups]

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """The groups over gtp_remat; its size must be the one given."""
        if self.gtp_remat != gtp_remat_size:
            raise AssertionError(
                f"gtp_remat has size {self.gtp_remat} here, {gtp_remat_size} was asked for."
            )
        return self.get_ranks("gtp_remat")


if not has("gtp_remat_size"):
    del RankGenerator.get_gtp_ranks
    _signature = inspect.signature(RankGenerator.__init__)
    _shown = [p for p in _signature.parameters.values() if p.name != "gtp_remat"]
    RankGenerator.__init__.__signature__ = _signature.replace(  # type: ignore[attr-defined]
        parameters=_shown
    )


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks with word embeddings: first and last stage of a pipeline."""
    if len(pp_ranks) == 1:
        return [pp_ranks[0]]
    return [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks with position embeddings: first stage of a pipeline."""
    return [pp_ranks[0]]
