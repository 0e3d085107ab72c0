"""Imports between files: down only, no circles; and the words that the core does not know.

Every import counts: at the top of a file, inside a function and under TYPE_CHECKING. Only
``hypergrid/__init__`` is left out: it loads its names, of any level, on first use.
"""

import ast
import re
from graphlib import TopologicalSorter

from tests.support import ROOT

# From the lowest to the highest: modules and packages. What stands on one line does not import
# each other. The core's end where compat's begin.
LEVELS = (ROOT / "tests" / "imports.txt").read_text().splitlines()


def modules():
    """The files of both packages, by the names of their modules."""
    files = {}
    for package in ("hypergrid", "compat"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    del files["hypergrid"]
    return files


MODULES = modules()


def imported(module):
    """The modules of ours that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: import by the full name"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"  # may be a file of its own
                names.add(name if name in MODULES else node.module)
    return {name for name in names if name in MODULES} - {module}


def place(module):
    """The entry of LEVELS that a module belongs to, the longest one, and its level."""
    places = []
    for level, line in enumerate(LEVELS):
        for part in line.split():
            if f"{module}.".startswith(f"{part}."):
                places.append((part, level))
    part, level = max(places, key=lambda found: len(found[0]), default=("compat", 0))
    # "compat" is compat/__init__, not what is in it.
    assert part != "compat" or module == part, f"{module} has no place in tests/imports.txt: add it"
    return part, level


def test_no_file_imports_itself_by_way_of_others():
    TopologicalSorter({module: imported(module) for module in MODULES}).prepare()


def test_imports_go_down_only():
    upward = []
    for module in MODULES:
        part, level = place(module)
        for target in imported(module):
            target_part, target_level = place(target)
            if target_part != part and target_level >= level:
                upward.append(f"{module} imports {target}")
    assert not upward, "\n".join(upward)


def test_the_core_knows_no_word_of_megatron():
    lines = []
    for path in sorted((ROOT / "hypergrid").rglob("*")):
        if path.suffix in (".py", ".js", ".html", ".css"):
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                if re.search("decoder|expert", line, re.IGNORECASE):
                    lines.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not lines, "\n".join(lines)
