"""Names that are private in torch are in one table, and a name that a torch lacks is reported."""

import ast
import inspect
import itertools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from compat import parallel_state as ps
from compat.cli.machine import examined
from compat.report import report
from hypergrid import of_torch
from hypergrid.groups import creation
from tests.support import ROOT
from tests.support.forked import on_ranks, sockets

OWN = ROOT / "hypergrid" / "of_torch.py"


@pytest.fixture(autouse=True)
def _looked_for_again():
    of_torch.has.cache_clear()
    yield
    of_torch.has.cache_clear()
    ps.destroy_model_parallel()


def _names_of_torch():
    """The private names that torch's modules and classes for groups have."""
    kinds = [c10d, c10d._world, torch._C, torch._C._distributed_c10d, dist.device_mesh.DeviceMesh]
    kinds += filter(inspect.isclass, vars(torch._C._distributed_c10d).values())
    names = {name for kind in kinds for name in dir(kind)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _of_torch_in(source):
    """What this source imports, reads, or asks for by its text, and is private in torch."""
    names = _names_of_torch()
    used = set()
    for node in ast.walk(ast.parse(source)):
        words = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            owner = getattr(node, "module", "torch")
            words = [f"{owner}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            words = [ast.unparse(node)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant):
                words = [f"{ast.unparse(owner)}.{name.value}"]
        for word in words:
            owner, _, last = word.rpartition(".")
            is_name = last in names and owner.split(".")[0] not in ("self", "cls", "os")
            if is_name or re.search(r"^torch\b.*\.(_(?!_)|distributed_c10d)", word):
                used.add(word)
    return used


def test_no_other_file_names_what_is_private_in_torch():
    files = [*(ROOT / "hypergrid").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    assert len(files) > 100
    for file in files:
        if file != OWN:
            assert _of_torch_in(file.read_text()) == set(), file


def test_every_private_name_that_is_used_is_in_the_table():
    listed = {"distributed_c10d", "_distributed_c10d", "_C"}
    for part in of_torch.PARTS.values():
        for name in part.names:
            listed.update(name.split("."))
    used = {word.rpartition(".")[2] for word in _of_torch_in(OWN.read_text())}
    assert len(used) > 15 and used <= listed, used - listed


def private_parts():
    """The row of doctor; the rows after it start processes."""
    return next(row for row in examined() if "private" in row[0])


def test_the_installed_torch_lacks_nothing_and_doctor_says_so():
    assert of_torch.lacking() == []
    _, state, remedy = private_parts()
    assert state == "all that are used are there; tested with torch 2.9 to 2.15"
    assert remedy == ""


def test_a_part_that_is_not_there_is_named_by_doctor_and_report_and_its_consequence(fake_world):
    fake_world(4)
    names = map("hash {}".format, itertools.count())
    with mock.patch.object(c10d, "_process_group_name", lambda *_, **__: next(names)):
        assert "running group number" in creation.abilities().obstacle
        ps.initialize_model_parallel(2)
        consequence = "every rank takes part in creating every group (torch "
        assert consequence in report(ps.current_state())
        ps.destroy_model_parallel()
        dist.destroy_process_group()  # doctor runs in no job
        _, state, remedy = private_parts()
        assert state.startswith(consequence) and remedy


def test_without_what_everything_needs_it_is_one_sentence(fake_world):
    fake_world(4)
    with (
        mock.patch.dict(of_torch.PARTS, groups=of_torch.PARTS["groups"]._replace(names=("_gone",))),
        pytest.raises(RuntimeError) as raised,
    ):
        ps.initialize_model_parallel(2)
    assert str(raised.value) == (
        f"no group can be created (torch {torch.__version__} has no _gone). Use torch 2.9 to 2.15, "
        f"or a newer hypergrid."
    )


@on_ranks(2)
def test_where_gloo_takes_no_devices_it_connects_at_once_and_the_report_says_so(rank):
    _, before = sockets()
    without = of_torch.PARTS["gloo"]._replace(names=("ProcessGroupGloo._Options._gone",))
    with mock.patch.dict(of_torch.PARTS, gloo=without):
        ps.initialize_model_parallel(connect="lazy")
        text = report(ps.current_state())
    assert sockets()[1] > before
    assert "connected at once: not every rank's torch can connect on first use" in text
    assert "gloo groups connect at once, whatever connect= says (torch" in text


@pytest.mark.parametrize("version", ["2.9.1+cu128", "2.13.0", "2.15.0", "2.16.0.dev20270101"])
def test_a_part_is_looked_for_in_the_lines_that_it_belongs_to(version):
    needed = of_torch.needed(version)
    minor = int(version.split(".")[1])
    assert ("torchcomms" in needed) == (minor >= 11) and ("timeouts" in needed) == (minor <= 13)
    assert ("lazy NCCL" in needed) == (minor >= 15) and "names" in needed
