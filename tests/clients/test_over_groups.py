"""Models of megatron-fsdp and mbridge are the same over the swap's groups as over stock's."""

import json

import pytest

from tests.support import OURS, ROOT, stock, warm

# A release that the program runs with, and how many numbers it gives on each rank.
RELEASES = {"megatron-fsdp-0.6.1": ("0.19.2", 2), "mbridge-0.15.1": ("0.16.1", 23)}


def run(program, *launcher):
    """The file of parallel_state, and what a program computes on each rank."""
    release, _ = RELEASES[program]
    done = warm.run(*launcher, "tests/clients/over_groups.py", program, **stock.following(release))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", RELEASES)
def test_a_program_computes_the_same_over_the_swaps_groups(program):
    release, count = RELEASES[program]
    if not stock.have_stock(release) or not (ROOT / ".cache" / program).is_dir():
        pytest.skip(f"run scripts/fetch_megatron {release} and scripts/fetch_forerunners")
    file_of_stock, on_stock = run(program)
    file_of_swap, on_swap = run(program, "-m", "compat.launch")
    assert file_of_swap.startswith(OURS) and not file_of_stock.startswith(OURS)
    assert on_swap == on_stock
    assert [len(numbers) for numbers in on_stock] == [count] * 4
