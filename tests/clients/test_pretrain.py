"""A script that calls ``megatron.training``, from the wheel of megatron-core, runs unchanged."""

import shutil
from pathlib import Path

import pytest

from tests.support import script_module, stock

RELEASE = "0.19.2"
FLAGS = "--tensor-model-parallel-size 2 --num-layers 2 --train-iters 2"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with the wheel's megatron and the script beside it."""
    if (
        not stock.have_stock(RELEASE)
        or not stock.source_dir(RELEASE).with_name("training").is_dir()
    ):
        pytest.skip(f"no megatron.training of {RELEASE}: run scripts/fetch_megatron {RELEASE}")
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "megatron").symlink_to(stock.source_dir(RELEASE).parent)
    shutil.copy(Path(__file__).with_name("pretrain_gpt.py"), folder)
    return folder


@pytest.fixture
def peers(monkeypatch):
    """The script that compares a checkout's training with stock's; here on four ranks."""
    module = script_module("peers")
    monkeypatch.setattr(module, "RANKS", 4)
    return module


def test_a_script_trains_to_the_same_digits_on_stock_and_on_the_swap(checkout, peers):
    seen, is_right = peers.run_training(FLAGS, checkout)
    assert is_right, seen


def test_the_line_of_a_script_is_verified(checkout, peers):
    seen, is_right = peers.run_verify(FLAGS, checkout)
    assert is_right, seen


def test_an_all_reduce_left_out_of_megatron_core_is_found(checkout, peers):
    seen, is_right = peers.run_fault(checkout)
    assert is_right and "gradient" in seen, seen
