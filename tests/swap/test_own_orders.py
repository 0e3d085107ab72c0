"""Megatron's modules that lay ranks out by themselves are named where another order is wanted."""

import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from compat.swap.own_orders import MODULES
from tests.support import ROOT, warm
from tests.support.stock import RELEASES, have_stock, source_dir

# What each release lays out by itself: megatron.rl is in the repository, not in the wheel.
BUILDERS = [
    ("0.16.1", "megatron.rl.parallel_utils"),
    ("0.17.1", "megatron.rl.parallel_utils"),
    ("0.18.2", "megatron.rl.parallel_utils"),
    ("0.19.2", "megatron.core.inference.shards"),
]


def run(code, *arguments, path, release, **environment):
    environment |= {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    environment |= {"HYPERGRID_MEGATRON_RELEASE": release}
    return warm.run("-W", "always", "-c", textwrap.dedent(code), *arguments, **environment)


def source_of(release, module):
    """The genuine file of ``module``; skips the test where it is not here."""
    path = Path(*module.split(".")).with_suffix(".py")
    if module.startswith("megatron.core."):
        if not have_stock(release):
            pytest.skip(f"run scripts/fetch_megatron {release}")
        return source_dir(release).parents[1] / path
    tag = f"core_v{release}"
    file = ROOT / ".cache" / f"Megatron-LM-{tag}" / path
    if not file.is_file():
        pytest.skip(
            f"{module} is not in the wheel: git clone --depth 1 --branch {tag} "
            f"https://github.com/NVIDIA/Megatron-LM .cache/Megatron-LM-{tag}"
        )
    return file


@pytest.fixture
def builder(request, tmp_path):
    """The genuine module of a release, without the rest of its package."""
    release, module = request.param
    core = tmp_path / "megatron" / "core"
    wanted = {module: source_of(release, module)}
    also = ["process_groups_config"] + ["inference.shards_spec"] * ("shards" in module)
    for name in also:
        wanted[f"megatron.core.{name}"] = source_of(release, f"megatron.core.{name}")
    for name, file in wanted.items():
        copy = tmp_path / Path(*name.split(".")).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    (core / "__init__.py").write_text("from megatron.core import parallel_state as mpu\n")
    return release, module, tmp_path


def every_builder(function):
    names = [f"{release} {module}" for release, module in BUILDERS]
    return pytest.mark.parametrize("builder", BUILDERS, indirect=True, ids=names)(function)


COMPARES = """
    import sys, compat; compat.install()
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    module, sizes, rank = sys.argv[1], eval(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
    from importlib import import_module
    from megatron.core import mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    mpu.initialize_model_parallel(**sizes)
    build = import_module(module).build_inference_pg_collection
    groups = build(16, use_tp_pp_dp_mapping=len(sys.argv) > 4)
    names = ("tp cp pp ep embd pos_embd dp tp_cp mp expt_tp expt_dp tp_ep tp_ep_pp dp_cp tp_dp_cp")
    ours = ProcessGroupCollection.use_mpu_process_groups(names.replace("tp_dp_cp", "").split())
    ours.tp_dp_cp = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    for name in names.split():
        theirs = getattr(groups, name)
        of = dist.get_process_group_ranks
        same = None if theirs is None else of(theirs)
        mine = getattr(ours, name)
        mine = None if mine is None or rank not in of(mine) else of(mine)
        print(name, "same" if same == mine else f"{same} and not {mine}")
"""
DENSE = "{'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 2"
SIZES = {
    "dense": DENSE + "}",
}


WARNS = "computes ranks by itself"


@every_builder
@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        ("tp-cp-pp-dp", "dp", "pp"),
        ("TP-CP-EP-PP-DP", "dp", "pp"),
        ("dp-tp-cp-ep-pp", "tp", "dp"),
        ("pp-dp-cp-ep-tp", "tp", "cp"),
    ],
)
def test_what_lays_out_an_inference_model_is_named_where_another_order_is_requested(
    builder, order, first, second
):
    release, module, path = builder
    arguments = {"path": path, "release": release, "HYPERGRID_ORDER": order}
    done = run(COMPARES, module, SIZES["dense"], "9", **arguments)
    assert done.stderr.count(WARNS) == 1, done.stderr
    assert f"{module} {WARNS}, as if {first} came before {second}" in done.stderr
    assert f"The order {order!r}, from HYPERGRID_ORDER in the environment" in done.stderr
    # And it is true: its groups are others than those of the requested order.
    assert " and not " in done.stdout, done.stdout + done.stderr


@every_builder
def test_an_inference_model_is_laid_out_as_stock(builder):
    release, module, path = builder
    for mapping, says in (((), "pp same"), (("mapping",), "pp [9, 11] and not [1, 9]")):
        done = run(COMPARES, module, SIZES["dense"], "9", *mapping, path=path, release=release)
        assert says in done.stdout.splitlines(), done.stdout + done.stderr
        assert WARNS not in done.stderr


@every_builder
def test_megatrons_order_for_an_inference_model_is_no_reason_to_warn(builder):
    release, module, path = builder
    for order in ("tp-dp-pp", "tp-cp-ep-dp-pp"):
        arguments = {"path": path, "release": release, "HYPERGRID_ORDER": order}
        done = run(COMPARES, module, SIZES["dense"], "9", **arguments)
        lines = [line.partition(" ")[2] for line in done.stdout.splitlines()]
        assert lines == ["same"] * 15, done.stdout + done.stderr
        assert WARNS not in done.stderr


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_names_what_a_release_has_and_everything_that_makes_a_grid(release):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    core = source_dir(release)
    made = set()
    for file in core.rglob("*.py"):
        name = ".".join(["megatron.core", *file.relative_to(core).with_suffix("").parts])
        text = file.read_text(encoding="utf-8")
        if re.search(r"^(?! *(?:class|>>>)).*\b(HyperCommGrid|RankGenerator)\(", text, re.M):
            made.add(name)
    assert made <= {"megatron.core.parallel_state", *MODULES}


IMPORTS = """
    import sys, compat; compat.install()
    from importlib import import_module
    import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("module", "order", "pair"),
    [
        ("transformer.moe.token_dispatcher", "tp-ep-dp-pp", None),
        ("transformer.moe.token_dispatcher", "dp-tp-ep-pp", None),
        ("transformer.moe.token_dispatcher", "dp-tp-pp", None),
        ("transformer.moe.token_dispatcher", "ep-tp-dp-pp", "tp came before ep"),
        ("transformer.moe.token_dispatcher", "ep-dp-tp-pp", "tp came before ep"),
        ("datasets.data_schedule", "tp-dp-pp", None),
        ("datasets.data_schedule", "dp-tp-pp", "tp came before dp"),
        ("optimizer", "dp-tp-pp", None),
    ],
)
def test_what_counts_on_tensor_parallel_ranks_side_by_side_is_warned_of(
    module, order, pair, tmp_path
):
    file = tmp_path / "megatron" / "core" / Path(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.touch()
    arguments = {"path": tmp_path, "release": "0.16.1", "HYPERGRID_ORDER": order}
    done = run(IMPORTS, f"megatron.core.{module}", **arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WARNS) == (pair is not None), done.stderr
    assert pair is None or f"megatron.core.{module} {WARNS}, as if {pair}." in done.stderr


def test_a_module_that_is_listed_says_what_the_list_says(tmp_path):
    """The sources of the two that count on consecutive ranks still have the classes that do."""
    classes = {
        "transformer/moe/token_dispatcher.py": ["MoEAlltoAllTokenDispatcher"],
        "datasets/data_schedule.py": ["HybridCPDataLoaderWrapper"],
    }
    if not have_stock("0.16.1"):
        pytest.skip("run scripts/fetch_megatron 0.16.1")
    for name, wanted in classes.items():
        text = (source_dir("0.16.1") / name).read_text(encoding="utf-8")
        assert all(f"class {each}" in text for each in wanted)
