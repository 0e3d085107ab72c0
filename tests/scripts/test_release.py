"""scripts/dev/release refuses what must not be released, says what to upload, uploads nothing."""

import shutil
import subprocess

import pytest

from tests.support import ROOT

BUILDS = """#!/bin/sh
mkdir "$2" && echo wheel > "$2/some.whl" && echo "$3 $4"
"""


@pytest.fixture
def tree(tmp_path):
    """A repository with this release script, one commit, and an 'extras' that builds a file."""
    for folder in ("scripts/dev", "hypergrid"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "dev" / "release", tmp_path / "scripts" / "dev")
    (tmp_path / "scripts" / "dev" / "extras").write_text(BUILDS)
    (tmp_path / "scripts" / "dev" / "extras").chmod(0o755)
    (tmp_path / "hypergrid" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".gitignore").write_text("dist/\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0\n\n## 1.1.0\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(tree, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)


def commit(tree):
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "x")


def released(tree, *arguments):
    command = [tree / "scripts" / "dev" / "release", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tree, timeout=60)


def test_it_says_what_to_upload_and_what_is_missing(tree):
    done = released(tree, "--only", "core")
    assert done.returncode == 0, done.stderr
    for text in (
        "--only core",
        "  some.whl",
        "git tag --annotate v1.2.0",
        "twine upload dist/*",
        "add [project.urls]",
    ):
        assert text in done.stdout
    assert released(tree).returncode == 0, "what an earlier run left in dist is replaced"


def change_a_file(tree):
    (tree / "new.txt").touch()


def forget_the_changelog(tree):
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0, not yet released\n")
    commit(tree)


def release_the_version(tree):
    git(tree, "tag", "v1.2.0")


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (change_a_file, "commit or remove these changes"),
        (forget_the_changelog, "no section '## 1.2.0'"),
        (release_the_version, "1.2.0 is released"),
    ],
)
def test_what_must_not_be_released_is_refused_and_nothing_is_built(tree, spoil, refusal):
    spoil(tree)
    done = released(tree)
    assert done.returncode == 1
    assert refusal in done.stderr
    assert not (tree / "dist").exists()
