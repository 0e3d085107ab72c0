"""Stock and a candidate beside each other while outside code writes, or replaces, what is theirs.

A module is asked everything after each single change: a private global written, a getter or a
helper replaced. Whatever stock answers then, the candidate has to answer.
"""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.parity.comparing import same_refusal
from tests.parity.configurations import random_config
from tests.parity.helpers import all_gather_groups
from tests.parity.recording import Recorder, _Options, observed, options_content
from tests.parity.repairs import repaired_stocks
from tests.parity.running import Report, fresh
from tests.parity.snapshots import initialisation
from tests.parity.surface import (
    Config,
    getter_calls,
    parameters,
    private_globals,
)
from tests.support.stock import load_stock

Answers = dict[str, Any]
OPTIONS = "get_nccl_options"
CREATORS = (
    *("create_group", "create_hierarchical_groups", "create_hierarchical_parallel_groups"),
    *("create_hybrid_dp_cp_groups", "create_dynamic_dp_cp_groups"),
)
HELPERS = (
    *(*CREATORS, OPTIONS, "RankGenerator", "generate_masked_orthogonal_rank_groups"),
    *("default_embedding_ranks", "default_position_embedding_ranks", "overwrite_nccl_comm_cfgs"),
    "_set_global_memory_buffer",
)
# What stock raises when it stumbles over a value, and not to refuse it.
ACCIDENTS = {"AttributeError", "IndexError", "KeyError", "UnboundLocalError"}


class Stub:
    """No group, but it has what numbers are asked of, as a client's own wrapper may."""

    def rank(self) -> int:
        return 2

    def size(self) -> int:
        return 5


def getters(release: str) -> list[str]:
    """The public functions that only answer."""
    return list(dict.fromkeys(call[1] for call in getter_calls(release)))


def written(name: str, sentinel: Any) -> list[Any]:
    """What outside code may put into the private global `name`."""
    if name.endswith("_GROUPS"):
        many = {2: sentinel, 4: sentinel} if "_DP_CP_" in name else [sentinel, sentinel]
        return [many, type(many)(), None]
    if "_GROUP" in name and name.endswith(("GROUP", "GLOO", "CP", "AG", "REMAT", "EGTP")):
        return [sentinel, Stub(), None]
    if name.endswith(("_GLOBAL_RANKS", "_GLOBAL_RANKS_WITH_CP", "_PARALLEL_RANKS")):
        return [[5, 3, 1], [0], None]
    if name == "_global_process_group_list":
        return [[None, sentinel], None]
    if name.endswith(("_RANK", "_WORLD_SIZE", "_START")):
        return [1, 0, None]
    return [{"by": "a client"}, None]


def answered(name: str, sentinel: Any) -> list[Any]:
    """What a client's own version of the getter `name` may answer."""
    if name.startswith(("is_", "has_")) or name.endswith("_initialized"):
        return [True, False]
    if name.endswith(("_group", "_gloo")) or "parallel_groups" in name:
        return [sentinel, Stub(), None]
    return [[5, 3, 1]] if name.endswith("_ranks") else [1, 0]


class Session:
    """A module during initialisations as one rank; asked again after each change."""

    def __init__(
        self, fresh: Callable[[], ModuleType], config: Config, rank: int, release: str
    ) -> None:
        self.fresh, self.config, self.rank, self.release = fresh, config, rank, release
        self.answers: dict[str, Answers] = {}

    def run(self) -> dict[str, Answers]:
        """All answers by what was changed before they were given."""
        helper_names = [name for name in HELPERS if hasattr(load_stock(self.release), name)]
        sets = [(name,) for name in helper_names] + [("create_group", OPTIONS), tuple(helper_names)]
        for names in sets:
            for replace in (listening, changing):
                with self.observed():
                    heard = self.replace_helpers(replace, names)
                    self.initialise(f"{replace.__name__} {', '.join(names)}", heard)
        with self.observed():
            heard = []
            listener = listening(self.module, "create_group", self.recorder.new_group, heard)
            with mock.patch.object(dist, "new_group", listener):
                self.initialise("new_group is listened to", heard)
        with self.observed():
            self.sentinel = self.recorder._new_group([self.rank], backend="fake")
            self.recorder.names[id(self.sentinel)] = "what was written"
            self.changes("before")
            self.call_initialise()
            self.ask("initialised")  # names the groups, by the getters that show them
            self.changes("initialised")
            self.module.destroy_model_parallel()
        return self.answers

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        self.module = self.fresh()
        originals = dict(vars(self.module))
        self.recorder = Recorder(self.module, self.config, self.rank, self.release)
        with warnings.catch_warnings(), observed(self.recorder):
            warnings.simplefilter("ignore")
            yield
            for name in HELPERS:
                if name in originals:
                    setattr(self.module, name, originals[name])

    def replace_helpers(
        self, replace: Callable[..., Any], names: tuple[str, ...]
    ) -> list[tuple[str, Any]]:
        heard: list[tuple[str, Any]] = []
        for name in names:
            original = getattr(self.module, name)
            setattr(self.module, name, replace(self.module, name, original, heard))
        return heard

    def call_initialise(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _, name, args, kwargs = initialisation(self.config, self.release, folder)
            getattr(self.module, name)(*args, **kwargs)

    def initialise(self, step: str, heard: list[tuple[str, Any]]) -> None:
        self.call_initialise()
        self.ask(step)
        shown = self.answers[step]
        if not any("gtp_remat" in name for name in self.config["kwargs"]):  # see `repairs`
            shown |= {f"more, {label}": a for label, a in all_gather_groups(self.recorder).items()}
        ordered = any(name in CREATORS for name, _ in heard)
        for name in dict.fromkeys(name for name, _ in heard):
            calls = [call for called, call in heard if called == name]
            exact = ordered and name in (*CREATORS, OPTIONS)
            shown[f"{name} is called with"] = calls if exact else sorted(set(calls))
        if ordered:
            shown["in the order"] = [name for name, _ in heard if name in (*CREATORS, OPTIONS)]
        shown["created"] = sorted(map(repr, self.recorder.created))
        for name in private_globals(self.release):
            value = getattr(self.module, name)
            listed = name == "_global_process_group_list"
            shown[name] = self.recorder.kinds(value) if listed else self.recorder.show(value, name)
        self.module.destroy_model_parallel()

    def ask(self, step: str) -> None:
        self.answers[step] = self.recorder.ask(getter_calls(self.release))

    def changes(self, step: str) -> None:
        sentinel, module = self.sentinel, self.module
        names = private_globals(self.release)
        for name in names:
            for value in written(name, sentinel):
                with changed(module, {name: value}):
                    self.ask(f"{step}, {name} = {brief(value)}")
        for i in range(3):
            values = {name: written(name, sentinel)[i:] for name in names}
            with changed(module, {name: value[0] for name, value in values.items() if value}):
                self.ask(f"{step}, all globals written, {i}")
        for name in getters(self.release):
            for value in answered(name, sentinel):
                heard: list[Any] = []
                with changed(module, {name: answering(value, heard, self.release, name)}):
                    self.ask(f"{step}, {name} replaced, answers {brief(value)}")
                calls = sorted(set(map(repr, heard)))
                self.answers[f"{step}, {name} replaced"] = {"is called with": calls}
        self.ask(f"{step}, all undone")


def listening(
    module: ModuleType, name: str, original: Callable[..., Any], heard: list[tuple[str, Any]]
) -> Callable[..., Any]:
    """A helper that keeps what it is called with and does as before."""
    if isinstance(original, type):

        class Listening(original):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                heard.append((name, plain(args, kwargs)))
                super().__init__(*args, **kwargs)

        return Listening

    @functools.wraps(original)
    def listen(*args: Any, **kwargs: Any) -> Any:
        heard.append((name, plain(args, kwargs)))
        return original(*args, **kwargs)

    vars(listen).pop("__hypergrid_members_only__", None)
    return listen


def changing(
    module: ModuleType, name: str, original: Callable[..., Any], heard: list[tuple[str, Any]]
) -> Callable[..., Any]:
    """A helper that does something else than before, as frameworks have it."""
    if name == "RankGenerator":

        class Reversed(original):  # type: ignore[misc, valid-type]
            def get_ranks(self, token: str) -> list[list[int]]:
                return [ranks[::-1] for ranks in super().get_ranks(token)[::-1]]

        return Reversed

    def change(*args: Any, **kwargs: Any) -> Any:
        heard.append((name, plain(args, kwargs)))
        if name == OPTIONS:
            return _Options(is_high_priority_stream=args[0] == "tp")
        if name == "_set_global_memory_buffer":
            module._GLOBAL_MEMORY_BUFFER = {"by": "a client"}
            return None
        if name == "overwrite_nccl_comm_cfgs":
            return original(args[0], args[1], ("min_ctas", 3))
        if name in CREATORS and "timeout" in kwargs:
            kwargs["timeout"] *= 2
        answer = original(*args, **kwargs)
        if name == "default_embedding_ranks":
            return list(args[0])
        if name == "default_position_embedding_ranks":
            return list(args[0][-1:])
        return [ranks[::-1] for ranks in answer] if name.startswith("generate_") else answer

    return change


def plain(args: Any, kwargs: dict[str, Any]) -> str:
    """Arguments as text, with communicator options by their content."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(value[key]) for key in sorted(value, key=str)}
        if isinstance(value, list | tuple):
            return type(value)(map(shown, value))
        return options_content(value) if isinstance(value, _Options) else value

    return f"{shown(args)} {shown(kwargs)}"


@contextlib.contextmanager
def changed(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    """Inside, attributes of `module` have other values; as a client writes and puts them back."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def answering(value: Any, heard: list[Any], release: str, name: str) -> Callable[..., Any]:
    """A function that answers `value` and keeps what it is given, by the release's own names."""
    names = list(parameters(release, name))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        passed = dict(zip(names, args, strict=False)) | kwargs
        heard.append({key: passed.get(key, "default") for key in sorted({*names, *passed})})
        return value

    return replacement


def brief(value: Any) -> str:
    """A written value in a label, the same for two modules."""
    if isinstance(value, dist.ProcessGroup):
        return "a group"
    return f"<{type(value).__name__}>" if isinstance(value, Stub | dict | list) else repr(value)


def agree(stock: Any, candidate: Any) -> bool:
    """Whether the candidate may answer so, where stock answers as it does."""
    if not (isinstance(stock, dict) and "raises" in stock):
        return bool(stock == candidate)
    kind = stock["raises"][0]
    if kind == "TypeError":
        return True
    refused = isinstance(candidate, dict) and "raises" in candidate
    return refused and (kind in ACCIDENTS or same_refusal(stock, candidate))


def sound_config(release: str, seed: int, number: int, max_world: int) -> Config:
    """A random configuration that stock accepts, and that none of the `REPAIRS` is about."""
    rng = random.Random(f"{seed}/{release}/{number}")
    while True:
        config = random_config(rng, release, max_world)
        repaired = any(True for _ in repaired_stocks(release, config))
        if config["kind"] != "sound" or config["world_size"] < 4 or repaired:
            continue
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            module = load_stock(release)
            with observed(Recorder(module, config, 0, release)), contextlib.suppress(Exception):
                _, name, args, kwargs = initialisation(config, release, folder)
                getattr(module, name)(*args, **kwargs)
                return config


def run_patched(
    candidate: ModuleType | Callable[[], ModuleType],
    release: str,
    n: int,
    seed: int,
    max_world: int,
    start: int = 0,
) -> Report:
    """Compare `candidate` with stock while either is written to, over `n` configurations.

    Parameters as for `run`.
    """
    report = Report(release)
    started = time.monotonic()
    load = functools.partial(load_stock, release)
    for number in range(start, start + n):
        config = sound_config(release, seed, number, max_world)
        # A rank outside the window takes no part on ours.
        first = config["kwargs"].get("rank_offset", 0)
        window_size = config["kwargs"].get("local_world_size", config["world_size"])
        ranks = [rank for rank in config["ranks"] if rank in range(first, first + window_size)]
        rank = random.Random(number).choice(ranks)
        stock = Session(load, config, rank, release).run()
        patched = Session(fresh(candidate), config, rank, release).run()
        where = f"#{number} rank {rank} of {config['world_size']} {config['kwargs']}: "
        lines = []
        for step, answers in stock.items():
            for label, answer in answers.items():
                report.answers += 1
                candidate_answer = patched[step].get(label, "<no answer>")
                if agree(answer, candidate_answer):
                    continue
                is_of_options = label == f"{OPTIONS} is called with" and step.endswith(
                    f"ing {OPTIONS}"
                )
                if is_of_options and lacks_embeddings_alone(answer, candidate_answer):
                    continue
                text = f"stock {answer}, candidate {candidate_answer}"
                lines.append(f"{where}{step}: {label}: {text}")
        report.add(where, lines)
        report.configurations += 1
        report.ranks += 1
    report.seconds = time.monotonic() - started
    return report


def lacks_embeddings_alone(calls: list[str], candidate_calls: list[str]) -> bool:
    """Whether options are asked for fewer groups, since a rank asks for those that it is in."""
    missing = {call.split("'")[1] for call in set(calls) - set(candidate_calls)}
    return set(candidate_calls) <= set(calls) and missing <= {"embd", "pos_embd"}
