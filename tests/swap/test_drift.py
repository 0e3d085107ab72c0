"""Differences between the modules of Megatron and those that replace them: all, and no others."""

from pathlib import Path

import pytest

from compat import hyper_comm_grid, parallel_state
from compat.megatron import sources
from compat.swap import drift
from tests.support import warm
from tests.support.stock import MAIN, RELEASES, following, have_stock, source, source_dir

GROUP = "def get_context_parallel_group(check_initialized=True):"
INIT = "    use_sharp: bool = False,\n"
END = "\n\ndef {}(a=1):\n    return None\n"
RANKS = "    def get_ranks(self, token):"
OF = "get_context_parallel_group(check_initialized=True{}) is get_context_parallel_group(check_init"
# What is replaced in stock's parallel_state.py, or added to its end; and what is said of it.
CHANGED = {
    "a function": (None, END.format("get_router_group"), "get_router_group(a=1) is unknown"),
    "under if": (None, "\nif True:\n    def get_a():\n        pass\n", "get_a() is unknown"),
    "under else": (None, "\nif 0:\n    pass\nelse:\n    def get_a(): pass\n", "get_a() is unk"),
    "under try": (None, "\ntry:\n    X_Y = 1\nexcept OSError:\n    pass\n", "X_Y = 1 is unknown"),
    "under except": (None, "\ntry:\n    pass\nexcept OSError:\n    X_Y = 1\n", "X_Y = 1 is unkn"),
    "under with": (None, "\nwith open('a'):\n    def get_a():\n        pass\n", "get_a() is unk"),
    "under match": (None, "\nmatch 1:\n    case 1:\n        X_Y = 1\n", "X_Y = 1 is unknown"),
    "async": (None, "\nasync def get_a():\n    pass\n", "get_a() is unknown"),
    "a class": (None, "\nclass Router:\n    pass\n", "class Router is unknown"),
    "a constant": (None, "\nROUTERS = 3\n", "ROUTERS = 3 is unknown"),
    "a typed constant": (None, "\nROUTERS: int = 3\n", "ROUTERS = 3 is unknown"),
    "two constants": (None, "\nROUTERS, SWITCHES = 3, 4\n", "SWITCHES is unknown"),
    "a constant's value": (
        "HAVE_EINOPS = ",
        "HAVE_EINOPS = 3; X = ",
        "HAVE_EINOPS = 3 is HAVE_EINOPS = ",
    ),
    "a private global": (None, "\n_ROUTER_GROUP = None\n", "_ROUTER_GROUP = None is unknown"),
    "a declared global": (GROUP, GROUP + "\n    global _A, _ROUTER", "_ROUTER is unknown"),
    "names of a star": (None, "\nfrom megatron.vendor import *\n", "import * is unknown"),
    "a module's __getattr__": (None, END.format("__getattr__"), "__getattr__(a=1) is unknown"),
    "an argument": (GROUP, GROUP.replace("):", ", of_router=1):"), OF.format(", of_router=1")),
    "an argument by keyword": (
        GROUP,
        GROUP.replace("(", "(*, "),
        "get_context_parallel_group(*, check_initialized=True) is get_context_parallel_group(ch",
    ),
    "by position alone": (GROUP, GROUP.replace("):", ", /):"), OF.format(", /")),
    "any arguments": (GROUP, GROUP.replace("):", ", **more):"), OF.format(", **more")),
    "a getter's default": (
        GROUP,
        GROUP.replace("=True", "=False"),
        "get_context_parallel_group(check_initialized=False) is get_",
    ),
    "a default less": (
        GROUP,
        GROUP.replace("=True", ""),
        "get_context_parallel_group(check_initialized) is get_",
    ),
    "a default that is no constant": (
        GROUP,
        GROUP.replace("=True", "=bool(1)"),
        "get_context_parallel_group(check_initialized=bool(1)) is get_",
    ),
    "initialisation's default, no constant": (
        INIT,
        "    use_sharp: bool = os.environ.get('SHARP') is not None,\n",
        "use_sharp=os.environ.get('SHARP') is not None, ",
    ),
    "initialisation's argument": (
        INIT,
        INIT + "    router_size: int = 1,\n",
        "use_sharp=False, router_size=1, ",
    ),
    "a creator's default": (
        "    use_local_synchronization=False,\n",
        "    use_local_synchronization=True,\n",
        "pg_options=None, use_local_synchronization=True, group_desc=None) is create_group(",
    ),
    "a method": (RANKS, f"    def of(self): pass\n\n{RANKS}", "RankGenerator.of(self) is unknown"),
    "a method's argument": (
        RANKS,
        RANKS.replace("):", ", at=0):"),
        "get_ranks(self, token, at=0) is RankGenerator.get_ranks(self, token) in",
    ),
    "a static method": (
        RANKS,
        f"    @staticmethod\n{RANKS}",
        "@staticmethod RankGenerator.get_ranks(self, token) is RankGenerator.get_ranks(",
    ),
    "a property": (
        RANKS,
        f"    @property\n{RANKS}",
        "@property RankGenerator.get_ranks(self, token) is RankGenerator.get_ranks(",
    ),
    "an attribute of a class": (
        RANKS,
        f"    routers = 2\n\n{RANKS}",
        "RankGenerator.routers = 2 is unk",
    ),
    "a field of a class": (
        RANKS,
        f"    routers: int\n\n{RANKS}",
        "RankGenerator.routers is unknown",
    ),
    "a special method": (
        RANKS,
        f"    def __len__(self): pass\n\n{RANKS}",
        "RankGenerator.__len__(self) is unknown",
    ),
    "a class in place of a function": (
        None,
        "\nclass is_initialized:\n    pass\n",
        "class is_initialized is is_initialized = <function",
    ),
}
GRID = "    def get_pg("
OF_THE_GRID = {
    "a method": (
        GRID,
        f"    def routers(self): pass\n\n{GRID}",
        "HyperCommGrid.routers(self) is unknown",
    ),
    "an argument": (
        "rank_offset: int = 0,",
        "rank_offset: int = 0, routers: int = 1,",
        "rank_offset=0, routers=1, ",
    ),
    "a default": (
        "rank_offset: int = 0,",
        "rank_offset: int = 1,",
        "rank_offset=1, ",
    ),
    "an order": (
        "shape: list[int],\n        dim_names: list[str],",
        "dim_names: list[str],\n        shape: list[int],",
        "(self, dim_names, shape, ",
    ),
}


def edited(text, old, new):
    assert old is None or old in text, old
    return text + new if old is None else text.replace(old, new)


def check_release(release, folder):
    """In a process that follows ``release``: no difference, and each change is one."""
    for module in drift.REPLACEMENTS:
        drift.refuse_drift(module)
    for file, ours, changes in (
        ("parallel_state.py", parallel_state, CHANGED),
        ("hyper_comm_grid.py", hyper_comm_grid, OF_THE_GRID),
    ):
        for name, (old, new, says) in changes.items():
            module = Path(folder, file)
            module.write_text(edited(source(release, file), old, new))
            text = "; ".join(drift.differences(sources.defined(module), vars(ours)))
            assert says in text, (release, file, name, text)
    print("done")


@pytest.mark.parametrize("release", [each for each in RELEASES if each in (*MAIN, "main", "dev")])
def test_each_kind_of_difference_is_named_and_stock_has_none(release, tmp_path):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    code = "import sys; from tests.swap.test_drift import check_release as c; c(*sys.argv[1:])"
    done = warm.run("-c", code, release, str(tmp_path), **following(release))
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_read_without_bodies_is_what_python_reads(release):
    import ast

    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    for path in source_dir(release).glob("*.py"):
        whole = [*sources._defined_by(ast.parse(path.read_text()))]
        assert sources.defined(path)[: len(whole)] == whole, path


DEFAULTS = """
import inspect
from datetime import timedelta
from compat import parallel_state as ps
from compat.megatron.request import Request
from compat.swap import drift
taken = inspect.signature(ps.initialize_model_parallel).parameters
print(taken["order"].default, taken["distributed_timeout_minutes"].default)
print(Request(job_size=8).order, Request(job_size=8).timeout)
print([*map(drift.refuse_drift, drift.REPLACEMENTS)])
"""


@pytest.mark.parametrize("release", MAIN)
def test_constant_defaults_of_initialisation_are_taken_over(release, tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for file in ("__init__.py", "package_info.py", "hyper_comm_grid.py"):
        (core / file).write_text("" if file == "__init__.py" else source(release, file))
    text = source(release)
    for old, new in (
        ('order: str = "tp-cp-ep-dp-pp"', 'order: str = "tp-cp-ep-pp-dp"'),
        ("distributed_timeout_minutes: int = 30", "distributed_timeout_minutes: int = 45"),
    ):
        text = edited(text, old, new)
    (core / "parallel_state.py").write_text(text)
    paths = {"PYTHONPATH": f"{tmp_path}:{following(release)['PYTHONPATH']}"}
    done = warm.run("-c", DEFAULTS, **{**following(release), **paths})
    assert done.stdout.splitlines() == [
        "tp-cp-ep-pp-dp 45",
        "tp-cp-ep-pp-dp 0:45:00",
        "[None, None]",
    ], done.stderr


def test_a_file_that_is_not_python_is_refused_by_name(tmp_path):
    (tmp_path / "parallel_state.py").write_text("def f(:\n")
    with pytest.raises(RuntimeError, match=r"parallel_state.py cannot be read as Python"):
        sources.read(tmp_path)
