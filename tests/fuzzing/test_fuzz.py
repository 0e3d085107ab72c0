"""Wrong arguments: refused in a sentence that names the argument, at once, nothing left behind.

``scripts/fuzz`` runs far more of the same.
"""

import math
import time
from types import ModuleType
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compat import parallel_state as ps
from compat.megatron import communicators as nccl
from compat.megatron.releases import RELEASE
from compat.megatron.request import Request
from tests.fuzzing import judging
from tests.fuzzing.judging import NAMED, judge, words_missing
from tests.fuzzing.wild import MARKER, ArgumentSet, Value
from tests.support import table, warm
from tests.support.stock import MAIN, RELEASES, have_stock

LINE = "{}.{}.".format(*RELEASE)
HERE = next((release for release in RELEASES if release.startswith(LINE)), "")
needs_stock = pytest.mark.skipif(not (HERE and have_stock(HERE)), reason="no source of stock")

pytestmark = pytest.mark.usefixtures("clean_state")


@pytest.mark.parametrize("release", MAIN)
def test_random_argument_sets_give_no_complaint(release):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    command = ["scripts/fuzz", "--release", release, "-n", "150"]
    done = warm.run(*command, timeout=600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{release} 150 sets, "), done.stdout


@settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary() | st.lists(st.sampled_from("{}[]:&*!-?|>'\"%@ \n<a1")).map("".join))
def test_any_content_of_a_configuration_file_is_read_or_refused_in_a_sentence(tmp_path, content):
    path = Value(f"file({content!r})").make(tmp_path)
    try:
        nccl.read_configs(path, None)
    except Exception as error:
        assert not words_missing(error, ["nccl_communicator_config_path"])


def refusal(arguments, kind):
    with pytest.raises(kind) as caught:
        ps.initialize_model_parallel(**arguments)
    assert not words_missing(caught.value, [*Request.__dataclass_fields__, *NAMED])
    return str(caught.value)


REFUSED = {title: row for title, *row in table("fuzzing/refusals.txt")}


@pytest.mark.parametrize("arguments, kind, words", REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_argument_and_says_what_to_change(fake_world, arguments, kind, words):
    fake_world(4)
    arguments = eval(f"dict({arguments})", {"inf": math.inf, "nan": math.nan})
    assert words in refusal({"create_gloo_process_groups": False, **arguments}, eval(kind))


@pytest.mark.parametrize("content, words", table("fuzzing/refused_files.txt"))
def test_a_bad_configuration_file_is_refused_at_once(fake_world, tmp_path, content, words):
    fake_world(4)
    path = Value(f"file({content})").make(tmp_path)
    started = time.monotonic()
    assert words in refusal({"nccl_communicator_config_path": path}, ValueError)
    assert time.monotonic() - started < 10
    assert not MARKER.exists()


def test_a_pipe_as_a_configuration_file_is_refused_and_not_waited_for(fake_world, tmp_path):
    fake_world(4)
    with judging.limited(5):
        text = refusal({"nccl_communicator_config_path": Value("pipe()").make(tmp_path)}, OSError)
    assert "not a regular file" in text


def test_options_without_an_nccl_in_torch_are_refused_in_a_sentence(fake_world, monkeypatch):
    fake_world(4)
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    text = refusal({"high_priority_stream_groups": ["dp"]}, AttributeError)
    assert "a torch that was built with NCCL" in text


def test_an_error_of_the_callers_function_comes_through_as_it_is(fake_world):
    fake_world(4)
    error = LookupError()

    def fail(ranks):
        raise error

    with pytest.raises(LookupError) as caught:
        ps.initialize_model_parallel(get_embedding_ranks=fail)
    assert caught.value is error
    assert not ps.is_initialized()


def broken(fault):
    """An initialisation to which `fault` happens where an order is passed."""

    def initialize(**arguments):
        if arguments.get("order"):
            fault()
        ps.initialize_model_parallel(**arguments)

    return initialize


def raising(error):
    return broken(mock.Mock(side_effect=error))


def accepting(**arguments):
    ps.initialize_model_parallel(create_gloo_process_groups=False)


BROKEN = {
    "hangs": (broken(lambda: time.sleep(60)), "hang"),
    "raises a bare word": (raising(KeyError("zz")), "no sentence"),
    "uses another's words": (raising(KeyError("order 'zz' is wrong.")), "not our own words"),
    "names nothing": (raising(KeyError("Something went very wrong here.")), "names no argument"),
    "floods the log": (raising(KeyError("order " + "z" * 2000 + " is not.")), "a message of"),
    "accepts it": (accepting, "ours accepts"),
    "leaves a group": (broken(lambda: dist.new_group([0])), "left behind: the group"),
}


def complaints_of(initialize, order):
    """The complaints about a module that initialises in its own way."""
    module = ModuleType("broken")
    for name in dir(ps):
        if not name.startswith("_"):
            setattr(module, name, getattr(ps, name))
    module.initialize_model_parallel = initialize
    config = {"world_size": 4, "kwargs": {}, "environment": {}, "kind": "sound", "positional": 0}
    with mock.patch.object(judging, "_PATIENCE", 0.5):
        _, texts = judge(ArgumentSet(HERE, config, 0, {"order": Value(repr(order))}), module)
    return texts


@needs_stock
@pytest.mark.parametrize("initialize, complaint", BROKEN.values(), ids=BROKEN)
def test_the_judge_notices_one_that(initialize, complaint):
    texts = complaints_of(initialize, order="zz")
    assert any(complaint in text for text in texts), texts


@needs_stock
def test_the_judge_notices_one_that_refuses_what_stock_takes():
    texts = complaints_of(raising(ValueError("order is not right.")), order="pp-dp-ep-cp-tp")
    assert any("stock accepts" in text for text in texts)
