"""Wrong arguments: refused in a sentence that names the argument, at once, nothing left behind.

What is promised holds for one release in this process, that of the installed megatron-core, and
for the others in processes of their own. ``scripts/fuzz`` runs far more of the same.
"""

import json
import math
import os
import time
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from compat import parallel_state as ps
from compat.megatron import communicators as nccl
from compat.megatron.releases import RELEASE
from compat.megatron.request import Request, lay_out
from compat.megatron.rows import PlannedRows
from hypergrid.layout import LayoutError
from tests.fuzzing import judging, wild
from tests.fuzzing.judging import NAMED, judge, words_missing
from tests.fuzzing.wild import CODE, MARKER, ArgumentSet, draw
from tests.parity.surface import DEFAULT_ORDER, parameters
from tests.support import table, warm
from tests.support.stock import MAIN, RELEASES, following, have_stock


def release_of_this_process():
    line = "{}.{}.".format(*RELEASE)
    return next((release for release in RELEASES if release.startswith(line)), "")


HERE = release_of_this_process()
OTHERS = [release for release in MAIN if release != HERE]

needs_stock = pytest.mark.skipif(not (HERE and have_stock(HERE)), reason="no source of stock")
quick = settings(
    deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

pytestmark = pytest.mark.usefixtures("clean_state")


def as_release(release, *command):
    """Run Python in a process of its own, where compat speaks as `release`."""
    return warm.run(*command, timeout=600, OMP_NUM_THREADS="1", **following(release))


@pytest.mark.parametrize("release", OTHERS)
def test_all_of_this_holds_for_other_releases(release):
    if not have_stock(release):
        pytest.skip(f"megatron-core {release} is not here")
    if os.environ.get("PYTEST_FUZZ_ALONE"):
        pytest.skip("each release asks for the others once")
    with mock.patch.dict(os.environ, PYTEST_FUZZ_ALONE="1"):
        done = as_release(release, "-m", "pytest", "-q", __file__)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("release", MAIN)
def test_random_argument_sets_give_no_complaint(release):
    if os.environ.get("PYTEST_FUZZ_ALONE") or not have_stock(release):
        pytest.skip(f"megatron-core {release} is not here, or has its turn elsewhere")
    command = ["scripts/fuzz", "--release", release, "-n", "100"]
    done = as_release(release, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{release} 100 sets, "), done.stdout


def call(wild, world=4, rank=0, **kwargs):
    config = {"world_size": world, "window": world, "kwargs": kwargs, "environment": {}}
    return ArgumentSet(HERE, config | {"kind": "sound", "positional": 0}, rank, wild)


def complaints(arguments, candidate=ps):
    _, texts = judge(arguments, candidate)
    return texts


@needs_stock
@quick
@given(rng=st.randoms(use_true_random=False))
def test_any_set_of_arguments_is_taken_or_refused_as_stock_does(rng):
    arguments = draw(rng, HERE)
    note(str(arguments))
    assert not complaints(arguments)


ANYTHING = st.one_of(
    st.none() | st.booleans() | st.integers(-5, 20) | st.integers() | st.floats(),
    st.text(max_size=20) | st.binary(max_size=5) | st.just("x" * 100_000),
    st.lists(st.integers(-2, 5) | st.text(max_size=3) | st.floats(), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@needs_stock
@quick
@given(name=st.sampled_from([*parameters(HERE or "0.16.1"), *wild.CHOICES]), value=ANYTHING)
def test_any_value_of_any_argument_is_taken_or_refused_as_stock_does(name, value):
    assert not complaints(call({name: value}))


@quick
@given(content=st.binary() | st.lists(st.sampled_from("{}[]:&*!-?|>'\"%@ \n<a1")).map("".join))
def test_any_content_of_a_configuration_file_is_read_or_refused_in_a_sentence(tmp_path, content):
    path = tmp_path / "options.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        nccl.check_mapping(str(path), nccl.read_configs(str(path), None))
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


FILES = {
    "a list": ("- dp", "must map names of groups to options, got ['dp']"),
    "nothing": ("", "got None"),
    "no YAML": ("dp: [1", "line 1: expected ',' or ']'"),
    "no text": (b"\xff\xff", "cannot be read: "),
    "a section of no options": ("dp:", "section 'dp' must map options to values"),
    "a text for a number": ("dp: {max_ctas: many}", "max_ctas of 'dp'"),
    "a number for a name": ("dp: {net_name: 5}", "net_name of 'dp'"),
    "code": (CODE, "constructor"),
    "a long file": ("#" + " " * (1 << 20), "longer than 1048576 characters"),
    "a bomb of aliases": (wild.bomb(12), "more than 40 aliases"),
    "a deep nest": ("[" * 60_000, "nested more than 20 deep"),
    "a deep nest of dashes": ("dp:\n  " + "- " * 60_000, "nested more than 20 deep"),
}


@pytest.mark.parametrize("content, words", FILES.values(), ids=FILES)
def test_a_bad_configuration_file_is_refused_at_once(fake_world, tmp_path, content, words):
    fake_world(4)
    path = tmp_path / "options.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.monotonic()
    assert words in refusal({"nccl_communicator_config_path": str(path)}, ValueError)
    assert time.monotonic() - started < 10
    assert not MARKER.exists()


def test_a_pipe_as_a_configuration_file_is_refused_and_not_waited_for(fake_world, tmp_path):
    fake_world(4)
    os.mkfifo(tmp_path / "pipe")
    with judging.limited(5):
        text = refusal({"nccl_communicator_config_path": tmp_path / "pipe"}, OSError)
    assert "not a regular file" in text


def test_only_known_options_reach_the_plan(fake_world, tmp_path):
    fake_world(4)
    path = tmp_path / "options.yaml"
    path.write_text("x: &x {max_ctas: 8}\ndp: {<<: *x, unknown: *x, 1: 2, net_name: IB}\n")
    request = Request(nccl_communicator_config_path=path)
    (row,) = (row for row in PlannedRows(request).plan.rows if row.label == "DATA_PARALLEL_GROUP")
    assert dict(row.options) == {"max_ctas": 8, "net_name": "IB"}


def test_options_without_an_nccl_in_torch_are_refused_in_a_sentence(fake_world, monkeypatch):
    fake_world(4)
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    text = refusal({"high_priority_stream_groups": ["dp"]}, AttributeError)
    assert "a torch that was built with NCCL" in text


@pytest.mark.parametrize(
    "number", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2)], ids=repr
)
def test_numbers_of_numpy_and_torch_are_as_good_as_plain_ones(fake_world, number):
    fake_world(8)
    names = ("tensor_model_parallel_size", "context_parallel_size", "distributed_timeout_minutes")
    request = Request(**dict.fromkeys(names, number), hierarchical_context_parallel_sizes=[number])
    plain = Request(**dict.fromkeys(names, 2), hierarchical_context_parallel_sizes=[2])
    proposal = json.dumps(PlannedRows(request).proposal())
    assert proposal == json.dumps(PlannedRows(plain).proposal())
    ps.initialize_model_parallel(number, number, create_gloo_process_groups=False)
    assert type(ps.get_tensor_model_parallel_world_size()) is int


def test_an_error_of_the_callers_function_comes_through_as_it_is(fake_world):
    fake_world(4)
    error = LookupError()

    def fail(ranks):
        raise error

    with pytest.raises(LookupError) as caught:
        ps.initialize_model_parallel(get_embedding_ranks=fail)
    assert caught.value is error
    assert not ps.is_initialized()


@pytest.mark.parametrize("order", ["tp-" * 50_000 + "tp", "x" * 10**6, "-" * 100_000])
def test_a_long_order_is_taken_or_refused_at_once_and_never_repeated_in_full(order):
    started = time.monotonic()
    sizes = dict.fromkeys(DEFAULT_ORDER.split("-"), 1)
    try:
        lay_out(order, sizes)
    except LayoutError as error:
        assert len(str(error)) < 1000
    assert time.monotonic() - started < 2


def raising(error):
    def initialize(**arguments):
        if arguments.get("order"):
            raise error
        ps.initialize_model_parallel(**arguments)

    return initialize


def hanging(**arguments):
    if arguments.get("order"):
        time.sleep(60)
    ps.initialize_model_parallel(**arguments)


def accepting(**arguments):
    ps.initialize_model_parallel(create_gloo_process_groups=False)


def leaving_a_group(**arguments):
    if arguments.get("order"):
        dist.new_group([0])
    ps.initialize_model_parallel(**arguments)


BROKEN = {
    "hangs": (hanging, "hang"),
    "raises a bare word": (raising(KeyError("zz")), "no sentence"),
    "uses another's words": (raising(KeyError("order 'zz' is wrong.")), "not our own words"),
    "names nothing": (raising(KeyError("Something went very wrong here.")), "names no argument"),
    "floods the log": (raising(KeyError("order " + "z" * 2000 + " is not.")), "a message of"),
    "accepts it": (accepting, "ours accepts"),
    "leaves a group": (leaving_a_group, "left behind: the group"),
}


def complaints_of(initialize, order):
    """The complaints about a module that initialises in its own way."""
    module = ModuleType("broken")
    for name in dir(ps):
        if not name.startswith("_"):
            setattr(module, name, getattr(ps, name))
    module.initialize_model_parallel = initialize
    with mock.patch.object(judging, "_PATIENCE", 0.5):
        return complaints(call({"order": order}), module)


@needs_stock
@pytest.mark.parametrize("initialize, complaint", BROKEN.values(), ids=BROKEN)
def test_the_judge_notices_one_that(initialize, complaint):
    texts = complaints_of(initialize, order="zz")
    assert any(complaint in text for text in texts), texts


@needs_stock
def test_the_judge_notices_one_that_refuses_what_stock_takes():
    texts = complaints_of(raising(ValueError("order is not right.")), order="pp-dp-ep-cp-tp")
    assert any("stock accepts" in text for text in texts)
