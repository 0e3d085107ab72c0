"""The wheel: builds, and installed alone it imports."""

import subprocess
import sys
import zipfile

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, ROOT], check=True
    )
    (path,) = out.glob("hypergrid-*.whl")
    return path


def test_the_wheel_holds_both_typed_packages_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"hypergrid/py.typed", "compat/py.typed", "compat/swap/startup/sitecustomize.py"} <= {
        *names
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hypergrid", "compat"}


def test_installed_alone_it_imports_and_asks_for_no_megatron(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.modules['megatron'] = None; import hypergrid, compat.parallel_state;"
        "import compat; compat.install();"
        "print(hypergrid.__version__, hypergrid.HyperCommGrid.__module__)"
    )
    # -I: neither this checkout nor the environment is on the path.
    command = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "hypergrid.groups.grid" in done.stdout


def test_planning_needs_no_torch(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['torch'] = None;"
        "from hypergrid import GroupPlan, GroupRow, RankLayout;"
        "layout = RankLayout(('tp', 'dp'), (8, 12500));"
        "plan = GroupPlan({'decoder': layout}, (GroupRow('DP', 'decoder', ('dp',)),));"
        "print(len(plan.mine(plan.rows[0], 77)['DP']))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "12500", done.stderr


def test_the_wheel_draws_a_page_without_torch_or_any_extra(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "sys.modules.update(dict.fromkeys(('torch', 'typer', 'rich', 'matplotlib')));"
        "from hypergrid import GroupPlan, RankLayout;"
        "from hypergrid.show.page import page;"
        "print(len(page(GroupPlan({'decoder': RankLayout(('tp', 'dp'), (8, 2))}), 8)))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert int(done.stdout or 0) > 20_000, done.stderr
