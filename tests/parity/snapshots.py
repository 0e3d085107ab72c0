"""Everything that a module shows of one configuration as one rank, step by step."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed.distributed_c10d as c10d

from tests.parity.helpers import all_gather_groups, helpers
from tests.parity.recording import Recorder, raised
from tests.parity.surface import plain_calls, public_functions, stage_calls
from tests.parity.watching import Client, Step, watch
from tests.support import table

Answers = dict[str, Any]
AGAIN_CALLS = [text for (text,) in table("parity/again_calls.txt")]


def everything(client: Client) -> Iterator[Step]:
    """Initialise, call what makes groups, set numbers, initialise again, and destroy."""
    recorder = client.recorder
    assert recorder is not None
    environment = dict(os.environ)
    client.initialise()
    count = len(recorder.created)
    yield (
        "initialised",
        {
            "barriers": sorted(set(recorder.barriers)),
            "environment": sorted(set(os.environ.items()) ^ set(environment.items())),
        },
    )
    yield "used", helpers(recorder) | all_gather_groups(recorder) | _setters(recorder)
    # Stock is not whole after a refusal: nothing is asked in between.
    yield "destroyed", _again(client, recorder) | _destroyed(recorder)
    del recorder.created[count:]  # the helpers' groups have been compared


snapshot = functools.partial(watch, everything)


def _setters(recorder: Recorder) -> Answers:
    """Each ``set_*`` with a value, zero and None, and what the numbers are then."""
    shown: Answers = {}
    plain = plain_calls(recorder.release)
    for name in public_functions(recorder.release):
        if not name.startswith("set_"):
            continue
        for setter in (f"{name}(3)", f"{name}(0)"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                shown[setter] = recorder.call(setter)
            shown[f"{setter} warns"] = sorted({w.category.__name__ for w in caught})
            staged = stage_calls(recorder.release) if "pipeline" in name else ()
            answers = recorder.ask(plain + staged)
            shown |= {f"{setter}, {text}": answer for text, answer in answers.items()}
        recorder.call(f"{name}(None)")
    answers = recorder.ask(plain)
    return shown | {f"setters given None, {text}": answer for text, answer in answers.items()}


def _again(client: Client, recorder: Recorder) -> Answers:
    """A second initialisation without a destroy: which refusal comes first."""
    shown: Answers = {}
    try:
        client.initialise()
    except Exception as error:
        shown["the same"] = raised(error)
    return shown | recorder.ask(AGAIN_CALLS, beyond=2 * recorder.world + 1)


def _destroyed(recorder: Recorder) -> Answers:
    shown = recorder.ask(["destroy_global_memory_buffer()", "get_global_memory_buffer()"])
    shown["destroy"] = recorder.call("destroy_model_parallel()")
    alive = {id(group) for group in c10d._world.pg_map}
    shown["open groups"] = sorted(
        name for key, name in recorder.names.items() if key in alive and name[0] != "_"
    )
    return shown | {"destroy again": recorder.call("destroy_model_parallel()")}
