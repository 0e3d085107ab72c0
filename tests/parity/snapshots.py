"""Everything that a module shows of one configuration as one rank, step by step."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.distributed_c10d as c10d

from tests.parity.configurations import CALLBACKS
from tests.parity.helpers import all_gather_groups, helpers
from tests.parity.recording import Recorder, observed, raised
from tests.parity.surface import (
    DEFAULT_ORDER,
    Call,
    Config,
    call,
    getter_calls,
    parameters,
    plain_calls,
    private_globals,
    public_functions,
    stage_calls,
)

Snapshot = dict[str, Any]
Answers = dict[str, Any]


def snapshot(module: ModuleType, config: Config, rank: int, release: str) -> Snapshot:
    """Everything that `module` shows of `config` as `rank`, as plain data.

    ``"outcome"`` is ``"ok"`` or what ``initialize_model_parallel`` raised; ``"answers"`` maps each
    step to its answers by the text of the call; ``"groups"`` and ``"created"`` say which groups
    were shown and made. The process is left as it was found.
    """
    recorder = Recorder(module, config, rank, release)
    answers: dict[str, Answers] = {}
    result: Snapshot = {"answers": answers, "groups": {}, "created": Counter()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = Recorder(module, config, rank, release)
        answers["without torch.distributed"] = alone.ask(plain_calls(release))
    with observed(recorder), tempfile.TemporaryDirectory() as folder:
        answers["before"] = _getters_and_globals(recorder)
        first = initialisation(config, release, folder)
        environment = dict(os.environ)
        try:
            module.initialize_model_parallel(*first[2], **first[3])
        except Exception as error:
            result["outcome"] = raised(error) | {"message": str(error)}
            with contextlib.suppress(Exception):
                module.destroy_model_parallel()
            return result
        result["outcome"] = "ok"
        result["created"] = Counter(recorder.created)
        answers["initialised"] = {
            "barriers": sorted(set(recorder.barriers)),
            "environment": sorted(set(os.environ.items()) ^ set(environment.items())),
        }
        steps: dict[str, Callable[[Recorder], Answers]] = {
            "shown": _getters_and_globals,
            "helpers": helpers,
            "all-gather": all_gather_groups,
            "setters": _setters,
            "again": lambda recorder: _again(recorder, first),
            "after": _after,
        }
        for step, take in steps.items():
            answers[step] = take(recorder)
        result["groups"] = recorder.details
    return result


def initialisation(config: Config, release: str, folder: str) -> Call:
    """The call of ``initialize_model_parallel``: callbacks and files in place of names."""
    kwargs = dict(config["kwargs"])
    for which in ("get_embedding_ranks", "get_position_embedding_ranks"):
        if which in kwargs:
            kwargs[which] = CALLBACKS[kwargs[which]]
    options = kwargs.get("nccl_communicator_config_path")
    if options is not None:
        path = Path(folder) / "communicators.yaml"
        kwargs["nccl_communicator_config_path"] = str(path)
        if not isinstance(options, str):
            path.write_text(json.dumps(options))
    leading = list(parameters(release).items())[: config["positional"]]
    args = [kwargs.pop(name, default) for name, default in leading]
    return "the same again", "initialize_model_parallel", tuple(args), kwargs


def _getters_and_globals(recorder: Recorder) -> Answers:
    """The answers of all getters, and all private globals."""
    shown = recorder.ask(getter_calls(recorder.release))
    for name in private_globals(recorder.release):
        try:
            value = getattr(recorder.module, name)
        except AttributeError as error:
            shown[name] = raised(error)
            continue
        listed = name == "_global_process_group_list" and value is not None
        shown[name] = recorder.kinds(value) if listed else recorder.show(value, name)
    return shown


def _setters(recorder: Recorder) -> Answers:
    """Each ``set_*`` with a value, zero and None, and what the numbers are then."""
    shown: Answers = {}
    plain = plain_calls(recorder.release)
    for name in public_functions(recorder.release):
        if not name.startswith("set_"):
            continue
        for value in (3, 0):
            setter_call = call(name, value)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                shown[setter_call[0]] = recorder.call(setter_call)
            shown[f"{setter_call[0]} warns"] = sorted({w.category.__name__ for w in caught})
            staged = stage_calls(recorder.release) if "pipeline" in name else ()
            answers = recorder.ask(plain + staged)
            shown |= {f"{setter_call[0]}, {label}": answer for label, answer in answers.items()}
        recorder.call(call(name, None))
    answers = recorder.ask(plain)
    return shown | {f"setters given None, {label}": a for label, a in answers.items()}


def _again(recorder: Recorder, first: Call) -> Answers:
    """A second initialisation without a destroy: which refusal comes first."""
    beyond = 2 * recorder.world + 1
    attempts: list[dict[str, Any]] = [
        {"tensor_model_parallel_size": beyond},
        {"expert_model_parallel_size": beyond},
        {"order": DEFAULT_ORDER + "-zz"},
        {"use_sharp": True, "sharp_enabled_group": "x"},
        {"virtual_pipeline_model_parallel_size": 2},
        {"num_distributed_optimizer_instances": beyond},
    ]
    return recorder.ask([first, *(call(first[1], **kwargs) for kwargs in attempts)])


def _after(recorder: Recorder) -> Answers:
    shown = recorder.ask([call("destroy_model_parallel")])
    alive = {id(group) for group in c10d._world.pg_map}
    shown["open groups"] = sorted(
        name for key, name in recorder.names.items() if key in alive and name[0] != "_"
    )
    shown |= _getters_and_globals(recorder)
    return shown | {"destroy again": recorder.call(call("destroy_model_parallel"))}
