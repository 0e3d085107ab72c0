"""A failure leaves nothing, destroying releases everything; scripts/soak tries longer."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hypergrid
from compat import members_only
from compat import parallel_state as ps
from hypergrid import AgreementError, CreationError, HyperCommGrid
from hypergrid.agreement import store as connection
from hypergrid.groups import creation, gloo
from tests.support import ROOT, own_keys, own_lines, soaking
from tests.support.forked import from_all, on_ranks, open_groups, run_ranks, total


def test_a_fault_in_any_function_leaves_the_process_as_before_and_a_retry_works():
    soaking.faults_in_every_function().check()


def test_a_fault_of_one_rank_in_the_middle_is_told_to_all_and_all_can_try_again():
    soaking.faults_on_one_rank([2, 13]).check()


def _hears_of_a_failure(rank):
    """Rank 1 fails at its third group; the others wait for its address there."""
    new_group = dist.new_group
    groups = []

    @members_only
    def failing(*args, **kwargs):
        groups.append(args)
        if rank == 1 and len(groups) == 3:
            raise RuntimeError("injected: no more communicators")
        return new_group(*args, **kwargs)

    start = time.monotonic()
    with mock.patch("torch.distributed.new_group", failing), pytest.raises(CreationError) as error:
        ps.initialize_model_parallel(2, distributed_timeout_minutes=3)
    return str(error.value), time.monotonic() - start


def test_a_rank_that_waits_for_an_address_hears_of_a_failure_long_before_its_timeout():
    for text, seconds in run_ranks(4, _hears_of_a_failure, timeout=120):
        assert "injected: no more communicators" in text
        assert seconds < 20  # of three minutes, of which gloo would have waited a fifth


def _creation_timeouts(rank):
    given = []
    options = gloo.options

    def noted(size, timeout=None):
        given.append(timeout)
        return options(size, timeout)

    with mock.patch.object(gloo, "options", noted):
        ps.initialize_model_parallel(2, distributed_timeout_minutes=1)
    twin = ps.get_expert_data_parallel_group_gloo()
    return given, twin._get_backend(torch.device("cpu")).options._timeout


def test_no_group_is_created_with_more_time_than_the_initialisation_has():
    for given, afterwards in run_ranks(4, _creation_timeouts):
        assert given and max(given) == timedelta(seconds=12)  # of which gloo takes five
        assert afterwards == c10d.default_pg_timeout  # as megatron-core has it


def _runs_out_of_descriptors(rank):
    new_group = dist.new_group
    groups = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    @members_only
    def greedy(*args, **kwargs):
        groups.append(args)
        if rank == 1 and len(groups) == 4:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        return new_group(*args, **kwargs)

    with mock.patch("torch.distributed.new_group", greedy), pytest.raises(CreationError) as error:
        ps.initialize_model_parallel(2, distributed_timeout_minutes=0.5)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return str(error.value)


def test_a_process_without_descriptors_says_so_and_lives():
    for text in run_ranks(4, _runs_out_of_descriptors, timeout=90):
        assert "rank 1 could not create" in text and "ulimit -n" in text


def _has_no_descriptors_for_all(rank, connect):
    grid = HyperCommGrid([8], ["dp"])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(10_000) if number not in used]
    with mock.patch.dict(os.environ, HYPERGRID_CONNECT=connect):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[10], limit[1]))
        try:
            grid.create_pg("dp")
        except CreationError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return "created"


def test_only_a_group_that_connects_at_once_needs_a_descriptor_for_each_member():
    assert set(run_ranks(8, _has_no_descriptors_for_all, "lazy")) == {"created"}
    for text in run_ranks(8, _has_no_descriptors_for_all, "eager"):
        assert "takes 12 descriptors" in text and "Raise its limits: ulimit -n" in text


def _interrupted_while_it_destroys(rank):
    ps.initialize_model_parallel(2)
    destroy = dist.destroy_process_group
    destroyed = []

    def interrupted(group):
        destroyed.append(group)
        if len(destroyed) == 3:
            raise KeyboardInterrupt
        destroy(group)

    with (
        mock.patch("torch.distributed.destroy_process_group", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        ps.destroy_model_parallel()
    left = len(open_groups())
    ps.destroy_model_parallel()
    return left, len(open_groups())


def test_what_an_interrupt_leaves_is_destroyed_by_the_next_call():
    for left, finally_left in run_ranks(4, _interrupted_while_it_destroys):
        assert left > 1 and finally_left == 1


@on_ranks(2)
def test_an_interrupt_that_comes_when_torch_alone_has_a_group_leaves_none(rank):
    grid = HyperCommGrid([2], ["dp"])
    before = len(open_groups())
    with (
        mock.patch("hypergrid.groups.pool.PooledGroup", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        grid.create_pg("dp")
    assert len(open_groups()) == before
    from_all(None)
    assert total(grid.create_pg("dp")) == 2


def _aborts_without_threads(rank):
    ps.initialize_model_parallel(2)
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        ps.destroy_model_parallel(abort=True)
    return len(open_groups())


def test_groups_are_aborted_also_where_no_thread_can_start():
    assert run_ranks(4, _aborts_without_threads) == [1] * 4


def test_each_thing_that_can_differ_on_one_rank_is_named_on_all():
    soaking.disagreements(14).check()


def test_lives_with_changing_sizes_leave_no_group_descriptor_thread_or_key():
    soaking.lives(8).check()


def _overlapping(rank):
    window = {"local_world_size": 4, "rank_offset": 4} if rank >= 4 else {}
    texts = []
    for _ in range(2):  # whoever comes first, and again with the same mistake
        try:
            ps.initialize_model_parallel(2, **window)
            texts.append("")
            ps.destroy_model_parallel()
        except AgreementError as error:
            texts.append(str(error))
        dist.barrier()
    ps.initialize_model_parallel(2, local_world_size=4, rank_offset=rank // 4 * 4)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2)  # the next life may have other windows
    return texts


def test_windows_that_overlap_are_refused_by_the_ranks_of_both():
    results = run_ranks(8, _overlapping)
    for texts in zip(*results, strict=True):
        # The smaller window may have had its groups before the larger one was known.
        told = set(texts[:4])
        assert len(told) == 1 and set(texts[4:]) <= {*told, ""}
        assert "windows 0..7 and 4..7 overlap: 4 of 8 ranks (4, 5, 6, 7) are in both" in told.pop()


def _window_unknown(rank):
    try:
        ps.initialize_model_parallel(2, rank_offset="0" if rank == 3 else 0)
    except (AgreementError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_does_not_even_know_its_window_keeps_nobody_waiting():
    results = run_ranks(4, _window_unknown)
    own = results.pop(3)
    assert not own.startswith("AgreementError") and "offset" in own
    assert all("rank 3 refused its arguments" in text for text in results)


def _unchecked(rank):
    os.environ["HYPERGRID_AGREEMENT"] = "0"
    for size in (2, 4):
        ps.initialize_model_parallel(size, distributed_timeout_minutes=0.5)
        dist.all_reduce(torch.ones(1), group=ps.get_tensor_model_parallel_group())
        ps.destroy_model_parallel()
    return own_keys(c10d._get_default_store())


def test_agreement_can_be_switched_off():
    assert run_ranks(4, _unchecked) == [[]] * 4


def _restarted(rank):
    def start(life):
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)

    def initialize(**options):
        ps.initialize_model_parallel(2, distributed_timeout_minutes=4 / 60, **options)

    def dies(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        if (pid := os.fork()) == 0:
            start(1)
            calls = iter([original_new_group] * 4 + [dies])
            dist.new_group = members_only(lambda *args, **kwargs: next(calls)(*args, **kwargs))
            initialize()
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        text = "CreationError"
    else:
        start(1)
        with pytest.raises(CreationError) as caught:
            initialize()
        text = f"CreationError: {caught.value}"
        assert len(open_groups()) == 1 and not ps.is_initialized()
        dist.destroy_process_group()
    start(2)
    initialize()
    return text, total(ps.get_data_parallel_group())


original_new_group = dist.new_group


def test_a_rank_killed_half_way_is_an_error_of_all_others_and_all_can_restart():
    results = run_ranks(4, _restarted, backend="", timeout=60)
    for text, added in results:
        assert text.startswith("CreationError") and added == 2.0
    assert any("could not create" in text for text, _ in results)


def _at_exit(*ends):
    code = """
        import torch.distributed as dist
        from compat import parallel_state as ps
        from hypergrid import HyperCommGrid
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ps.initialize_model_parallel(order="tp-cp-ep-dp-pp", create_gloo_process_groups=False)
        grid = HyperCommGrid([1, 1], ["tp", "dp"])
        group = grid.create_pg("dp")
    """
    code = textwrap.dedent(code) + "\n".join(ends)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    "ends",
    [
        [],
        ["dist.destroy_process_group()"],
        ["dist.destroy_process_group()", "ps.destroy_model_parallel()", "grid.destroy()"],
        ["ps.destroy_model_parallel()", "grid.destroy()", "grid.destroy()"],
    ],
    ids=["nothing destroyed", "torch's only", "torch's first", "ours only"],
)
def test_at_exit_it_is_quiet(ends):
    done = _at_exit(*ends)
    assert (done.returncode, own_lines(done.stdout), done.stderr) == (0, "", "")


def _recorded(rank):
    ps.initialize_model_parallel(2, share="all", create_gloo_process_groups=False)
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    grid.create_pg("dp", group_desc="mine")
    own = ps.create_group([0, 1, 2, 3], group_desc="the user's")
    text, shown = hypergrid.dump(), (repr(ps.current_state()), repr(grid))
    names = {group.group_name for group in open_groups()}
    tp = ps.get_tensor_model_parallel_group().group_name
    ps.destroy_model_parallel()
    grid.destroy()
    return text, shown, names, tp, own.group_name, hypergrid.dump()


def test_what_lives_can_be_asked_as_json_under_the_names_that_torch_uses():
    for rank, (text, _, names, tp, own, afterwards) in enumerate(run_ranks(4, _recorded)):
        record = json.loads(text)
        assert (record["rank"], record["world_size"], record["schema"]) == (rank, 4, 1)
        assert {group["name"] for group in record["groups"]} == names
        groups = {group["label"]: group for group in record["groups"] if group["label"]}
        tensor = groups["TENSOR_MODEL_PARALLEL_GROUP"]
        assert tensor["name"] == tp and tensor["dims"] == ["tp"] and tensor["backend"] == "gloo"
        assert tensor["ranks"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert tensor["owner"].startswith("ParallelState over RankLayout(tp=2")
        assert any(group["shared_with"] in groups for group in record["groups"])
        assert groups["dp"]["description"] == "mine" and "HyperCommGrid" in groups["dp"]["owner"]
        others = [group["name"] for group in record["groups"] if group["label"] is None]
        left = {group["name"] for group in json.loads(afterwards)["groups"]}
        assert set(others) == left and own in left and len(left) == 2


def test_a_state_and_a_grid_print_where_this_rank_stands():
    for rank, (_, (state, grid), *_) in enumerate(run_ranks(4, _recorded)):
        assert f"rank {rank} at" in state and f"'tp': {rank % 2}" in state
        assert f"rank {rank} at {{'tp': {rank % 2}, 'dp': {rank // 2}}}" in grid


def test_a_record_can_be_written_to_a_file_and_asked_for_before_there_is_anything(tmp_path):
    text = hypergrid.dump(tmp_path / "groups.json")
    assert json.loads((tmp_path / "groups.json").read_text()) == json.loads(text)
    assert json.loads(text)["groups"] == [] and json.loads(text)["rank"] is None


def _timeouts_that_groups_have(rank):
    ps.initialize_model_parallel(2, distributed_timeout_minutes=7)
    groups = [group.group for group in ps.current_state().pool.groups]
    assert creation.creation_timeout("gloo", timedelta(seconds=60)) == timedelta(seconds=12)
    assert creation.creation_timeout(None, timedelta(seconds=9)) == timedelta(seconds=2)
    assert creation.creation_timeout("nccl", timedelta(seconds=60)) is None
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_groups_are_created_in_a_fifth_of_their_timeout_and_then_have_all_of_it(fake_world):
    timeouts = set(run_ranks(2, _timeouts_that_groups_have)[0])
    assert timeouts == {timedelta(minutes=7), c10d.default_pg_timeout}
    fake_world(2)
    assert creation.creation_timeout("gloo", timedelta(seconds=60)) is None


def _keeps_options(rank):
    store, seconds = c10d._get_default_store(), timedelta(seconds=8)
    options = [(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), (socket.SOL_SOCKET, 9)]

    def read():
        return [c.getsockopt(*option) for c in connection._connections(store) for option in options]

    before = read()
    with connection.noticing_a_dead_link(store, seconds):
        inside = read()
    return before, inside, read(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no TCP_USER_TIMEOUT")
def test_the_stores_connection_gives_up_in_time_only_while_groups_are_made():
    for before, inside, after, descriptors in run_ranks(2, _keeps_options):
        assert inside and inside == [4000, 1] * (len(inside) // 2) and before == after != inside
        assert descriptors < 64
