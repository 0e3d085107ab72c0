"""README and docs are true: every block runs, the site builds, and the tests they name exist."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import zlib

import pytest
from click.testing import CliRunner

import hypergrid
from compat.cli.app import app
from tests.support import ROOT, commands, pages, run_pages, warm

BLOCKS_OF_PAGE = {page: pages.blocks(page) for page in pages.PAGES}
BLOCKS = [block for blocks in BLOCKS_OF_PAGE.values() for block in blocks]
CHAINS = [chain for blocks in BLOCKS_OF_PAGE.values() for chain in pages.chains(blocks)]
OTHERS = [block for block in BLOCKS if block.language != "python"]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: str(chain[0]))
def test_the_python_of_a_page_runs_and_gives_what_it_says(chain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    warm.call(run_pages.run, chain)


@pytest.mark.parametrize("block", OTHERS, ids=str)
def test_a_command_of_a_page_runs_and_prints_what_it_says(block, tmp_path):
    if block.language == "bash":
        (tmp_path / "scripts").symlink_to(ROOT / "scripts")
        tried = commands.split(block.text)
        assert tried
        for command in tried:
            commands.check(command, tmp_path)
    elif block.language == "console":
        shows_what_it_prints(block)
    else:
        assert block.language in ("", "text"), f"nothing here runs {block.language!r}"
        assert block.comments.get("output"), (
            "say in <!-- output: ... --> what it is and why it is not run"
        )


def shows_what_it_prints(block):
    """One command of hypergrid's, whose lines a backslash joins, and its output."""
    lines = block.text.splitlines()
    command = lines.pop(0)
    while command.endswith("\\"):
        command = command[:-1] + lines.pop(0)
    assert command.startswith("$ hypergrid ")
    assert not [line for line in lines if line.startswith("$ ")], "one command for each block"
    words = shlex.split(command)[2:]
    done = CliRunner().invoke(app, words, env={"NO_COLOR": "1", "COLUMNS": "80"})
    printed = [line.rstrip() for line in done.output.rstrip().splitlines()]
    assert printed == [line.rstrip() for line in lines]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # an advertisement
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|ERROR", done.stderr), done.stderr
    return out


def test_the_site_builds_strictly_and_asks_nobody_else(site):
    written = sorted(site.rglob("*.html"))
    assert len(written) > 20
    loads = r"<(?:script|img|iframe|source|link)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    for page in written:
        text = page.read_text()
        assert not re.findall(loads, text), page
        assert not re.search(r":(meth|func|class):", text), "markup of another documentation tool"
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)[\"' ]*(?:https?:)?//", style.read_text()), style


def test_the_reference_is_complete(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    listed = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines() if line}
    names = {f"hypergrid.{name}" for name in hypergrid.__all__} - {"hypergrid.__version__"}
    getters = (ROOT / "compat" / "megatron" / "getters").glob("[!_]*.py")
    for file in (ROOT / "compat" / "parallel_state.py", *getters):
        functions = re.findall(r"^def ([a-z]\w+)\(", file.read_text(), re.M)
        names |= {f"compat.parallel_state.{name}" for name in functions}
    assert len(names) > 70
    assert names - listed == {"compat.parallel_state.missing"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_pages_outside_the_site_resolve(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    assert not [t for t in targets if "://" not in t and not (ROOT / t).exists()]


PROMISING = ("README.md", "SECURITY.md")
NAMED = re.findall(
    r"`(test_\w+\.py)::(\w+)`", "".join((ROOT / page).read_text() for page in PROMISING)
)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_promise_names_a_test_that_exists(file, name):
    paths = (ROOT / "tests").rglob(file)
    assert any(f"def {name}(" in path.read_text() for path in paths)


def test_every_claim_of_the_readme_names_its_page_or_its_test():
    page = (ROOT / "README.md").read_text()
    first_part = page.partition("\n## Try it")[0]
    assert "**Alpha. One GPU has run it**" in first_part and "](docs/gpu.md)" in first_part
    for gain in re.findall(r"^- \*\*.+", first_part, re.M):
        assert "](docs/" in gain
    for check in re.findall(r"^\| .+ \| (`.+`) \|$", first_part, re.M):
        assert re.fullmatch(r"`(test_\w+\.py::test_\w+|python scripts/\w+\.py)`", check)


def test_every_figure_of_the_readme_is_one_of_its_page():
    page = (ROOT / "README.md").read_text()
    section = page.partition("\n## What it saves")[2].partition("\n\nmegatron-core")[0]
    figures = re.findall(r"^\| [^|]+ \| ([^|]+ \| [^|]+ \|)$", section, re.M)
    measured = (ROOT / "docs" / "performance.md").read_text()
    assert figures and all(figure in measured for figure in figures)


def test_the_hang_of_the_readme_is_the_one_of_its_page():
    outputs = [block for block in BLOCKS_OF_PAGE[ROOT / "README.md"] if "output" in block.comments]
    diagnosed, _ = outputs
    assert diagnosed.text.strip() in (ROOT / "docs" / "hangs.md").read_text()


def test_the_map_names_what_exists_and_every_package():
    blocks = BLOCKS_OF_PAGE[ROOT / "CONTRIBUTING.md"]
    (tree,) = (block for block in blocks if block.comments.get("output", "").startswith("the map"))
    path = []
    named = set()
    for line in tree.text.splitlines():
        path[(len(line) - len(line.lstrip())) // 2 :] = [line.split()[0]]
        named.add(ROOT / "".join(path))
    packages = set()
    for file in (*ROOT.glob("hypergrid/**/*.py"), *ROOT.glob("compat/**/*.py")):
        packages.add(file.parent)
    path_of_a_group = re.findall(r"\b(?:hypergrid|compat)/[\w/]+\.py", str(blocks))
    named |= {ROOT / name for name in path_of_a_group}
    assert not [path for path in named if not path.exists()]
    assert not packages - named
