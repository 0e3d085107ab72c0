"""The release: wheel and sdist hold the tree's files, and the wheel works alone."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib import metadata

import pytest

from tests.support import ROOT

GENERATED = ("__pycache__", ".egg-info", "PKG-INFO", "setup.cfg", "build", "dist", "out", "site")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", out, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(built):
    return built[1]


def of_the_project():
    """Paths of this project's files: what git has or would add; all that are there without git."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    else:
        files = [file.relative_to(ROOT) for file in ROOT.rglob("*") if file.is_file()]
        paths = [str(f) for f in files if not any(part.endswith(GENERATED) for part in f.parts)]
    return {path for path in paths if not path.startswith(".")}


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {p for p in of_the_project() if p.startswith(("hypergrid/", "compat/"))}


def test_the_sdist_has_every_file_of_the_project_and_no_other(built):
    with tarfile.open(built[0]) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    assert {n for n in names if not n.startswith(("PKG-INFO", "setup.cfg", "hypergrid"))} == {
        path for path in of_the_project() if not path.startswith("hypergrid")
    }


def test_the_wheel_holds_both_typed_packages_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"hypergrid/py.typed", "compat/py.typed", "compat/swap/startup/sitecustomize.py"} <= {
        *names
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"hypergrid", "compat", "hypergrid_comm"}


LICENCES = re.findall(
    r"^\| ([\w-]+) \| ([\w, ]+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.M
)[1:]


def test_the_page_of_licences_has_every_dependency(wheel):
    archive = zipfile.ZipFile(wheel)
    (written,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    extras_of = {}
    for line in message_from_bytes(archive.read(written)).get_all("Requires-Dist"):
        name = re.match(r"[\w-]+", line)[0]
        extra = re.search(r"extra == \"(\w+)\"", line)
        extras_of.setdefault(name, set()).add(extra[1] if extra else "always")
    del extras_of["hypergrid-comm"]  # an extra of others
    assert {name: set(extras.split(", ")) for name, extras, _ in LICENCES} == extras_of


def installed(name):
    try:
        return metadata.metadata(name)
    except metadata.PackageNotFoundError:
        for cached in metadata.distributions(path=[str(ROOT / ".cache" / "resiliency")]):
            if cached.metadata["Name"] == name:
                return cached.metadata
    return None


@pytest.mark.parametrize(("name", "licence"), [(name, licence) for name, _, licence in LICENCES])
def test_a_licence_is_what_the_installed_package_says(name, licence):
    package = installed(name)
    if package is None:
        pytest.skip(f"{name} is not installed")
    pinned = re.search(rf"(?m)^{name}==(\S+)$", (ROOT / "scripts" / "constraints.txt").read_text())
    if pinned and package["Version"].partition("+")[0] != pinned[1]:
        pytest.skip(f"the page says it of {name} {pinned[1]}")
    stated = package.get("License-Expression") or package.get("License", "")
    if not stated or "\n" in stated:  # none, or its whole text
        classifiers = package.get_all("Classifier", [])
        stated = next(text for text in classifiers if text.startswith("License"))
    assert licence == stated.split(" :: ")[-1]


def test_no_page_or_message_installs_from_an_index():
    """The distribution is in none, and ``hypergrid`` is somebody else's name there."""
    for path in of_the_project():
        text = (ROOT / path).read_text(errors="replace")
        joined = re.sub(r"\"\s+f?\"", "", text)
        if not path.startswith("tests/"):
            assert not re.search(r"pip install(?: -\S+)* ['\"]?hypergrid", joined), path


@pytest.fixture
def run_in_wheel(wheel, tmp_path):
    """Run code over the unpacked wheel alone; gives what it printed."""
    zipfile.ZipFile(wheel).extractall(tmp_path)

    def run(code):
        # -I: neither this checkout nor the environment is on the path.
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r});" + code
        command = [sys.executable, "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_installed_alone_it_imports_and_asks_for_no_megatron(run_in_wheel):
    printed = run_in_wheel(
        "sys.modules['megatron'] = None; import hypergrid, compat.parallel_state;"
        "import compat; compat.install(); print(hypergrid.HyperCommGrid.__module__)"
    )
    assert printed == "hypergrid.groups.grid"


def test_planning_needs_no_torch(run_in_wheel):
    printed = run_in_wheel(
        "sys.modules['torch'] = None;"
        "from hypergrid import GroupPlan, GroupRow, RankLayout;"
        "layout = RankLayout(('tp', 'dp'), (8, 12500));"
        "plan = GroupPlan({'decoder': layout}, (GroupRow('DP', 'decoder', ('dp',)),));"
        "print(len(plan.mine(plan.rows[0], 77)['DP']))"
    )
    assert printed == "12500"


def test_the_wheel_draws_a_page_without_torch_or_any_extra(run_in_wheel):
    printed = run_in_wheel(
        "sys.modules.update(dict.fromkeys(('torch', 'typer', 'rich', 'matplotlib')));"
        "from hypergrid import GroupPlan, RankLayout;"
        "from hypergrid.show.page import page;"
        "print(len(page(GroupPlan({'decoder': RankLayout(('tp', 'dp'), (8, 2))}), 8)))"
    )
    assert int(printed) > 20_000
