"""The stand-in for NCCL: that it keeps its rules, and that each rule stands in torch's sources."""

import os
import threading
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support import ROOT
from tests.support.forked import from_all, on_ranks
from tests.support.nccl_rules import DEVICE, start

SOURCES = sorted(ROOT.glob(".cache/torch/*/lib/python*/site-packages/torch"))


class Rule(NamedTuple):
    """A paragraph of ``nccl_rules.txt``."""

    name: str
    says: str
    file: str
    words: str
    lines: str = "2.9 to 3.0"

    def is_of(self, release):
        first, last = (self.numbers(line) for line in self.lines.split(" to "))
        return first <= self.numbers(release) <= last

    @staticmethod
    def numbers(version):
        return tuple(map(int, version.split(".")[:2]))


_, *PARAGRAPHS = (ROOT / "tests/support/nccl_rules.txt").read_text().split("\n\n")
RULES = [Rule(*paragraph.splitlines()) for paragraph in PARAGRAPHS]


def plain(text):
    """The words of a text, without line ends and the marks of comments."""
    return " ".join(" ".join(line.strip().lstrip("/#* ") for line in text.splitlines()).split())


def readable():
    folder = Path(torch.__file__).parent
    yield torch.__version__, folder
    for source in SOURCES:
        yield source.parents[3].name, source


@pytest.mark.parametrize(("release", "folder"), readable(), ids=lambda value: str(value)[-12:])
def test_each_rule_stands_in_the_files_of_torch(release, folder):
    installed = ("include/", "distributed/")
    if (folder / "../nvidia/nccl").exists():
        installed += ("../nvidia/",)
    checked = [rule for rule in RULES if rule.is_of(release) and rule.file.startswith(installed)]
    for rule in checked:
        assert plain(rule.words) in plain((folder / rule.file).read_text()), rule.name
    assert len(checked) > 7


def hangs(call):
    """Whether a call in a thread of its own has not returned after a while."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.5)
    return thread.is_alive()


@on_ranks(2, backend="")
def test_wait_blocks_no_cpu_and_kernels_that_are_aborted_raise_nothing(rank):
    world = start(rank, 2)
    total = torch.ones(1)
    dist.all_reduce(total)
    DEVICE.synchronize()
    assert total.item() == 2
    if rank == 0:
        dist.all_reduce(total)  # returns: it orders the stream
        assert hangs(DEVICE.synchronize)
        world.abort()
        DEVICE.synchronize()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            dist.all_reduce(total)
    from_all(None)


@on_ranks(2, backend="")
def test_connecting_has_no_limit_but_for_one_that_does_not_block(rank):
    world = start(rank, 2)
    assert not world.communicators
    if rank == 0:
        assert hangs(lambda: dist.all_reduce(torch.ones(1)))
        os.environ.update(TORCH_NCCL_USE_COMM_NONBLOCKING="1", TORCH_NCCL_NONBLOCKING_TIMEOUT="1")
        with pytest.raises(dist.DistBackendError, match="timeout"):
            dist.all_reduce(torch.ones(1))
    from_all(None)


@on_ranks(3, backend="")
def test_a_split_needs_every_rank_holds_the_parents_lock_and_goes_by_colour(rank):
    world = start(rank, 3, kind="nccl, bound")
    split = dist.new_group([0, 1])
    assert (split is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 2)
    with mock.patch.object(c10d, "_process_group_color", return_value=7):
        merged = dist.new_group([[0, 1], [2]][rank // 2])
    summand = torch.ones(1)
    merged.allreduce([summand]).wait()
    DEVICE.synchronize()
    assert merged.size() < summand.item() == 3
    from_all(None)
    if rank == 0:
        assert hangs(lambda: dist.new_group([0, 1]))
        assert hangs(world.abort)
    from_all(None)


@on_ranks(2, backend="")
def test_an_abort_waits_for_the_kernels_of_other_groups(rank):
    world = start(rank, 2)
    other = dist.new_group([0, 1])
    for group in (world, other):
        dist.all_reduce(torch.ones(1), group=group)
    DEVICE.synchronize()
    from_all(None)
    if rank == 0:
        for group in (world, other):
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert hangs(world.abort)
        other.abort()
        assert not hangs(world.abort)
    from_all(None)
