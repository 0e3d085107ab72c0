"""The smallest layout that keeps a job's structure: which groups have one, two or more members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from operator import itemgetter
from typing import Any, NamedTuple

from compat.megatron.request import Request
from compat.megatron.rows import PlannedRows
from compat.verification.layout import INSTANCES, SIZES, Layout
from compat.verification.ranks import MAX_RANKS
from hypergrid.messages import few

_MANY = 3  # members that stand for any larger number; of stages: a first, a middle and a last
# Products of the sizes 1, 2 and 3, and the powers of two, as far as ranks reach.
_SMALL_SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16)
DIMS_TOLD_APART = ("tp", "cp", "pp", "dp", "ep")
_PAIRS_OF_DIMS = tuple(combinations(DIMS_TOLD_APART, 2))
# What a small layout may not keep, the worst first: a group has one member, or more than one, or
# there is no stage between the first and the last, or two members stand for more.
_SEVERITIES = (_ALONE, _JOINED, _NO_MIDDLE, _OTHER_SIZE) = range(4)


_REFUSALS = (AssertionError, RuntimeError)  # as Megatron refuses sizes


class _Difference(NamedTuple):
    severity: int
    text: str  # a sentence; of _OTHER_SIZE, the group that has two members instead of more


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
    order = Layout.order
    if getattr(args, "use_tp_pp_dp_mapping", False):
        order = "tp-cp-ep-pp-dp"
    has_experts = args.num_experts is not None
    try:
        members_in_job = _members(job, has_experts, order)
    except _REFUSALS as error:
        raise ValueError(str(error)) from error
    candidates = []
    groups = getattr(args, "num_query_groups", None) or job["tp"]
    for sizes in _candidates(job, set(keep), has_experts, groups):
        try:
            members = _members(sizes, has_experts, order)
        except _REFUSALS:
            continue
        differences = list(_differences(members_in_job, members, job, sizes))
        counts = Counter(difference.severity for difference in differences)
        # The fewest of the worst differences, then of equal sizes; the fewest ranks; the least ep.
        worst_first = [counts[severity] for severity in _SEVERITIES]
        equal = len(equal_sizes(job, sizes, _PAIRS_OF_DIMS))
        distance = (*worst_first, equal, _ranks(sizes), sizes["ep"])
        candidates.append((distance, sizes, differences))
    if not candidates:
        raise ValueError(f"with {' '.join(keep)} kept, no layout has at most {MAX_RANKS} ranks.")
    _, sizes, differences = min(candidates, key=itemgetter(0))

    cut = []
    for name, size in sizes.items():
        if job[name] != size:
            cut.append(f"{name} {job[name]} -> {size}")
    if cut:
        notes.append(f"dims are smaller: {', '.join(cut)}")
        notes.extend(_consequences(differences))

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
    job: Mapping[str, int], small: Mapping[str, int], pairs: Iterable[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The pairs of names, as cp and dp, that have one size in the small job alone."""
    equal = []
    for first, second in pairs:
        if small[first] == small[second] > 1 and job[first] != job[second]:
            equal.append((first, second))
    return equal


def job_sizes(args: Any) -> dict[str, int]:
    sizes = {}
    for short, name in SIZES.items():
        sizes[short] = getattr(args, name, None) or 1
    model_size = sizes["tp"] * sizes["cp"] * sizes["pp"]
    sizes["dp"] = args.world_size // model_size
    sizes[INSTANCES] = getattr(args, INSTANCES, None) or 1
    # etp is tp unless given.
    if not getattr(args, SIZES["etp"], None):
        sizes["etp"] = sizes["tp"]
    # Without experts nobody uses the expert groups.
    if args.num_experts is None:
        sizes["ep"] = 1
        sizes["etp"] = sizes["tp"]
        # With dp after pp, megatron-core asks for equal data-parallel sizes even so.
        if getattr(args, "use_tp_pp_dp_mapping", False):
            sizes["etp"] = sizes["tp"] * sizes["cp"]
    return sizes


def _ranks(sizes: Mapping[str, int]) -> int:
    return sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]


def _candidates(
    job: Mapping[str, int], keep: set[str], has_experts: bool, query_groups: int
) -> Iterator[dict[str, int]]:
    """Smaller layouts on at most 16 ranks, of which Megatron may refuse some."""
    choices = {}
    for name, size in job.items():
        if name in keep:
            choices[name] = [size]
        elif name == "vp":
            choices[name] = [min(size, _MANY)]
        else:
            choices[name] = [small for small in _SMALL_SIZES if small <= size]
    if query_groups < job["tp"] and "tp" not in keep:
        # Two ranks of the small layout, too, hold the keys and values of one group.
        choices["tp"] = [size for size in choices["tp"] if size % 2 == 0]
    for tp, cp, pp, dp in product(choices["tp"], choices["cp"], choices["pp"], choices["dp"]):
        dense = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "vp": 1}
        # Most combinations have too many ranks: their experts are not tried.
        if _ranks(dense) > MAX_RANKS:
            continue
        if pp > 1:
            dense["vp"] = choices["vp"][0]
        expert_tensor_sizes = choices["etp"]
        if job["etp"] == job["tp"]:
            # A job whose experts are split as its dense layers keeps that.
            expert_tensor_sizes = [tp]
        elif not has_experts:
            expert_tensor_sizes = [tp * cp]
        for ep, etp, instances in product(choices["ep"], expert_tensor_sizes, choices[INSTANCES]):
            yield {**dense, "ep": ep, "etp": etp, INSTANCES: instances}


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
        if is_expert and not has_experts:
            continue
        # The groups of the pipeline's ends have the same dims as the pipeline.
        if row.pick != "all":
            continue
        dim_names = [dim for dim in row.dims if dim != "gtp_remat"]
        if is_expert:
            dim_names.insert(0, "expert")
        name = "-".join(dim_names)
        if row.chunk is not None:
            name += " of an optimizer instance"
        members[name] = len(ranks)
    return members


def _differences(
    job: Mapping[str, int],
    small: Mapping[str, int],
    job_sizes: Mapping[str, int],
    small_sizes: Mapping[str, int],
) -> Iterator[_Difference]:
    """Properties of the job's groups that a small layout does not keep."""
    for name, size in job.items():
        small_size = small.get(name, 1)
        if small_size == 1 < size:
            traffic = "reductions"
            if name == "pp":
                traffic = "messages"
            sentence = f"{name} has one member: its {traffic} are not verified"
            yield _Difference(_ALONE, sentence)
        elif size == 1 < small_size:
            sentence = f"{name} has {small_size} members, and one in the job"
            yield _Difference(_JOINED, sentence)
        elif small_size == 2 < size:
            yield _Difference(_OTHER_SIZE, name)
        elif size == 2 < small_size:
            yield _Difference(_OTHER_SIZE, "")
    if job_sizes["pp"] >= _MANY > small_sizes["pp"]:
        sentence = "pp has no middle stage: what only a middle stage does is not verified"
        yield _Difference(_NO_MIDDLE, sentence)


def _consequences(differences: Iterable[_Difference]) -> Iterator[str]:
    """The faults that the small layout cannot show, in words."""
    pairs = []
    for difference in differences:
        if difference.severity != _OTHER_SIZE:
            yield difference.text
        elif difference.text:
            pairs.append(difference.text)
    if pairs:
        yield f"two members instead of more, so a fault of three or more is not seen: {few(pairs)}"
