"""The groups that stay inside a host."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergrid import LayoutError, RankLayout, Topology
from tests.support import ROOT, table

LAYOUT = RankLayout(("tp", "cp", "dp"), (2, 2, 4))


@pytest.mark.parametrize("hosts", [4, np.uint64(4), [h for h in "abcd" for _ in "1234"]])
def test_hosts_of_every_form_give_the_same_answers(hosts):
    topology = Topology(LAYOUT, hosts)
    assert all(topology.inside(dims) for dims in ("tp", "cp", "tp-cp", ()))
    assert not any(topology.inside(dims) for dims in ("dp", "tp-dp"))
    assert topology.crossing("tp") == []
    assert topology.crossing("dp")[1] == [1, 5, 9, 13]


def test_hosts_of_different_sizes_may_part_some_groups_and_not_others():
    topology = Topology(LAYOUT, ["small"] * 3 + ["large"] * 13)
    assert not topology.inside("tp-cp")
    assert topology.crossing("tp") == [[2, 3]]
    assert topology.host(2) == "small"


@given(
    st.lists(st.sampled_from("xyz"), min_size=16, max_size=16),
    st.lists(st.sampled_from(LAYOUT.dims), unique=True),
)
def test_a_group_is_inside_exactly_when_its_ranks_have_one_host(names, dims):
    topology = Topology(LAYOUT, names)
    groups = LAYOUT.groups(dims)
    host_counts = [len({names[member] for member in ranks}) for ranks in groups.tolist()]
    assert topology.touched(groups).tolist() == host_counts
    assert topology.inside(dims) == (max(host_counts) == 1)
    assert bool(topology.crossing(dims)) != topology.inside(dims)


@pytest.mark.parametrize(("hosts", "says"), table("hypergrid/refusals_of_hosts.txt"))
def test_hosts_that_cannot_be_are_refused(hosts, says):
    with pytest.raises(LayoutError, match=says):
        Topology(LAYOUT, eval(hosts))


def test_ranks_outside_have_no_host():
    with pytest.raises(LayoutError, match="rank 16 is outside"):
        Topology(LAYOUT, 4).host(16)


def test_layouts_and_topologies_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None;"
        "from hypergrid import RankLayout, Topology;"
        "layout = RankLayout(('model', 'dp'), (8, 12_500));"
        "print(Topology(layout, hosts=8).inside('model'))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "True", done.stderr
