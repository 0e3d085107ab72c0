"""Code of other projects has the effect on parallel_state that it has on stock Megatron."""

import functools
import json

import pytest

from tests.clients.programs import PROGRAMS, REAL
from tests.support import warm
from tests.support.stock import EACH_RELEASE, following, have_stock

TRAINS = "0.16.1"  # the release that real ranks try


@functools.cache
def differences_by_program(release, *how):
    """What differs, by program: all programs of a release in one process that speaks as it."""
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    environment = following(release) | {"OMP_NUM_THREADS": "1"}
    done = warm.run("-m", "tests.clients", release, *how, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("release", EACH_RELEASE)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_sees_what_it_sees_on_stock(program, release):
    differences, errors = differences_by_program(release)
    assert not differences[program], "\n".join([*differences[program][:20], errors[-2000:]])


@pytest.mark.parametrize("program", REAL)
def test_a_clients_real_ranks_communicate_as_on_stock(program):
    differences, errors = differences_by_program(TRAINS, "--real")
    assert not differences[program], "\n".join([*differences[program][:20], errors[-2000:]])
