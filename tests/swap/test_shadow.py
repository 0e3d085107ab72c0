"""A shadow run: stock runs the job, and what hypergrid would have created is compared with it."""

import subprocess
import sys
import textwrap

import pytest

from tests.shadows.judging import (
    ARGUMENTS,
    HARMLESS,
    SEEN_BY_TORCH,
    VISIBLE,
    Edit,
    edited,
    has_arguments,
    judge,
)
from tests.shadows.patches import PATCHES
from tests.shadows.running import write_tree
from tests.support import ROOT, warm
from tests.support.stock import MAIN, NEWEST, have_stock, source

NEWEST_AND_BRANCHES = [*NEWEST]
for branch in ("main", "dev"):
    absent = pytest.mark.skipif(not have_stock(branch), reason=f"no {branch} under .cache")
    NEWEST_AND_BRANCHES.append(pytest.param(branch, marks=[pytest.mark.long, absent]))


@pytest.mark.parametrize("release", MAIN)
def test_beside_stock_it_finds_no_difference(release):
    command = ("-m", "tests.parity.shadowing", release, "-n", "15", "--seed", "1")
    done = warm.run(*command, timeout=300, HYPERGRID_MEGATRON_RELEASE=release)
    assert done.stdout.split() == ["done"], done.stdout + done.stderr


@pytest.mark.parametrize("release", NEWEST_AND_BRANCHES)
@pytest.mark.parametrize("name", [*VISIBLE, *SEEN_BY_TORCH])
def test_an_edit_of_stock_that_a_caller_or_torch_sees_is_a_difference(release, name):
    arguments, old, new = {**VISIBLE, **SEEN_BY_TORCH}[name]
    text = source(release).replace(old, new)
    if text == source(release) or not has_arguments(text, ARGUMENTS[arguments]):
        pytest.skip(f"{release} has no place for it, or no {ARGUMENTS[arguments]}")
    verdict = judge(release, Edit(name, text, (), ARGUMENTS[arguments]))
    assert verdict.kind == "difference"
    assert verdict.differing or name in SEEN_BY_TORCH


@pytest.mark.parametrize("release", NEWEST_AND_BRANCHES)
@pytest.mark.parametrize("arguments", ["experts", "optimizer instances", "no gloo"])
def test_all_edits_that_no_caller_sees_are_no_difference_and_no_refusal(release, arguments):
    text = source(release)
    for old, new in HARMLESS.values():
        text = edited(text, old, new)
    verdict = judge(release, Edit("all", text, (), ARGUMENTS[arguments]))
    assert verdict.differing == []
    assert verdict.kind == "same"


@pytest.mark.parametrize("release", NEWEST_AND_BRANCHES)
@pytest.mark.parametrize(
    ("patch", "arguments"),
    [
        *((patch, "experts") for patch in PATCHES),
        *(("wrappers", arguments) for arguments in ("interleaved", "context", "hybrid")),
    ],
)
def test_functions_that_clients_replace_are_no_false_alarm(release, patch, arguments):
    text = source(release)
    if not has_arguments(text, ARGUMENTS[arguments]):
        pytest.skip(f"{release} has no {ARGUMENTS[arguments]}")
    verdict = judge(release, Edit(patch, text, (patch,), ARGUMENTS[arguments]))
    assert verdict.differing == []
    assert verdict.kind == "same"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-n", "4", "--seed", "1", "--release", MAIN[1]), id="newest"),
        pytest.param(("-n", "20"), id="all, and a new seed", marks=pytest.mark.long),
    ],
)
def test_random_edits_are_the_same_exactly_where_callers_see_the_same(options):
    command = [sys.executable, "scripts/shadow_fuzz", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    print(done.stdout)  # the seed
    assert done.returncode == 0, done.stdout + done.stderr


JOB = """
    import datetime, gc, os, sys
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from megatron.core import parallel_state

    rank = int(os.environ["RANK"])
    if "nothing" in sys.argv:
        sys.exit()
    dist.init_process_group("gloo")
    if "communicates" in sys.argv:
        class Generator(parallel_state.RankGenerator):
            def get_ranks(self, token):
                lists = [super().get_ranks(token)]
                dist.broadcast_object_list(lists, src=0)
                return lists[0]

        parallel_state.RankGenerator = Generator

    def last_call():
        group = parallel_state.get_model_parallel_group()
        c10d._set_pg_timeout(datetime.timedelta(minutes=11), group)

    if "late" in sys.argv and rank > 1:
        parallel_state.timedelta = lambda minutes: datetime.timedelta(minutes=minutes + 1)
        parallel_state._set_global_memory_buffer = last_call
    if "killed" in sys.argv and rank == 2:
        parallel_state._set_global_memory_buffer = lambda: os.kill(os.getpid(), 9)
    before = c10d._world.group_count
    parallel_state.initialize_model_parallel(3 if "refused" in sys.argv else 2, 2)
    if rank == 0:
        print(f"{parallel_state.__name__} made {c10d._world.group_count - before} groups")
    if "killed" not in sys.argv:
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()
        # Each open gloo group has threads.
        assert len(os.listdir("/proc/self/task")) < 40, "the shadow run keeps groups of stock"
"""


FORKING = """
    import os, socket, sys, threading
    from compat import launch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="4")
    children = []
    for rank in range(4):
        child = os.fork()
        if not child:
            os.environ["RANK"] = str(rank)
            launch.main(sys.argv[1:])
            # As Python does when it ends.
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            sys.exit()
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    print("statuses", statuses)
    sys.exit(any(statuses))
"""

FORKED = ("ranks.py",)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
TORCHRUN += ("-m", "compat.launch")


@pytest.fixture
def run_job(tmp_path):
    """What a job on four ranks prints, which has a megatron-core that is imported fast."""
    write_tree(tmp_path, MAIN[0], source(MAIN[0]))
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    (tmp_path / "ranks.py").write_text(textwrap.dedent(FORKING))

    def run(*words, fails=False, launch=FORKED):
        done = warm.run(*launch, "--shadow", "job.py", *words, cwd=str(tmp_path))
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize(("word", "launch"), [("", TORCHRUN), ("communicates", FORKED)])
def test_stock_runs_the_job_and_one_line_says_that_nothing_differs(run_job, word, launch):
    out = run_job(word, launch=launch)
    (line,) = (line for line in out.splitlines() if line.startswith("hypergrid"))
    assert line.startswith(
        "hypergrid (shadow): would have created the same groups on all 4 ranks: 20 groups on this "
        "one, 53 -> 20 calls of new_group. Compared: names, arguments and defaults of the replaced "
    )
    assert "megatron.core.parallel_state made 53 groups" in out


def test_a_difference_is_told_by_rank_and_field_and_the_job_goes_on(run_job):
    out = run_job("late")
    assert "(shadow): would differ from stock on 2 of 4 ranks. Stock's groups are used." in out
    for rank in (2, 3):
        assert (
            f"rank {rank}: TENSOR_MODEL_PARALLEL_GROUP of ranks [2, 3]: timeout is 0:31:00 with "
            f"stock, and would be 0:30:00." in out
        )
        assert f"rank {rank}: MODEL_PARALLEL_GROUP of ranks [0, 1, 2, 3]: description and" in out
    assert "megatron.core.parallel_state made 53 groups" in out


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("nothing", "rank 0: nothing was compared: the script did not call"),
        ("refused", "nothing was compared: initialize_model_parallel failed, RuntimeError: "),
    ],
)
def test_a_run_without_an_initialisation_says_so_in_one_line(run_job, word, why):
    out = run_job(word, fails=word == "refused")
    (line,) = (line for line in out.splitlines() if line.startswith("hypergrid"))
    assert why in line


def test_a_killed_rank_makes_the_run_undecided_and_nobody_waits_for_it(run_job):
    out = run_job("killed", fails=True)
    assert "undecided: the same groups on 3 of 4 ranks; not answered: 2. Compared" in out
    assert "on all" not in out
    assert "statuses [0, 0, 9, 0]" in out


def test_other_import_hooks_stay_in_place(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (tmp_path / "hook.py").write_text(
        "import importlib.machinery, sys\n"
        "class Loader(importlib.machinery.SourceFileLoader):\n"
        "    def get_data(self, path):\n"
        "        return b'def initialize_model_parallel(): return 3'\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'megatron.core.parallel_state':\n"
        "            file = 'hooked.py'\n"
        "            return importlib.util.spec_from_file_location(\n"
        "                name, file, loader=Loader(name, file))\n"
        "import importlib.util\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    code = (
        "import hook; from compat.swap import shadow; shadow.install()\n"
        "from megatron.core import parallel_state as ps\n"
        "print(ps.initialize_model_parallel.__wrapped__())\n"
    )
    done = warm.run("-c", code, cwd=str(tmp_path), PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout.splitlines()[0] == "3", done.stderr
