"""The memory of communicators: published figures, and what a rank's groups add up to."""

import pytest

from compat.megatron.job import from_sizes
from compat.megatron.traffic import SENDS
from hypergrid import GroupPlan, GroupRow, LayoutError, RankLayout
from hypergrid.analysis.memory import MIB, Buffers, bills, communicator
from hypergrid.network import Network
from tests.support import ROOT


def of_verl(**more):
    """TP=2 PP=2 DP=2 on 8 GPUs of one host, as upstream creates the groups."""
    plan = from_sizes(world_size=8, tp=2, pp=2, **more).request().plan
    return bills(plan, Network.regular(8, 8).topology(8), SENDS)["none"]["nccl"].bytes


def added(patterns):
    """What sends add to rings, on 8 GPUs of one host."""
    most = communicator(8, 8, patterns)[1] - communicator(8, 8)[1]
    return most, most


# What was measured, the figure in MiB, the prediction, and whether it holds the figure.
PUBLISHED = [
    ("sglang 35538: each group of one rank", 388, communicator(1, 1), True),
    (
        "sglang 35538: the same with NCCL_MAX_NCHANNELS=1",
        10,
        communicator(1, 1, (), Buffers(channels=1)),
        True,
    ),
    (
        "NCCL 2363: network buffer of a group of one rank",
        512,
        (communicator(1, 1)[1] - communicator(1, 1)[0],) * 2,
        True,
    ),
    ("NCCL 1685: first all-to-all of 8 H100, 3.28 GB", 3128, added(("all-to-all",)), True),
    ("NCCL 964: 2 of 4 A100, all-reduce", 544, communicator(2, 2), True),
    ("NCCL 964: 3 or 4 of 4 A100, all-reduce", 688, communicator(4, 4), True),
    ("verl 6408: Megatron TP=2 PP=2 DP=2, dense, 7 GB", 6676, of_verl(), True),
    ("verl 6408: the same with experts, 9.5 GB", 9060, of_verl(ep=2), True),
    ("NCCL 864: each of further communicators, 2.2 GB", 2098, communicator(8, 8), False),
]


@pytest.mark.parametrize(("what", "figure", "bytes", "holds"), PUBLISHED)
def test_published_figures_stand_beside_predictions_in_the_docs(what, figure, bytes, holds):
    low, high = (round(n / MIB) for n in bytes)
    close = low * 0.995 <= figure <= high * 1.005
    assert close == holds
    shown = f"{low:,} to {high:,}" if low < high else f"{low:,}"
    line = f"| {what} | {figure:,} | {shown} |"
    assert line in (ROOT / "docs" / "placement.md").read_text(), line


def test_a_communicator_in_numbers():
    """Rings of 16 channels at least; at most rings and trees of 32, and their structures."""
    assert Buffers().receive == 10 * MIB  # 4 MiB + 512 KiB + 4800 KiB in granules of 2 MiB
    assert communicator(2, 2) == ((4 + 16 * 12) * MIB, (4 + 32 * 6 + 32 * 12) * MIB)
    small = Buffers(buffsize=MIB, channels=4)
    assert small.receive == 8 * MIB
    assert communicator(8, 8, (), small) == ((4 + 4 * 10) * MIB, (4 + 4 * 6 + 4 * 10 * 2) * MIB)
    # Two peers in the host, and the buffers for those behind the network.
    far = communicator(4, 2, ("neighbours",))[1] - communicator(4, 2)[1]
    assert far == (1 * 32 * 14 + 2 * 32 * 16 // 8) * MIB


def test_more_members_channels_and_bytes_never_take_less():
    for patterns in ((), ("neighbours",), ("all-to-all",)):
        highs = [communicator(n, min(n, 8), patterns)[1] for n in range(2, 40)]
        assert highs == sorted(highs)
        for channels in range(1, 64):
            less, more = (
                communicator(8, 4, patterns, Buffers(channels=n)) for n in (channels, channels + 1)
            )
            assert less[0] <= more[0] <= more[1] and less[1] <= more[1]


def test_sharing_is_counted_by_backend_and_groups_of_one_rank_once():
    layout = {"all": RankLayout(("tp", "dp"), (2, 4))}
    rows = [
        GroupRow("A", "all", ("dp",)),
        GroupRow("B", "all", ("dp",)),
        GroupRow("C", "all", ("dp",), traffic="tokens"),
        GroupRow("D", "all", ("dp",), backend="gloo"),
        GroupRow("E", "all", ()),
        GroupRow("F", "all", (), traffic="tokens"),
    ]
    near = Network.regular(8, 8).topology(8)
    found = bills(GroupPlan(layout, tuple(rows)), near, {"tokens": ("all-to-all",)})
    counts = {share: (b["nccl"].communicators, b["nccl"].alone) for share, b in found.items()}
    assert counts == {
        "none": ((5, 5), (2, 2)),
        "singletons": ((4, 4), (1, 1)),
        "all": ((3, 3), (1, 1)),
    }
    ring, tokens, one = (communicator(*n) for n in ((4, 4), (4, 4, ("all-to-all",)), (1, 1)))
    assert found["all"]["nccl"].bytes == (ring[0] + tokens[0], ring[1] + tokens[1] + one[1])
    assert found["none"]["gloo"].communicators == (1, 1) and found["none"]["gloo"].bytes is None


@pytest.mark.parametrize("wrong", [{"buffsize": 0}, {"buffsize": 1 << 31}, {"channels": 0}])
def test_numbers_that_nccl_does_not_take_are_refused(wrong):
    with pytest.raises(LayoutError, match="got"):
        Buffers(**wrong)
