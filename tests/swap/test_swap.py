"""The swap: one module object by every form of import, refusals, and the launcher."""

import functools
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from hypergrid.plan import GroupPlan
from tests.cli.test_cli import answers
from tests.shadows.running import write_tree
from tests.support import ROOT, stock, table, warm

STARTUP = ROOT / "compat" / "swap" / "startup"


def python(*arguments, cwd, fails=False, **environment):
    """Run an interpreter that finds this checkout; its output."""
    done = warm.run("-W", "ignore::UserWarning:megatron", *arguments, cwd=cwd, **environment)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(directory, body, name="script.py"):
    path = directory / name
    path.write_text(textwrap.dedent(body))
    return str(path)


@pytest.fixture
def quick_megatron(tmp_path):
    """Stock's parallel_state in a megatron-core that is imported fast, for many processes."""
    write_tree(tmp_path, stock.MAIN[0], stock.source(stock.MAIN[0]))


EVERY_FORM = """
    import compat
    compat.install()
    compat.install()
    import megatron.core
    import compat.parallel_state as ours
    from megatron.core import parallel_state as first
    from megatron.core import mpu
    import megatron.core.parallel_state as third
    from megatron.core.parallel_state import get_tensor_model_parallel_rank
    import importlib
    fourth = importlib.import_module("megatron.core.parallel_state")
    assert ours is first is mpu is third is fourth is megatron.core.parallel_state
    assert get_tensor_model_parallel_rank is ours.get_tensor_model_parallel_rank
    assert ours.__name__ == ours.__spec__.name == "compat.parallel_state"
    import megatron.core.tensor_parallel.layers as layers
    assert layers.get_tensor_model_parallel_rank is ours.get_tensor_model_parallel_rank
    from compat import hyper_comm_grid
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.pipeline_parallel import bridge_communicator
    assert HyperCommGrid is hyper_comm_grid.HyperCommGrid is bridge_communicator.HyperCommGrid
    assert megatron.core.hyper_comm_grid.HyperCommGrid is HyperCommGrid

    try:
        compat.uninstall()
    except RuntimeError as error:
        assert "Start a new process" in str(error)
    else:
        raise AssertionError("uninstalled under megatron's feet")
    print("one object")
"""

TOO_LATE = """
    import compat
    compat.install()
    compat.uninstall()
    from megatron.core import parallel_state as stock
    assert stock.__name__ == "megatron.core.parallel_state"
    try:
        compat.install()
    except RuntimeError as error:
        print(error)
"""


def test_by_every_form_of_import_it_is_one_object(tmp_path):
    assert "one object" in python("-c", textwrap.dedent(EVERY_FORM), cwd=tmp_path)


def test_too_late_is_refused(tmp_path):
    out = python("-c", textwrap.dedent(TOO_LATE), cwd=tmp_path)
    assert "comes too late: megatron.core.parallel_state is already imported" in out
    assert "Call compat.install() before the first `import megatron`" in out


LIVES = """
    import importlib, os, sys
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if sys.argv[1] == "ours":
        importlib.import_module("compat").install()
    import megatron.core
    from megatron.core import parallel_state as mpu
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    for life in range(4):
        seen = [mpu.is_initialized(), mpu.get_virtual_pipeline_model_parallel_rank()]
        mpu.initialize_model_parallel(2, 2 ** (life % 2), create_gloo_process_groups=False)
        mpu.set_virtual_pipeline_model_parallel_rank(1)
        mpu.get_tensor_model_parallel_rank = len
        print("life", life, *seen, mpu.get_pipeline_model_parallel_world_size())
        if sys.argv[1] == "ours" and life:
            planned = mpu.current_state().pool.groups
            print("groups open", len(c10d._world.pg_map) - len(set(planned)))
        mpu = importlib.reload(mpu)
        assert megatron.core.parallel_state is mpu and callable(mpu.get_tensor_model_parallel_rank)
        assert mpu.get_tensor_model_parallel_rank is not len
"""


def test_a_module_that_is_reloaded_begins_anew(tmp_path):
    path = script(tmp_path, LIVES)
    swapped = python(path, "ours", cwd=tmp_path).splitlines()
    stock = python(path, "stock", cwd=tmp_path).splitlines()
    lives = [line for line in swapped if line.startswith("life")]
    assert len(lives) == 4
    assert lives == [line for line in stock if line.startswith("life")]
    # Only the default group beside those of the life that is on.
    assert {line for line in swapped if line.startswith("groups")} == {"groups open 1"}


AUDITED = """
    import importlib, sys
    from compat import audit, parallel_state
    with audit.recording(sys.argv[1]):
        importlib.reload(parallel_state)
        user = compile("parallel_state.is_initialized()", "user.py", "exec")
        exec(user, {"__name__": "user", "parallel_state": parallel_state})
"""


def test_an_audit_goes_on_after_a_reload(tmp_path):
    python(script(tmp_path, AUDITED), str(tmp_path / "out"), cwd=tmp_path)
    assert "is_initialized" in "".join(f.read_text() for f in (tmp_path / "out").iterdir())


def test_two_states_side_by_side_are_warned_of(tmp_path):
    code = """
        import megatron.core.parallel_state
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from compat import parallel_state
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        parallel_state.initialize_model_parallel(2)
    """
    out = python("-c", textwrap.dedent(code), cwd=tmp_path)
    assert "megatron.core has loaded its own parallel_state, which has no groups" in out


SHOWS_THE_ORDER = """
    import sys
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from megatron.core import parallel_state
    assert __name__ == "__main__"
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    parallel_state.initialize_model_parallel(
        2, 2, expert_model_parallel_size=int(sys.argv[1]), create_gloo_process_groups=False
    )
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    print(parallel_state.__name__, ranks, sys.argv)
"""


def launch(*arguments, cwd, **options):
    return python("-m", "compat.launch", *arguments, cwd=cwd, **options)


@pytest.fixture
def shows_the_order(tmp_path, quick_megatron):
    return script(tmp_path, SHOWS_THE_ORDER)


def test_the_plan_of_a_script_is_printed_at_its_initialisation_which_ends_it(
    tmp_path, shows_the_order
):
    out = launch("--plan", "--order", "tp-cp-pp-dp", shows_the_order, "1", cwd=tmp_path)
    (printed,) = (line for line in out.splitlines() if line.startswith("{"))
    plan = GroupPlan.from_json(printed)
    assert plan.layouts["decoder"].trimmed.dims == ("tp", "pp", "dp")
    assert "compat.parallel_state [" not in out


def test_a_path_in_the_environment_swaps_without_the_launcher(tmp_path, shows_the_order):
    startup = launch("--startup-path", cwd=tmp_path).strip()
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other sitecustomize ran too')")
    path = f"{startup}:{other}:{ROOT}"
    run = functools.partial(start, shows_the_order, "1", cwd=tmp_path, PYTHONPATH=path)
    _, out, _ = run(HYPERGRID_ORDER="tp-pp-dp", HYPERGRID_REPORT="1")
    assert "compat.parallel_state [0, 2]" in out and "the other sitecustomize ran too" in out
    assert "hypergrid: rank 0" in out
    _, out, _ = run(HYPERGRID_SWAP="0")
    assert "megatron.core.parallel_state [0, 4]" in out


SPAWNS = """
    import sys
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def work(rank, store):
        from megatron.core import parallel_state
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=4)
        parallel_state.initialize_model_parallel(1, 2, create_gloo_process_groups=False)
        ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        print(f"rank {rank}: {parallel_state.__name__} {ranks}", flush=True)
        dist.barrier()

    if __name__ == "__main__":
        mp.spawn(work, (sys.argv[1],), nprocs=4)
"""


def test_ranks_that_a_script_spawns_run_what_the_launcher_was_told(tmp_path, quick_megatron):
    for flag, says in (("--order=tp-pp-dp", "compat.parallel_state [0, 1]"), ("--no-swap", "mega")):
        run = ("-m", "compat.launch", flag, script(tmp_path, SPAWNS), str(tmp_path / flag))
        code, out, errors = start(*run, cwd=tmp_path, PYTHONPATH=f"{STARTUP}:{ROOT}")
        assert code == 0, errors
        assert f"rank 0: {says}" in out and out.count(says.partition(" ")[0]) == 4


def start(*arguments, cwd, **environment):
    """Run an interpreter without this checkout on its path; exit status, output, errors."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **environment},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


NAMES_ITS_PACKAGE = "import sys; print(sys.modules['compat'].__file__, sys.path)"


def test_the_start_up_directory_finds_its_own_package_from_any_directory(tmp_path):
    (tmp_path / "compat.py").write_text("install = None")
    path = f"{STARTUP}:{tmp_path}"
    code, out, errors = start("-c", NAMES_ITS_PACKAGE, cwd=tmp_path, PYTHONPATH=path)
    assert code == 0 and out.startswith(f"{ROOT / 'compat' / '__init__.py'} "), errors
    assert f"'{ROOT}'" not in out  # the rest of the checkout hides nothing of the user's
    assert "has the same name as hypergrid's package" in errors


@pytest.fixture
def broken(tmp_path):
    """A copy of the start-up directory whose package cannot be imported."""
    package = tmp_path / "broken" / "compat"
    shutil.copytree(STARTUP, package / "swap" / "startup")
    return package


@pytest.mark.parametrize("package", [None, "import not_installed", "install ="])
def test_a_start_up_directory_that_cannot_swap_ends_the_process(tmp_path, broken, package):
    if package is not None:
        (broken / "__init__.py").write_text(package)
        shutil.copytree(ROOT / "hypergrid", broken.parent / "hypergrid")
    path = str(broken / "swap" / "startup")
    code, out, errors = start("-c", "print('went on')", cwd=tmp_path, PYTHONPATH=path)
    assert (code, out) == (2, "") and "Traceback" not in errors
    assert f"hypergrid: the start-up directory {path} cannot replace" in errors
    assert "remove it from PYTHONPATH or set HYPERGRID_SWAP=0" in errors
    off = {"PYTHONPATH": path, "HYPERGRID_SWAP": "0"}
    assert start("-c", "print('went on')", cwd=tmp_path, **off) == (0, "went on\n", "")


def test_the_start_up_directory_imports_neither_torch_nor_numpy(tmp_path):
    heavy = {"torch", "numpy", "compat.megatron.releases"}
    code = f"import sys; print(*sorted({heavy} & set(sys.modules)))"
    choices = {"HYPERGRID_ORDER": "TP-pp-dp", "HYPERGRID_SHARE": "all", "HYPERGRID_CONNECT": ""}
    assert start("-c", code, cwd=tmp_path, PYTHONPATH=str(STARTUP), **choices) == (0, "\n", "")


@pytest.mark.parametrize(
    ("launcher", "home"),
    [(("-m", "compat.launch"), ROOT), ((), STARTUP)],
    ids=["the launcher", "the start-up directory"],
)
@pytest.mark.parametrize(("variable", "says"), table("swap/misspelt.txt"))
def test_a_misspelt_variable_is_refused_in_a_line_before_the_script(
    tmp_path, launcher, home, variable, says
):
    command = [*launcher, script(tmp_path, "print('went on')")]
    name, _, value = variable.partition("=")
    run = functools.partial(start, *command, cwd=tmp_path, PYTHONPATH=str(home), **{name: value})
    code, out, errors = run()
    assert (code, out) == (2, "") and says in errors and "Traceback" not in errors
    assert run(LOCAL_RANK="1") == (2, "", ""), "the first rank of the host has said it"
    assert run(HYPERGRID_SWAP="0") == (0, "went on\n", "")


LAYS_OUT = """
    import os, sys
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from compat import parallel_state
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    order = {"order": sys.argv[2]} if sys.argv[2:] else {}
    parallel_state.initialize_model_parallel(
        2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=int(sys.argv[1]), **order
    )
"""


CHOOSES = """
    import os, sys
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from compat import parallel_state
    from compat.report import report
    from compat.state import ParallelState
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    chosen = {"order": "tp-cp-ep-pp-dp", "share": "all", "creation": "members"}
    chosen["create_gloo_process_groups"] = False
    if sys.argv[1] == "state":
        print(report(ParallelState.create(tensor_model_parallel_size=2, **chosen)))
    else:
        parallel_state.initialize_model_parallel(2, **chosen)
        print(report(parallel_state.current_state()))
"""


@pytest.mark.parametrize("answer", answers("swap/launches.txt"), ids=lambda answer: answer.command)
def test_a_launch_prints_and_ends_as_written(tmp_path, answer):
    script(tmp_path, SHOWS_THE_ORDER, "shows.py")
    script(tmp_path, LAYS_OUT, "lays_out.py")
    script(tmp_path, CHOOSES, "chooses.py")
    words = answer.command.split()[1:]
    done = warm.run(*words, cwd=tmp_path, **answer.variables)
    assert done.returncode == answer.status, done.stdout + done.stderr
    answer.check(done.stdout + done.stderr)


def test_a_compat_of_the_users_own_is_named(tmp_path):
    path = script(tmp_path, "import compat; print(compat.__file__)")
    users_own = script(tmp_path, "users_own = True", "compat.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = launch(path, cwd=elsewhere)
    assert f"{users_own} has the same name as hypergrid's package `compat`" in out


def test_ranks_that_torchrun_starts(tmp_path, shows_the_order):
    ranks = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        import megatron.core.parallel_state as parallel_state
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(2, 2)
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        print(f"rank {dist.get_rank()}: {total.item()}", flush=True)
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        """,
        "ranks.py",
    )
    run = f"torch.distributed.run --standalone --nproc-per-node 4 -m compat.launch {ranks}"
    out = python("-m", *run.split(), cwd=tmp_path, HYPERGRID_ORDER="tp-pp-cp-ep-dp")
    for line in ("rank 0: 2.0", "rank 1: 4.0", "rank 2: 2.0", "rank 3: 4.0"):
        assert line in out
