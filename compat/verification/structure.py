"""The smallest layout that keeps a job's structure: which groups have one, two or more members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from operator import itemgetter
from typing import Any

from compat.megatron.request import Request
from compat.megatron.rows import PlannedRows
from compat.verification.layout import INSTANCES, SIZES, Layout
from compat.verification.ranks import MAX_RANKS

_MANY = 3  # members that stand for any larger number; of stages: a first, a middle and a last
# Products of the sizes 1, 2 and 3, and the powers of two, as far as ranks reach.
_SMALL_SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16)
DIMS_TOLD_APART = ("tp", "cp", "pp", "dp", "ep")
# What groups of a small layout may not keep, the worst first.
_LOSSES = (_ALONE, _MORE, _NO_MIDDLE, _TWO) = (
    "one member, so reductions or messages are not verified",
    "more members than in the job",
    "no middle stage, so what only a middle stage does is not verified",
    "two members instead of more, so a fault of three or more is not seen",
)


def small_layout(args: Any, keep: Iterable[str], notes: list[str]) -> Layout:
    """The layout of Megatron's arguments on at most 16 ranks, with consequences in ``notes``.

    Dims in ``keep`` have the size that the job has. Example: ep=4 on 16 ranks has four members in
    expert-dp; with ep=3 on 9 ranks, ep and expert-dp both keep more than two members.

    Raises
    ------
    ValueError
        The kept dims need more than 16 ranks.
    """
    job = job_sizes(args)
    is_dp_last = getattr(args, "use_tp_pp_dp_mapping", False)
    order = "tp-cp-ep-pp-dp" if is_dp_last else Layout.order
    has_experts = args.num_experts is not None
    members_in_job = _members(job, has_experts, order)
    candidates = []
    groups = getattr(args, "num_query_groups", None) or job["tp"]
    for sizes in _candidates(job, keep, groups):
        try:
            members = _members(sizes, has_experts, order)
        except (AssertionError, RuntimeError):  # as Megatron refuses sizes
            continue
        lost = _lost(members_in_job, members)
        # The fewest of the worst losses, then of equal sizes; the fewest ranks; the least ep.
        distance = [
            *map(len, lost.values()),
            len(equal_sizes(job, sizes, DIMS_TOLD_APART)),
            _ranks(sizes),
            sizes["ep"],
        ]
        candidates.append((distance, sizes, lost))
    if not candidates:
        raise ValueError(f"with {' '.join(keep)} kept, no layout has at most {MAX_RANKS} ranks.")
    _, sizes, lost = min(candidates, key=itemgetter(0))

    cut = []
    for name, size in sizes.items():
        if job[name] != size:
            cut.append(f"{name} {job[name]} -> {size}")
    if cut:
        notes.append(f"dims are smaller: {', '.join(cut)}")
        for loss, names in lost.items():
            if names:
                notes.append(f"{loss}: {', '.join(names)}")

    small: dict[str, int | None] = dict(sizes)
    options = {}
    instances = small.pop(INSTANCES)
    if instances != 1:
        options[INSTANCES] = instances
    if small["vp"] == 1:
        small["vp"] = None
    if small["etp"] == small["tp"]:
        small["etp"] = None
    return Layout(**small, order=order, options=options)  # type: ignore[arg-type]


def equal_sizes(
    job: Mapping[str, int], small: Mapping[str, int], names: Iterable[str]
) -> list[str]:
    """The pairs of names, "cp and dp", that have one size in the small job alone."""
    equal = []
    for first, second in combinations(names, 2):
        # A size of 1 is of a dim that nobody splits: its code does not run.
        are_equal = small[first] == small[second] > 1
        if are_equal and job[first] != job[second]:
            equal.append(f"{first} and {second}")
    return equal


def job_sizes(args: Any) -> dict[str, int]:
    """The sizes of Megatron's arguments, which are None or absent where nothing was asked for."""
    sizes = {short: getattr(args, name, None) or 1 for short, name in SIZES.items()}
    # The rest of the world is data-parallel.
    model_size = sizes["tp"] * sizes["cp"] * sizes["pp"]
    sizes["dp"] = args.world_size // model_size
    sizes[INSTANCES] = getattr(args, INSTANCES, None) or 1
    # etp is tp unless given.
    if not getattr(args, SIZES["etp"], None):
        sizes["etp"] = sizes["tp"]
    return sizes


def _ranks(sizes: Mapping[str, int]) -> int:
    return sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]


def _candidates(
    job: Mapping[str, int], keep: Iterable[str], query_groups: int
) -> Iterator[dict[str, int]]:
    """Smaller layouts on at most 16 ranks, of which Megatron may refuse some."""
    choices = {}
    for name, size in job.items():
        choices[name] = [small for small in _SMALL_SIZES if small <= size]
    choices["vp"] = [min(job["vp"], _MANY)]
    if query_groups < job["tp"]:
        # Two ranks of the small layout, too, hold the keys and values of one group.
        choices["tp"] = [size for size in choices["tp"] if size % 2 == 0]
    choices |= {name: [job[name]] for name in keep}
    splits_experts_alike = job["etp"] == job["tp"]
    if splits_experts_alike:
        choices["etp"] = [1]  # follows from tp
    # Most of them need more ranks than this machine gets.
    for values in product(*choices.values()):
        sizes = dict(zip(choices, values, strict=True))
        if _ranks(sizes) > MAX_RANKS:
            continue
        if sizes["pp"] == 1:
            sizes["vp"] = 1
        if splits_experts_alike:
            sizes["etp"] = sizes["tp"]
        yield sizes


def _members(sizes: Mapping[str, int], has_experts: bool, order: str) -> dict[str, int]:
    """How many members each group of rank 0 has in the plan, by the group's dims."""
    dims: dict[str, Any] = {name: sizes[short] for short, name in SIZES.items()}
    # Chunks of a pipeline have no groups of their own.
    del dims[SIZES["vp"]]
    request = Request(
        **dims,
        num_distributed_optimizer_instances=sizes[INSTANCES],
        order=order,
        job_size=_ranks(sizes),
        create_gloo_process_groups=False,
    )
    members = {}
    for row, ranks in PlannedRows(request).plan.groups_of(0):
        is_expert = row.layout.startswith("expert")
        # The groups of the pipeline's ends have the same dims as the pipeline.
        is_of_ends = row.pick != "all"
        # Without experts these groups exist, and nobody uses them.
        is_unused = is_expert and not has_experts
        if is_of_ends or is_unused:
            continue
        # A dim of some releases, whose size is 1 here.
        dim_names = [dim for dim in row.dims if dim != "gtp_remat"]
        if is_expert:
            dim_names.insert(0, "expert")
        name = "-".join(dim_names)
        if row.chunk is not None:
            name += " of an optimizer instance"
        members[name] = len(ranks)
    return members


def _lost(job: Mapping[str, int], small: Mapping[str, int]) -> dict[str, list[str]]:
    """The groups of the job that have other members in a small layout, by what that loses."""
    lost: dict[str, list[str]] = {loss: [] for loss in _LOSSES}
    for name, size in job.items():
        small_size = small.get(name, 1)
        if name == "pp" and small_size < _MANY <= size:
            lost[_NO_MIDDLE].append(name)
        if small_size == 1 < size:
            lost[_ALONE].append(name)
        elif size < min(small_size, _MANY):
            lost[_MORE].append(name)
        elif small_size == 2 < size:
            lost[_TWO].append(name)
    return lost
