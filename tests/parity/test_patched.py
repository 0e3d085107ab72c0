"""Outside code writes private globals and replaces functions: as on stock, for every release."""

import functools

import pytest

from tests.parity.patching import run_patched
from tests.parity.repairs import replaced
from tests.parity.test_parity import compare
from tests.support.stock import EACH_RELEASE, have_stock, load_stock


@pytest.mark.parametrize("release", EACH_RELEASE)
def test_whatever_is_written_or_replaced_getters_answer_as_stock(release):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    compare(release, "--patched", n=1, world=16)


# What a module gets wrong that does not ask itself: stock, edited so.
DEAF = {
    "a getter that reads the global beside it": (
        "return get_context_parallel_group().rank()",
        "return _CONTEXT_PARALLEL_GROUP.rank() if _CONTEXT_PARALLEL_GROUP else 0",
    ),
    "a getter that reads another global": (
        "return _DATA_PARALLEL_GROUP_GLOO",
        "return _DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    ),
}


@pytest.mark.parametrize("edit", DEAF)
def test_a_module_that_does_not_listen_is_noticed(edit):
    deaf = functools.partial(load_stock, "0.16.1", replaced(DEAF[edit]))
    assert run_patched(deaf, "0.16.1", n=1, seed=1, max_world=16).differences
