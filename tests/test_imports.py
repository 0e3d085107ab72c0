"""Imports between files: down only, no circles; and the words that the core does not know.

Every import counts: at the top of a file, inside a function and under TYPE_CHECKING. Two files are
left out, as everything imports them or they import everything: ``hypergrid/__init__`` loads its
names on first use, and ``hypergrid/__main__`` starts the command line, which is in ``compat/cli``.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"hypergrid", "hypergrid.__main__"}

# From the lowest to the highest. Modules and packages on one line do not import each other.
ORDERS = {
    "hypergrid": (
        ("errors", "messages", "of_torch"),
        ("files", "logs"),
        ("layout",),
        ("topology", "policy"),
        ("plan",),
        ("summary",),
        ("agreement",),
        ("groups",),
        ("hangs",),
        ("show",),
    ),
    "compat": (
        ("megatron", "transformer_engine.process"),
        ("swap",),
        ("planned", "verification"),
        ("",),  # compat/__init__ itself
        ("state", "hyper_comm_grid"),
        (
            "collection",
            "report",
            "transformer_engine",
            "colossalai",
            "physicsnemo",
            "resiliency",
        ),
        ("audit",),
        ("parallel_state",),
        ("swap.replay",),
        ("swap.shadow",),
        ("cli", "launch", "swap.startup"),
    ),
}
LEVELS = {
    f"{package}.{name}".rstrip("."): (package, level)
    for package, order in ORDERS.items()
    for level, names in enumerate(order)
    for name in names
}


def sources():
    files = {}
    for path in [p for package in ORDERS for p in (ROOT / package).rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in files.items() if name not in LEFT_OUT}


def imported(path, modules):
    """The files of ``modules`` that one file imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: import by the full name"
            # Each name may be a file of its own.
            files = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each if each in modules else node.module for each in files]
        else:
            continue
        yield from (name for name in names if name in modules)


def part_of(module):
    """The entry of ORDERS that a module belongs to: the longest that it begins with."""
    pieces = module.split(".")
    known = (".".join(pieces[:end]) for end in range(len(pieces), 0, -1))
    part = next((name for name in known if name in LEVELS), None)
    in_root = part in ORDERS and part != module  # "compat" is compat/__init__, not what is in it
    assert part and not in_root, f"{module} has no place in the order of imports: add it"
    return part


MODULES = sources()
EDGES = {name: set(imported(path, MODULES)) - {name} for name, path in MODULES.items()}


def test_no_file_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(EDGES).prepare()
    except CycleError as error:
        raise AssertionError(f"an import circle: {' <- '.join(error.args[1])}") from None


def may_import(module, target):
    (package, level), (below, lower) = LEVELS[part_of(module)], LEVELS[part_of(target)]
    if package == below:
        return lower < level or part_of(module) == part_of(target)
    return package == "compat"  # compat is built on the core, and the core knows nothing of it


def test_imports_go_down_only():
    assert len(MODULES) > 50 and sum(map(len, EDGES.values())) > 100
    upward = [
        f"{module} imports {target}"
        for module, targets in EDGES.items()
        for target in targets
        if not may_import(module, target)
    ]
    assert not upward, "\n".join(upward)


def test_the_core_starts_the_command_line_in_one_place():
    naming_compat = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hypergrid").rglob("*.py")
        if list(imported(path, [name for name in MODULES if name.startswith("compat")]))
    }
    assert naming_compat == {"hypergrid/__main__.py"}


def test_the_core_knows_no_word_of_megatron():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "hypergrid").rglob("*"))
        if path.suffix in (".py", ".js", ".html", ".css")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search("decoder|expert", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
