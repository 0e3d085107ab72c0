"""Transformer Engine in real processes: gloo groups, its own classes, whole and broken packages."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from compat.state import ParallelState
from tests.support import ROOT, te_on_cpu
from tests.support.forked import open_groups

NOT_FETCHED = "no source of transformer-engine: run scripts/fetch_forerunners"
fetched = pytest.mark.skipif(not te_on_cpu.SOURCE.is_dir(), reason=NOT_FETCHED)


def run(*command, path=(), **environment):
    """The command of a fresh Python with ``path`` in front; what it did."""
    places = [*map(str, path), str(ROOT)]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment},
        timeout=200,
    )


# Transformer Engine's own Python classes. The compiled extension, triton and the GPU are stood in
# for (te_on_cpu.py): groups, sizes and the reduction of maxima are real, products are not there.


@pytest.fixture(scope="module")
def real_classes():
    if not te_on_cpu.SOURCE.is_dir():
        pytest.skip(NOT_FETCHED)
    names = ["applied", "amax", "destroyed", "too_early"]
    done = run("-m", "tests.support.te_program", *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def test_our_arguments_give_every_module_of_a_real_layer_its_groups(real_classes):
    for outcome in real_classes["applied"]:
        assert len(outcome) == 2 * 4  # kinds of context parallelism
        assert all(map(all, outcome)), outcome


def test_maxima_are_reduced_over_exactly_our_group_and_over_the_world_with_none(real_classes):
    # tp=2, dp=2, pp=2, and tp=2, pp=4: the highest rank of tp x dp, of tp, of tp; of the world.
    for rank, highest in enumerate(real_classes["amax"]):
        assert highest == [rank | 3, rank | 1, rank | 1, 7]


def test_destroy_ends_expert_parallelism_before_its_group_goes_and_clears_sizes(real_classes):
    still_after_others, over, group_was_there, cached = True, False, [True], [0, 0]
    expected = [still_after_others, over, group_was_there, cached]
    assert real_classes["destroyed"] == [[expected] * 2] * 8


def test_our_arguments_cut_a_layer_and_correct_a_size_that_was_asked_too_early(real_classes):
    assert real_classes["too_early"] == [[1, 8, 128 // 2]] * 8


# Without Transformer Engine, and beside broken ones.


def test_destroy_imports_nothing_and_survives_a_context_that_cannot_end(fake_world, monkeypatch):
    fake_world(8)
    state = ParallelState.create(tensor_model_parallel_size=2)
    loaded = set(sys.modules)
    state.destroy()
    assert set(sys.modules) == loaded
    state = ParallelState.create(tensor_model_parallel_size=2, expert_model_parallel_size=2)
    group = state.get_expert_tensor_and_model_parallel_group()
    ep_finalize = mock.Mock(side_effect=RuntimeError("no communicator"))
    expert = SimpleNamespace(_EP_GROUP=group, ep_finalize=ep_finalize)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.ep", expert)
    with pytest.warns(RuntimeWarning, match="could not end its expert parallelism over .*no commu"):
        state.destroy()
    assert group not in open_groups()


def test_the_probe_survives_a_broken_installation(tmp_path):
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text(
        "import sys; assert 'torch' in sys.modules\nimport transformer_engine.part\n"
    )
    (package / "part.py").write_text("raise OSError('libnccl.so.2 is not there\\nand so on')")
    done = run("-c", PROBE, path=[tmp_path])
    assert done.stdout.split("\n")[:2] == [
        "Installation(version=None, importable=False, why='OSError: libnccl.so.2 is not there.')",
        "[]",
    ], done.stderr


PROBE = """
import sys
from compat.transformer_engine.process import probe
print(probe())
print([name for name in sys.modules if name.startswith('transformer_engine')])
"""


IMPORT = "import megatron.core; print('imported')"
SAYS = "transformer-engine 2.20.2 is installed without its libraries"


@fetched
def test_the_empty_package_breaks_megatron_and_install_said_so_before():
    done = run("-c", f"import compat; compat.install(); {IMPORT}", path=[te_on_cpu.SOURCE])
    assert "RuntimeError: Found empty `transformer-engine` meta package" in done.stderr
    assert done.stderr.index(SAYS) < done.stderr.index("Traceback")
    assert "<string>:1: UserWarning" in done.stderr  # where install() was called
    for remedy in ("pip uninstall transformer-engine", "'transformer-engine[pytorch]==2.20.2'"):
        assert remedy in done.stderr


@fetched
@pytest.mark.parametrize(
    ("name", "wheel", "empty"),
    [
        ("transformer_engine_cu13", "true", False),  # the libraries, beside the Python files
        ("transformer_engine", "false", False),  # built from source
        ("transformer_engine", "true", True),
    ],
)
def test_nothing_is_said_of_a_whole_installation(tmp_path, name, wheel, empty):
    info = tmp_path / f"{name}-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 2.20.2\n")
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {wheel}\n")
    done = run("-c", QUIET, path=[tmp_path, te_on_cpu.SOURCE])
    assert done.stdout == f"False {empty}\n"
    assert (SAYS in done.stderr) == empty and bool(done.stderr) == empty


QUIET = """
import sys, compat
compat.install()
from compat.transformer_engine.process import empty_meta_package
print('torch' in sys.modules, empty_meta_package())
"""
