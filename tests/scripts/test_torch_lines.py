"""Names that are private in torch and used here, looked for in the sources of each line."""

import ast
import hashlib
import inspect
import re

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from hypergrid import of_torch
from hypergrid.groups import creation
from tests.support import ROOT

FILES = ("distributed_c10d.py", "device_mesh.py", "_distributed_c10d.pyi", "__init__.pyi")
FILES += ("fake_pg.py",)
LINES = ["2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]


@pytest.fixture(params=["installed", *LINES])
def source(request):
    if request.param == "installed":
        return inspect.getsource(c10d)
    return _text(request.param, "distributed_c10d.py")


def _text(version, name):
    file = ROOT / ".cache" / f"torch-{version}" / name
    if not file.exists():
        pytest.skip(f"torch {version} is not fetched: scripts/torch_lines fetches and checks")
    return file.read_text()


@pytest.mark.parametrize("version", LINES)
def test_every_part_that_is_looked_for_in_a_line_has_its_names_there(version):
    words = set()
    for file in FILES:
        words.update(re.findall(r"\w+", _text(version, file)))
    library = _text(version, "names")  # a name may be the end of a longer one
    missing = []
    for part, requirement in of_torch.needed(version).items():
        for name in requirement.names:
            for word in name.split("."):
                if word not in words and f"{word}\n" not in library:
                    missing.append(f"{part}: {name}")
    assert missing == []


def test_the_lines_that_are_checked_are_those_that_are_supported():
    lines = [version.rpartition(".")[0] for version in LINES]
    assert lines[0] == of_torch.OLDEST
    assert lines[-1] == of_torch.NEWEST
    minors = [int(line.partition(".")[2]) for line in lines]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert f'"torch>={of_torch.OLDEST}"' in (ROOT / "pyproject.toml").read_text()
    assert torch.__version__.startswith(tuple(lines))


def _definitions(source, *names):
    """These functions and classes of torch's, in a namespace of their own."""
    nodes = [node for node in ast.parse(source).body if getattr(node, "name", None) in names]
    assert {node.name for node in nodes} == set(names)
    namespace = {"hashlib": hashlib, "GroupName": str, "_group_count": 0}
    text = "\n".join(map(ast.unparse, nodes))
    exec(f"from __future__ import annotations\n{text}", namespace)
    return namespace


def _calls(node):
    return [call for call in ast.walk(node) if isinstance(call, ast.Call)]


def test_the_running_number_becomes_the_name_and_grows_by_one(source):
    torchs = _definitions(source, "_World", "_hash_ranks_to_str", "_process_group_name")
    world = torchs["_world"] = torchs["_World"]()
    number = creation.group_name("A", [0, 1], "epoch")
    world.group_count = number
    assert torchs["_process_group_name"]([0, 1], use_hashed_name=False) == str(number)
    assert world.group_count == number + 1


def test_a_new_group_takes_its_name_from_there_unless_it_is_synchronised_locally(source):
    functions = {getattr(node, "name", None): node for node in ast.parse(source).body}
    calls = list(map(ast.unparse, _calls(functions["_new_group_with_tag"])))
    assert "_process_group_name(ranks, use_hashed_name=use_local_synchronization)" in calls, calls


def test_gloo_is_created_with_arguments_that_its_options_have_too(source):
    """Where torch lacks one, connect= and abort() are off, with a warning: see gloo.py."""
    arguments = set()
    for call in _calls(ast.parse(source)):
        if ast.unparse(call.func) == "ProcessGroupGloo":
            arguments.update(keyword.arg for keyword in call.keywords)
    assert arguments <= {"timeout", "enable_reconfigure"}
