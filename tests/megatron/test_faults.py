"""A failure leaves nothing, destroying releases everything; scripts/soak tries longer."""

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hypergrid
from compat import parallel_state as ps
from hypergrid import AgreementError, HyperCommGrid
from hypergrid.agreement import store as connection
from tests.support import ROOT, faults, own_lines
from tests.support.forked import from_all, on_ranks, open_groups, total
from tests.support.stock import PUBLISHED


def test_a_fault_in_any_function_leaves_the_process_as_before_and_a_retry_works():
    assert not faults.faults_in_every_function()


def test_lives_with_changing_sizes_leave_no_group_descriptor_thread_or_key():
    assert not faults.lives(8)


@pytest.mark.parametrize("stdout", ["closed", "full", "in ASCII"])
@on_ranks(2)
def test_a_report_that_cannot_be_printed_is_a_warning_and_all_keep_their_groups(rank, stdout):
    stream = open("/dev/full", "w", encoding="ascii")  # noqa: SIM115
    if stdout == "closed":
        stream.close()
    report = "é" if stdout == "in ASCII" else "the report"
    warned = pytest.warns(RuntimeWarning, match="the report cannot be printed: ")
    with (
        mock.patch.dict(os.environ, HYPERGRID_REPORT="1"),
        mock.patch("compat.report.report", return_value=report),
        mock.patch("sys.stdout", stream),
        warned if rank == 0 else nullcontext(),
    ):
        ps.initialize_model_parallel(2)
    assert total(ps.get_tensor_model_parallel_group()) == 2


@on_ranks(4)
def test_groups_are_aborted_also_where_no_thread_can_start(rank):
    ps.initialize_model_parallel(2)
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        ps.destroy_model_parallel(abort=True)
    assert len(open_groups()) == 1


@pytest.mark.release(PUBLISHED[-1])
@on_ranks(8)
def test_windows_that_overlap_are_refused_by_the_ranks_of_both(rank):
    window = {"local_world_size": 4, "rank_offset": 4} if rank >= 4 else {}
    for _ in range(2):  # whoever comes first, and again with the same mistake
        error = ""
        try:
            ps.initialize_model_parallel(2, **window)
            ps.destroy_model_parallel()
        except AgreementError as caught:
            error = str(caught)
        texts = from_all(error)
        (text,) = {*texts[:4]}
        assert "windows 0..7 and 4..7 overlap: 4 ranks (4, 5, 6, 7) are in both" in text
        # The smaller window may have had its groups before the larger one was known.
        assert {*texts[4:]} <= {text, ""}
        dist.barrier()
    ps.initialize_model_parallel(2, local_world_size=4, rank_offset=rank // 4 * 4)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2)  # the next life may have other windows


GROUPS_OF_A_SCRIPT = """
import torch.distributed as dist
from compat import parallel_state as ps
from hypergrid import HyperCommGrid
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ps.initialize_model_parallel(order="tp-cp-ep-dp-pp", create_gloo_process_groups=False)
grid = HyperCommGrid([1, 1], ["tp", "dp"])
group = grid.create_pg("dp")
"""


@pytest.mark.parametrize(
    "end", ["", "dist.destroy_process_group(); ps.destroy_model_parallel(); grid.destroy()"]
)
def test_at_exit_it_is_quiet(end):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    command = [sys.executable, "-c", GROUPS_OF_A_SCRIPT + end]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, own_lines(done.stdout), done.stderr) == (0, "", "")


# What lives can be asked.


@on_ranks(4)
def test_what_lives_can_be_asked_as_json_under_the_names_that_torch_uses(rank):
    ps.initialize_model_parallel(2, share="all", create_gloo_process_groups=False)
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    grid.create_pg("dp", group_desc="mine")
    record = json.loads(hypergrid.dump())
    assert (record["rank"], record["world_size"], record["schema"]) == (rank, 4, 1)
    group_of = {group["name"]: group for group in record["groups"]}
    assert group_of.keys() == {group.group_name for group in open_groups()}
    tensor = group_of[ps.get_tensor_model_parallel_group().group_name]
    pair = rank // 2 * 2
    expected = {
        "label": "TENSOR_MODEL_PARALLEL_GROUP",
        "dims": ["tp"],
        "backend": "gloo",
        "ranks": [pair, pair + 1],
    }
    assert expected.items() <= tensor.items()
    assert tensor["owner"].startswith("ParallelState over RankLayout(tp=2")
    assert f"rank {rank} at {{'tp': {rank % 2}, 'dp': {rank // 2}}} of" in repr(ps.current_state())
    assert f"rank {rank} at {{'tp': {rank % 2}, 'dp': {rank // 2}}}" in repr(grid)
    assert any(group["shared_with"] for group in record["groups"])
    of_grid = group_of[grid.get_pg("dp").group_name]
    assert of_grid["description"] == "mine" and "HyperCommGrid" in of_grid["owner"]


def test_a_record_can_be_written_to_a_file_and_asked_for_before_there_is_anything(tmp_path):
    text = hypergrid.dump(tmp_path / "groups.json")
    assert json.loads((tmp_path / "groups.json").read_text()) == json.loads(text)
    assert json.loads(text)["groups"] == [] and json.loads(text)["rank"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no TCP_USER_TIMEOUT")
@on_ranks(2)
def test_the_stores_connection_alone_gives_up_in_time_while_groups_are_made(rank):
    store = c10d._get_default_store()
    socket.setdefaulttimeout(20)  # Python makes each socket that it creates non-blocking
    # Another host's server with the port of the store.
    port = 0 if rank else connection.innermost(store).port
    with (
        socket.create_server(("127.0.0.2", port)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):

        def limits():
            limits_of_links = []
            for link in (*connection.connections_to(store), client):
                timeout = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                keeps_alive = link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                limits_of_links.append((timeout, keeps_alive, os.get_blocking(link.fileno())))
            return limits_of_links

        before = limits()
        with connection.noticing_a_dead_link(store, timedelta(seconds=8)):
            *of_store, of_client = limits()
        assert of_store and set(of_store) == {(4000, 1, True)} and of_client[:2] == (0, 0)
        assert limits() == before
