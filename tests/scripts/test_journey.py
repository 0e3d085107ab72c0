"""How many files a call passes until torch is asked for a group; CONTRIBUTING names them."""

import re
import subprocess
import sys

import pytest

from tests.support import ROOT

# Files, and changes from one to another.
MOST = {"initialize_model_parallel(2)": (15, 98), 'create_pg("tp")': (9, 69)}


@pytest.fixture(scope="module")
def printed():
    command = [sys.executable, "scripts/studies/journey", "--files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("call", MOST)
def test_the_way_to_a_group_is_no_longer_than_it_was(printed, call):
    (row,) = (line for line in printed.splitlines() if line.startswith(call))
    files, changes, _ = map(int, row.removeprefix(call).split())
    assert files <= MOST[call][0] and changes <= MOST[call][1]


def test_contributing_names_files_of_that_way(printed):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    path = text.split("<!-- output: the path of a group -->")[1].split("```")[1]
    files = {*re.findall(r"(?:hypergrid|compat)/[\w/]+\.py", path)}
    passed_files = {line.strip() for line in printed.splitlines()}
    # A grid answers with the groups and a getter reads them, when the call has created them.
    afterwards = {"compat/megatron/getters/groups.py"}
    assert len(files) > 10 and files - afterwards <= passed_files
