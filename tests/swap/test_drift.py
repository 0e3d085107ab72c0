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
# What is replaced in stock's parallel_state.py, or added to its end; and what is said of it.
CHANGED = {
    "a function": (None, END.format("get_router_group"), "get_router_group() is unknown"),
    "under if": (None, "\nif True:\n    def get_a():\n        pass\n", "get_a() is unknown"),
    "under else": (None, "\nif 0:\n    pass\nelse:\n    def get_a(): pass\n", "get_a() is unk"),
    "under try": (None, "\ntry:\n    X_Y = 1\nexcept OSError:\n    pass\n", "X_Y is unknown"),
    "under with": (None, "\nwith open('a'):\n    def get_a():\n        pass\n", "get_a() is unk"),
    "async": (None, "\nasync def get_a():\n    pass\n", "get_a() is unknown"),
    "a class": (None, "\nclass Router:\n    pass\n", "Router is unknown"),
    "a constant": (None, "\nROUTERS = 3\n", "ROUTERS is unknown"),
    "a typed constant": (None, "\nROUTERS: int = 3\n", "ROUTERS is unknown"),
    "two constants": (None, "\nROUTERS, SWITCHES = 3, 4\n", "SWITCHES is unknown"),
    "a constant's value": ("HAVE_EINOPS = ", "HAVE_EINOPS = 3; X = ", "HAVE_EINOPS is 3, not"),
    "a private global": (None, "\n_ROUTER_GROUP = None\n", "_ROUTER_GROUP is unknown"),
    "a declared global": (GROUP, GROUP + "\n    global _A, _ROUTER", "_ROUTER is unknown"),
    "names of a star": (None, "\nfrom megatron.vendor import *\n", "import * is unknown"),
    "a module's __getattr__": (None, END.format("__getattr__"), "__getattr__() is unknown"),
    "an argument": (GROUP, GROUP.replace("):", ", of_router=1):"), "(of_router=) is unknown"),
    "an argument by keyword": (
        GROUP,
        GROUP.replace("(", "(*, "),
        "(check_initialized=) is keyword-only, not positional or keyword",
    ),
    "by position alone": (GROUP, GROUP.replace("):", ", /):"), "is positional-only"),
    "any arguments": (GROUP, GROUP.replace("):", ", **more):"), "(more=) takes any number"),
    "a default less": (GROUP, GROUP.replace("=True", ""), "has no default, not the default True"),
    "a default that is no constant": (
        GROUP,
        GROUP.replace("=True", "=bool(1)"),
        "has the default bool(1), not the default True",
    ),
    "initialisation's default, no constant": (
        INIT,
        "    use_sharp: bool = os.environ.get('SHARP') is not None,\n",
        "initialize_model_parallel(use_sharp=) has the default os.environ",
    ),
    "initialisation's argument": (
        INIT,
        INIT + "    router_size: int = 1,\n",
        "(router_size=) is un",
    ),
    "a creator's default": (
        "    use_local_synchronization=False,\n",
        "    use_local_synchronization=True,\n",
        "create_group(use_local_synchronization=) has the default True, not the default False",
    ),
    "a method": (RANKS, f"    def of(self): pass\n\n{RANKS}", "RankGenerator.of() is unknown"),
    "a method's argument": (RANKS, RANKS.replace("):", ", at=0):"), "get_ranks(at=) is unknown"),
    "a static method": (RANKS, f"    @staticmethod\n{RANKS}", "is a staticmethod, not a function"),
    "a property": (RANKS, f"    @property\n{RANKS}", "is a property, not a function"),
    "an attribute of a class": (
        RANKS,
        f"    routers = 2\n\n{RANKS}",
        "RankGenerator.routers is unk",
    ),
    "a field of a class": (
        RANKS,
        f"    routers: int\n\n{RANKS}",
        "RankGenerator.routers is unknown",
    ),
    "a special method": (RANKS, f"    def __len__(self): pass\n\n{RANKS}", "__len__() is unknown"),
    "a class in place of a function": (None, "\nclass is_initialized:\n    pass\n", "is a class"),
}
GRID = "    def get_pg("
OF_THE_GRID = {
    "a method": (
        GRID,
        f"    def routers(self): pass\n\n{GRID}",
        "HyperCommGrid.routers() is unknown",
    ),
    "an argument": (
        "rank_offset: int = 0,",
        "rank_offset: int = 0, routers: int = 1,",
        "(routers=) is",
    ),
    "a default": (
        "rank_offset: int = 0,",
        "rank_offset: int = 1,",
        "has the default 1, not the default 0",
    ),
    "an order": (
        "shape: list[int],\n        dim_names: list[str],",
        "dim_names: list[str],\n        shape: list[int],",
        "takes",
    ),
}


def edited(text, old, new):
    assert old is None or old in text, old
    return text + new if old is None else text.replace(old, new)


def check_release(release, folder):
    """In a process that follows ``release``: no difference, and each change is one."""
    assert not any(map(drift.drift, drift.REPLACEMENTS)), [*map(drift.drift, drift.REPLACEMENTS)]
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
        whole = [*sources._defined_by(ast.parse(path.read_text()).body, "")]
        assert sources.defined(path)[: len(whole)] == whole, path


DEFAULTS = """
import inspect
from datetime import timedelta
from compat import parallel_state as ps
from compat.megatron.planning import Request
from compat.swap import drift
taken = inspect.signature(ps.initialize_model_parallel).parameters
print(taken["order"].default, taken["distributed_timeout_minutes"].default)
print(ps.get_context_parallel_group(), Request(job_size=8).order, Request(job_size=8).timeout)
print([*map(drift.drift, drift.REPLACEMENTS)])
"""


@pytest.mark.parametrize("release", MAIN)
def test_constant_defaults_of_initialisation_and_getters_are_taken_over(release, tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for file in ("__init__.py", "package_info.py", "hyper_comm_grid.py"):
        (core / file).write_text("" if file == "__init__.py" else source(release, file))
    text = source(release)
    for old, new in (
        ('order: str = "tp-cp-ep-dp-pp"', 'order: str = "tp-cp-ep-pp-dp"'),
        ("distributed_timeout_minutes: int = 30", "distributed_timeout_minutes: int = 45"),
        (GROUP, GROUP.replace("True", "False")),
    ):
        text = edited(text, old, new)
    (core / "parallel_state.py").write_text(text)
    paths = {"PYTHONPATH": f"{tmp_path}:{following(release)['PYTHONPATH']}"}
    done = warm.run("-c", DEFAULTS, **{**following(release), **paths})
    assert done.stdout.splitlines() == [
        "tp-cp-ep-pp-dp 45",
        "None tp-cp-ep-pp-dp 0:45:00",
        "['', '']",
    ], done.stderr


def test_a_file_that_is_not_python_is_refused_by_name(tmp_path):
    (tmp_path / "parallel_state.py").write_text("def f(:\n")
    with pytest.raises(RuntimeError, match=r"parallel_state.py cannot be read as Python"):
        sources.read(tmp_path)
