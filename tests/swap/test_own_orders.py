"""Megatron's modules that lay ranks out by themselves: the order asked for reaches them."""

import importlib.metadata
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
    "experts": DENSE + ", 'expert_model_parallel_size': 2}",
    "both": DENSE + ", 'context_parallel_size': 2, 'expert_model_parallel_size': 2}",
}


@every_builder
@pytest.mark.parametrize(
    ("order", "sizes", "mapping"),
    [
        ("tp-cp-pp-dp", "dense", False),
        ("TP-CP-EP-PP-DP", "both", False),
        ("cp-tp-dp-ep-pp", "experts", True),
        ("pp-dp-cp-ep-tp", "both", True),
    ],
)
def test_an_inference_models_groups_are_those_of_parallel_state(builder, order, sizes, mapping):
    release, module, path = builder
    arguments = (module, SIZES[sizes], "9", *["mapping"] * mapping)
    done = run(COMPARES, *arguments, path=path, release=release, HYPERGRID_ORDER=order)
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert lines == ["same"] * 15, done.stdout + done.stderr


@every_builder
def test_without_an_order_from_outside_an_inference_model_is_laid_out_as_stock(builder):
    release, module, path = builder
    for mapping, says in (((), "pp same"), (("mapping",), "pp [9, 11] and not [1, 9]")):
        done = run(COMPARES, module, SIZES["dense"], "9", *mapping, path=path, release=release)
        assert says in done.stdout.splitlines(), done.stdout + done.stderr


@every_builder
def test_an_order_that_an_inference_model_cannot_have_says_where_it_came_from(builder):
    release, module, path = builder
    code = COMPARES.replace("build(16,", "build(16, ep_size=2, expt_tp_size=1,")
    asked = {"release": release, "path": path, "HYPERGRID_ORDER": "tp-cp-dp-pp"}
    done = run(code, module, SIZES["dense"], "0", **asked)
    assert "order 'tp-cp-dp-pp' leaves out 'ep', whose size is 2" in done.stderr
    says = "from HYPERGRID_ORDER in the environment, which also lays out the grids of " + module
    assert says in done.stderr


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
        for wrapped in MODULES.get(name, ()):
            assert wrapped in text
    assert made <= {"megatron.core.parallel_state", *MODULES}


COUNTS_ON_TP = """
    import sys, compat; compat.install()
    import torch, torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch.cuda.Stream = lambda *a, **k: None  # a machine without CUDA makes none
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    from megatron.core import mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=4,
        tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )
    experts = int(sys.argv[1])
    mpu.initialize_model_parallel(2, expert_model_parallel_size=experts)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if experts > 1:
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        MoEAlltoAllTokenDispatcher(2, [0, 1], config, groups)
    else:
        from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
        config.max_seqlen_per_dp_cp_rank = 8
        HybridCPDataLoaderWrapper(iter([]), config)
"""


@pytest.mark.parametrize(
    ("experts", "order", "ranks"),
    [
        (2, "tp-ep-dp-pp", None),
        (2, "dp-tp-ep-pp", None),
        (2, "ep-tp-dp-pp", "[0, 2]"),
        (2, "ep-dp-tp-pp", "[0, 4]"),
        (1, "tp-dp-pp", None),
        (1, "dp-tp-pp", "[0, 4]"),
    ],
)
def test_what_counts_on_tensor_parallel_ranks_side_by_side_is_warned_of(experts, order, ranks):
    try:
        release = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    done = run(COUNTS_ON_TP, str(experts), path="", release=release, HYPERGRID_ORDER=order)
    assert done.returncode == 0, done.stderr
    says = f"tensor-parallel ranks are consecutive, and here they are {ranks}"
    assert done.stderr.count("assumes that tensor-parallel ranks") == (ranks is not None)
    assert ranks is None or says in done.stderr
