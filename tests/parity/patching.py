"""Stock and a candidate beside each other while outside code writes, or replaces, what is theirs.

A module is asked everything after each single change: a private global written, a getter or a
helper replaced. Whatever stock answers then, the candidate has to answer.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.parity.configurations import random_config
from tests.parity.helpers import all_gather_groups
from tests.parity.recording import _Options, options_content
from tests.parity.running import View, place
from tests.parity.surface import Config, called, getter_calls, parameters, private_globals
from tests.parity.watching import Behaviour, Client, Step, watch
from tests.support import table
from tests.support.stock import load_stock

WRITES = table("parity/writes.txt")
OPTIONS = "get_nccl_options"
CREATORS = (
    "create_group",
    "create_hierarchical_groups",
    "create_hierarchical_parallel_groups",
    "create_hybrid_dp_cp_groups",
    "create_dynamic_dp_cp_groups",
)
HELPERS = (
    *CREATORS,
    OPTIONS,
    "RankGenerator",
    "generate_masked_orthogonal_rank_groups",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "overwrite_nccl_comm_cfgs",
    "_set_global_memory_buffer",
)


class Stub:
    """No group, but it has what numbers are asked of, as a client's own object may."""

    def rank(self) -> int:
        return 2

    def size(self) -> int:
        return 5


def written(name: str, group: Any) -> tuple[Any, ...]:
    """What outside code may put into a private global, or answer in place of a getter."""
    for pattern, values in WRITES:
        if re.fullmatch(pattern, name):
            return eval(values, {"group": group, "Stub": Stub})  # type: ignore[no-any-return]
    raise LookupError(name)


def programs(release: str) -> dict[str, Behaviour]:
    """All that outside code may do to the module of a release, by name."""
    helpers = [name for name in HELPERS if hasattr(load_stock(release), name)]
    named: dict[str, Behaviour] = {"all written": everything_written, "new_group": torch_replaced}
    for names in (*((name,) for name in helpers), tuple(helpers)):
        named[f"{', '.join(names)} replaced"] = functools.partial(helpers_replaced, names)
    return named


def helpers_replaced(names: tuple[str, ...], client: Client) -> Iterator[Step]:
    """Initialise while the helpers `names` are replaced; with what they are called."""
    heard: list[tuple[str, Any]] = []
    replacements = {}
    for name in names:
        original = getattr(client.module, name)
        replacements[name] = replacement_of(client.module, name, original, heard)
    with mock.patch.multiple(client.module, **replacements):
        yield from _initialised(client, heard, names == (OPTIONS,))


def torch_replaced(client: Client) -> Iterator[Step]:
    """Initialise while torch's own ``new_group`` is replaced in ``torch.distributed`` alone."""
    heard: list[tuple[str, Any]] = []
    replacement = replacement_of(client.module, "create_group", dist.new_group, heard)
    with mock.patch.object(dist, "new_group", replacement):
        yield from _initialised(client, heard)


def _initialised(
    client: Client, heard: list[tuple[str, Any]], are_options_alone: bool = False
) -> Iterator[Step]:
    client.initialise()
    yield "initialised", None
    shown: dict[str, Any] = {}
    if not any("gtp_remat" in name for name in client.sizes):  # see `repairs`
        assert client.recorder is not None
        shown |= all_gather_groups(client.recorder)
    if are_options_alone:  # ours asks for those of the groups that the rank is in
        heard = [call for call in heard if call[1].split("'")[1] not in ("embd", "pos_embd")]
    shown["calls"] = sorted(set(heard))
    if any(name in CREATORS for name, _ in heard):
        shown["calls in order"] = [call for call in heard if call[0] in (*CREATORS, OPTIONS)]
    yield "all-gather groups created", shown


def everything_written(client: Client) -> Iterator[Step]:
    """Write each global and replace each getter in turn, before and after an initialisation."""
    recorder = client.recorder
    assert recorder is not None
    sentinel = dist.new_group([recorder.rank])
    recorder.names[id(sentinel)] = "what was written"
    yield from _changes(client, "before", sentinel)
    client.initialise()
    yield "initialised", None  # names the groups, by the getters that show them
    yield from _changes(client, "initialised", sentinel)


def _changes(client: Client, when: str, sentinel: Any) -> Iterator[Step]:
    names = private_globals(client.release)
    for name in names:
        for value in written(name, sentinel):
            with mock.patch.object(client.module, name, value):
                yield f"{when}, {name} = {brief(value)}", None
    for i in range(3):
        values = {name: written(name, sentinel)[i:] for name in names}
        writes = {name: value[0] for name, value in values.items() if value}
        with mock.patch.multiple(client.module, **writes):
            yield f"{when}, all globals written, {i}", None
    heard: list[Any] = []
    for name in dict.fromkeys(map(called, getter_calls(client.release))):
        for value in written(name, sentinel):
            calls = {"calls of the getter before": sorted(set(map(repr, heard)))}
            heard = []
            replacement = answering(value, heard, client.release, name)
            with mock.patch.object(client.module, name, replacement):
                yield f"{when}, {name} replaced, answers {brief(value)}", calls
    yield f"{when}, all undone", {"calls of the getter before": sorted(set(map(repr, heard)))}


def replacement_of(
    module: ModuleType, name: str, original: Callable[..., Any], heard: list[tuple[str, Any]]
) -> Callable[..., Any]:
    """A helper that keeps what it is called with, and does something else than before."""
    if name == "RankGenerator":

        class Reversed(original):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                heard.append((name, plain(args, kwargs)))
                super().__init__(*args, **kwargs)

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
        # torch's own new_group may be called without a timeout.
        if name in CREATORS and kwargs.get("timeout"):
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


def programs_on_one_rank(rng: random.Random, release: str, max_world: int) -> Iterator[View]:
    """What each program shows on a rank of a configuration that stock accepts."""
    config = sound_config(rng, release, max_world)
    # A rank outside the window takes no part on ours.
    first = config["kwargs"].get("rank_offset", 0)
    window = range(first, first + config["kwargs"].get("local_world_size", config["world_size"]))
    rank = rng.choice([rank for rank in config["ranks"] if rank in window])
    for name, program in programs(release).items():
        show = functools.partial(watch, program, config=config, rank=rank, release=release)
        yield View(f"{place(config, rank)}, {name}", show, is_written_to=True)


def sound_config(rng: random.Random, release: str, max_world: int) -> Config:
    """A random configuration that stock accepts."""
    while True:
        config = random_config(rng, release, max_world)
        if config["kind"] == "sound" and config["world_size"] >= 4:
            shown = watch(only_initialised, load_stock(release), config, 0, release)
            if shown["outcome"] == "ok":
                return config


def only_initialised(client: Client) -> Iterator[Step]:
    """Initialise."""
    client.initialise()
    yield "initialised", None
