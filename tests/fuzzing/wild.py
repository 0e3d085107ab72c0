"""Sets of arguments for ``initialize_model_parallel`` in small worlds, most of them wrong."""

from __future__ import annotations

import itertools
import math
import os
import random
import string
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parity.configurations import random_config
from tests.parity.snapshots import initialisation
from tests.parity.surface import COMMUNICATORS, DEFAULT_ORDER, Config, parameters

MARKER = Path(tempfile.gettempdir()) / f"hypergrid-fuzz-{os.getpid()}"
CHOICES = ("share", "connect", "creation")  # ours alone


@dataclass(frozen=True)
class Made:
    """A value that every run makes anew, in a folder of its own.

    ``comparable`` is False where stock would wait for ever; ``refusable`` where it lets something
    pass that ours may refuse.
    """

    label: str
    make: Callable[[Path], Any]
    comparable: bool = True
    refusable: bool = False

    def __repr__(self) -> str:
        return f"<{self.label}>"


class Hang(BaseException):
    """Time is up, or reading would not end. Nothing that catches Exception catches it."""


def endless(value: Any) -> Iterator[Any]:
    """``value`` again and again, as far as a reader that stops in time may go."""
    yield from itertools.repeat(value, 50_000)
    raise Hang("read without end")


class Index:
    """A whole number that is no int."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Unspeakable:
    """A value whose own words fail."""

    WORDS = "this has no words"

    def __repr__(self) -> str:
        raise RuntimeError(self.WORDS)


TEXTS = (
    *("", " ", "2", "two", "٣", "\uff11", "-1", "0x2", "1e3", "None", "x" * 100_000, "\0", "2\0"),
    *("\u200f2", "\u202etp", "\ud800", "{0.__class__}", "{tp}", "%s", "%s%n", "%d"),
    *(f"$(touch {MARKER})", f"`touch {MARKER}`", f"; touch {MARKER}", "../../etc/passwd", "\n"),
    *("True", "False", "false", "no"),
)
_OTHERS = (
    *([], [2], [2, 2], (1,), {}, {"tp": 2}, {2}, b"2", b"", object(), Unspeakable(), int, len),
    *(range(2), 1j, Fraction(2), Decimal(2), np.array([2]), np.array([2, 2]), np.array([2.0, 2.0])),
    *(torch.tensor([1, 2]), torch.tensor(2.0), ..., NotImplemented, Exception("x")),
)
_NUMBERS = (
    *(None, 0, -1, -2, 1, 2, 4, 3, 7, 10**6, 2**31, 2**63, 10**30, -(10**30), 10**5000),
    *(2.0, 1.0, 0.5, 1.5, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, True, False),
    *(np.int64(2), np.int32(1), np.uint8(2), np.int64(0), np.float64(2), np.float32(1)),
    *(np.bool_(True), np.array(2), torch.tensor(2), torch.tensor(True), Index(2), Index(0)),
)
_ORDERS = (
    *(None, DEFAULT_ORDER.encode(), DEFAULT_ORDER.split("-"), DEFAULT_ORDER.upper(), 5, 2.0),
    *(f"{DEFAULT_ORDER} ", f" {DEFAULT_ORDER}", f"-{DEFAULT_ORDER}", f"{DEFAULT_ORDER}-"),
    *(
        DEFAULT_ORDER.replace("-", each)
        for each in ("--", " ", "\u2010", "_", ",", " - ", "\u2212")
    ),
    *(
        DEFAULT_ORDER.replace("tp", each)
        for each in ("\uff54\uff50", "t\u200bp", "tP", "tpx", "gtp", "")
    ),
    *(
        f"{DEFAULT_ORDER}-{each}"
        for each in ("tp", "dp", "pp", "TP", "gtp_remat", "zz", "{0}", "%s")
    ),
    *("tp-" * 2_000 + "tp", "-" * 100_000, "dp", "pp", "tp", "gtp_remat-GTP_REMAT", "TP-tp"),
    *("pp-dp-ep-cp-tp", "tp-cp-dp-ep-pp-gtp_remat", "\u0130-\u0131-ß", "tp\u200f-cp-ep-dp-pp"),
)
_HIERARCHIES = (
    *((2, 2), [1], [1, 1], [2], [2, 1], ["2", "2"], "22", "1", [0, 4], [-1, -1], [-2, -2], [[2]]),
    *([[1]], [2.0], [1.0], [None], [1, None], [True], {1: 1}, {1}, range(1, 3), np.array([2, 1])),
    *(np.array([1]), [np.int64(2)], torch.tensor([2]), [torch.tensor(1)], [10**30], [2**63, 0]),
    *([1] * 70, [math.nan], b"\x01", b"\x02", [Unspeakable()], 2, 1, True),
)
_PRIORITIES = (
    *(["dp_cp"], ["nobody"], "dp_cp", "dp", [1], [None], [["dp"]], ("tp", "pp"), {"tp": 1}, 5),
    *(b"dp", [b"dp"], ["dp"] * 3, [math.nan], [""], True, [Unspeakable()]),
)
_TIMEOUTS = (
    *(1, 30, 0.5, 0, -1, -0.5, math.nan, math.inf, -math.inf, "30", "", 1e-9, 1e9, 1e12, 10**9),
    *(
        10**15,
        10**30,
        10**400,
        True,
        np.int64(3),
        np.float64(3),
        torch.tensor(3),
        Fraction(1),
        None,
    ),
)
_FLAGS = (True, False, None, 0, 1, 2, "False", "no", "", [], [0], {}, 0.0, math.nan, object())
_FLAGS = (*_FLAGS, np.bool_(True), np.array([1, 2]), np.array([0]), torch.tensor([1, 2]), b"")
_BACKENDS = (None, "nccl", "ucc", "gloo", "NCCL", "UCC ", "fake", 5, ["nccl"], b"nccl", True)
_SHARPS = (None, "dp", "dp_replica", "DP", "tp", 5, ["dp"], b"dp", True, {"dp"})
_CHOSEN = ("none", "all", "lazy", "eager", "auto", "members", "ALL", 5, ["all"], True, b"all", {})


def _chooses(label: str, choose: Any, comparable: bool = True, refusable: bool = False) -> Made:
    return Made(f"a function that returns {label}", lambda _: choose, comparable, refusable)


def _raises(error: BaseException) -> Callable[[list[int]], list[int]]:
    def choose(ranks: list[int]) -> list[int]:
        raise error

    return choose


def _numbers(ranks: list[int]) -> Iterator[int]:
    yield from ranks


_CALLBACKS: tuple[Any, ...] = (
    _chooses("foreign ranks", lambda ranks: [10**6]),
    _chooses("the whole world and one more", lambda ranks: list(range(17))),
    _chooses("the first rank of the world", lambda ranks: [0]),
    _chooses("a negative rank", lambda ranks: [-1]),
    _chooses("a huge rank", lambda ranks: [10**30]),
    _chooses("a rank twice", lambda ranks: [ranks[0], ranks[0]]),
    _chooses("text", lambda ranks: "01"),
    _chooses("no text", lambda ranks: ""),
    _chooses("texts", lambda ranks: [str(rank) for rank in ranks]),
    _chooses("None", lambda ranks: None),
    _chooses("a None among ranks", lambda ranks: [*ranks, None]),
    _chooses("a number", lambda ranks: ranks[0]),
    _chooses("floats", lambda ranks: [float(rank) for rank in ranks], refusable=True),
    _chooses("nan", lambda ranks: [math.nan], refusable=True),
    _chooses("bools", lambda ranks: [True]),
    _chooses("nothing", lambda ranks: []),
    _chooses("lists of lists", lambda ranks: [ranks]),
    _chooses("a mapping", lambda ranks: dict.fromkeys(ranks)),
    _chooses("a set", set),
    _chooses("a tuple", tuple),
    _chooses("numpy's numbers", lambda ranks: [np.int64(rank) for rank in ranks]),
    _chooses("an array", np.array),
    _chooses("an array of no dimension", lambda ranks: np.array(ranks[0])),
    _chooses("an array of two dimensions", lambda ranks: np.array([ranks])),
    _chooses("a tensor", torch.tensor, comparable=False),  # sorting gives tensors, equal to none
    _chooses("a generator", _numbers, comparable=False),  # the recorder reads it to its end
    _chooses("ranks without end", lambda ranks: endless(0), comparable=False),
    _chooses("a million ranks", lambda ranks: list(range(10**6))),
    _chooses("what cannot be shown", lambda ranks: Unspeakable()),
    _chooses("nothing, as it raises", _raises(LookupError("the callback's own error"))),
    _chooses("nothing, as it raises without a word", _raises(ValueError())),
    _chooses("nothing, as it takes no ranks", lambda: []),
    _chooses("ranks of two arguments", lambda ranks, more: ranks),
    *(5, "ranks", [0], {}, True, Unspeakable(), None),
)


def _file(label: str, content: str | bytes, **how: bool) -> Made:
    def make(folder: Path) -> str:
        path = folder / "options.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return Made(label, make, **how)


def _folder(folder: Path) -> str:
    return str(folder)


def _pipe(folder: Path) -> str:
    path = folder / "pipe"
    if not path.exists():
        os.mkfifo(path)
    return str(path)


def _bomb(depth: int, links: str) -> str:
    """Aliases of aliases: some hundred bytes that stand for ``9 ** depth`` values."""
    lines = ["a0: &a0 {max_ctas: 1}"]
    for i in range(1, depth):
        nine = ", ".join([f"*a{i - 1}"] * 9)
        lines.append(f"a{i}: &a{i} " + links.format(nine))
    return "\n".join(lines)


_EVIL = f"!!python/object/apply:os.system ['touch {MARKER}']"
_PATHS: tuple[Any, ...] = (
    Made("a missing file", lambda folder: str(folder / "absent.yaml")),
    Made("a folder", _folder),
    Made("a path object of a folder", lambda folder: folder),
    Made("a pipe", _pipe, comparable=False),
    *(Made(path, lambda _, path=path: path, False) for path in ("/dev/zero", "/dev/stdin")),
    Made("/dev/null", lambda _: "/dev/null", refusable=True, comparable=False),
    Made("bytes", lambda folder: os.fsencode(folder / "absent.yaml")),
    Made("a path in a file", lambda folder: _file("", "").make(folder) + "/x"),
    *(Made(f"{number!r} as a path", lambda _, n=number: n, False) for number in (0, 1, 2, True)),
    *(2.5, [], ["x"], {}, object()),
    _file("an empty file", ""),
    _file("a list", "- dp_cp\n- dp\n", refusable=True),
    _file("a list of nothing known", "- 1\n", refusable=True),
    _file("a word", "hello", refusable=True),
    _file("the word dp_cp", "dp_cp", refusable=True),
    _file("a number", "5", refusable=True),
    _file("a date", "2024-01-01", refusable=True),
    _file("an impossible date", "dp: 2024-99-99"),
    _file("a tag of another date", "dp: !!timestamp x"),
    _file("a tag of an empty number", "dp: !!int ''"),
    _file("no YAML", "dp_cp: [unclosed"),
    _file("two documents", "dp: {}\n---\ncp: {}\n"),
    _file("a tab", "dp:\n\tmax_ctas: 1\n"),
    _file("bytes that are no text", b"\xff\xfe\x00\xd8\x80"),
    _file("a zero byte", b"dp: \x00"),
    _file("UTF-16", "dp: {max_ctas: 8}".encode("utf-16")),
    _file("a mark of byte order", b"\xef\xbb\xbfdp: {max_ctas: 8}"),
    _file("a key that is a list", "? [a]\n: b"),
    _file("keys that cannot be sorted", "dp_cp: {1: 2, a: 3, max_ctas: 4}"),
    _file("a section twice", "dp_cp: {max_ctas: 1}\ndp_cp: {max_ctas: 2}"),
    _file("one section by alias", "dp: &x {max_ctas: 8}\ncp: *x\n"),
    _file("an alias of nothing", "dp: *x"),
    _file("a list in itself", "dp: &x [*x]", refusable=True),
    _file("a bomb of aliases", _bomb(12, "[{}]"), refusable=True),
    _file("a bomb of merged keys", _bomb(7, "{{<<: [{}]}}"), refusable=True, comparable=False),
    _file("a bomb for dp_cp", _bomb(10, "[{}]") + "\ndp_cp: *a9", refusable=True),
    _file("a bomb in an option", _bomb(10, "[{}]") + "\ndp_cp: {max_ctas: *a9}", refusable=True),
    _file("code", _EVIL),
    _file("code in a section", f"dp_cp: {_EVIL}"),
    _file("a name in Python", "dp_cp: {max_ctas: !!python/name:os.system }"),
    _file("an unknown tag", "dp_cp: !mine {max_ctas: 1}"),
    _file("a file that is too long", "# " + "x" * (1 << 20), refusable=True),
    _file("a deep nest", "[" * 5_000),
    _file("a long number", "dp_cp: {max_ctas: " + "9" * 5_000 + "}", refusable=True),
    _file("a long word", "nobody: " + "x" * 5_000, refusable=True),
    _file("a long sexagesimal number", "nobody: 1" + ":59" * 3_000, refusable=True),
    _file("too many values", "nobody: [" + "1," * 21_000 + "]", refusable=True, comparable=False),
)
_SCALARS = (
    *("8", "8.5", "8.0", "eight", "'8'", "null", "true", "yes", "[8]", "{a: 1}", "99999999999"),
    *("-1", "IB", "ib", "Socket", "eth", "''", "~", ".nan", ".inf", "0x10", "1_0", "1:30", "٣"),
    *("!!binary aGk=", "2024-01-01", "&x 8", '"\\u202eIB"', "{0.__class__}x", "%s"),
)
_KEYS = (
    *("is_high_priority_stream", "cga_cluster_size", "max_ctas", "min_ctas", "net_name"),
    *("unknown", "1", "null", "MAX_CTAS", "''"),
)

_WHOLE = {
    **dict.fromkeys(("rank_offset", "local_world_size"), _NUMBERS),
    "num_distributed_optimizer_instances": _NUMBERS,
}
TABLE: dict[str, tuple[Any, ...]] = {
    **_WHOLE,
    "pipeline_model_parallel_comm_backend": _BACKENDS,
    "use_sharp": _FLAGS,
    "hierarchical_context_parallel_sizes": (
        *_HIERARCHIES,
        Made("a generator", lambda _: (size for size in (1,))),
        Made("sizes without end", lambda _: endless(1), comparable=False),
    ),
    "hybrid_context_parallel": _FLAGS,
    "nccl_communicator_config_path": _PATHS,
    "distributed_timeout_minutes": _TIMEOUTS,
    "order": _ORDERS,
    "get_embedding_ranks": _CALLBACKS,
    "get_position_embedding_ranks": _CALLBACKS,
    "create_gloo_process_groups": _FLAGS,
    "high_priority_stream_groups": (
        *_PRIORITIES,
        Made("a generator", lambda _: (name for name in ("dp_cp", "tp"))),
        Made("names without end", lambda _: endless("tp"), False),
    ),
    "sharp_enabled_group": _SHARPS,
    "create_all_gather_group": _FLAGS,
    **dict.fromkeys(CHOICES, _CHOSEN),
}


@dataclass(frozen=True)
class ArgumentSet:
    """One call as one rank: a configuration of ``tests.parity`` with ``wild`` put over it."""

    release: str
    config: Config
    rank: int
    wild: dict[str, Any]

    def arguments(self, folder: Path) -> dict[str, Any]:
        """The keyword arguments, files and functions made."""
        *_, kwargs = initialisation(self.config, self.release, str(folder))
        made = {
            name: value.make(folder) if isinstance(value, Made) else value
            for name, value in self.wild.items()
        }
        return {**kwargs, **made}

    def parts(self) -> Iterator[ArgumentSet]:
        """The sets with some of the faults left out."""
        sound = {**self.config, "kwargs": {}}
        for count in range(len(self.wild), -1, -1):
            for names in itertools.combinations(self.wild, count):
                wild = {name: self.wild[name] for name in names}
                for config in (self.config, sound):
                    yield replace(self, config=config, wild=wild)

    def __str__(self) -> str:
        wild = ", ".join(f"{name}={_brief(value)}" for name, value in self.wild.items())
        world = f"rank {self.rank} of {self.config['world_size']}"
        return f"{world}, {self.config['kwargs']} with {wild or 'nothing wild'}"


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) < 120 else f"{text[:80]}... ({len(text)} characters)"


def draw(rng: random.Random, release: str) -> ArgumentSet:
    """One set in a world of up to 16 ranks; most have a fault, many have several."""
    config = random_config(rng, release, 16) | {"positional": 0}
    names = [*parameters(release), rng.choice(CHOICES)]
    count = rng.choices((0, 1, 2, 3, 5), (6, 52, 26, 12, 4))[0]
    wild = {name: _value(rng, name) for name in rng.sample(names, count)}
    return ArgumentSet(release, config, rng.choice(config["ranks"]), wild)


def _value(rng: random.Random, name: str) -> Any:
    """A value for the argument ``name``: of its own kind, drawn freely, or of another kind."""
    way = rng.random()
    if way < 0.6:
        return rng.choice(TABLE.get(name, _NUMBERS))
    if way < 0.8:
        return _free(rng, name)
    return rng.choice(rng.choice((_NUMBERS, TEXTS, _OTHERS)) if way < 0.95 else _ORDERS)


def _free(rng: random.Random, name: str) -> Any:
    if name == "order":
        return _text(rng)
    if name == "nccl_communicator_config_path":
        return _file("a drawn file", _yaml(rng))
    if name == "hierarchical_context_parallel_sizes":
        return [_number(rng) for _ in range(rng.randint(0, 4))]
    if name == "high_priority_stream_groups":
        return [rng.choice((*COMMUNICATORS, _text(rng), 1)) for _ in range(rng.randint(0, 4))]
    if name in ("pipeline_model_parallel_comm_backend", "sharp_enabled_group", *CHOICES):
        return _text(rng)
    if name in ("get_embedding_ranks", "get_position_embedding_ranks"):
        ranks = [rng.randint(-2, 17) for _ in range(rng.randint(0, 4))]
        return Made(f"a function that returns {ranks}", lambda _: lambda pipeline: list(ranks))
    return _number(rng)


def _number(rng: random.Random) -> Any:
    return rng.choice(
        (
            rng.randint(-3, 20),
            np.int64(rng.randint(0, 8)),
            rng.randint(-(2**70), 2**70),
            rng.uniform(-3, 20),
            float(rng.randint(0, 8)),
        )
    )


_PIECES = (
    *(
        "tp",
        "cp",
        "ep",
        "dp",
        "pp",
        "gtp_remat",
        "TP",
        "-",
        "-",
        "-",
        "--",
        " ",
        "_",
        "{",
        "}",
        "%s",
    ),
    *("\0", "\u2010", "\u200f", "\u202e", "٣", "İ", "ß", "\n", "'", '"', "\ud800", "\U0001f600"),
    *string.ascii_letters[:4],
)


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.randint(0, 12)))


def _yaml(rng: random.Random) -> str:
    def section() -> str:
        if rng.random() < 0.2:
            return rng.choice(_SCALARS)
        options = {rng.choice(_KEYS): rng.choice(_SCALARS) for _ in range(rng.randint(0, 3))}
        return "{" + ", ".join(f"{key}: {value}" for key, value in options.items()) + "}"

    names = {
        rng.choice((*COMMUNICATORS, "dp_cp", "tp", "1")): None for _ in range(rng.randint(1, 5))
    }
    return "\n".join(f"{name}: {section()}" for name in names)
