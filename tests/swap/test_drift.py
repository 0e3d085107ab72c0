"""Differences between the modules of Megatron and those that replace them: all, and no others."""

import json
from pathlib import Path

import pytest

from compat import hyper_comm_grid, parallel_state
from compat.megatron import sources
from compat.swap import drift
from tests.shadows.judging import edited
from tests.shadows.running import write_tree
from tests.support import ROOT, warm
from tests.support.stock import MAIN, following, have_stock, source

# Of a change of stock's file, by its kind: what it replaces (null: it is added to the end), the
# new text, and what is said of it.
CHANGES = json.loads((ROOT / "tests" / "swap" / "drift.json").read_text())


def check_release(release, folder):
    """In a process that follows ``release``: no difference, and each change is one."""
    for module in drift.REPLACEMENTS:
        drift.refuse_drift(module)
    for file, replacement in (
        ("parallel_state.py", parallel_state),
        ("hyper_comm_grid.py", hyper_comm_grid),
    ):
        text = source(release, file)
        module = Path(folder, file)
        module.write_text(text)
        assert not drift.differences(sources.defined(module), vars(replacement))
        for kind, (old, new, says) in CHANGES[file].items():
            module.write_text(edited(text, old, new))
            said = "; ".join(drift.differences(sources.defined(module), vars(replacement)))
            assert says in said, (release, file, kind, said)
    print("done")


@pytest.mark.parametrize("release", [*MAIN, "main", "dev"])
def test_each_kind_of_difference_is_named_and_stock_has_none(release, tmp_path):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    code = "import sys; from tests.swap.test_drift import check_release as c; c(*sys.argv[1:])"
    done = warm.run("-c", code, release, str(tmp_path), **following(release))
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


DEFAULTS = """
import inspect
from datetime import timedelta
from compat import parallel_state as ps
from compat.megatron.request import Request
from compat.swap import drift
taken = inspect.signature(ps.initialize_model_parallel).parameters
print(taken["order"].default, taken["distributed_timeout_minutes"].default)
print(Request(job_size=8).order, Request(job_size=8).timeout)
print([*map(drift.refuse_drift, drift.REPLACEMENTS)])
"""


MEANINGLESS = """
from compat import parallel_state as ps
try:
    ps.initialize_model_parallel()
except TypeError as error:
    print(error)
"""


def run_beside(release, folder, code, *replacements):
    """Lines that are printed by code which finds an edited parallel_state of a release."""
    text = source(release)
    for old, new in replacements:
        text = edited(text, old, new)
    write_tree(folder, release, text)
    variables = following(release)
    variables["PYTHONPATH"] = f"{folder}:{variables['PYTHONPATH']}"
    return warm.run("-c", code, **variables).stdout.splitlines()


@pytest.mark.parametrize("release", MAIN)
def test_constant_defaults_of_initialisation_are_taken_over(release, tmp_path):
    printed = run_beside(
        *(release, tmp_path, DEFAULTS),
        ('str = "tp-cp-ep-dp-pp"', 'str = "tp-cp-ep-pp-dp"'),
        ("timeout_minutes: int = 30", "timeout_minutes: int = 45"),
    )
    assert printed == ["tp-cp-ep-pp-dp 45", "tp-cp-ep-pp-dp 0:45:00", "[[], []]"]


@pytest.mark.parametrize("release", MAIN)
def test_a_default_of_none_that_only_stocks_body_explains_is_refused_when_it_is_used(
    release, tmp_path
):
    flag = "create_gloo_process_groups: bool = "
    (line,) = run_beside(release, tmp_path, MEANINGLESS, (f"{flag}True", f"{flag}None"))
    assert "create_gloo_process_groups=None is the default of this Megatron" in line


def test_a_file_that_is_not_python_is_refused_by_name(tmp_path):
    (tmp_path / "parallel_state.py").write_text("def f(:\n")
    with pytest.raises(SyntaxError, match=r"parallel_state.py"):
        sources.read(tmp_path)
