"""What README says that a command prints is what it prints."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypergrid.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = [
    (page.name, block)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for block in re.findall(r"```console\n\$ hypergrid (.*?)```", page.read_text(), re.S)
]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=lambda text: text[:40])
def test_a_console_block_shows_what_the_command_prints(page, block):
    # The command ends where its quotes are closed.
    lines, command = block.splitlines(), ""
    while not command or command.count('"') % 2:
        command += lines.pop(0) + "\n"
    done = CliRunner().invoke(app, shlex.split(command), env={"NO_COLOR": "1", "COLUMNS": "80"})
    printed = [line.rstrip() for line in done.output.rstrip().splitlines()]
    assert printed == [line.rstrip() for line in lines], page
