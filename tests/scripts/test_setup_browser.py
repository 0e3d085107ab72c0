"""scripts/dev/setup_browser says what it is about to install, and what to do where it cannot."""

import os
import shutil
import subprocess

import pytest

from tests.support import ROOT

BASH = shutil.which("bash")


def set_up(tmp_path, commands):
    """What it prints where only these commands are on PATH, each a line of shell."""
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!{BASH}\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [BASH, ROOT / "scripts" / "dev" / "setup_browser"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize("browser", ["chromium", "google-chrome"])
def test_where_there_is_a_browser_it_does_nothing(tmp_path, browser):
    assert set_up(tmp_path, {browser: "", "apt-get": "exit 1", "id": "echo 0"}) == ""


def test_without_root_it_installs_nothing_and_says_what_to_do(tmp_path):
    for commands in ({}, {"apt-get": f"echo called > {tmp_path}/called", "id": "echo 1000"}):
        said = set_up(tmp_path, commands)
        assert "need a browser" in said and "They are skipped" in said
        assert "Put one on PATH, which needs no root" in said and "apt-get install chromium" in said
    assert not (tmp_path / "called").exists()


def test_as_root_it_says_what_it_installs_before_it_does(tmp_path):
    said = set_up(tmp_path, {"apt-get": f'echo "$@" >> {tmp_path}/called', "id": "echo 0"})
    assert said.index("need a browser") < said.index("Installing one as root")
    assert "--no-install-recommends chromium" in (tmp_path / "called").read_text()
    assert "could not install it" in set_up(tmp_path, {"apt-get": "exit 1", "id": "echo 0"})
