"""Differences between releases: names and arguments, and which release this is."""

import os

import pytest

from compat.megatron import releases
from hypergrid import of_torch
from tests.support import ROOT, warm
from tests.support.stock import PUBLISHED, RELEASES, following, have_stock, source


def python(*command, path=(), **environment):
    environment = {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])} | environment
    return warm.run("-W", "always", *command, **environment)


RELEASE = "import compat.parallel_state, compat.megatron.releases as r, sys; "
RELEASE += "print(r.RELEASE, sorted(n for n in sys.modules if n.startswith('megatron')))"


SURFACE = """
import inspect, sys, compat.parallel_state as ours
from tests.parity.surface import compare_surface, parameters, private_globals, public_functions
from tests.support.stock import RELEASES, have_stock
release = sys.argv[1]
print(*compare_surface(ours, release), sep="\\n", end="")
names = lambda release: {*public_functions(release), *private_globals(release)}
others = set().union(*(names(each) for each in RELEASES if have_stock(each)))
print(*(f"of another release: {n}" for n in others - names(release) if hasattr(ours, n)), sep="\\n")
for name in public_functions(release):
    known = [r for r in RELEASES if have_stock(r) and name in public_functions(r)]
    taken = {*inspect.signature(getattr(ours, name)).parameters}
    for argument in {each for r in known for each in parameters(r, name)} - taken:
        try:
            getattr(ours, name)(**{argument: None})
        except TypeError as error:
            assert argument in str(error) or "required" in str(error), (name, argument, error)
        else:
            print(f"{name} takes {argument}")
"""


@pytest.mark.parametrize("release", RELEASES)
def test_every_function_has_its_releases_signature_and_every_global_is_there(release):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    ways = [following(release)]
    if release in PUBLISHED:
        ways.append({"HYPERGRID_MEGATRON_RELEASE": release})  # its number, without a source
    for way in ways:
        done = python("-c", SURFACE, release, **way)
        assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


STRICT = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import compat
compat.install()
from compat import audit, collection
from compat.state import ParallelState
from megatron.core import parallel_state as ps
from megatron.core.process_groups_config import ProcessGroupCollection
dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
with audit.recording(sys.argv[1]):
    ps.initialize_model_parallel(2, 2, num_distributed_optimizer_instances=2)
    state = ps.current_state()
    theirs = vars(ProcessGroupCollection.use_mpu_process_groups())
    ours = vars(collection.from_state(state))
    assert ours and all(ours[name] is group for name, group in theirs.items() if name in ours)
    state.suspend()
    state.resume()
    assert ps.get_data_parallel_world_size() == 4
    ps.destroy_model_parallel()
    assert not ps.is_initialized()
try:
    ParallelState.create(gtp_remat_size=2)
except TypeError as error:
    print(error)
"""


def test_states_collections_and_the_audit_need_no_name_of_another_release(tmp_path):
    done = python("-W", "ignore", "-c", STRICT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gtp_remat_size is no argument of megatron-core 0.16, which")
    assert "set HYPERGRID_MEGATRON_RELEASE to a release that has it" in done.stdout


def test_a_newer_release_is_taken_for_the_newest_with_one_warning():
    done = python("-c", RELEASE, HYPERGRID_MEGATRON_RELEASE="0.99.1")
    assert done.stdout == f"(0, {releases.NEWEST[1]}) []\n", done.stderr
    assert done.stderr.count("UserWarning") == 1
    assert "megatron-core 0.99.1 is newer than" in done.stderr
    done = python("-c", RELEASE, HYPERGRID_MEGATRON_RELEASE=PUBLISHED[-1])
    assert done.stderr == ""


def test_the_window_of_support_is_the_same_wherever_it_is_written():
    oldest = "{}.{}".format(*releases.OLDEST)
    assert PUBLISHED[0].startswith(f"{oldest}.")
    assert f'"megatron-core>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    window = (ROOT / "docs" / "coverage.md").read_text().partition("## The window of support")[2]
    assert f"| megatron-core | {PUBLISHED[0]}, of the" in window
    assert f"hypergrid-comm=={releases.LAST_WITH_OLDER}" in window
    assert f"| torch | {of_torch.OLDEST} | {of_torch.NEWEST} |" in window


def checkout(directory, version, text=None):
    """A folder for ``sys.path`` with a megatron.core that must not be imported."""
    core = directory / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('it was imported')")
    (core / "package_info.py").write_text("MAJOR = {}\nMINOR = {}\n".format(*version.split(".")))
    if text is not None:
        (core / "parallel_state.py").write_text(text)
    return directory


def test_the_release_of_a_checkout_on_the_path_is_read_and_not_imported(tmp_path):
    path = [checkout(tmp_path, "0.14")]
    done = python("-c", RELEASE, path=path, HYPERGRID_MEGATRON_RELEASE="")
    assert done.stdout == "(0, 14) []\n", done.stderr
    done = python("-c", RELEASE, path=path, HYPERGRID_MEGATRON_RELEASE="0.15.3")
    assert done.stdout == "(0, 15) []\n", done.stderr


def test_a_release_before_the_window_is_refused_by_name_wherever_it_comes_from(tmp_path):
    path = [checkout(tmp_path, "0.13")]
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("")
    asked = {"HYPERGRID_MEGATRON_RELEASE": "0.13"}
    plan = ("-m", "hypergrid", "plan", "--world-size", "8")
    for origin, command, how in (
        ("installed", ("-c", RELEASE), {"path": path}),
        ("HYPERGRID_MEGATRON_RELEASE", ("-c", RELEASE), asked),
        ("installed", plan, {"path": path}),
        ("--megatron", (*plan, "--megatron", "0.13"), {}),
    ):
        done = python(*command, **how)
        assert done.returncode == (2 if "hypergrid" in command else 1)
        text = " ".join(done.stderr.replace("│", " ").split())
        assert f"megatron-core 0.13 ({origin}) is older than 0.14" in text, text
        assert "hypergrid-comm 0.1.0 was the last to follow it" in text
        assert "Traceback" not in text or "hypergrid" not in command
    done = python("-c", RELEASE, path=path, HYPERGRID_MEGATRON_RELEASE="0.14")
    assert done.stdout == "(0, 14) []\n", done.stderr


@pytest.mark.parametrize("release", PUBLISHED)
def test_the_file_and_not_the_version_says_which_release_it_is(release, tmp_path):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    path = [checkout(tmp_path, "0.17", source(release))]  # as 0.16.0rc0 has 0.15.3's
    done = python("-c", RELEASE, path=path)
    same = {release.split(".")[1], str(releases.NEWEST[1]) if release == PUBLISHED[-1] else ""}
    assert done.stdout in {f"(0, {minor}) []\n" for minor in same}, done.stderr


SWAPPED = """
import compat
compat.install()
try:
    from megatron.core import parallel_state
except ImportError as error:
    print(error)
"""
MORE = """
_ROUTER_GROUP = None


def get_router_group(check_initialized=True):
    return _ROUTER_GROUP
"""


def test_a_source_with_unknown_names_is_not_replaced_unless_a_release_is_asked_for(tmp_path):
    text = source("0.16.1")
    head = "def get_context_parallel_group(check_initialized=True"
    path = [checkout(tmp_path, "0.16", text.replace(head, f"{head}, of_router=False") + MORE)]
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("")
    done = python("-c", SWAPPED, path=path)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("RuntimeError")]
    assert error.count(" is unknown") == 2
    other = "get_context_parallel_group(check_initialized=True, of_router=False) is get_context_"
    for name in "_ROUTER_GROUP", "get_router_group(check_initialized=True)", other:
        assert name in error
    assert "set HYPERGRID_MEGATRON_RELEASE=0.16." in error
    done = python("-c", SWAPPED, path=path, HYPERGRID_MEGATRON_RELEASE="0.16")
    assert done.returncode == 0 and done.stderr.count("UserWarning") == 1
    assert "_ROUTER_GROUP" in done.stderr
