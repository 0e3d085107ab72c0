"""The stand-in for NCCL: that it keeps its rules, and that each rule stands in torch's sources."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support import ROOT

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
