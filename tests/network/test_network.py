"""Networks: units that lie inside each other, read from flags, SLURM's texts, YAML and JSON."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergrid import LayoutError
from hypergrid.network.files import FORMATS, expanded, hostlist, read
from hypergrid.network.levels import BETWEEN_PODS, Network

TREE = """# two racks under one core switch
SwitchName=s0 Nodes=t[0-1]
SwitchName=s1 Nodes=t[2-3] # the other
SwitchName=core Switches=s[0-1]
"""
SCONTROL = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=t[0-1]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=t[2-3]
SwitchName=core Level=1 LinkSpeed=1 Nodes=t[0-3] Switches=s[0-1]
"""
ADDRESSES = "core.s0.t0\ncore.s0.t1\ncore.s1.t2\ncore.s1.t3\n"
YAML = """
hosts:
  - {name: t0, gpus: 8, rack: s0, pod: core}
  - {name: t1, gpus: 8, rack: s0, pod: core}
  - {name: t2, gpus: 8, pod: core, rack: s1}
  - {name: t3, rack: s1, pod: core}
bandwidth: {world: 12.5}
"""


def read_text(tmp_path, text, per_host=8):
    (tmp_path / "network").write_text(text)
    return read(tmp_path / "network", per_host)


@pytest.mark.parametrize("text", [TREE, SCONTROL, ADDRESSES, YAML])
def test_every_form_of_one_network_is_the_same(tmp_path, text):
    network = read_text(tmp_path, text)
    assert network.hosts == ("t0", "t1", "t2", "t3") and network.ranks == (8,) * 4
    assert network.levels == ("host", "rack", "pod", "world")
    assert np.array_equal(network.numbers()[1], [0] * 16 + [1] * 16)
    assert set(network.numbers()[2]) == {0}
    again = read_text(tmp_path, json.dumps(network.to_json()))
    assert again == network


@pytest.mark.parametrize(
    "text",
    [
        "BlockName=b0 Nodes=t[0-1]\nBlockName=b1 Nodes=t[2-3]\nBlockSizes=2\n",
        "BlockName=b0 BlockIndex=0 Nodes=t[0-1] BlockSize=2\nBlockName=b1 Nodes=t[2-3]\n",
        "b0.t0 block.node\nb0.t1 block.node\nb1.t2 block.node\nb1.t3 block.node\n",
    ],
)
def test_blocks_of_slurm_are_nvlink_domains(tmp_path, text):
    network = read_text(tmp_path, text, 4)
    assert network.units == {"nvlink": ("b0", "b0", "b1", "b1")}
    assert network.speeds == {"host": 900, "nvlink": 900, "world": 50}


def test_a_tree_and_blocks_make_three_levels(tmp_path):
    blocks = "BlockName=b0 Nodes=t0\nBlockName=b1 Nodes=t1\nBlockName=b2 Nodes=t[2-3]\n"
    network = read_text(tmp_path, TREE + blocks)
    assert network.levels == ("host", "nvlink", "rack", "pod", "world")
    assert network.units["nvlink"] == ("b0", "b1", "b2", "b2")


def test_a_file_of_slurm_is_read_as_slurm_reads_it(tmp_path):
    text = """# The racks \\
    SwitchName = s0 Nodes="t[0-1]" LinkSpeed=1
    switchname=s1 nodes=t2\\
,t3
    SwitchName=core Switches=s[0-1]
    """
    network = read_text(tmp_path, text)
    assert network.units == {"rack": ("s0", "s0", "s1", "s1"), "pod": ("core",) * 4}
    empty = "BlockName=b0 BlockIndex=0 Nodes=t0 BlockSize=1\nBlockName=b1 Nodes= BlockSize=1\n"
    assert read_text(tmp_path, empty).hosts == ("t0",)


def test_an_address_may_have_several_switches_of_a_level_or_none(tmp_path):
    network = read_text(tmp_path, "c[1-2].s0.t0\nc[1-2].s0.t1\nc[1-2]..t2\n")
    assert network.hosts == ("t0", "t1", "t2") and network.levels == (
        "host",
        "rack",
        "pod",
        "world",
    )
    assert np.array_equal(network.numbers()[1], [0] * 16 + [1] * 8)


def test_links_above_pods_are_shared_whether_a_switch_above_them_is_named_or_not(tmp_path):
    pods = "SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b\nSwitchName=p0 Switches=s0\n"
    network = read_text(
        tmp_path, pods + "SwitchName=p1 Switches=s1\nSwitchName=c Switches=p[0-1]\n"
    )
    assert network.speeds == {
        **{"host": 450, "rack": 50, "pod": 50},
        **{"switch2": BETWEEN_PODS, "world": BETWEEN_PODS},
    }


def test_flags_make_units_of_equal_size():
    network = Network.regular(
        80, 4, nvlink_domain=16, hosts_per_rack=8, racks_per_pod=2, bandwidth={"rack": 40}
    )
    assert network.levels == ("host", "nvlink", "rack", "pod", "world")
    assert [len(set(names)) for names in network.units.values()] == [5, 3, 2]
    assert network.speeds["rack"] == 40 and network.speeds["world"] == BETWEEN_PODS


def test_hosts_in_another_order_keep_their_ranks_and_units():
    network = Network(["a", "b", "c"], [2, 4, 2], {"rack": ["r", "r", "s"]})
    turned = network.in_order([2, 1, 0])
    assert (turned.hosts, turned.ranks) == (("c", "b", "a"), (2, 4, 2))
    assert turned.numbers(7).tolist() == [[0, 0, 1, 1, 1, 1, 2], [0, 0, 1, 1, 1, 1, 1]]
    assert turned.topology(7).host(2) == "b" and turned.topology(7, "rack").host(0) == "s"


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("a\nb\n", {"a": 4, "b": 4}),
        ("# mine\na.cluster.local slots=8\nb.cluster.local slots=8 max_slots=9\n",
         {"a.cluster.local": 8, "b.cluster.local": 8}),
        ("a.cluster.local\nb.cluster.local\n", {"a.cluster.local": 4, "b.cluster.local": 4}),
        ("10.0.0.1:8\n10.0.0.2:6\n", {"10.0.0.1": 8, "10.0.0.2": 6}),
        ("b\nb\na\na\na\n", {"b": 2, "a": 3}),
    ],
)  # fmt: skip
def test_a_hostfile_is_a_network_and_names_keep_their_domain(tmp_path, text, gpus):
    network = read_text(tmp_path, text, 4)
    assert dict(zip(network.hosts, network.ranks, strict=True)) == gpus


def test_the_nodes_of_kubernetes_are_those_with_gpus_in_their_nvlink_domains(tmp_path):
    def node(name, gpus, **labels):
        return {
            "metadata": {"name": name, "uid": 1, "labels": labels},
            "status": {"allocatable": {"cpu": "96", **gpus}, "conditions": []},
        }

    clique = {"nvidia.com/gpu.clique": "7c.0"}
    nodes = [
        node("control", {}),
        node("gpu-0.eu.internal", {"nvidia.com/gpu": "4"}, **clique),
        node("gpu-1.eu.internal", {"nvidia.com/gpu": "4"}, **clique),
    ]
    network = read_text(tmp_path, json.dumps({"kind": "List", "items": nodes}))
    assert network.hosts == ("gpu-0.eu.internal", "gpu-1.eu.internal")
    assert (network.ranks, network.units) == ((4, 4), {"nvlink": ("7c.0", "7c.0")})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("hosts: 5", "it has no list `hosts:`"),
        ("hosts: []", "hosts must be names, at least one"),
        ("hosts: [{gpus: 8}]", "the host None has no 'name'"),
        ("hosts: [{name: a}, {name: a}]", "the host 'a' is listed twice"),
        ("hosts: [{name: a, gpus: 0}]", "each at least 1"),
        ("hosts: [{name: a, gpus: eight}]", "each at least 1"),
        ("hosts: [{name: a, rack: r}, {name: b}]", "the host 'b' has no 'rack'"),
        ("hosts: [{name: a, rack: [r]}]", "expected `int | str`, got `array`, at `hosts[0][...]`"),
        ("hosts: [{name: a, world: w}]", "cannot be called 'world'"),
        ("hosts: [{name: a}]\nracks: 3", "unknown key 'racks'; allowed: hosts, bandwidth"),
        ("hosts: [{name: a}]\nbandwidth: {rack: 5}", "the levels host, world"),
        ("hosts: [{name: a}]\nbandwidth: {world: 0}", "must be GB/s above 0, got 0"),
        (
            "hosts: [{name: a}]\nbandwidth: {world: fast}",
            "expected `float`, got `str`, at `bandwidth[...]`",
        ),
        ("hosts: [{name: a}]\nbandwidth: 5", "expected `object`, got `str`, at `bandwidth`"),
        ("{ hosts", "it is not JSON"),
        ('{"hosts": ' + "[" * 100_000, "it is nested too deeply"),
        ("hosts: " + "[" * 10_000, "it is not YAML"),
        ("hosts: [a: b: c", "it is not YAML"),
        ("SwitchName=s0 Nodes=t[0-\n", "is not a hostlist"),
        ("SwitchName=s0 Nodes=a\nBlockName=b0 Nodes=a,c\n", "no switch has the host 'c'"),
        ("SwitchName=s0 Switches=s1\n", "hosts must be names"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Switches=s0\nSwitchName=s0 Switches=s1\n", "above"),
        ("SwitchName=s0 Nodes=a,b\nSwitchName=s1 Nodes=b,c\n", "'b' is in the switches s0 and s1"),
        ("BlockName=b0 Nodes=a\nBlockName=b1 Nodes=a\n", "'a' is in the blocks b0 and b1"),
        ("- topology: t\n  tree: {switches: []}\n", "what `scontrol show topology` prints"),
        ("b.a switch.switch.node\n", "is not of the form"),
        ("SwitchName=s Nodes=a[1-999999]\n", "too many"),
    ],
)
def test_what_is_no_network_is_refused_in_a_sentence(tmp_path, text, says):
    with pytest.raises(LayoutError, match=re.escape(says)):
        read_text(tmp_path, text)


def test_units_that_cross_are_refused():
    with pytest.raises(LayoutError, match="nvlink 'd0' has hosts in the rack 'r0' and in 'r1'"):
        Network(["a", "b", "c"], 8, {"nvlink": ["d0", "d0", "d1"], "rack": ["r0", "r1", "r1"]})
    with pytest.raises(LayoutError, match="does not hold whole hosts of 8"):
        Network.regular(64, 8, nvlink_domain=12)
    with pytest.raises(LayoutError, match="racks per pod need the hosts per rack"):
        Network.regular(64, 8, racks_per_pod=2)
    with pytest.raises(LayoutError, match="has 16 ranks on 2 hosts, and the job has 17"):
        Network.regular(16, 8).numbers(17)


def test_yaml_without_its_package_names_the_extra_and_json_needs_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(
        LayoutError, match=r"pip install '\.\[topology\]' in a checkout of hypergrid. JSON with"
    ):
        read_text(tmp_path, YAML)
    assert read_text(tmp_path, '{"hosts": [{"name": "a"}]}').ranks == (8,)


def test_hostlists_are_those_of_slurm():
    assert expanded("a[01-03,7],b2") == ["a01", "a02", "a03", "a7", "b2"]
    assert expanded("r[0-1]n[08-09]x") == ["r0n08x", "r0n09x", "r1n08x", "r1n09x"]
    assert hostlist(["a09", "a10", "a11", "b", "a1", "a7", "c"]) == "a[09-11],b,a[1,7],c"
    for wrong in ("", "a[", "a]b", "a[3-1]", "a[x]", "a,,b", "[1-3]", "a[1-9999999999]"):
        with pytest.raises(LayoutError):
            expanded(wrong)


@given(st.lists(st.from_regex(r"[a-z]{1,2}-?[0-9]{0,3}", fullmatch=True), min_size=1))
def test_a_hostlist_is_read_as_it_was_written(names):
    assert expanded(hostlist(names)) == names


def test_an_order_of_hosts_is_written_for_every_launcher():
    network = Network(["b", "a"], [2, 1])
    assert {name: write(network) for name, write in FORMATS.items()} == {
        "hostfile": "b slots=2\na slots=1",
        "hostlist": "b,a",
        "slurm": "b\nb\na",
    }
