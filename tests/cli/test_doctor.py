"""`hypergrid doctor`: what this machine has, and what a job's own directory may not change."""

import os
import sys

import pytest

from compat.cli import machine
from tests.cli.test_cli import LINE, run
from tests.support import ROOT


def test_the_doctor_finds_this_machine_well():
    printed = run("doctor")
    for text in ("works: megatron.core.parallel_state is ours", "creation", "members", "gloo"):
        assert text in printed


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes packages, which the processes of the doctor find."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)

    return write


@pytest.fixture
def hostile_directory(package, tmp_path, monkeypatch):
    """The current directory, with packages that leave a file behind when they are imported."""
    for name in ("megatron", "megatron/core", "megatron/training"):
        package(name, "open('was_run', 'w').close()")
    (tmp_path / "megatron" / "training" / "arguments.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_verify_runs_only_a_checkout_that_is_named(hostile_directory):
    assert "Missing option '--checkout'" in run(f"verify --from-args '{LINE}'", 2)
    assert not (hostile_directory / "was_run").exists()


@pytest.mark.parametrize("path", [[], [""]], ids=["as installed", "as python -m"])
def test_the_doctor_imports_from_where_its_own_process_does(hostile_directory, monkeypatch, path):
    elsewhere = [place for place in sys.path if place not in ("", str(hostile_directory))]
    monkeypatch.setattr(sys, "path", [*path, *elsewhere])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    machine._trial()
    assert (hostile_directory / "was_run").exists() == bool(path)


def test_the_doctor_names_an_empty_transformer_engine_and_the_remedy(package):
    error = "RuntimeError('Found empty `transformer-engine` meta package')"
    package("transformer_engine", f"raise {error}")
    state, remedy = machine._trial()
    assert "empty `transformer-engine` meta package" in state
    assert "pip uninstall transformer-engine" in remedy


def test_the_doctor_gives_the_last_words_of_an_import_that_fails(package):
    package("einops", "raise OSError('libmagic.so: cannot open')")
    package("megatron", "import einops")
    state, remedy = machine._trial()
    assert state == "fails: OSError: libmagic.so: cannot open" and "Fix" in remedy
