"""Real ranks of other projects communicate over the groups that they have on stock Megatron."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from compat import parallel_state
from tests.clients import programs
from tests.clients.programs import Program
from tests.parity.surface import public_functions
from tests.parity.watching import Client, follow
from tests.support.forked import run_ranks
from tests.support.stock import load_stock

RELEASE = "0.16.1"
REAL = {
    "in another order": Program(programs.ranks_in_another_order, world=4, pp=1),
    # Its pipelines overlap: not every member of a group holds it.
    "share a stage": Program(programs.pipelines_that_share_a_stage, world=6, ep=1),
    "closed and made anew": Program(programs.groups_closed_and_made_anew, world=4, pp=1),
}


def members(answer, name):
    """The ranks of each group of an answer, and those who took part in a sum over it."""
    if isinstance(answer, list):
        return [members(group, name) for group in answer]
    presence = torch.zeros(8)
    presence[dist.get_rank()] = 1
    if name != "share a stage":
        dist.all_reduce(presence, group=answer)
    return dist.get_process_group_ranks(answer), presence.nonzero().flatten().tolist()


def seen(rank, name, load):
    """What a rank is answered by every getter of a group, after each step of a program."""
    module = load()

    def ask_all():
        shown = {}
        for getter in public_functions(RELEASE):
            if getter.startswith("get_") and getter.endswith(("_group", "_gloo")):
                with contextlib.suppress(AssertionError):  # not initialised, or no such group
                    shown[getter] = members(getattr(module, getter)(), name)
        return shown

    client = Client(module, REAL[name].config(), RELEASE)
    return follow(REAL[name].run(client), ask_all)


@pytest.mark.release(RELEASE)
@pytest.mark.parametrize("name", REAL)
def test_a_clients_real_ranks_communicate_as_on_stock(name):
    world = REAL[name].world
    on_stock = run_ranks(world, seen, name, lambda: load_stock(RELEASE))
    assert all(snapshot["outcome"] == "ok" for snapshot in on_stock)
    assert run_ranks(world, seen, name, lambda: parallel_state) == on_stock
