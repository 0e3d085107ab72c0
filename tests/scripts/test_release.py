"""scripts/dev/release refuses what must not be released, says what to upload, uploads nothing."""

import subprocess

import pytest

from tests.support import ROOT

# A repository with this release script, one commit, and an 'extras' that builds a file.
REPOSITORY = f"""
mkdir -p scripts/dev hypergrid
cp {ROOT}/scripts/dev/release scripts/dev
echo '#!/bin/sh' > scripts/dev/extras
echo 'mkdir "$2" && echo wheel > "$2/some.whl" && echo "$3 $4"' >> scripts/dev/extras
chmod +x scripts/dev/extras
echo '__version__ = "1.2.0"' > hypergrid/__init__.py
echo '[project]' > pyproject.toml
echo 'dist/' > .gitignore
printf '# Changelog\\n\\n## 1.2.0\\n\\n## 1.1.0\\n' > CHANGELOG.md
git init --quiet
git config user.name a
git config user.email a@b.c
git add --all
git commit --quiet --message x
"""


@pytest.fixture
def in_repository(tmp_path):
    """Runs a command in the repository."""

    def run(command):
        words = ["bash", "-ec", command]
        return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    assert run(REPOSITORY).returncode == 0
    return run


def test_it_says_what_to_upload_and_what_is_missing(in_repository):
    done = in_repository("scripts/dev/release --only core")
    assert done.returncode == 0, done.stderr
    for text in (
        "--only core",
        "  some.whl",
        "git tag --annotate v1.2.0",
        "twine upload dist/*",
        "add [project.urls]",
    ):
        assert text in done.stdout
    again = in_repository("scripts/dev/release")
    assert again.returncode == 0, "what an earlier run left in dist is replaced"


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        ("touch new.txt", "commit or remove these changes"),
        ("sed -i 's/^## 1.2.0/&, no/' CHANGELOG.md; git commit -qam x", "no section '## 1.2.0'"),
        ("git tag v1.2.0", "1.2.0 is released"),
    ],
)
def test_what_must_not_be_released_is_refused_and_nothing_is_built(in_repository, spoil, refusal):
    done = in_repository(f"{spoil}; scripts/dev/release")
    assert done.returncode == 1
    assert refusal in done.stderr
    assert in_repository("ls dist").returncode != 0
