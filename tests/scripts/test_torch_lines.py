"""Names that are private in torch and used here, looked for in the sources of each line."""

import re

import pytest
import torch

from hypergrid import of_torch
from tests.support import ROOT

FILES = ("distributed_c10d.py", "device_mesh.py", "_distributed_c10d.pyi", "__init__.pyi")
FILES += ("fake_pg.py",)
LINES = ["2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]


def _text(version, name):
    file = ROOT / ".cache" / f"torch-{version}" / name
    if not file.exists():
        pytest.skip(f"torch {version} is not fetched: scripts/torch_lines fetches and checks")
    return file.read_text()


@pytest.mark.parametrize("version", LINES)
def test_every_part_that_is_looked_for_in_a_line_has_its_names_there(version):
    words = set()
    for file in FILES:
        words.update(re.findall(r"\w+", _text(version, file)))
    library = _text(version, "names")  # a name may be the end of a longer one
    missing = []
    for part, requirement in of_torch.needed(version).items():
        for name in requirement.names:
            for word in name.split("."):
                if word not in words and f"{word}\n" not in library:
                    missing.append(f"{part}: {name}")
    assert missing == []


def test_the_lines_that_are_checked_are_those_that_are_supported():
    lines = [version.rpartition(".")[0] for version in LINES]
    assert lines[0] == of_torch.OLDEST
    assert lines[-1] == of_torch.NEWEST
    minors = [int(line.partition(".")[2]) for line in lines]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert f'"torch>={of_torch.OLDEST}"' in (ROOT / "pyproject.toml").read_text()
    assert torch.__version__.startswith(tuple(lines))
