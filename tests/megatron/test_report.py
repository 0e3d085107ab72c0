"""The report's lines on hosts: ranks report their hosts before they agree on their groups."""

import socket
from unittest import mock

import torch.distributed as dist

from compat import parallel_state as ps
from tests.support.forked import on_ranks


def reported(hosts, rank, **environment):
    """What this rank prints where each rank is on one of ``hosts``."""
    with (
        mock.patch.object(socket, "gethostname", lambda: hosts[rank]),
        mock.patch.dict("os.environ", {"HYPERGRID_REPORT": "1", **environment}),
        mock.patch("builtins.print") as printed,
    ):
        ps.initialize_model_parallel(2)
    ps.destroy_model_parallel()
    return "\n".join(call.args[0] for call in printed.call_args_list)


@on_ranks(4)
def test_the_report_notices_interleaved_ranks(rank):
    report = reported("abab", rank)
    dist.barrier()
    if rank == 0:
        assert (
            "ranks are interleaved over hosts: a has ranks 0, 2, so that groups of neighbouring "
            "ranks cross hosts. Start with srun --distribution=block" in report
        )
    report = reported("aabb", rank)
    if rank == 0:
        assert "TENSOR_MODEL_PARALLEL_GROUP" in report and "interleaved" not in report


@on_ranks(2)
def test_a_rank_that_does_not_tell_its_host_leaves_the_report_without_that_line(rank):
    report = reported("ab", rank, HYPERGRID_REPORT=str(1 - rank))
    if rank == 0:
        assert "TENSOR_MODEL_PARALLEL_GROUP" in report and "hosts" not in report


@on_ranks(4)
def test_the_name_of_a_host_prints_no_line_of_its_own(rank):
    report = reported(["a\nhypergrid: all is well", "b"] * 2, rank)
    if rank == 0:
        assert "a\\nhypergrid: all is well has ranks 0, 2" in report
        assert "\nhypergrid: all is well" not in report
