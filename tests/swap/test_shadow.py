"""A shadow run: stock runs the job, and what hypergrid would have created is compared with it."""

import datetime
import textwrap

import pytest

from tests.support import ROOT, warm
from tests.support.stock import MAIN

TODAY = f"{datetime.date.today():%Y%m%d}"
# What the first initialisation of a job shows; others raise, or show after a destroy.
VISIBLE = {
    *("tp-cp becomes tp-dp", "a group's members", "another timeout", "another description"),
    *("another group's options", "a getter of another group", "an alias becomes a copy"),
    *("a gloo group with a timeout", "another default", "a global of a copy", "hybrid sizes"),
}


def shadowing(release, *arguments):
    """Lines of ``python -m tests.parity.shadowing``."""
    done = warm.run(
        *("-m", "tests.parity.shadowing", release, *arguments),
        cwd=str(ROOT),
        timeout=600,
        HYPERGRID_MEGATRON_RELEASE=release,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("release", MAIN)
def test_beside_stock_it_finds_no_difference(release):
    assert [*filter(None, shadowing(release, "-n", "30", "--seed", TODAY))] == ["done"]


@pytest.mark.slow
@pytest.mark.parametrize("release", MAIN)
def test_beside_broken_copies_of_stock_it_finds_each_difference_that_shows(release):
    assert {*shadowing(release, "-n", "60", "--seed", "3", "--mutants")} >= VISIBLE


JOB = """
    import datetime, os, sys, time
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from megatron.core import parallel_state

    rank = int(os.environ["RANK"])
    plain = parallel_state.create_group
    if "late" in sys.argv:
        def create_group(*args, **kwargs):
            kwargs["timeout"] = kwargs.get("timeout") or datetime.timedelta(days=208)
            return plain(*args, **kwargs)
        parallel_state.create_group = create_group
    if "any" in sys.argv:
        new_group = dist.new_group
        dist.new_group = lambda *args, **kwargs: new_group(*args, **kwargs)
    if "generator" in sys.argv:
        class Generator(parallel_state.RankGenerator):
            def get_ranks(self, token):
                lists = [super().get_ranks(token)]
                dist.broadcast_object_list(lists, src=0)
                return lists[0]
        parallel_state.RankGenerator = Generator
    if "other" in sys.argv:
        # As a broken copy of stock: the group's timeout is no longer the one that is asked for.
        late = (lambda ranks, **kwargs: plain(ranks, **{**kwargs, "timeout": LATE})
                if kwargs.get("group_desc") == "TENSOR_MODEL_PARALLEL_GROUP" and 3 in ranks
                else plain(ranks, **kwargs))
        LATE = datetime.timedelta(minutes=7)
        code = parallel_state.initialize_model_parallel.__wrapped__
        vars(parallel_state)["create_group"] = late
        from compat.swap import shadow
        parallel_state.initialize_model_parallel = code
        shadow.watch(parallel_state)

    if "nothing" in sys.argv:
        sys.exit()
    dist.init_process_group("gloo")
    before = c10d._world.group_count
    sizes = {"virtual_pipeline_model_parallel_size": 2} if "interleaved" in sys.argv else {}
    sizes |= {"order": "tp-xp"} if "refused" in sys.argv else {}
    if "dead" in sys.argv and rank == 2:
        time.sleep(1)
        os._exit(0)
    if "dead" in sys.argv:
        # Stock waits for no rank while it creates groups of which the dead one is no member.
        c10d._store_based_barrier = lambda *args, **kwargs: None
        c10d._new_process_group_helper = lambda *args, **kwargs: (None, None)
        dist.new_group = lambda *args, **kwargs: None
    begun = time.monotonic()
    parallel_state.initialize_model_parallel(2, 2, **sizes)
    print(f"rank {rank} waited {time.monotonic() - begun:.0f} s")
    if rank == 0:
        print(f"{parallel_state.__name__} made {c10d._world.group_count - before} groups")
    if "dead" not in sys.argv:
        dist.barrier()
        dist.destroy_process_group()
"""


def run_job(tmp_path, *arguments, fails=False, launch=("-m", "compat.launch"), **environment):
    job = tmp_path / "job.py"
    job.write_text(textwrap.dedent(JOB))
    flags = [each for each in arguments if each.startswith("--")]
    done = warm.run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *(*launch, *flags, str(job), *(each for each in arguments if each not in flags)),
        cwd=str(tmp_path),
        **environment,
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_stock_runs_the_job_and_one_line_says_that_nothing_differs(tmp_path):
    out = run_job(tmp_path, "--shadow")
    (said,) = (line for line in out.splitlines() if line.startswith("hypergrid"))
    assert said == (
        "hypergrid (shadow): would have created the same groups on all 4 ranks: 20 groups on this "
        "one, 53 -> 20 calls of new_group."
    )
    assert "megatron.core.parallel_state made 53 groups" in out


def test_a_difference_is_told_by_rank_and_field_and_the_job_goes_on(tmp_path):
    out = run_job(tmp_path, "--shadow", "late")
    assert "(shadow): would differ from stock on 2 of 4 ranks. Stock's groups are used." in out
    for rank in (2, 3):
        assert (
            f"rank {rank}: TENSOR_MODEL_PARALLEL_GROUP: timeout is 0:07:00 with stock, and would "
            f"be 0:30:00." in out
        )
    assert "megatron.core.parallel_state made 53 groups" in out


def test_strict_ends_the_job_on_every_rank(tmp_path):
    out = run_job(tmp_path, "--shadow-strict", "late", fails=True)
    for rank in range(4):
        assert f"RuntimeError: rank {rank} ends the job, as HYPERGRID_SHADOW=strict asks" in out
    assert "made" not in out


def test_the_start_up_directory_shadows_too(tmp_path):
    startup = warm.run("-m", "compat.launch", "--startup-path", cwd=str(ROOT)).stdout.strip()
    out = run_job(tmp_path, launch=(), PYTHONPATH=startup, HYPERGRID_SHADOW="1")
    assert "would have created the same groups on all 4 ranks" in out


def test_what_a_shadow_run_cannot_obey_is_refused(tmp_path):
    for flag in ("--order=tp-dp", "--report", "--share=all"):
        done = warm.run("-m", "compat.launch", "--shadow", flag, __file__, cwd=str(ROOT))
        assert done.returncode == 2 and "needs the swap, which --shadow switches off" in done.stderr
    done = warm.run("-m", "compat.launch", "--shadow", "--no-swap", __file__, cwd=str(ROOT))
    assert done.returncode == 2 and "--no-swap switches off: remove one" in done.stderr


def test_arguments_that_hypergrid_refuses_are_a_difference_and_no_error():
    from types import ModuleType

    from compat.swap import shadow

    stock = ModuleType("stock")
    found = []
    stock.initialize_model_parallel = lambda new_axis_size=1: "what stock returns"
    shadow.watch(stock, lambda *told: found.append(told))
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert stock.initialize_model_parallel() == "what stock returns"
    finally:
        dist.destroy_process_group()
    ((_, ranks, _, (said,)),) = found
    assert [*ranks] == [0, 1] and "refuses these arguments" in said and "new_axis_size" in said
