"""The swap: one module object by every form of import, refusals, and the launcher."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments, cwd, fails=False, **environment):
    """Run an interpreter that finds this checkout; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning:megatron", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(directory, body, name="script.py"):
    path = directory / name
    path.write_text(textwrap.dedent(body))
    return str(path)


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
    from compat import swap
    assert swap.stray_bindings() == []

    try:
        compat.uninstall()
    except RuntimeError as error:
        assert "Start a fresh process" in str(error)
    else:
        raise AssertionError("uninstalled under megatron's feet")
    compat.uninstall(forget_megatron=True)
    from megatron.core import parallel_state as stock
    assert stock is not ours and stock.__name__ == "megatron.core.parallel_state"

    try:
        compat.install()
    except RuntimeError as error:
        print(error)
"""


def test_by_every_form_of_import_it_is_one_object_and_too_late_is_refused(tmp_path):
    out = python("-c", textwrap.dedent(EVERY_FORM), cwd=tmp_path)
    assert "comes too late: megatron.core.parallel_state is already imported" in out
    assert "Call compat.install() before the first `import megatron`" in out


def test_uninstall_before_megatron_gives_stock(tmp_path):
    code = """
        import compat
        compat.install()
        compat.uninstall()
        compat.uninstall()
        import megatron.core.parallel_state as stock
        print(stock.__name__, stock.__file__)
    """
    assert "megatron/core/parallel_state.py" in python("-c", textwrap.dedent(code), cwd=tmp_path)


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
    assert "megatron.core has loaded its own parallel_state, which stays without groups" in out


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


@pytest.fixture
def shows_the_order(tmp_path):
    return script(tmp_path, SHOWS_THE_ORDER)


def launch(*arguments, cwd, **options):
    return python("-m", "compat.launch", *arguments, cwd=cwd, **options)


def test_the_launcher_runs_an_unchanged_script_and_its_order_wins(tmp_path, shows_the_order):
    out = launch("--order", "tp-cp-pp-dp", "--report", shows_the_order, "1", "--own", cwd=tmp_path)
    assert f"compat.parallel_state [0, 2] ['{shows_the_order}', '1', '--own']" in out
    assert "PIPELINE_MODEL_PARALLEL_GROUP" in out and out.count("hypergrid: rank 0") == 1


def test_without_flags_the_scripts_own_order_stands(tmp_path, shows_the_order):
    out = launch(shows_the_order, "2", cwd=tmp_path)
    assert "compat.parallel_state [0, 4]" in out and "hypergrid: rank" not in out


def test_no_swap_runs_stock(tmp_path, shows_the_order):
    assert "megatron.core.parallel_state [0, 4]" in launch(
        "--no-swap", shows_the_order, "2", cwd=tmp_path
    )
    assert "leave out --no-swap" in launch(
        "--no-swap", "--order", "tp-dp", shows_the_order, cwd=tmp_path, fails=True
    )


def test_an_order_without_ep_is_refused_where_there_is_ep(tmp_path, shows_the_order):
    out = launch("--order", "tp-cp-dp-pp", shows_the_order, "2", cwd=tmp_path, fails=True)
    assert "OrderError: order 'tp-cp-dp-pp' leaves out 'ep', whose size is 2" in out


def test_environment_variables_do_the_same(tmp_path, shows_the_order):
    flags = {"HYPERGRID_ORDER": "tp-cp-pp-dp", "HYPERGRID_REPORT": "1"}
    out = launch(shows_the_order, "1", cwd=tmp_path, **flags)
    assert "compat.parallel_state [0, 2]" in out and "hypergrid: rank 0" in out
    out = launch(shows_the_order, "1", cwd=tmp_path, HYPERGRID_SWAP="0")
    assert "megatron.core.parallel_state [0, 4]" in out


def test_a_path_in_the_environment_swaps_without_the_launcher(tmp_path, shows_the_order):
    startup = launch("--startup-path", cwd=tmp_path).strip()
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other sitecustomize ran too')")
    path = os.pathsep.join([startup, str(other), str(ROOT)])
    out = python(shows_the_order, "1", cwd=tmp_path, PYTHONPATH=path, HYPERGRID_ORDER="tp-pp-dp")
    assert "compat.parallel_state [0, 2]" in out and "the other sitecustomize ran too" in out
    out = python(shows_the_order, "1", cwd=tmp_path, PYTHONPATH=path, HYPERGRID_SWAP="0")
    assert "megatron.core.parallel_state [0, 4]" in out


def test_a_module_can_be_launched_by_name(tmp_path):
    script(tmp_path, "import sys; print('ran', __name__, sys.argv[1:])", "work.py")
    assert "ran __main__ ['--flag']" in launch("-m", "work", "--flag", cwd=tmp_path)


def test_a_script_that_is_not_there_is_named(tmp_path):
    assert "there is no script 'no.py'" in launch("no.py", cwd=tmp_path, fails=True)
    assert "name the SCRIPT to run" in launch("--report", cwd=tmp_path, fails=True)


def test_a_compat_of_the_users_own_is_named(tmp_path):
    path = script(tmp_path, "import compat; print(compat.__file__)")
    theirs = script(tmp_path, "mine = True", "compat.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = launch(path, cwd=elsewhere)
    assert f"{theirs} has the same name as hypergrid's package `compat`" in out


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
    out = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("-m", "compat.launch", "--order", "tp-pp-cp-ep-dp", ranks),
        cwd=tmp_path,
    )
    expected = {0: 2.0, 1: 4.0, 2: 2.0, 3: 4.0}
    assert all(f"rank {rank}: {total}" in out for rank, total in expected.items())
