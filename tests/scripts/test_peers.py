"""scripts/peers: what is lost on the swap is red; a missing checkout is named."""

import json
import sys

import pytest

from tests.support import script_module


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """The script, with results and a page of its own."""
    module = script_module("peers")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "peers.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "coverage.md")
    monkeypatch.setattr(module, "install_packages", lambda: None)
    monkeypatch.setattr(sys, "argv", ["peers", str(tmp_path), "--only", "verify/main/moe"])
    return module


def test_a_missing_checkout_is_named_with_the_way_to_make_it(peers, tmp_path, capsys):
    assert peers.main() == 2
    printed = capsys.readouterr().out
    assert "git clone https://github.com/NVIDIA/Megatron-LM" in printed
    folder = tmp_path / "main"
    assert f"{folder} is missing: mkdir -p {folder} && git -C Megatron-LM archive" in printed
    assert "0.14.0" not in printed  # no row that was asked for needs it


@pytest.mark.parametrize(("verdict", "status"), [("verified", 0), ("differs", 1), ("refused", 1)])
def test_a_red_row_ends_in_status_1_and_is_written_down(
    peers, tmp_path, monkeypatch, capsys, verdict, status
):
    (tmp_path / "main" / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "coverage.md").write_text(
        "above\n<!-- peers -->\nold\n<!-- end of peers -->\nbelow\n"
    )
    monkeypatch.setattr(peers, "verdict_on", lambda *_: peers.checkout.Verdict(verdict, {}, "tp=2"))
    sys.argv.append("--write")
    assert peers.main() == status
    word = "RED" if status else "ok"
    assert f"{word:4} verify/main/moe" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert row[0] == "verify/main/moe"
    page = (tmp_path / "coverage.md").read_text()
    assert page.startswith("above\n<!-- peers -->\n")
    assert f"{verdict}: tp=2" in page
    assert "old" not in page
    assert page.endswith("<!-- end of peers -->\nbelow\n")


def test_a_test_that_passes_on_stock_alone_is_lost(peers):
    stock = {"a::both": "passed", "a::stock": "passed", "a::neither": "failed"}
    swap = {"a::both": "passed", "a::stock": "failed", "a::neither": "failed"}
    text, is_right = peers.compare_tests(stock, swap, "")
    assert not is_right
    assert text == "stock 2 passed, 1 failed; swap 1 passed, 2 failed; lost: stock"
    assert peers.compare_tests(swap, stock, "") == (
        "stock 1 passed, 2 failed; swap 2 passed, 1 failed",
        True,
    )


def test_a_test_passes_only_on_all_ranks(peers, tmp_path):
    for rank in range(peers.RANKS):
        fails = "failed" if rank == 5 else "passed"
        outcomes = [["a::all", "passed", []], ["a::some", fails, []], ["a::ended", "passed", []]]
        if rank == 7:  # it hung
            del outcomes[2]
        lines = [json.dumps(outcome) for outcome in outcomes]
        (tmp_path / f"rank{rank}.txt").write_text("\n".join(lines))
    outcomes = peers.outcome_of_tests(tmp_path)
    assert outcomes == {"a::all": "passed", "a::some": "failed", "a::ended": "failed"}
