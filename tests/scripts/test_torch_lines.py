"""The private thing of torch's that creation needs, read in the source of each release line."""

import ast
import hashlib
import inspect

import pytest
from torch.distributed import distributed_c10d as c10d

from hypergrid.groups import creation
from tests.support import ROOT

CACHE = ROOT / ".cache"
LINES = [
    "2.6.0",
    "2.7.1",
    "2.8.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.1",
    "2.13.0",
    "2.14.1",
    "2.15.0",
]


@pytest.fixture(params=["installed", *LINES])
def source(request):
    if request.param == "installed":
        return inspect.getsource(c10d)
    file = CACHE / f"torch-{request.param}" / "distributed_c10d.py"
    if not file.exists():
        pytest.skip(f"torch {request.param} is not fetched: scripts/torch_lines fetches and checks")
    return file.read_text()


def _definitions(source, *names):
    """Those functions and classes of torch's, in a namespace of their own."""
    wanted = [n for n in ast.parse(source).body if getattr(n, "name", None) in names]
    assert {n.name for n in wanted} == set(names)
    space = {"hashlib": hashlib, "GroupName": str, "_group_count": 0}
    exec("from __future__ import annotations\n" + "\n".join(map(ast.unparse, wanted)), space)
    return space


def test_the_running_number_becomes_the_name_and_grows_by_one(source):
    space = _definitions(source, "_World", "_hash_ranks_to_str", "_process_group_name")
    world = space["_world"] = space["_World"]()
    number = creation.group_name("A", [0, 1], "epoch")
    world.group_count = number
    assert space["_process_group_name"]([0, 1], use_hashed_name=False) == str(number)
    assert world.group_count == number + 1


def test_a_new_group_takes_its_name_from_there_unless_it_is_synchronised_locally(source):
    (function,) = (
        node
        for node in ast.parse(source).body
        if getattr(node, "name", None) == "_new_group_with_tag"
    )
    calls = [ast.unparse(n) for n in ast.walk(function) if isinstance(n, ast.Call)]
    assert "_process_group_name(ranks, use_hashed_name=use_local_synchronization)" in calls, calls


def test_this_torch_is_told_apart():
    assert creation.names_can_be_set()
