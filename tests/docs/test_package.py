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
def project_files():
    """Paths of what git has of this project, or would add."""
    if not (ROOT / ".git").exists():
        pytest.skip("the project's files are those that git lists, and there is no git here")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", ":!:.*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {path for path in listed.stdout.splitlines() if (ROOT / path).is_file()}


def test_the_wheel_has_every_file_of_the_packages_and_the_licence_and_no_other(
    built, project_files
):
    wheel = built[1]
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {path for path in project_files if path.startswith(("hypergrid/", "compat/"))}
    assert "dist-info/licenses/LICENSE" in " ".join(zipfile.ZipFile(wheel).namelist())


def test_the_sdist_has_every_file_of_the_project_and_no_other(built, project_files):
    with tarfile.open(built[0]) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
    names = {member.name.partition("/")[2] for member in members}
    generated = {name for name in names if re.match(r"PKG-INFO|setup\.cfg|hypergrid_comm", name)}
    assert names - generated == project_files


LICENCES = re.findall(
    r"^\| ([\w-]+) \| ([\w, ]+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.M
)[1:]


def test_the_page_of_licences_has_every_dependency_of_a_user(built):
    archive = zipfile.ZipFile(built[1])
    (written,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    extras_of = {}
    for line in message_from_bytes(archive.read(written)).get_all("Requires-Dist"):
        name = re.match(r"[\w-]+", line)[0]
        extra = re.search(r"extra == \"(\w+)\"", line)
        extras_of.setdefault(name, set()).add(extra[1] if extra else "always")
    del extras_of["hypergrid-comm"]  # an extra of others
    users_extras_of = {}
    for name, extras in extras_of.items():
        if extras - {"docs", "test"}:
            users_extras_of[name] = extras - {"docs", "test"}
    assert {name: set(extras.split(", ")) for name, extras, _ in LICENCES} == users_extras_of


@pytest.mark.parametrize(("name", "extras", "licence"), LICENCES)
def test_a_licence_is_what_the_installed_package_says(name, extras, licence):
    path = [*sys.path, str(ROOT / ".cache" / "resiliency")]
    package = next(iter(metadata.distributions(name=name, path=path)), None)
    if package is None:
        pytest.skip(f"{name} is not installed")
    pins = (ROOT / "scripts" / "constraints.txt").read_text()
    pinned = re.search(rf"(?m)^{name}==(\S+)$", pins)
    if pinned and package.version.partition("+")[0] != pinned[1]:
        pytest.skip(f"{name} {package.version} is installed: the page is about {pinned[1]}")
    fields = package.metadata
    stated = [fields.get("License-Expression"), fields.get("License")]
    stated += [text.split(" :: ")[-1] for text in fields.get_all("Classifier", [])]
    assert licence in stated


def test_no_page_or_message_installs_from_an_index(project_files):
    """The distribution is in none, and ``hypergrid`` is somebody else's name there."""
    for path in project_files:
        text = (ROOT / path).read_text(errors="replace")
        joined = re.sub(r"\"\s+f?\"", "", text)
        if not path.startswith("tests/"):
            assert not re.search(r"pip install(?: -\S+)* ['\"]?hypergrid", joined), path


@pytest.fixture
def run_in_wheel(built, tmp_path):
    """Run code over the unpacked wheel alone; gives what it printed."""
    zipfile.ZipFile(built[1]).extractall(tmp_path)

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


def test_planning_and_its_page_need_no_torch_and_no_extra(run_in_wheel):
    printed = run_in_wheel(
        "sys.modules.update(dict.fromkeys(('torch', 'click', 'rich', 'matplotlib')));"
        "from hypergrid import GroupPlan, GroupRow, RankLayout, Topology;"
        "from hypergrid.show.page import page;"
        "layout = RankLayout(('tp', 'dp'), (8, 12));"
        "plan = GroupPlan({'decoder': layout}, (GroupRow('DP', 'decoder', ('dp',)),));"
        "print(len(plan.mine(plan.rows[0], 77)['DP']), len(page(plan, Topology(layout, 8))))"
    )
    members, length = map(int, printed.split())
    assert members == 12 and length > 20_000
