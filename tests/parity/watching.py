"""Runs a program that uses a module, and asks the module everything after each of its steps."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.parity.comparing import Snapshot
from tests.parity.configurations import initialisation
from tests.parity.recording import Recorder, observed, raised
from tests.parity.surface import Config

Step = tuple[str, Any]  # its name, and what else is compared: a value, or several by name


@dataclass
class Client:
    """What a program works with: the module, and a world in which a configuration was chosen."""

    module: ModuleType
    config: Config
    release: str
    recorder: Recorder | None = None  # None on real ranks

    @property
    def sizes(self) -> dict[str, Any]:
        """The keyword arguments of the configuration."""
        return self.config["kwargs"]  # type: ignore[no-any-return]

    def initialise(self, **more: Any) -> None:
        """Call ``initialize_model_parallel`` with the configuration, and with `more`."""
        with tempfile.TemporaryDirectory() as folder:
            args, kwargs = initialisation(self.config, self.release, folder)
            self.module.initialize_model_parallel(*args, **kwargs, **more)


Behaviour = Callable[[Client], Iterator[Step]]


def watch(
    program: Behaviour, module: ModuleType, config: Config, rank: int, release: str
) -> Snapshot:
    """What `program` shows of `module` as one rank of a world that is not there."""
    recorder = Recorder(module, config, rank, release)
    is_in_a_world = config["world_size"] > 0
    client = Client(module, config, release, recorder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        if is_in_a_world:
            stack.enter_context(observed(recorder))
        warnings.simplefilter("ignore")
        snapshot = follow(program(client), recorder.ask_all)
        with contextlib.suppress(Exception):
            module.destroy_model_parallel()
    return snapshot | {"created": Counter(recorder.created), "groups": recorder.details}


def follow(steps: Iterator[Step], ask_all: Callable[[], dict[str, Any]]) -> Snapshot:
    """The answers after each step, and how the program ended; as ``snapshots.snapshot``."""
    answers = {"before": ask_all()}
    outcome: Any = "ok"
    assert isinstance(steps, Generator)
    with contextlib.closing(steps):
        try:
            for step, value in steps:
                values = value if isinstance(value, dict) else {"value": value}
                shown = {f"its own {name}": copy.deepcopy(part) for name, part in values.items()}
                answers[step] = shown | ask_all()
        except Exception as error:
            place = traceback.format_exc().splitlines()[-3].strip()
            outcome = raised(error) | {"message": f"{error} ({place})"}
    return {
        "outcome": outcome,
        "answers": answers,
        "created": Counter(),
        "groups": {},
    }
