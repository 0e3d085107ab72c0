"""Wrong arguments: refused in a sentence that names the argument, at once, nothing left behind.

``scripts/parity --wild`` runs far more of the same.
"""

import math
from unittest import mock

import pytest
import torch.distributed as dist

from compat import parallel_state as ps
from compat.megatron.request import Request
from tests.fuzzing.wild import NAMED, Value, limited, words_missing
from tests.support import table

pytestmark = pytest.mark.usefixtures("clean_state")


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
    path = Value(content).make(tmp_path)
    # One that is waited for ends the test, and one that runs code is seen.
    with limited(10), mock.patch("os.system") as command:
        assert words in refusal({"nccl_communicator_config_path": path}, (ValueError, OSError))
    assert not command.called


def test_options_without_an_nccl_in_torch_are_refused_in_a_sentence(fake_world, monkeypatch):
    fake_world(4)
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    text = refusal({"high_priority_stream_groups": ["dp"]}, AttributeError)
    assert "a torch that was built with NCCL" in text


def test_an_error_of_the_callers_function_comes_through_as_it_is(fake_world):
    fake_world(4)
    fail = mock.Mock(side_effect=LookupError())
    with pytest.raises(LookupError) as caught:
        ps.initialize_model_parallel(get_embedding_ranks=fail)
    assert caught.value is fail.side_effect
    assert not ps.is_initialized()
