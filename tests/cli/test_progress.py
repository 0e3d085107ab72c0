"""On a terminal a command that takes long shows that it moves, and nothing of that stays."""

import os
import pty
import subprocess
import sys

import pytest

ERASES = b"\x1b[1A\x1b[2K"  # the line above


def on_a_terminal(command):
    """What a command prints to a standard error that is a terminal."""
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "hypergrid", *command]
    done = subprocess.run(program, stderr=theirs, stdout=subprocess.DEVNULL, timeout=100)
    os.close(theirs)
    printed = os.read(ours, 1 << 16)
    os.close(ours)
    return done.returncode, printed


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("check --suggest --world-size 64 --tp 8 --pp 2", b"Ranking all orders"),
        ("show --world-size 64 --tp 8", b"Laying out the table"),
        ("show --world-size 64 --tp 8 --html page.html", b"Writing page.html"),
    ],
)
def test_a_line_moves_on_a_terminal_and_is_gone_at_the_end(command, title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, printed = on_a_terminal(command.split())
    assert status in (0, 1) and title in printed and printed.endswith(ERASES)
    program = [sys.executable, "-m", "hypergrid", *command.split()]
    assert subprocess.run(program, capture_output=True, timeout=100).stderr == b""
