"""RankGenerator and the functions around it, as megatron-core has them, on ``RankLayout``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from compat.release import HAS_GTP_REMAT
from hypergrid.layout import LayoutError, RankLayout


class OrderError(LayoutError, RuntimeError, KeyError):
    """An order that leaves out a dim larger than 1 (upstream: RuntimeError) or names none that
    exists (upstream: KeyError)."""

    __str__ = ValueError.__str__  # KeyError would quote the sentence


def order_tokens(order: str, sizes: Mapping[str, int]) -> list[str]:
    """The dims of ``order``, those of size 1 that it leaves out added at the end.

    A dim of size 1 may repeat: it changes nothing, and upstream lets it.

    Raises
    ------
    OrderError
        A token that is no dim, or a dim larger than 1 without a token.
    LayoutError
        A token that repeats, of a dim larger than 1.
    """
    tokens = order.lower().split("-")
    for token in tokens:
        if token not in sizes:
            raise OrderError(
                f"order {order!r} names {token!r}, which is no dim. Known: {', '.join(sizes)}."
            )
        if tokens.count(token) > 1 and sizes[token] != 1:
            raise LayoutError(f"order {order!r} names {token!r} more than once. Name it once.")
    for name, size in sizes.items():
        if name not in tokens:
            if size != 1:
                raise OrderError(
                    f"order {order!r} leaves out {name!r}, whose size is {size}. Add {name!r} to "
                    f"the order, or make its size 1."
                )
            tokens.append(name)
    return tokens


def lay_out(tokens: list[str], sizes: Mapping[str, int], offset: int) -> RankLayout:
    """The layout that :func:`order_tokens` describes."""
    dims = tuple(dict.fromkeys(tokens))
    return RankLayout(dims, tuple(sizes[name] for name in dims), offset)


def inject_gtp_remat_axis(order: str, after: str = "tp") -> str:
    """``order`` with gtp_remat put behind ``after``, else behind tp, else first."""
    tokens = order.split("-")
    if "gtp_remat" in tokens:
        return order
    anchor = next((name for name in (after, "tp") if name in tokens), None)
    tokens.insert(0 if anchor is None else tokens.index(anchor) + 1, "gtp_remat")
    return "-".join(tokens)


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
    names = [str(i) for i in range(len(parallel_size))]
    picked = [name for name, wanted in zip(names, mask, strict=True) if wanted]
    layout = RankLayout(tuple(names), tuple(parallel_size))
    if world_size > layout.size:
        raise AssertionError(
            f"world size {world_size} is larger than {' x '.join(map(str, parallel_size))} = "
            f"{layout.size}. Make them equal."
        )
    groups: list[list[int]] = layout.groups(picked).tolist()
    return groups[: world_size // layout.dim_size(picked)]


class RankGenerator:
    """Rank groups for one factorisation of the world, as megatron-core's class of this name.

    Raises
    ------
    AssertionError
        Both ep and cp larger than 1: they belong to different grids.
    OrderError
        See :func:`order_tokens`.
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
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.gtp_remat = gtp_remat
        self.rank_offset = rank_offset
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        if HAS_GTP_REMAT:
            self.name_to_size["gtp_remat"] = gtp_remat
        self.world_size = prod(self.name_to_size.values())
        tokens = order_tokens(order, self.name_to_size)
        self.order = "-".join(tokens)
        self.ordered_size = [self.name_to_size[name] for name in tokens]
        self.layout = lay_out(tokens, self.name_to_size, max(rank_offset, 0))

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Which dims of ``order`` are in ``token``, such as ``"tp-dp"``."""
        dims, wanted = order.split("-"), token.split("-")
        for name in wanted:
            if name not in dims:
                raise ValueError(f"{name!r} is not in the order {order!r}.")
        return [name in wanted for name in dims]

    def get_ranks(self, token: str) -> list[list[int]]:
        """All groups over the dims of ``token``, such as ``"tp-dp"``, as lists of ranks."""
        groups: list[list[int]] = self.layout.groups(token.split("-")).tolist()
        return groups

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """The groups over gtp_remat; its size must be the one given."""
        if self.gtp_remat != gtp_remat_size:
            raise AssertionError(
                f"gtp_remat has size {self.gtp_remat} here, {gtp_remat_size} was asked for."
            )
        return self.get_ranks("gtp_remat")


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """First and last stage of a pipeline: where word embeddings live."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """First stage of a pipeline: where position embeddings live."""
    return [pp_ranks[0]]
