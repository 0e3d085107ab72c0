"""Names that share a communicator: never two whose traffic Megatron has in flight together."""

import re
import warnings
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compat import parallel_state as ps
from compat.megatron.table import ROWS, TWINS
from compat.planned.job import JobError, from_sizes
from compat.state import GROUP_SLOTS
from hypergrid.policy import Policy
from tests.support import ROOT
from tests.support.forked import on_ranks

SIZES = st.fixed_dictionaries(
    {name: st.sampled_from([1, 2, 4, 8]) for name in ("tp", "cp", "pp", "ep", "etp", "instances")}
)


def test_only_the_table_and_the_getters_name_a_global_that_holds_groups():
    for file in (ROOT / "compat").rglob("*.py"):
        if file.name != "table.py" and file.parent.name != "getters":
            assert not {*re.findall(r'"(_\w+)"', file.read_text())} & {*GROUP_SLOTS}, file


@settings(max_examples=200)
@given(SIZES)
def test_no_communicator_of_several_ranks_carries_two_kinds_of_traffic(sizes):
    try:
        plan = from_sizes(world_size=64, **sizes).plan()
    except JobError:
        assume(False)
    for rank in (0, 21, 63):
        carried = {}
        for row, ranks, owner in plan.sharing(rank, Policy(share="all")):
            carried.setdefault(owner or row.label, set()).add(row.traffic)
            assert owner is None or len(ranks) == 1 or carried[owner] == {row.traffic}


EXPERTS = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("sizes", "apart"),
    [
        ({"tensor_model_parallel_size": 8, **EXPERTS}, ["TP", "TP_CP", "EP", "TP_EP", "default"]),
        (EXPERTS, ["DP DP_CP", "EP", "TP_EP", "default"]),
        ({}, ["DP DP_CP", "EDP", "default"]),
    ],
    ids=["tp8 ep8 etp1", "tp1 ep8", "dense"],
)
@on_ranks(8)
def test_expert_tokens_wait_behind_no_gradients_and_the_default_serves_no_name(rank, sizes, apart):
    ps.initialize_model_parallel(**sizes, share="all")
    named = {
        "DP": ps.get_data_parallel_group(),
        "DP_CP": ps.get_data_parallel_group(with_context_parallel=True),
        "TP": ps.get_tensor_model_parallel_group(),
        "TP_CP": ps.get_tensor_and_context_parallel_group(),
        "EP": ps.get_expert_model_parallel_group(),
        "TP_EP": ps.get_expert_tensor_and_model_parallel_group(),
        "EDP": ps.get_expert_data_parallel_group(),
        "default": dist.group.WORLD,
    }
    names_of = {}
    for name, group in named.items():
        if group.size() == 8:
            names_of.setdefault(group, set()).add(name)
    expected = [set(names.split()) for names in apart]
    assert sorted(names_of.values(), key=sorted) == sorted(expected, key=sorted)


@pytest.mark.parametrize("group", ["dp", "tp", None])
@on_ranks(4)
def test_a_new_timeout_of_a_shared_communicator_says_whose_it_is_too(rank, group):
    ps.initialize_model_parallel(2, share="all")
    groups = {"dp": ps.get_data_parallel_group(), "tp": ps.get_tensor_model_parallel_group()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.update_pg_timeout(timedelta(minutes=7), groups.get(group))
    texts = [str(warning.message) for warning in caught]
    texts = [text for text in texts if "update_pg_timeout" in text]
    assert len(texts) == (group == "dp")
    for text in texts:
        assert re.search("DATA_PARALLEL_GROUP_WITH_CP of .* and DATA_PARALLEL_GROUP of", text)
        assert "share='none'" in text


def test_the_docs_list_each_kind_of_traffic():
    page = (ROOT / "docs" / "concepts.md").read_text()
    table = page.partition("| Traffic |")[2].partition("\n\n")[0]
    rows = re.findall(r"(?m)^\| ([\w ]+) \| (.*) \|$", table)
    assert {kind: {*re.findall("`(.*?)`", groups)} for kind, groups in rows} == {
        kind: {row.label.format("N") for row in ROWS if row.traffic == kind}
        for kind in (TWINS, *(row.traffic for row in ROWS))
    }
