"""The names of parallel_state that published programs use are there wherever stock has them.

The programs' own sources are read, as the registry has them: scripts/fetch_forerunners.
"""

import ast
import json
from importlib import import_module

import pytest

from compat.megatron.releases import PUBLISHED
from tests.support import ROOT, warm
from tests.support.stock import following, have_stock, source

FILES = ("parallel_state", "hyper_comm_grid")
# Where programs find them, and which file that is.
MODULES = {
    "megatron.core.parallel_state": "parallel_state",
    "megatron.core.mpu": "parallel_state",
    "megatron.core.hyper_comm_grid": "hyper_comm_grid",
}
PROGRAMS = (
    *("mbridge-0.15.1", "mcore-bridge-1.6.5", "megatron-bridge-0.3.1", "megatron-fsdp-0.6.1"),
    *("ms-swift-4.6.0", "nemo-toolkit-3.0.0", "resiliency", "verl-0.9.1"),
)


def names_used(tree):
    """The names that a file imports or reads: ``("parallel_state", "get_data_parallel_rank")``."""
    modules = dict(MODULES)  # by what the file calls them
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for imported in node.names:
                if node.module in MODULES:
                    yield MODULES[node.module], imported.name
                elif (name := f"{node.module}.{imported.name}") in MODULES:
                    modules[imported.asname or imported.name] = MODULES[name]
        elif isinstance(node, ast.Import):
            for imported in node.names:
                if imported.name in MODULES and imported.asname:
                    modules[imported.asname] = MODULES[imported.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            yield modules[ast.unparse(node.value)], node.attr


def names_of_stock(release, file):
    names = set()
    for node in ast.walk(ast.parse(source(release, f"{file}.py"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(imported.asname or imported.name for imported in node.names)
    return names


def names_of_ours():
    """In a process that follows a release: the names of each of the two modules."""
    return [dir(import_module(f"compat.{file}")) for file in FILES]


@pytest.fixture(scope="module")
def used():
    """By program, the names that it uses."""
    names = {}
    for program in PROGRAMS:
        folder = ROOT / ".cache" / program
        if not folder.is_dir():
            pytest.skip("run scripts/fetch_forerunners and scripts/fetch_resiliency")
        names[program] = set()
        for path in folder.rglob("*.py"):
            names[program].update(names_used(ast.parse(path.read_text())))
    return names


@pytest.mark.parametrize("release", PUBLISHED)
def test_what_stock_has_and_a_program_uses_is_there(release, used):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    code = "from tests.clients.test_names import *; print(json.dumps(names_of_ours()))"
    done = warm.run("-c", code, **following(release))
    ours = dict(zip(FILES, map(set, json.loads(done.stdout)), strict=True))
    missing = []
    for program, names in used.items():
        for file, name in sorted(names):
            if name in names_of_stock(release, file) and name not in ours[file]:
                missing.append(f"{program}: {file}.{name}")
    assert not missing


def test_the_programs_use_many_names(used):
    assert len(set().union(*used.values())) > 40
    assert used["verl-0.9.1"] and used["megatron-bridge-0.3.1"]
