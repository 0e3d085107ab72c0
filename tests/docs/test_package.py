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
    found = {}
    for line in message_from_bytes(archive.read(written)).get_all("Requires-Dist"):
        extra = re.search(r"extra == \"(\w+)\"", line)
        found.setdefault(re.match(r"[\w-]+", line)[0], set()).add(extra[1] if extra else "always")
    del found["hypergrid-comm"]  # an extra of others
    assert {name: set(extras.split(", ")) for name, extras, _ in LICENCES} == found


@pytest.mark.parametrize(("name", "licence"), [(name, said) for name, _, said in LICENCES])
def test_a_licence_is_what_the_installed_package_says(name, licence):
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        cached = metadata.distributions(path=[str(ROOT / ".cache" / "resiliency")])
        found = next((each.metadata for each in cached if each.metadata["Name"] == name), None)
    if found is None:
        pytest.skip(f"{name} is not installed")
    pinned = re.search(rf"(?m)^{name}==(\S+)$", (ROOT / "scripts" / "constraints.txt").read_text())
    if pinned and found["Version"].partition("+")[0] != pinned[1]:
        pytest.skip(f"the page says it of {name} {pinned[1]}")
    named = found.get("License-Expression") or found.get("License", "")
    kinds = [each for each in found.get_all("Classifier", []) if each.startswith("License")]
    long = "\n" in named or not named
    assert licence == (kinds[0].split(" :: ")[-1] if long else named)


def test_no_page_or_message_installs_from_an_index():
    """The distribution is in none, and ``hypergrid`` is somebody else's name there."""
    files = [ROOT / path for path in of_the_project() if not path.startswith("tests/")]
    texts = {file: file.read_text(errors="replace") for file in files}
    joined = {file: re.sub(r"\"\s+f?\"", "", text) for file, text in texts.items()}
    index = re.compile(r"pip install(?: -\S+)* ['\"]?hypergrid")
    assert not [file for file, text in joined.items() if index.search(text)]


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
