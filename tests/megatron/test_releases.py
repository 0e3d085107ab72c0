"""What differs by release: places and defaults of arguments, and which release this is."""

import importlib.util
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

from compat import parallel_state as ps
from compat import state
from compat.megatron import getters, releases, replaced
from compat.report import report
from tests.parity.surface import parameters, public_functions
from tests.support import ROOT, warm
from tests.support.forked import run_ranks
from tests.support.stock import RELEASES, have_stock


@pytest.fixture(params=RELEASES)
def speaking(request, monkeypatch):
    """A release, and compat.parallel_state as it is there."""
    if not have_stock(request.param):
        pytest.skip(f"run scripts/fetch_megatron {request.param}")
    version = tuple(map(int, request.param.split(".")[:2]))
    monkeypatch.setattr(releases, "RELEASE", version)
    for fact, span in releases.FACTS.items():
        monkeypatch.setitem(releases.HAS, fact, span[0] <= version <= span[1])
    # What the module tells of itself when it is loaded.
    for name in ("_home", "_at_home"):
        monkeypatch.setattr(state, name, getattr(state, name))
    monkeypatch.setattr(replaced, "_namespace", {})
    monkeypatch.setattr(replaced, "_own", {})
    copies = []
    for name, original in ((getters.__name__, getters), ("speaking", ps)):
        spec = importlib.util.spec_from_file_location(name, original.__file__)
        copies.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, name, copies[-1])
        spec.loader.exec_module(copies[-1])
        monkeypatch.setattr(state, "over", copies[0].over)
    return request.param, copies[1]


def test_what_a_release_takes_by_position_means_what_it_means_by_name(speaking, monkeypatch):
    release, module = speaking
    names = [name for name in parameters(release) if name != "order"]
    given = {name: object() for name in names} | {"order": "tp"}
    asked = []

    def request(**arguments):
        asked.append({name: arguments[name] for name in given})
        raise LookupError

    monkeypatch.setitem(vars(module), "Request", request)
    with pytest.raises(LookupError):
        module.initialize_model_parallel(*(given[name] for name in parameters(release)))
    with pytest.raises(LookupError):
        module.initialize_model_parallel(**given)
    assert asked == [given, given]


class Named:
    """A group or a list of ranks that answers with the name of its private global."""

    def __init__(self, name):
        self.rank = self.size = lambda: name


def _answer(getter, *args, **kwargs):
    try:
        return getter(*args, **kwargs)
    except Exception as error:
        return repr(error)


def test_getters_mean_the_same_by_position_and_by_name(speaking, monkeypatch):
    release, module = speaking
    for slot in state.SLOTS - {*state.OVERRIDE_SLOTS}:
        monkeypatch.setitem(vars(module), slot, Named(slot))
    monkeypatch.setitem(vars(module), "_numbers", {"a group": (0, 1)})
    answers = set()
    for name in public_functions(release):
        if name.startswith(("get_", "is_", "has_")) and name != "get_nccl_options":
            getter, arguments = getattr(module, name), [*parameters(release, name)]
            for chosen in [None, *arguments]:
                given = {each: each == chosen for each in arguments}
                answer = _answer(getter, *given.values())
                assert answer == _answer(getter, **given), (name, given)
                answers.add(str(answer))
    assert len(answers) > 30


def python(*command, path=(), **environment):
    path = os.pathsep.join([*map(str, path), str(ROOT)])
    return warm.run("-W", "always", *command, PYTHONPATH=path, **environment)


RELEASE = "import compat.parallel_state, compat.megatron.releases as r, sys; "
RELEASE += "print(r.RELEASE, sorted(n for n in sys.modules if n.startswith('megatron')))"


SURFACE = """
import sys, compat.parallel_state
from tests.parity.surface import compare_surface
print(*compare_surface(compat.parallel_state, sys.argv[1]), sep="\\n", end="")
"""


@pytest.mark.parametrize("release", RELEASES)
def test_every_function_has_its_releases_signature_and_every_global_is_there(release):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    done = python("-c", SURFACE, release, HYPERGRID_MEGATRON_RELEASE=release)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_an_unknown_release_is_taken_for_the_nearest_with_one_warning():
    for text, known, word in (("0.20.1", "(0, 19)", "newer"), ("0.11.0", "(0, 12)", "older")):
        done = python("-c", RELEASE, HYPERGRID_MEGATRON_RELEASE=text)
        assert done.stdout == f"{known} []\n", done.stderr
        assert done.stderr.count("UserWarning") == 1
        assert f"megatron-core {text} is {word} than" in done.stderr
    done = python("-c", RELEASE, HYPERGRID_MEGATRON_RELEASE="0.19.2")
    assert (done.stdout, done.stderr) == ("(0, 19) []\n", "")


def test_the_release_of_a_checkout_on_the_path_is_read_and_not_imported(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('it was imported')")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 14\nPATCH = 7\n")
    done = python("-c", RELEASE, path=[tmp_path], HYPERGRID_MEGATRON_RELEASE="")
    assert done.stdout == "(0, 14) []\n", done.stderr
    done = python("-c", RELEASE, path=[tmp_path], HYPERGRID_MEGATRON_RELEASE="0.13.1")
    assert done.stdout == "(0, 13) []\n", done.stderr


def test_an_encoder_feeds_the_pipelines_of_the_decoder(fake_world):
    fake_world(6, rank=1)
    # Two encoder ranks; behind them tp=2 dp=2: each feeds both halves of its model's tensors.
    ps.initialize_model_parallel(
        2, encoder_tensor_model_parallel_size=1, encoder_pipeline_model_parallel_size=1
    )
    try:
        groups = ps.get_pipeline_model_parallel_group()
        assert [dist.get_process_group_ranks(group) for group in groups] == [[1, 4], [1, 5]]
        assert ps.get_pipeline_model_parallel_next_rank() == [4, 5]
        assert ps.get_pipeline_model_parallel_first_rank() == 1
        assert (ps.get_pipeline_model_parallel_rank(), ps.is_pipeline_first_stage()) == (0, True)
        assert (ps.is_inside_encoder(), ps.is_inside_decoder()) == (True, False)
        assert ps.get_tensor_model_parallel_world_size() == 1
        state = ps.current_state()
        assert "of the encoder" in repr(state)
        assert "; encoder RankLayout(" in report(state)
        state.suspend("recreate")
        assert ps.get_pipeline_model_parallel_world_size() == 2
        state.resume()
        assert ps.get_pipeline_model_parallel_next_rank() == [4, 5]
        assert [group.size() for group in ps.get_pipeline_model_parallel_group()] == [2, 2]
        assert {*state._global_process_group_list[1:]} <= {*dist.distributed_c10d._world.pg_map}
    finally:
        ps.destroy_model_parallel()


@pytest.mark.parametrize("deprecated", [False, True])
def test_from_0_13_on_an_encoder_is_told_to_go(fake_world, monkeypatch, deprecated):
    monkeypatch.setitem(releases.HAS, "encoder_deprecated", deprecated)
    fake_world(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.initialize_model_parallel(encoder_pipeline_model_parallel_size=1)
        asked = [ps.is_inside_encoder(), ps.is_inside_decoder(0), ps.is_pipeline_stage_at_split()]
    ps.destroy_model_parallel()
    told = [w for w in caught if issubclass(w.category, DeprecationWarning)]
    assert asked == [True, False, True]
    assert [w.filename == __file__ for w in told[1:4]] == [True] * (3 * deprecated)
    assert bool(told) == deprecated


def _collectives(rank):
    ps.initialize_model_parallel(
        2, encoder_tensor_model_parallel_size=1, encoder_pipeline_model_parallel_size=2
    )
    # By the pool: of the groups that share an encoder's rank, the getters know the last alone.
    for pooled in ps.current_state().pool.groups:
        total = torch.tensor([2.0**rank])
        dist.all_reduce(total, group=pooled.group)
        assert total.item() == sum(2.0**member for member in pooled.ranks), pooled
    pipelines = ps.get_pipeline_model_parallel_group()
    ps.destroy_model_parallel()
    return len(pipelines) if isinstance(pipelines, list) else 1


def test_real_ranks_of_encoder_and_decoder_pass_collectives_on_every_group():
    assert run_ranks(8, _collectives) == [2] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"encoder_tensor_model_parallel_size": 3}, "is more than tensor_model_parallel_size=2"),
        ({"encoder_pipeline_model_parallel_size": 2}, "2 and its encoder of .* = 4 = 6: it leaves"),
        ({"encoder_pipeline_model_parallel_size": -1}, "at least 0 \\(no encoder\\)"),
        ({"pipeline_model_parallel_split_rank": 4}, "split_rank=4 for a pipeline of 1"),
    ],
)
def test_an_encoder_that_cannot_be_is_refused(fake_world, arguments, says):
    fake_world(8)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError), match=says):
        ps.initialize_model_parallel(2, **arguments)
