"""Megatron's modules that lay ranks out by themselves are named where another order is wanted."""

import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from compat.swap.own_orders import MODULES
from tests.support import ROOT, table, warm
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
    where = f"Megatron-LM-core_v{release}"  # what is not in the wheel
    if module.startswith("megatron.core."):
        where = f"megatron-core-{release}"
    file = ROOT / ".cache" / where / path
    if not file.is_file():
        pytest.skip(f"{file} is missing: scripts/fetch_megatron, or a clone of NVIDIA/Megatron-LM")
    return file


@pytest.fixture
def builder(request, tmp_path):
    """The genuine module of a release, without the rest of its package."""
    release, module = request.param
    core = tmp_path / "megatron" / "core"
    names = [module, "megatron.core.process_groups_config"]
    if "shards" in module:
        names.append("megatron.core.inference.shards_spec")
    for name in names:
        copy = tmp_path / Path(*name.split(".")).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_of(release, name), copy)
    (core / "__init__.py").write_text("from megatron.core import parallel_state as mpu\n")
    return release, module, tmp_path


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
    groups = build(16)
    names = "tp cp pp ep embd pos_embd dp tp_cp mp expt_tp expt_dp tp_ep tp_ep_pp dp_cp".split()
    ours = ProcessGroupCollection.use_mpu_process_groups(names)
    ours.tp_dp_cp = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)

    def members(group):
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        return ranks if rank in ranks else []

    for name in [*names, "tp_dp_cp"]:
        megatrons, swapped = members(getattr(groups, name)), members(getattr(ours, name))
        print(name, "same" if megatrons == swapped else f"{megatrons} and not {swapped}")
"""
SIZES = "{'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 2}"
WARNS = "computes ranks by itself"


@pytest.mark.parametrize("builder", BUILDERS, indirect=True)
@pytest.mark.parametrize(
    ("order", "first", "second"), [("TP-CP-EP-PP-DP", "dp", "pp"), ("pp-dp-cp-ep-tp", "tp", "cp")]
)
def test_what_lays_out_an_inference_model_is_named_where_another_order_is_requested(
    builder, order, first, second
):
    release, module, path = builder
    done = run(COMPARES, module, SIZES, "9", path=path, release=release, HYPERGRID_ORDER=order)
    assert done.stderr.count(WARNS) == 1, done.stderr
    assert f"{module} {WARNS}, as if {first} came before {second}" in done.stderr
    assert f"The order {order!r}, from HYPERGRID_ORDER in the environment" in done.stderr
    # And it is true: its groups are others than those of the requested order.
    assert " and not " in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("builder", BUILDERS, indirect=True)
def test_megatrons_order_for_an_inference_model_is_no_reason_to_warn(builder):
    release, module, path = builder
    order = "tp-dp-pp"
    done = run(COMPARES, module, SIZES, "9", path=path, release=release, HYPERGRID_ORDER=order)
    answers = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert answers == ["same"] * 15, done.stdout + done.stderr
    assert WARNS not in done.stderr


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_names_what_a_release_has_and_everything_that_makes_a_grid(release):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    core = source_dir(release)
    module_names = set()
    for file in core.rglob("*.py"):
        name = ".".join(["megatron.core", *file.relative_to(core).with_suffix("").parts])
        text = file.read_text(encoding="utf-8")
        if re.search(r"^(?! *(?:class|>>>)).*\b(HyperCommGrid|RankGenerator)\(", text, re.M):
            module_names.add(name)
    assert module_names <= {"megatron.core.parallel_state", *MODULES}


IMPORTS = """
    import sys, compat; compat.install()
    from importlib import import_module
    import_module(sys.argv[1])
"""


@pytest.mark.parametrize(("module", "order", "pair"), table("swap/neighbours.txt"))
def test_what_counts_on_tensor_parallel_ranks_side_by_side_is_warned_of(
    module, order, pair, tmp_path
):
    file = tmp_path / "megatron" / "core" / Path(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.touch()
    arguments = {"path": tmp_path, "release": "0.16.1", "HYPERGRID_ORDER": order}
    done = run(IMPORTS, f"megatron.core.{module}", **arguments)
    assert done.returncode == 0, done.stderr
    if pair == "-":
        assert WARNS not in done.stderr
    else:
        assert f"megatron.core.{module} {WARNS}, as if {pair}." in done.stderr
