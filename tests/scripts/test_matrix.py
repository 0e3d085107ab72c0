"""scripts/matrix: a promise that is not kept shows in its cell and in the exit status."""

import sys

import pytest

from tests.support import script_module
from tests.support.stock import have_stock


@pytest.fixture(scope="module")
def matrix():
    return script_module("matrix")


@pytest.mark.parametrize(("kept", "status"), [(True, 0), (None, 0), (False, 1)])
def test_a_red_cell_ends_in_status_1(matrix, monkeypatch, capsys, kept, status):
    cells = [matrix.Cell("all there", True)] * 3 + [matrix.Cell("3 models", kept)]
    monkeypatch.setattr(matrix, "release_row", lambda release, given: cells)
    monkeypatch.setattr(sys, "argv", ["matrix", "--release", "0.16.1", "--markdown"])
    assert matrix.main() == status
    assert "| 0.16.1 | all there | all there | all there | 3 models |" in capsys.readouterr().out


def test_a_release_is_measured_or_the_cell_says_why_not(matrix):
    cells = matrix.surface("9.9.9", 1, 1)
    assert [cell.kept for cell in cells] == [False, False]
    assert "run scripts/fetch_megatron 9.9.9" in cells[0].text
    if not have_stock("0.14.0"):
        pytest.skip("run scripts/fetch_megatron 0.14.0")
    offered, grids = matrix.surface("0.14.0", 3, 1)
    assert (offered.kept, grids) == (True, ("3 grids, 0 differences", True)), offered
