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
    assert "--only core" in done.stdout and "  some.whl" in done.stdout
    assert "git tag --annotate v1.2.0" in done.stdout and "twine upload dist/*" in done.stdout
    assert "add [project.urls]" in done.stdout
    assert released(tree).returncode == 0, "what an earlier run left in dist is replaced"


def test_a_tree_with_changes_is_refused(tree):
    (tree / "new.txt").touch()
    done = released(tree)
    assert done.returncode == 1 and "commit or remove these changes" in done.stderr
    assert "new.txt" in done.stderr and not (tree / "dist").exists()


@pytest.mark.parametrize("heading", ["1.2.0rc1", "1.2.0, not yet released", "11.2.0", "1.2x0"])
def test_a_version_without_its_section_in_the_changelog_is_refused(tree, heading):
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")
    commit(tree)
    done = released(tree)
    assert done.returncode == 1 and "no section '## 1.2.0'" in done.stderr


def test_a_version_that_has_a_tag_is_refused(tree):
    git(tree, "tag", "v1.2.0")
    done = released(tree)
    assert done.returncode == 1 and "1.2.0 is released" in done.stderr
