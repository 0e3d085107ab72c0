"""Getter-by-getter parity of a candidate module with stock ``parallel_state``, in one process.

Draw a random configuration of ``initialize_model_parallel``, run stock and the candidate under
torch's ``fake`` backend as some of its ranks, write down everything that either shows, compare.

>>> report = run(candidate, "0.19.2", n=2000, seed=1, max_world=1024)
>>> assert not report.differences, report

``scripts/parity`` does this from the command line, each release in a process of its own.

What may differ, and nothing else:

* *supersets*: where stock raises ``TypeError`` for an argument it does not know, the candidate may
  answer; it may have more functions, and more arguments after stock's;
* *leftovers*: stock forgets part of its state on destroy. Afterwards the candidate may answer as
  stock does or as stock did before the first initialisation;
* *failures*: a failed initialisation of stock leaves some globals set. Only the exception's type is
  compared: the candidate's has to be an instance of stock's, or any where stock's is not a builtin;
* *nonsense* (`is_nonsense`): sizes below one, negative offsets and repeated tokens, which stock
  sometimes lets pass. The candidate may refuse them with any exception;
* *unreachable groups* (`UNREACHABLE`): groups that stock makes and no getter returns;
* *repeated barriers*: stock repeats the barrier that starts SHARP on replicas once for each later
  expert data-parallel group; which groups meet is compared, not how often;
* *repairs* (`REPAIRS`): where stock's own code defeats itself, the candidate may agree with stock
  or with a copy of stock in which that one place is put right.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import random
import re
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.stock import load_stock, source

Config = dict[str, Any]
Snapshot = dict[str, Any]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
UNREACHABLE = {"HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L1"}
STEPS = ("before", "getters", "globals", "helpers", "all_gather", "setters", "again", "after")


# ---------------------------------------------------------------------------------------------
# Configurations


def _strict(pick: Callable[[list[int]], Sequence[int]]) -> Callable[[list[int]], Sequence[int]]:
    """A callback that insists on what stock passes: a list of plain ints."""

    def callback(ranks: list[int]) -> Sequence[int]:
        if type(ranks) is not list or any(type(rank) is not int for rank in ranks):
            raise TypeError(f"embedding callbacks take a list of ints, not {ranks!r}")
        return pick(ranks)

    return callback


def _raise_lookup(ranks: list[int]) -> list[int]:
    raise LookupError("the callback's own error")


CALLBACKS: dict[str, Callable[[list[int]], Sequence[int]]] = {
    "all": _strict(list),
    "reversed": _strict(lambda r: list(reversed(r))),
    "first": _strict(lambda r: r[:1]),
    "last": _strict(lambda r: r[-1:]),
    "first+middle+last": _strict(lambda r: sorted({r[0], r[len(r) // 2], r[-1]})),
    "last+first": _strict(lambda r: list(dict.fromkeys([r[-1], r[0]]))),
    "every second": _strict(lambda r: r[::2]),
    "none": _strict(lambda r: []),
    "a tuple": _strict(tuple),
    "rank 0 of the world too": _strict(lambda r: sorted({0, r[-1]})),
    "twice": _strict(lambda r: [r[0], r[0]]),
    "outside": _strict(lambda r: [r[0], 10**6]),
    "raises": _raise_lookup,
}
_SOUND_CALLBACKS = [name for name in CALLBACKS if name not in ("twice", "outside", "raises")]

_OPTION_KEYS = [
    *("dp_cp", "dp", "cp", "hcp", "mp", "tp", "pp", "embd", "pos_embd", "tp_dp_cp", "tp_dp"),
    *("tp_cp", "ep", "ep_tp", "tp_ep_mp", "tp_ep_pp", "ep_dp", "intra_dp_cp", "intra_ep_dp"),
    *("inter_ep_dp", "intra_dist_opt_instance", "gtp_remat", "gtp_remat_dp", "gtp_remat_dp_cp"),
    *("expt_gtp_remat", "tp_ep_gtp_remat_pp", "ep_gtp_remat_dp", "nobody"),
]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _world_size(rng: random.Random, largest: int) -> int:
    ceiling = min(largest, rng.choices((8, 16, 32, 64, 256, 1024), (30, 30, 18, 17, 4, 1))[0])
    odd = [w for w in (1, 2, 3, 5, 6, 7, 9, 10, 12, 15, 18, 20, 24, 30, 36, 40, 48, 60, 96, 144)]
    odd += [192, 240, 384, 720, 960]
    twos = [2**i for i in range(11)]
    sizes = [w for w in (odd if rng.random() < 0.45 else twos) if ceiling // 8 < w <= ceiling]
    return rng.choice(sizes or [1])


def _options_file(rng: random.Random) -> dict[str, dict[str, Any]]:
    chosen = rng.sample(_OPTION_KEYS, rng.randint(1, 8))
    drawn: dict[str, Callable[[], Any]] = {
        "is_high_priority_stream": lambda: rng.random() < 0.5,
        "cga_cluster_size": lambda: rng.choice([1, 2, 4]),
        "min_ctas": lambda: rng.choice([1, 4, 8]),
        "max_ctas": lambda: rng.choice([16, 32]),
        "net_name": lambda: rng.choice(["IB", "ib", "Socket"]),
        "an_unknown_field": lambda: 1,
    }
    return {k: {f: v() for f, v in drawn.items() if rng.random() < 0.4} for k in chosen}


def random_config(rng: random.Random, release: str, max_world: int) -> Config:
    """One configuration: ``world_size``, the ``ranks`` to try, and ``kwargs``.

    The keyword arguments are plain data: callbacks are named (`CALLBACKS`), a communicator
    configuration is the mapping that its file will hold. About a quarter is meant to be refused;
    ``kind`` says what was broken.
    """
    gtp = "gtp_remat_size" in _parameters(release)
    world = _world_size(rng, max_world)
    kwargs: dict[str, Any] = {}
    window, offset = world, 0
    if gtp and world > 1 and rng.random() < 0.12:
        window = rng.randint(1, world)
        offset = rng.randint(0, world - window)
        kwargs |= {"local_world_size": window, "rank_offset": offset}

    pp = rng.choice(_divisors(window))
    plane = window // pp
    tp = rng.choice(_divisors(plane))
    cp = rng.choice(_divisors(plane // tp))
    remat = rng.choice(_divisors(plane // tp // cp)) if gtp and rng.random() < 0.3 else 1
    dp = plane // tp // cp // remat
    order = DEFAULT_ORDER
    pp_last = True
    if rng.random() < 0.5:
        order, pp_last = _random_order(rng, {"tp": tp, "cp": cp, "dp": dp, "pp": pp}, gtp)

    same_data_parallel = not pp_last and pp > 1 and rng.random() < 0.8
    expert_plane = plane // dp if same_data_parallel else plane
    etp = rng.choice(_divisors(expert_plane))
    if expert_plane % tp == 0 and rng.random() < 0.5:
        etp = tp
    ep_sizes = _divisors(expert_plane // etp) if "ep" in order.lower() else [1]
    ep = rng.choice(ep_sizes)
    expert_remat = 1
    if same_data_parallel:
        rest = expert_plane // etp
        if "ep" not in order.lower():
            ep, etp = 1, expert_plane
        elif gtp and rng.random() < 0.3:
            expert_remat = rest // ep
        else:
            ep = rest
    elif gtp and rng.random() < 0.3:
        expert_remat = rng.choice(_divisors(expert_plane // etp // ep))
    expert_dp = plane // (etp * ep * expert_remat)

    kwargs |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if cp > 1 or rng.random() < 0.5:
        kwargs["context_parallel_size"] = cp
    if ep > 1 or rng.random() < 0.5:
        kwargs["expert_model_parallel_size"] = ep
    if etp != tp or rng.random() < 0.3:
        kwargs["expert_tensor_parallel_size"] = etp
    if remat > 1:
        kwargs["gtp_remat_size"] = remat
    if expert_remat > 1:
        kwargs["expert_gtp_remat_size"] = expert_remat
    if order != DEFAULT_ORDER:
        kwargs["order"] = order
    if pp > 1 and rng.random() < 0.3:
        kwargs["virtual_pipeline_model_parallel_size"] = rng.choice([1, 2, 3])

    instances = 1
    if remat == expert_remat == 1 and rng.random() < 0.35:
        instances = rng.choice(_divisors(math.gcd(dp * cp, expert_dp)))
        kwargs["num_distributed_optimizer_instances"] = instances
    if rng.random() < 0.25:
        kwargs["hierarchical_context_parallel_sizes"] = _factors(rng, cp)
    if dp * cp % 2 == 0 and rng.random() < 0.2:
        kwargs["hybrid_context_parallel"] = True
    if rng.random() < 0.4:
        kwargs["create_gloo_process_groups"] = rng.random() < 0.3
    if rng.random() < (0.05 if gtp else 0.12):
        kwargs["use_sharp"] = True
        choices = [None, "dp"] + (["dp_replica"] if instances > 1 else [])
        kwargs["sharp_enabled_group"] = rng.choice(choices)
    if rng.random() < 0.3:
        kwargs["distributed_timeout_minutes"] = rng.choice([1, 10, 45, 0.5])
    for which in ("get_embedding_ranks", "get_position_embedding_ranks"):
        if rng.random() < 0.3:
            kwargs[which] = rng.choice(_SOUND_CALLBACKS)
    if rng.random() < 0.15:
        kwargs["pipeline_model_parallel_comm_backend"] = rng.choice(["nccl", "ucc"])
    if rng.random() < 0.15:
        kwargs["high_priority_stream_groups"] = rng.sample(_OPTION_KEYS, rng.randint(0, 6))
    if rng.random() < 0.25:
        kwargs["nccl_communicator_config_path"] = _options_file(rng)
    if "create_all_gather_group" in _parameters(release) and rng.random() < 0.3:
        kwargs["create_all_gather_group"] = rng.random() < 0.8

    environment = {
        name: value
        for name, value in (
            ("NCCL_COLLNET_ENABLE", "1"),
            ("UCX_TLS", "tcp"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        )
        if rng.random() < 0.1
    }
    config: Config = {
        "kind": "sound",
        "world_size": world,
        "kwargs": kwargs,
        "positional": rng.choices((0, 1, 2, 3, 99), (60, 8, 8, 14, 10))[0],
        "environment": environment,
        "window": window,
    }
    if rng.random() < 0.25:
        config["kind"] = _break(rng, config, gtp)
    ranks = range(world)
    few = {0, world - 1, offset, min(offset + window, world) - 1, rng.choice(ranks)}
    config["ranks"] = list(ranks) if world <= 4 else sorted(few | {rng.choice(ranks)})
    if world > 128:
        config["ranks"] = sorted({offset, rng.choice(ranks)})
    return config


def _random_order(rng: random.Random, sizes: dict[str, int], gtp: bool) -> tuple[str, bool]:
    tokens = ["tp", "cp", "ep", "dp", "pp"]
    rng.shuffle(tokens)
    if rng.random() < 0.4:
        tokens = [t for t in tokens if t != "pp"] + ["pp"]
    if rng.random() < 0.3:
        unneeded = [t for t in tokens if sizes.get(t, 1) == 1 and not (gtp and t == "tp")]
        dropped = rng.sample(unneeded, rng.randint(0, min(len(unneeded), len(tokens) - 1)))
        tokens = [t for t in tokens if t not in dropped]
    if gtp and rng.random() < 0.15:
        tokens.insert(rng.randint(0, len(tokens)), "gtp_remat")
    order = "-".join(tokens)
    if rng.random() < 0.25:
        order = rng.choice([order.upper(), order.title()])
    return order, order.lower().endswith("pp")


def _factors(rng: random.Random, number: int) -> list[int]:
    factors: list[int] = []
    while number > 1 and len(factors) < 3:
        factors.append(rng.choice(_divisors(number)[1:]))
        number //= factors[-1]
    if number > 1 or not factors:
        factors.append(number)
    rng.shuffle(factors)
    return factors


def _break(rng: random.Random, config: Config, gtp: bool) -> str:
    """Break `config` in one way, usually so that stock refuses it; says which."""
    world, kwargs = config["world_size"], config["kwargs"]
    cp = kwargs.get("context_parallel_size", 1)
    order = kwargs.get("order", DEFAULT_ORDER)
    sizes = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
    ]
    sizes += ["gtp_remat_size", "expert_gtp_remat_size"] if gtp else []

    def token_out() -> None:
        kwargs["order"] = "-".join(t for t in order.split("-") if t != rng.choice(order.split("-")))

    def another_order() -> None:
        tokens = DEFAULT_ORDER.split("-")
        rng.shuffle(tokens)
        kwargs["order"] = "-".join(tokens)

    def sharp_replica_of_one() -> None:
        kwargs.update(use_sharp=True, sharp_enabled_group="dp_replica")
        kwargs.pop("num_distributed_optimizer_instances", None)

    def set_one_connection() -> None:
        config["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        kwargs["pipeline_model_parallel_comm_backend"] = "ucc"

    def set_bad_net() -> None:
        kwargs["nccl_communicator_config_path"] = {rng.choice(_OPTION_KEYS): {"net_name": "eth"}}

    def set_(name: str, *values: Any) -> Callable[[], None]:
        return lambda: kwargs.__setitem__(name, rng.choice(values))

    ways: dict[str, Callable[[], None]] = {
        "indivisible size": set_(rng.choice(sizes), world + 1, 7, 2, 3, 5),
        "another size": set_(rng.choice(sizes), 2, 3, 4, 6, 8),
        "size below one": set_(rng.choice(sizes), 0, 0, -1, -2),
        "virtual stages": lambda: kwargs.update(
            pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=2
        ),
        "order lacks a token": token_out,
        "another order": another_order,
        "another case": lambda: kwargs.update(order=order.upper()),
        "unknown token": lambda: kwargs.update(
            order=rng.choice([order + "-zz", "xpp-" + order, order.replace("-", " "), "", "-"])
        ),
        "repeated token": lambda: kwargs.update(
            order=order + "-" + rng.choice(order.split("-")).lower()
        ),
        "instances": set_("num_distributed_optimizer_instances", 2, 3, 4, 5, 8),
        "hierarchy": set_("hierarchical_context_parallel_sizes", [cp, 2], [cp + 1], [2, 2], []),
        "hybrid": set_("hybrid_context_parallel", True),
        "sharp group without sharp": lambda: kwargs.update(
            use_sharp=False, sharp_enabled_group=rng.choice(["dp", "dp_replica", "x"])
        ),
        "unknown sharp group": lambda: kwargs.update(use_sharp=True, sharp_enabled_group="tp"),
        "sharp replica of one": sharp_replica_of_one,
        "pipeline backend": set_("pipeline_model_parallel_comm_backend", "gloo", "UCC", "x", ""),
        "one connection": set_one_connection,
        "callback": set_("get_embedding_ranks", "twice", "outside", "raises"),
        "position callback": set_("get_position_embedding_ranks", "twice", "outside", "raises"),
        "bad net": set_bad_net,
        "no such file": set_("nccl_communicator_config_path", "absent"),
    }
    if gtp:
        ways["window"] = lambda: kwargs.update(
            local_world_size=config["window"], rank_offset=world - config["window"] + 1
        )
        ways["window too large"] = set_("local_world_size", 2 * world, 2 * world, 0)
        ways["negative offset"] = set_("rank_offset", -1, -world)
    kind = rng.choice(list(ways))
    ways[kind]()
    if rng.random() < 0.2:
        second = rng.choice(list(ways))
        ways[second]()
        kind = f"{kind}, {second}"
    return kind


def is_nonsense(config: Config) -> bool:
    """Whether refusing is right whatever stock does.

    A size below one, a negative offset, or a token twice in the order.
    """
    kwargs = config["kwargs"]
    tokens = kwargs.get("order", "").lower().split("-")
    if len(set(tokens)) != len(tokens):
        return True
    sizes = [value for name, value in kwargs.items() if name.endswith("_size")]
    sizes += [kwargs.get("num_distributed_optimizer_instances", 1)]
    return any(s is not None and s < 1 for s in sizes) or kwargs.get("rank_offset", 0) < 0


# ---------------------------------------------------------------------------------------------
# What stock offers, read from its source and its signatures


@functools.cache
def _pattern(release: str) -> ModuleType:
    return load_stock(release)


@functools.cache
def _parameters(release: str) -> dict[str, Any]:
    """The names and defaults of a release's ``initialize_model_parallel``, in order."""
    found = inspect.signature(_pattern(release).initialize_model_parallel).parameters
    return {name: parameter.default for name, parameter in found.items()}


@functools.cache
def public_functions(release: str) -> tuple[str, ...]:
    """The public functions that a release defines, in the order of its source."""
    module = _pattern(release)
    return tuple(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    )


@functools.cache
def private_globals(release: str) -> tuple[str, ...]:
    """The private module globals that a release assigns at its top or declares in a function."""
    tree = ast.parse(source(release))
    names = {n for node in ast.walk(tree) if isinstance(node, ast.Global) for n in node.names}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return tuple(sorted(name for name in names if name.startswith("_")))


Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
_VALUES: dict[str, tuple[Any, ...]] = {
    "vp_stage": (None, 0, 1, 2),
    "group_size": (None, 1, 2, 3, 4, 6, 8, 12, 16, 32),
}
_NOT_GETTERS = {"get_nccl_options"}


def _call(name: str, *args: Any, **kwargs: Any) -> Call:
    shown = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
    return f"{name}({', '.join(shown)})", name, args, kwargs


@functools.cache
def getter_calls(release: str) -> tuple[Call, ...]:
    """Every getter and predicate with every sensible set of arguments, by position and keyword."""
    calls: dict[str, Call] = {}
    for name in public_functions(release):
        getter = name.startswith(("get_", "is_", "has_")) or name.endswith("_is_initialized")
        if not getter or name in _NOT_GETTERS:
            continue
        found = inspect.signature(getattr(_pattern(release), name)).parameters
        values = [_VALUES.get(parameter, (False, True)) for parameter in found]
        made = [_call(name)]
        for length in range(1, len(values) + 1):
            made += [_call(name, *args) for args in itertools.product(*values[:length])]
        omit = object()
        for args in itertools.product(*[(omit, *choices) for choices in values]):
            given = {p: a for p, a in zip(found, args, strict=True) if a is not omit}
            made.append(_call(name, **given))
        made += [_call(name, **{p: 1}) for p in found if p not in _VALUES]
        made.append(_call(name, *[True] * (len(values) + 1)))
        calls |= {call[0]: call for call in made}
    return tuple(calls.values())


@functools.cache
def plain_calls(release: str) -> tuple[Call, ...]:
    """The getters and predicates that give numbers, ranks and strings, without arguments."""
    wanted = re.compile(r"_(rank|ranks|size|initialized)$|^(is|has)_")
    found = [call for call in getter_calls(release) if call[0] == f"{call[1]}()"]
    return tuple(call for call in found if wanted.search(call[1]))


@functools.cache
def _stage_calls(release: str) -> tuple[Call, ...]:
    staged = ("is_pipeline_first_stage", "is_pipeline_last_stage", "is_rank_in_embedding_group")
    return tuple(call for call in getter_calls(release) if call[1] in staged)


# ---------------------------------------------------------------------------------------------
# Observing one module as one rank


class _Options:
    """Stands in for ``ProcessGroupNCCL.Options``, which a CPU build of torch lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = types.SimpleNamespace()


class _ProcessGroupNCCL:
    Options = _Options


def _options_content(options: Any) -> Any:
    if options is None:
        return None
    if isinstance(options, _Options):
        config = tuple(sorted(vars(options.config).items()))
        return ("options", options.is_high_priority_stream, config)
    return type(options).__name__


class _Recorder:
    """Takes the place of torch's group calls, and names what a module answers.

    A group is named by the first answer that showed it, so that two modules agree on which
    answers are the very same object exactly when they agree on the names.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.created: list[tuple[Any, ...]] = []
        self.barriers: list[Any] = []
        self.timeouts: list[Any] = []
        self.names: dict[int, str] = {}
        self.details: dict[str, Any] = {}
        self._asked: dict[int, tuple[Any, ...]] = {}
        self._alive: list[Any] = []
        self._new_group = c10d.new_group

    def new_group(
        self,
        ranks: Any = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        **more: Any,
    ) -> Any:
        members = list(range(self.world)) if ranks is None else list(ranks)
        if self.rank not in members:
            if len(set(members)) != len(members):
                raise ValueError(f"ranks repeat in {members}")
            if members and (min(members) < 0 or max(members) >= self.world):
                raise ValueError(f"ranks beyond the world of {self.world} in {members}")
            if use_local_synchronization:
                return None
            c10d._world.group_count += 1
            return dist.GroupMember.NON_GROUP_MEMBER
        collnet = os.environ.get("NCCL_COLLNET_ENABLE")
        group = self._new_group(
            ranks=ranks,
            timeout=timeout,
            backend="fake",
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
            **more,
        )
        asked = (backend, str(timeout), _options_content(pg_options), collnet)
        self._asked[id(group)] = asked
        self._alive.append(group)
        self.created.append((group_desc, tuple(sorted(members)), *asked))
        return group

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.barriers.append((tuple(ranks), tuple(device_ids or ())))

    def set_timeout(self, timeout: timedelta, group: Any = None) -> None:
        self.timeouts.append((str(timeout), self._kind_of(group)))

    def _kind_of(self, group: Any) -> Any:
        if group is None:
            return None
        return group.group_desc, tuple(dist.get_process_group_ranks(group))

    def show(self, value: Any, label: str) -> Any:
        """`value` as plain data that can be compared and printed."""
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        if value is dist.GroupMember.NON_GROUP_MEMBER:
            return "<not a member>"
        if isinstance(value, dist.ProcessGroup):
            name = self.names.get(id(value))
            if name is None:
                name = self.names[id(value)] = label
                self._alive.append(value)
                self.details[name] = self._detail(value)
            return f"group of {name}"
        if isinstance(value, list | tuple):
            if all(type(item) is int for item in value):
                return repr(value)
            shown = [self.show(item, f"{label}[{i}]") for i, item in enumerate(value)]
            return [type(value).__name__, *shown]
        if isinstance(value, dict):
            keys = sorted(value, key=repr)
            return {repr(key): self.show(value[key], f"{label}[{key!r}]") for key in keys}
        if isinstance(value, _Options):
            return list(map(repr, _options_content(value)))
        return f"<{type(value).__name__}>"

    def _detail(self, group: Any) -> Any:
        if group is dist.group.WORLD:
            return "the default group"
        if group not in c10d._world.pg_group_ranks:
            return "a closed group"
        ranks = dist.get_process_group_ranks(group)
        asked = self._asked.get(id(group), ("not made through new_group",))
        return [group.group_desc, ranks, *asked, group.rank(), group.size()]

    def call(self, module: ModuleType, call: Call) -> Any:
        """What `call` answers, or the classes of what it raises."""
        label, name, args, kwargs = call
        try:
            value = getattr(module, name)(*args, **kwargs)
        except Exception as error:
            return raised(error)
        return self.show(value, label)


def raised(error: BaseException) -> dict[str, Any]:
    """An exception as data: the names of its classes, the most special first."""
    return {"raises": [base.__name__ for base in type(error).__mro__[:-1]]}


@contextlib.contextmanager
def _observed(config: Config, rank: int) -> Iterator[_Recorder]:
    """torch as one rank of a world that is not there; everything as before on leaving."""
    world = config["world_size"]
    environment = dict(os.environ)
    os.environ.pop("NCCL_COLLNET_ENABLE", None)
    os.environ.update(config.get("environment", {}))
    recorder = _Recorder(rank, world)
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.update, environment)
        stack.callback(os.environ.clear)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        patches = [
            (dist, "new_group", recorder.new_group),
            (c10d, "new_group", recorder.new_group),
            (dist, "barrier", recorder.barrier),
            (c10d, "barrier", recorder.barrier),
            (c10d, "_set_pg_timeout", recorder.set_timeout),
            (dist, "ProcessGroupNCCL", _ProcessGroupNCCL),
            (c10d, "ProcessGroupNCCL", _ProcessGroupNCCL),
            (dist.distributed_c10d.torch.cuda, "current_device", lambda: 0),
            (dist.distributed_c10d.torch.cuda, "synchronize", lambda *_: None),
        ]
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield recorder


def _arguments(config: Config, release: str, folder: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for ``initialize_model_parallel``: callbacks and files in place of names."""
    kwargs = dict(config["kwargs"])
    for which in ("get_embedding_ranks", "get_position_embedding_ranks"):
        if isinstance(kwargs.get(which), str):
            kwargs[which] = CALLBACKS[kwargs[which]]
    options = kwargs.get("nccl_communicator_config_path")
    if options is not None:
        path = os.path.join(folder, "communicators.yaml")
        kwargs["nccl_communicator_config_path"] = path
        if not isinstance(options, str):
            Path(path).write_text(json.dumps(options))
    if isinstance(kwargs.get("hierarchical_context_parallel_sizes"), list):
        sizes = list(kwargs["hierarchical_context_parallel_sizes"])
        kwargs["hierarchical_context_parallel_sizes"] = sizes
    leading = list(_parameters(release).items())[: config.get("positional", 0)]
    args = [kwargs.pop(name, default) for name, default in leading]
    return args, kwargs


def snapshot(
    module: ModuleType,
    config: Config,
    rank: int,
    release: str,
    steps: Sequence[str] = STEPS,
) -> Snapshot:
    """Everything that `module` shows of `config` as `rank`, as plain data.

    The result maps ``"outcome"`` to ``"ok"`` or to what ``initialize_model_parallel`` raised, and
    each of `steps` to its answers by the text of the call. The process is left as it was found.
    """
    result: Snapshot = {"answers": {}, "groups": {}, "created": Counter()}
    answers = result["answers"]
    if "before" in steps:
        alone = _Recorder(rank, config["world_size"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers["without torch.distributed"] = _ask(alone, module, plain_calls(release))
    with _observed(config, rank) as recorder, tempfile.TemporaryDirectory() as folder:
        if "before" in steps:
            before = _ask(recorder, module, getter_calls(release))
            answers["before"] = before | _globals(recorder, module, release)
        args, kwargs = _arguments(config, release, folder)
        environment = dict(os.environ)
        try:
            module.initialize_model_parallel(*args, **kwargs)
        except Exception as error:
            result["outcome"] = raised(error) | {"message": str(error)}
            with contextlib.suppress(Exception):
                module.destroy_model_parallel()
            return result
        result["outcome"] = "ok"
        result["created"] = Counter(c for c in recorder.created if c[0] not in UNREACHABLE)
        answers["initialised"] = {
            "barriers": sorted(set(recorder.barriers)),
            "environment": sorted(set(os.environ.items()) ^ set(environment.items())),
        }
        taken = {
            "getters": lambda: _ask(recorder, module, getter_calls(release)),
            "globals": lambda: _globals(recorder, module, release),
            "helpers": lambda: _helpers(recorder, module, config, release),
            "all_gather": lambda: _all_gather(recorder, module, config, release),
            "setters": lambda: _setters(recorder, module, release),
            "again": lambda: _again(recorder, module, config, args, kwargs),
            "after": lambda: _after(recorder, module, release),
        }
        for step in steps:
            if step in taken:
                answers[step] = taken[step]()
        if "after" not in steps:
            module.destroy_model_parallel()
        result["groups"] = recorder.details
    return result


def _ask(recorder: _Recorder, module: ModuleType, calls: Sequence[Call]) -> dict[str, Any]:
    return {call[0]: recorder.call(module, call) for call in calls}


def _globals(recorder: _Recorder, module: ModuleType, release: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name in private_globals(release):
        try:
            value = getattr(module, name)
        except AttributeError as error:
            shown[name] = raised(error)
            continue
        if name == "_global_process_group_list" and value is not None:
            kinds = [recorder._kind_of(group) for group in value]
            kinds = [kind for kind in kinds if kind is None or kind[0] not in UNREACHABLE]
            shown[name] = sorted(map(repr, kinds))
        else:
            shown[name] = recorder.show(value, name)
    return shown


def _helpers(
    recorder: _Recorder, module: ModuleType, config: Config, release: str
) -> dict[str, Any]:
    """The functions that make groups and ranks for whoever calls them."""
    rank, world, kwargs = recorder.rank, recorder.world, config["kwargs"]
    if world > 64:
        return {}
    shown: dict[str, Any] = {}

    def note(label: str, action: Callable[[], Any]) -> Any:
        try:
            value = action()
        except Exception as error:
            shown[label] = raised(error)
            return None
        shown[label] = recorder.show(value, label)
        return value

    sizes = {
        "tp": kwargs.get("tensor_model_parallel_size", 1),
        "ep": 1,
        "pp": kwargs.get("pipeline_model_parallel_size", 1),
        "cp": kwargs.get("context_parallel_size", 1),
    }
    sizes["dp"] = max(1, world // math.prod(sizes.values()))
    order = kwargs.get("order", DEFAULT_ORDER)
    tokens = ["tp", "dp", "pp-tp", "tp-dp-cp", "ep", "zz"]
    for label, more in {"": {}, " in a window": {"rank_offset": 3}}.items():
        generator = note(
            f"RankGenerator{label}",
            functools.partial(lambda m: module.RankGenerator(order=order, **sizes, **m), more),
        )
        for name in ("order", "ordered_size", "world_size", "rank_offset", "name_to_size"):
            note(f"RankGenerator{label}.{name}", functools.partial(getattr, generator, name))
        for token in tokens:
            note(
                f"RankGenerator{label}.get_ranks({token!r})",
                functools.partial(lambda g, t: g.get_ranks(t), generator, token),
            )
    note("RankGenerator of ep and cp", lambda: module.RankGenerator(1, 2, 1, 1, 2, order))
    shape = [sizes["tp"], sizes["cp"], sizes["dp"], sizes["pp"]]
    for mask in ([True, False, True, False], [False] * 4, [True] * 4):
        note(
            f"generate_masked_orthogonal_rank_groups({mask})",
            functools.partial(
                lambda m: module.generate_masked_orthogonal_rank_groups(math.prod(shape), shape, m),
                mask,
            ),
        )
    for ranks in ([4], [4, 9], [7, 5, 3]):
        for which in ("default_embedding_ranks", "default_position_embedding_ranks"):
            note(
                f"{which}({ranks})",
                functools.partial(lambda w, r: getattr(module, w)(r), which, ranks),
            )
    options: dict[str, Any] = {"tp": {"max_ctas": 8, "net_name": "IB"}, "dp": {"net_name": "eth"}}
    for key, pair in (("tp", ("min_ctas", 2)), ("pp", ("is_high_priority_stream", True))):
        note(
            f"overwrite_nccl_comm_cfgs({key!r})",
            functools.partial(
                lambda k, p: module.overwrite_nccl_comm_cfgs(options, k, p), key, pair
            ),
        )
    note("overwrite_nccl_comm_cfgs", lambda: options)
    for key in ("tp", "dp", "pp", "none"):
        note(
            f"get_nccl_options({key!r})",
            functools.partial(lambda k: module.get_nccl_options(k, options), key),
        )

    before = len(recorder.created)
    everyone = list(range(world))
    others = [r for r in everyone if r != rank]
    note("create_group of all", lambda: module.create_group(everyone, group_desc="EXTRA"))
    note(
        "create_group with options",
        lambda: module.create_group(
            ranks=[rank],
            timeout=timedelta(minutes=7),
            backend="gloo",
            pg_options=module.get_nccl_options("tp", options),
            group_desc="EXTRA_GLOO",
        ),
    )
    note("create_group of others", lambda: module.create_group(others, group_desc="EXTRA"))
    halves = [2, world // 2] if world % 2 == 0 else [world]
    for gloo in (False, True):
        note(
            f"create_hierarchical_groups(gloo={gloo})",
            functools.partial(
                lambda g: module.create_hierarchical_groups(
                    rank, everyone, halves, create_gloo_process_groups=g, group_desc="EXTRA"
                ),
                gloo,
            ),
        )
    note(
        "create_hierarchical_groups of a wrong product",
        lambda: module.create_hierarchical_groups(rank, everyone, [world + 1]),
    )
    note(
        "create_hybrid_dp_cp_groups",
        lambda: module.create_hybrid_dp_cp_groups(rank, everyone, None),
    )
    shown["groups made by helpers"] = sorted(map(repr, recorder.created[before:]))
    recorder.barriers.clear()
    note("update_pg_timeout", lambda: module.update_pg_timeout(timedelta(minutes=3)))
    note(
        "update_pg_timeout(pg)",
        lambda: module.update_pg_timeout(timedelta(minutes=4), dist.group.WORLD),
    )
    kept = [t for t in recorder.timeouts if t[1] is None or t[1][0] not in UNREACHABLE]
    shown["update_pg_timeout sets"] = sorted(map(repr, kept))
    shown["update_pg_timeout waits for"] = sorted(map(repr, recorder.barriers))
    return shown


def _all_gather(
    recorder: _Recorder, module: ModuleType, config: Config, release: str
) -> dict[str, Any]:
    kwargs = config["kwargs"]
    if (
        "create_all_gather_groups" not in public_functions(release)
        or kwargs.get("order", DEFAULT_ORDER) != DEFAULT_ORDER
        or kwargs.get("rank_offset", 0)
        or kwargs.get("local_world_size", recorder.world) != recorder.world
    ):
        return {}
    before = len(recorder.created)
    options = {"dp_cp": {"max_ctas": 4}, "ep_dp": {"min_ctas": 1}}
    name = "create_all_gather_groups"
    calls = [
        _call(name),
        _call(name, True),
        _call(
            name,
            for_expert_parallelism=True,
            timeout=timedelta(minutes=5),
            nccl_comm_cfgs=options,
        ),
    ]
    shown = _ask(recorder, module, calls)
    shown["groups made for all-gather"] = sorted(map(repr, recorder.created[before:]))
    return shown


def _setters(recorder: _Recorder, module: ModuleType, release: str) -> dict[str, Any]:
    """Each ``set_*`` with a value, zero and None, and what the numbers are then."""
    shown: dict[str, Any] = {}
    for name in public_functions(release):
        if not name.startswith("set_"):
            continue
        for value in (3, 0):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                shown[f"{name}({value})"] = recorder.call(module, _call(name, value))
            shown[f"{name}({value}) warns"] = sorted({w.category.__name__ for w in caught})
            calls = plain_calls(release) + (_stage_calls(release) if "pipeline" in name else ())
            answers = _ask(recorder, module, calls)
            shown |= {f"{name}({value}), {label}": answer for label, answer in answers.items()}
        recorder.call(module, _call(name, None))
    answers = _ask(recorder, module, plain_calls(release))
    return shown | {f"setters given None, {label}": a for label, a in answers.items()}


def _again(
    recorder: _Recorder, module: ModuleType, config: Config, args: list[Any], kwargs: Config
) -> dict[str, Any]:
    """A second initialisation without a destroy: which refusal comes first."""
    name = "initialize_model_parallel"
    world = recorder.world
    attempts = {
        "the same again": (args, kwargs),
        "an indivisible world again": ([2 * world + 1], {}),
        "indivisible experts again": ([], {"expert_model_parallel_size": 2 * world + 1}),
        "an unknown token again": ([], {"order": DEFAULT_ORDER + "-zz"}),
        "an invalid sharp group again": ([], {"use_sharp": True, "sharp_enabled_group": "x"}),
        "virtual stages again": ([], {"virtual_pipeline_model_parallel_size": 2}),
        "indivisible instances again": (
            [],
            {"num_distributed_optimizer_instances": 2 * world + 1},
        ),
    }
    return {
        label: recorder.call(module, (label, name, tuple(a), k))
        for label, (a, k) in attempts.items()
    }


def _after(recorder: _Recorder, module: ModuleType, release: str) -> dict[str, Any]:
    shown = {"destroy": recorder.call(module, _call("destroy_model_parallel"))}
    alive = {id(group) for group in c10d._world.pg_map}
    shown["open groups"] = sorted(
        name for key, name in recorder.names.items() if key in alive and name[0] != "_"
    )
    shown |= _ask(recorder, module, getter_calls(release)) | _globals(recorder, module, release)
    shown["destroy again"] = recorder.call(module, _call("destroy_model_parallel"))
    return shown


# ---------------------------------------------------------------------------------------------
# Comparing


def _same_refusal(stock: dict[str, Any], candidate: dict[str, Any]) -> bool:
    kind, theirs = stock["raises"][0], candidate.get("raises", ())
    return kind in theirs if hasattr(builtins, kind) else bool(theirs)


def _agree(stock: Any, candidate: Any) -> bool:
    if isinstance(stock, dict) and "raises" in stock:
        if stock["raises"][0] == "TypeError":
            return True
        return isinstance(candidate, dict) and _same_refusal(stock, candidate)
    return bool(stock == candidate)


def compare(
    stock: Snapshot, candidate: Snapshot, where: str = "", nonsense: bool = False
) -> list[str]:
    """What differs, one readable line each; empty when the candidate passes.

    Parameters
    ----------
    where : str
        the beginning of each line: the configuration and the rank.
    nonsense : bool
        the configuration is one that may be refused whatever stock does.
    """
    found: list[str] = []

    def differ(what: str, ours: Any, theirs: Any) -> None:
        found.append(f"{where}{what}: stock {ours}, candidate {theirs}")

    ours, theirs = stock["outcome"], candidate["outcome"]
    if nonsense and theirs != "ok":
        return found
    if ours != "ok" or theirs != "ok":
        refused = ours != "ok" and theirs != "ok" and _same_refusal(ours, theirs)
        if not refused:
            differ("initialize_model_parallel", _brief(ours), _brief(theirs))
        _compare_answers(stock, candidate, differ, ("without", "before"))
        return found
    for made in sorted((stock["created"] | candidate["created"]), key=repr):
        counts = stock["created"][made], candidate["created"][made]
        if counts[0] != counts[1]:
            differ(f"created {made}", f"{counts[0]} times", f"{counts[1]} times")
    _compare_answers(stock, candidate, differ, ("",))
    for name in sorted(stock["groups"].keys() & candidate["groups"].keys()):
        if stock["groups"][name] != candidate["groups"][name]:
            differ(f"the group of {name}", stock["groups"][name], candidate["groups"][name])
    return found


def _brief(outcome: Any) -> str:
    if outcome == "ok":
        return "accepts"
    return f"raises {outcome['raises'][0]} ({outcome.get('message', '')[:160]})"


def _compare_answers(
    stock: Snapshot,
    candidate: Snapshot,
    differ: Callable[[str, Any, Any], None],
    steps: tuple[str, ...],
) -> None:
    before = stock["answers"].get("before", {})
    for step, answers in stock["answers"].items():
        if not step.startswith(steps):
            continue
        theirs = candidate["answers"].get(step, {})
        for label, answer in answers.items():
            other = theirs.get(label, "<no answer>")
            if _agree(answer, other):
                continue
            if step == "after" and label in before and _agree(before[label], other):
                continue
            if label == "open groups":
                leaked = sorted(set(other) - set(answer))
                if not leaked:
                    continue
                answer, other = "closes these", f"leaves open {leaked}"
            differ(f"{step}: {label}", answer, other)


def compare_surface(candidate: ModuleType, release: str) -> list[str]:
    """Names, parameters and defaults of every public function, beside stock's.

    The order of the parameters is left to the calls by position.
    """
    found: list[str] = []
    for name in public_functions(release):
        theirs = getattr(candidate, name, None)
        if not callable(theirs):
            found.append(f"{name}: the candidate has no such function")
            continue
        try:
            their_parameters = list(inspect.signature(theirs).parameters.values())
        except (TypeError, ValueError):
            continue
        if any(p.kind is p.VAR_POSITIONAL for p in their_parameters):
            continue
        ours = inspect.signature(getattr(_pattern(release), name)).parameters.values()
        known = {p.name: repr(p.default) for p in their_parameters}
        for p in ours:
            if known.get(p.name) != repr(p.default):
                shown = known.get(p.name, "no such parameter")
                found.append(f"{name}, {p.name}: stock's default {p.default!r}, candidate {shown}")
    for module, label in ((_pattern(release), "stock"), (candidate, "candidate")):
        try:
            module.initialize_model_parallel()
            found.append(f"initialize_model_parallel without torch.distributed: {label} accepts")
        except Exception as error:
            if not isinstance(error, AssertionError):
                found.append(f"initialize_model_parallel without torch.distributed: {error!r}")
    return found


def _replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """An edit of stock's source that insists on finding what it replaces."""

    def edit(text: str) -> str:
        for old, new in pairs:
            if old not in text:
                raise ValueError(f"the source has no {old!r} to replace")
            text = text.replace(old, new)
        return text

    return edit


@dataclass(frozen=True)
class Repair:
    """A place where stock defeats itself, and which configurations come across it."""

    edit: Callable[[str], str]
    applies: Callable[[Config], bool]


_SHARP_BARRIER = """torch.distributed.barrier(
            group=get_data_parallel_group(with_context_parallel=True),"""

REPAIRS = {
    # 0.19: the barrier asks for a group that is only made later, so that SHARP on dp always fails.
    # In either release, a rank outside the window has no such group at all.
    "sharp on dp": Repair(
        _replaced(
            (
                _SHARP_BARRIER,
                """if _DATA_PARALLEL_GROUP_WITH_CP is not None: torch.distributed.barrier(
            group=_DATA_PARALLEL_GROUP_WITH_CP,""",
            )
        ),
        lambda config: config["kwargs"].get("use_sharp", False),
    ),
    # 0.19: "tp" is looked for in a string that contains "gtp_remat".
    "order without tp": Repair(
        _replaced(("if name not in order", 'if name not in order.split("-")')),
        lambda config: "tp" not in config["kwargs"].get("order", "tp").lower().split("-"),
    ),
    # 0.19: the data-parallel size already counts gtp_remat, which is then counted again.
    "all-gather groups with gtp_remat": Repair(
        _replaced(
            (
                "dp_size = get_data_parallel_world_size()",
                "dp_size = get_data_parallel_world_size(with_gtp_remat=False)",
            ),
            (
                "expert_dp_size = get_expert_data_parallel_world_size()",
                "expert_dp_size = get_expert_data_parallel_world_size(with_gtp_remat=False)",
            ),
        ),
        lambda config: (
            config["kwargs"].get("gtp_remat_size", 1) > 1
            or config["kwargs"].get("expert_gtp_remat_size", 1) > 1
        ),
    ),
}


def repaired_stocks(release: str, config: Config) -> Iterator[ModuleType]:
    """Stock with one or more of the `REPAIRS` that `config` would come across."""
    if "gtp_remat_size" not in _parameters(release):
        return
    edits = [repair.edit for repair in REPAIRS.values() if repair.applies(config)]
    for count in range(1, len(edits) + 1):
        for chosen in itertools.combinations(edits, count):
            yield load_stock(release, functools.partial(_edit_all, chosen))


def _edit_all(edits: Sequence[Callable[[str], str]], text: str) -> str:
    for edit in edits:
        text = edit(text)
    return text


@dataclass
class Report:
    """What a run found.

    `answers` counts single values that were compared; `refused` counts configurations that stock
    refused on at least one rank; `refusals` counts them by exception and kind of configuration;
    `differences` counts differences by what differs, and `examples` keeps the first few of each;
    `repaired` counts ranks on which the candidate agrees with a repaired stock instead.
    """

    release: str
    configurations: int = 0
    refused: int = 0
    ranks: int = 0
    answers: int = 0
    repaired: int = 0
    seconds: float = 0.0
    differences: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)

    def add(self, where: str, found: list[str]) -> None:
        """Count differences, each a line that begins with `where`, and keep a few as examples."""
        for line in found:
            what = line.removeprefix(where).partition(": stock ")[0]
            what = re.sub(r"^created \('?(\w*).*", r"created \1", what)
            self.differences[what] = self.differences.get(what, 0) + 1
            if self.differences[what] <= 2:
                self.examples.append(line)

    def __str__(self) -> str:
        counts = f"{self.configurations} configurations, {self.refused} refused"
        lines = [f"{self.release}: {counts}, {self.ranks} ranks, {self.answers} answers"]
        lines += [f"{sum(self.differences.values())} differences", *self.examples[:20]]
        return "\n".join(lines)


def config_number(number: int, seed: int, release: str, max_world: int) -> Config:
    """The configuration that `run` draws as its `number`-th."""
    return random_config(random.Random(f"{seed}/{release}/{number}"), release, max_world)


def run(
    candidate: ModuleType | Callable[[], ModuleType],
    release: str,
    n: int,
    seed: int,
    max_world: int,
    time_budget: float | None = None,
    first: int = 0,
    stop_after: int = 20_000,
) -> Report:
    """Compare `candidate` with stock over `n` random configurations.

    Parameters
    ----------
    candidate : module, or callable
        the module, used again and again; a callable gives a fresh one for each rank.
    max_world : int
        the largest world; most worlds are far smaller.
    time_budget : float, optional
        seconds after which no further configuration starts.
    first : int
        number of the first configuration, to repeat one from a report.
    stop_after : int
        differences after which the run ends.
    """
    report = Report(release)
    started = time.monotonic()
    fresh = (lambda: candidate) if isinstance(candidate, ModuleType) else candidate
    report.add("", compare_surface(fresh(), release))
    refusals: Counter[str] = Counter()
    for number in range(first, first + n):
        if time_budget is not None and time.monotonic() - started > time_budget:
            break
        if sum(report.differences.values()) >= stop_after:
            break
        config = config_number(number, seed, release, max_world)
        nonsense = is_nonsense(config)
        refused = False
        for rank in config["ranks"]:
            ours = snapshot(load_stock(release), config, rank, release)
            theirs = snapshot(fresh(), config, rank, release)
            where = (
                f"#{number} ({config['kind']}) rank {rank} of {config['world_size']} "
                f"{config['kwargs']} {config['environment'] or ''}: "
            )
            found = compare(ours, theirs, where, nonsense)
            for repaired in repaired_stocks(release, config) if found else ():
                other = snapshot(repaired, config, rank, release)
                if not compare(other, theirs, where, nonsense):
                    found = []
                    report.repaired += 1
                    break
            report.add(where, found)
            report.ranks += 1
            report.answers += 1 + sum(map(len, ours["answers"].values()))
            report.answers += len(ours["groups"]) + len(ours["created"])
            if ours["outcome"] != "ok":
                if not refused:
                    refusals[f"{ours['outcome']['raises'][0]}: {config['kind']}"] += 1
                refused = True
        report.refused += refused
        report.configurations += 1
    report.refusals = dict(sorted(refusals.items()))
    report.seconds = time.monotonic() - started
    return report


# ---------------------------------------------------------------------------------------------
# Mutants: the harness has to notice each of these


def _mutant(old: str, new: str) -> Callable[[str], str]:
    return _replaced((old, new))


MUTANTS: dict[str, Callable[[str], str]] = {
    "tp-cp becomes tp-dp": _mutant("get_ranks('tp-cp')", "get_ranks('tp-dp')"),
    "a group's members": _mutant("if rank in embedding_ranks:", "if rank in ranks:"),
    "another timeout": _mutant(
        "timedelta(minutes=distributed_timeout_minutes)",
        "timedelta(minutes=distributed_timeout_minutes + 1)",
    ),
    "another description": _mutant('group_desc="MODEL_PARALLEL_GROUP"', 'group_desc="MODEL"'),
    "another group's options": _mutant('get_nccl_options("tp_cp",', 'get_nccl_options("tp",'),
    "a getter of another group": _mutant(
        "return _CONTEXT_PARALLEL_GROUP\n", "return _TENSOR_AND_CONTEXT_PARALLEL_GROUP\n"
    ),
    "an alias becomes a copy": _mutant(
        "            _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = _EXPERT_DATA_PARALLEL_GROUP\n",
        "            _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = create_group(\n"
        "                ranks, timeout=timeout, group_desc='EXPERT_DATA_PARALLEL_GROUP')\n",
    ),
    "a gloo group with a timeout": _mutant(
        'ranks, backend="gloo", group_desc="EXPERT_DATA_PARALLEL_GROUP_GLOO"',
        'ranks, timeout=timeout, backend="gloo", group_desc="EXPERT_DATA_PARALLEL_GROUP_GLOO"',
    ),
    "another default": _mutant(
        "def is_pipeline_last_stage(ignore_virtual=True",
        "def is_pipeline_last_stage(ignore_virtual=False",
    ),
    "arguments swapped": _mutant(
        "get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False)",
        "get_amax_reduction_group(tp_only_amax_red=False, with_context_parallel=False)",
    ),
    "another exception": _mutant(
        'raise RuntimeError(f"world_size', 'raise ValueError(f"world_size'
    ),
    "zero taken for unset": _mutant(
        "if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:",
        "if _MPU_PIPELINE_MODEL_PARALLEL_RANK:",
    ),
    "case of the order": _mutant('order.endswith("pp")', 'order.lower().endswith("pp")'),
    "destroy forgets": _mutant("    _MODEL_PARALLEL_GROUP = None\n\n    global", "\n    global"),
    "sharp on every group": _mutant('del os.environ["NCCL_COLLNET_ENABLE"]', "pass"),
    "a group of gloo left open": _mutant(
        "torch.distributed.destroy_process_group(_EXPERT_DATA_PARALLEL_GROUP_GLOO)", "pass"
    ),
    "checks in another order": _mutant(
        "    assert torch.distributed.is_initialized()\n",
        "    assert torch.distributed.is_initialized() and not is_initialized()\n",
    ),
    "a global of a copy": _mutant("_EMBEDDING_GLOBAL_RANKS = embedding_ranks", "pass"),
    "ucc without its variables": _mutant('os.environ["UCX_NET_DEVICES"] = "all"', "pass"),
    "hybrid sizes": _mutant("range(int(log2(len(ranks))))", "range(int(log2(len(ranks))) + 1)"),
    "hierarchy from the other end": _mutant('"(l s u) -> (l u) s"', '"(u s l) -> (l u) s"'),
}


def run_mutants(release: str, n: int, seed: int, max_world: int) -> dict[str, Report]:
    """One run per mutant of stock, each ended by its first differences."""
    reports = {}
    for name, edit in MUTANTS.items():
        mutant = functools.partial(load_stock, release, edit)
        reports[name] = run(mutant, release, n, seed, max_world, stop_after=1)
    return reports


def main(argv: Sequence[str] | None = None) -> None:
    """One release in this process; writes the report as JSON (see ``scripts/parity``)."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--release", required=True)
    parser.add_argument("-n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-world", type=int, default=64)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--time-budget", type=float)
    parser.add_argument("--against-itself", action="store_true")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--out", required=True)
    given = parser.parse_args(argv)
    os.environ["HYPERGRID_MEGATRON_RELEASE"] = given.release
    try:
        source(given.release)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    scale = (given.release, given.n, given.seed, given.max_world)
    if given.mutants:
        reports = run_mutants(*scale)
    else:
        candidate: ModuleType | Callable[[], ModuleType]
        if given.against_itself:
            candidate = functools.partial(load_stock, given.release)
        else:
            import compat.parallel_state as candidate  # type: ignore[no-redef]
        budget, first = given.time_budget, given.first
        reports = {"": run(candidate, *scale, time_budget=budget, first=first)}
    text = json.dumps({name: asdict(report) for name, report in reports.items()})
    Path(given.out).write_text(text)


if __name__ == "__main__":
    main()
