"""A job that is planned without running it, from sizes with short names or from a launch line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from compat.megatron.planning import Request
from compat.megatron.traffic import Shape
from hypergrid.layout import RankLayout
from hypergrid.messages import shown
from hypergrid.plan import GroupPlan

TP_PP_DP = "tp-cp-ep-pp-dp"  # what Megatron's --use-tp-pp-dp-mapping means
RANKS_PER_HOST = 8

_NUMBER, _TEXT, _YES, _NO, _NUMBERS = "number", "text", "yes", "no", "numbers"

# Argument of initialize_model_parallel, or "_..." for a fact about the job: kind of value, flags.
_SETTINGS = {
    "tensor_model_parallel_size": (_NUMBER, "tensor-model-parallel-size tp"),
    "pipeline_model_parallel_size": (_NUMBER, "pipeline-model-parallel-size pp"),
    "virtual_pipeline_model_parallel_size": (_NUMBER, "num-virtual-stages-per-pipeline-rank vp"),
    "context_parallel_size": (_NUMBER, "context-parallel-size cp"),
    "hierarchical_context_parallel_sizes": (
        _NUMBERS,
        "hierarchical-context-parallel-sizes hierarchical-cp",
    ),
    "hybrid_context_parallel": (_YES, "hybrid-context-parallel"),
    "dynamic_context_parallel": (_YES, "dynamic-context-parallel"),
    "min_dynamic_context_parallel_size": (_NUMBER, "min-dynamic-context-parallel-size"),
    "expert_model_parallel_size": (_NUMBER, "expert-model-parallel-size ep"),
    "expert_tensor_parallel_size": (_NUMBER, "expert-tensor-parallel-size etp"),
    "gtp_remat_size": (_NUMBER, "gtp-remat-size"),
    "expert_gtp_remat_size": (_NUMBER, "expert-gtp-remat-size"),
    "num_distributed_optimizer_instances": (
        _NUMBER,
        "num-distributed-optimizer-instances instances",
    ),
    "order": (_TEXT, "order"),
    "distributed_timeout_minutes": (_NUMBER, "distributed-timeout-minutes"),
    "use_sharp": (_YES, "use-sharp"),
    "sharp_enabled_group": (_TEXT, "sharp-enabled-group"),
    "create_all_gather_group": (_YES, "create-all-gather-group"),
    "create_gloo_process_groups": (_NO, "disable-gloo-process-groups no-gloo"),
    "_tp_pp_dp": (_YES, "use-tp-pp-dp-mapping"),
    "_user_buffers": (_YES, "tp-comm-overlap"),
    "_layers": (_NUMBER, "num-layers layers"),
    "_layers_per_stage": (_NUMBER, "num-layers-per-virtual-pipeline-stage"),
    # Where the ranks are: our own flags, and those of torchrun, srun, mpirun and deepspeed.
    "_world": (_NUMBER, "world-size ntasks"),
    "_hosts": (_NUMBER, "nnodes nodes num-nodes"),
    "_per_host": (_NUMBER, "gpus-per-node nproc-per-node ntasks-per-node num-gpus"),
    "_hosts_per_rack": (_NUMBER, "hosts-per-rack"),
    "_racks_per_pod": (_NUMBER, "racks-per-pod"),
    "_nvlink_domain": (_NUMBER, "nvlink-domain"),
    # The model and the batch, for the traffic alone.
    "_hidden": (_NUMBER, "hidden-size hidden"),
    "_sequence": (_NUMBER, "seq-length seq"),
    "_ffn": (_NUMBER, "ffn-hidden-size ffn"),
    "_experts": (_NUMBER, "num-experts experts"),
    "_topk": (_NUMBER, "moe-router-topk topk"),
    "_expert_ffn": (_NUMBER, "moe-ffn-hidden-size expert-ffn"),
    "_micro_batch": (_NUMBER, "micro-batch-size"),
    "_micro_batches": (_NUMBER, "micro-batches"),
    "_batch": (_NUMBER, "global-batch-size"),
}
_OF_MODEL = tuple(_SETTINGS)[list(_SETTINGS).index("_hidden") :]
_MICRO_BATCHES = 32  # of a job that does not say
_KEYS = {flag: key for key, (_, flags) in _SETTINGS.items() for flag in flags.split()}
# One-letter flags have this meaning only after their launcher.
_SHORT = {
    ("srun", "-N"): "nodes",
    ("srun", "-n"): "ntasks",
    **dict.fromkeys((("mpirun", "-n"), ("mpirun", "-np"), ("mpirun", "--np")), "ntasks"),
}
_VARIABLES = {"WORLD_SIZE": "_world", "HYPERGRID_ORDER": "order"}


class JobError(ValueError):
    """A job that cannot be read or planned; the message says what to write instead."""


@dataclass(frozen=True)
class Job:
    """What a job asks of ``initialize_model_parallel``, and where its ranks are."""

    arguments: Mapping[str, Any]  # of initialize_model_parallel, those that were given
    world_size: int
    ranks_per_host: int = RANKS_PER_HOST
    hosts_per_rack: int | None = None  # None: not known
    racks_per_pod: int | None = None
    nvlink_domain: int | None = None  # GPUs; None: no more than a host
    shape: Shape | None = None  # of the model, where all of it is known
    user_buffers: bool = False  # whether Transformer Engine's are on (--tp-comm-overlap)
    assumed: tuple[str, ...] = field(default=(), compare=False)  # in sentences

    def request(self) -> Request:
        """The request of ``initialize_model_parallel``; where that would raise, a JobError."""
        request = Request(**self.arguments, job_size=self.world_size)
        try:
            request.check()
            _ = request.plan
        except Exception as error:
            raise JobError(str(error)) from error
        return request

    def plan(self) -> GroupPlan:
        """The groups that the job would create."""
        return self.request().plan

    def layouts(self, order: str) -> Mapping[str, RankLayout] | None:
        """Its layouts under another order, or None where Megatron refuses that order."""
        try:
            return replace(self, arguments={**self.arguments, "order": order}).request().layouts
        except JobError:
            return None


def from_line(text: str, **given: Any) -> Job:
    """The job that a launch line starts: torchrun's or srun's flags, and Megatron's.

    ``text`` is as in a script: continued lines, comments, ``NAME=value``, ``$NAME``,
    ``${NAME:-8}``, ``$((A * B))``, ``ARGS=(...)`` and ``#SBATCH`` are understood. Flags without
    effect on the layout are ignored. ``given`` are settings that override the line's, named as
    flags with ``_`` for ``-``: ``tp=4``.

    Raises JobError on a value that is missing, not a number, or in a variable that is not set.
    """
    tokens, variables = _expanded(text)
    set_here = ((key, name, variables.get(name)) for name, key in _VARIABLES.items())
    written = {key: (name, value) for key, name, value in set_here if value}
    said: dict[str, Any] = {}
    launcher, i = "", 0
    while i < len(tokens):
        token, i = tokens[i], i + 1
        if token in ("srun", "mpirun"):
            launcher = token
        elif token.endswith(".py") or token.startswith("python"):
            launcher = ""  # what follows are the script's own flags
        flag, has_value, value = token.partition("=")
        if (launcher, token[:2]) in _SHORT and token[2:3].isdecimal():  # -N16
            flag, has_value, value = token[:2], "=", token[2:]
        long = flag[2:].replace("_", "-") if flag.startswith("--") else ""
        key = _KEYS.get(_SHORT.get((launcher, flag), long))
        if key is None:
            continue
        takes, values = _SETTINGS[key][0], [value] * bool(has_value)
        if takes in (_YES, _NO):
            said[key] = takes == _YES
            continue
        if not has_value:
            stop = i + (len(tokens) if takes == _NUMBERS else 1)
            while i < min(stop, len(tokens)) and not tokens[i].startswith("--"):
                values.append(tokens[i])
                i += 1
        if not values:
            raise JobError(f"{flag} has no value in the launch line. Write a number after it.")
        written[key] = (flag, " ".join(values))
    asked = _by_key(given)
    said |= asked
    for key, (flag, value) in written.items():
        # A line may leave to variables what only the traffic needs, or what the ranks tell.
        spared = key in _OF_MODEL or (key == "_hosts" and "_world" in asked)
        if key not in said and not (spared and not re.fullmatch(r"\d{1,18}", value)):
            said[key] = _read(key, flag, value)
    return _job(said, asked)


def from_sizes(**given: Any) -> Job:
    """The job with these settings, named as flags with ``_`` for ``-``: ``tp=4, world_size=64``."""
    said = _by_key(given)
    return _job(said, said)


def _by_key(given: Mapping[str, Any]) -> dict[str, Any]:
    said = {_KEYS[name.replace("_", "-")]: v for name, v in given.items() if v is not None}
    switches = {key for key in said if _SETTINGS[key][0] in (_YES, _NO)}
    on = {key: _SETTINGS[key][0] == _YES for key in switches if said[key]}
    return {key: value for key, value in said.items() if key not in switches} | on


def _read(key: str, flag: str, text: str) -> Any:
    """A setting's value from the text after ``flag``."""
    takes = _SETTINGS[key][0]
    if takes == _TEXT:
        return text
    numbers = []
    for word in text.split():
        if "$" in word:
            raise JobError(
                f"{flag} is {word}, which the launch line does not set. Paste the line that sets "
                f"it too, or write the number."
            )
        if not re.fullmatch(r"-?\d{1,18}", word):
            raise JobError(f"{flag} must be a whole number, got {shown(word)}.")
        numbers.append(int(word))
    return numbers if takes == _NUMBERS else numbers[0]


def _job(said: dict[str, Any], asked: Mapping[str, Any]) -> Job:
    """The job of all settings, of which ``asked`` were given beside a launch line or without it."""
    arguments = {key: value for key, value in said.items() if not key.startswith("_")}
    assumed = []
    if said.get("_tp_pp_dp"):
        arguments.setdefault("order", TP_PP_DP)
    per_host, hosts, world = said.get("_per_host"), said.get("_hosts"), said.get("_world")
    if world is None and per_host is not None:
        world = per_host * (1 if hosts is None else hosts)
        if hosts is None:
            assumed.append(f"the {world} ranks of one host are the whole job")
    if world is None:
        models = ("tensor_model", "pipeline_model", "context")
        least = prod(arguments.get(f"{name}_parallel_size", 1) for name in models)
        raise JobError(
            f"the number of ranks is missing. Give --world-size (a multiple of {least}, the "
            f"product of the sizes), or torchrun's --nnodes and --nproc-per-node."
        )
    if per_host is None:
        per_host = -(-world // hosts) if hosts else min(RANKS_PER_HOST, world)
        if not hosts:
            assumed.append(f"{per_host} ranks on each host; --gpus-per-node changes it")
    for name, value in (("world-size", world), ("gpus-per-node", per_host)):
        if value < 1:
            raise JobError(f"--{name} must be at least 1, got {value}.")
    if hosts is not None and said.get("_per_host") is not None and world > per_host * hosts:
        raise JobError(
            f"{world} ranks do not fit on {hosts} hosts of {per_host}, which are "
            f"{per_host * hosts}. Change one of the three numbers."
        )
    _add_virtual_stages(arguments, said)
    shape = _shape(said, asked, arguments, world, assumed)
    racks, pods, domain = (
        said.get(f"_{n}") for n in ("hosts_per_rack", "racks_per_pod", "nvlink_domain")
    )
    buffers = bool(said.get("_user_buffers"))
    return Job(arguments, world, per_host, racks, pods, domain, shape, buffers, tuple(assumed))


def _shape(
    said: Mapping[str, Any],
    asked: Mapping[str, Any],
    arguments: Mapping[str, Any],
    world: int,
    assumed: list[str],
) -> Shape | None:
    """The model's shape; None where it is not known. A JobError if it was begun and not ended."""
    needed = {"_hidden": "hidden", "_layers": "layers", "_sequence": "seq"}
    missing = [flag for key, flag in needed.items() if key not in said]
    begun = [key for key in (*_OF_MODEL, "_layers") if key in asked]
    wrong = [key for key in (*_OF_MODEL, "_layers") if said.get(key, 1) < 1]
    if missing and begun:
        raise JobError(
            f"the shape of a model needs --hidden, --layers and --seq: --{missing[0]} is missing."
        )
    if missing or (wrong and not begun):
        return None
    if wrong:
        flag = _SETTINGS[wrong[0]][1].split()[-1]
        raise JobError(f"--{flag} must be at least 1, got {said[wrong[0]]}.")
    names = ("tensor_model", "pipeline_model", "context")
    replicas = max(1, world // prod(arguments.get(f"{name}_parallel_size", 1) for name in names))
    micro_batch = said.get("_micro_batch", 1)
    many = said.get("_micro_batches")
    if many is None and "_batch" in said:
        many = max(1, said["_batch"] // (micro_batch * replicas))
    if many is None:
        many = _MICRO_BATCHES
        assumed.append(f"{many} micro-batches in a step; --micro-batches changes it")
    optional = {
        name: said[f"_{name}"]
        for name in ("ffn", "experts", "topk", "expert_ffn")
        if f"_{name}" in said
    }
    ep = arguments.get("expert_model_parallel_size", 1)
    if ep > 1 and "experts" not in optional:
        optional["experts"] = ep
        assumed.append(f"{ep} experts; --experts changes it")
    sizes = (said["_hidden"], said["_layers"], said["_sequence"], many, micro_batch)
    return Shape(*sizes, **optional)


def _add_virtual_stages(arguments: dict[str, Any], said: Mapping[str, Any]) -> None:
    """As Megatron's arguments: from the layers of each virtual stage; none with one stage."""
    stages = arguments.get("pipeline_model_parallel_size", 1)
    name = "virtual_pipeline_model_parallel_size"
    if stages == 1:
        arguments.pop(name, None)
        return
    layers, each = said.get("_layers"), said.get("_layers_per_stage")
    if each is not None and name not in arguments:
        if layers is None or each < 1 or layers % (stages * each):
            raise JobError(
                f"--num-layers-per-virtual-pipeline-stage {each} needs a --num-layers that is a "
                f"multiple of {stages} stages x {each}, got {layers}."
            )
        arguments[name] = layers // stages // each


_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_USED = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_SBATCH = re.compile(r"(?m)^#SBATCH\s+(-[a-zA-Z]|--[a-z-]+(?=[= ]))[= ]?\s*(\d+)")
_SLURM = {  # the variables that SLURM sets for an option of the script's head
    **dict.fromkeys(("-N", "--nodes"), ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    **dict.fromkeys(("-n", "--ntasks"), ("SLURM_NTASKS", "SLURM_NPROCS")),
}
_SUM = re.compile(r"\$\(\((.*?)\)\)")


def _expanded(text: str) -> tuple[list[str], dict[str, str]]:
    """The words of a shell text, with the values of variables that it sets; and these."""
    variables: dict[str, str] = {}
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    for found in _SBATCH.finditer(text):
        for name in _SLURM.get(found[1], ()):
            variables[name] = found[2]
    text = re.sub(r"(?m)^#SBATCH\b", "srun", text)
    text = re.sub(r"[A-Za-z_]\w*\+?=\(", " ", text)  # of ARGS=( ... ) the words are read
    try:
        sums_in_a_word = _SUM.sub(lambda found: "".join(found[0].split()), text)
        tokens = shlex.split(sums_in_a_word, comments=True)
    except ValueError as error:
        raise JobError(f"the launch line cannot be read: {error}. Close its quotes.") from None
    words: list[str] = []
    for token in tokens:
        word = _SUM.sub(lambda found: _value(found[1], variables), token)
        word = _USED.sub(
            lambda found: variables.get(found[1] or found[2]) or found[3] or found[0], word
        )
        assigned = _ASSIGNED.fullmatch(word.rstrip(";"))
        if assigned is not None and not word.startswith("-"):
            variables[assigned[1]] = assigned[2]
        # The shell splits a variable's value into words too.
        words += word.rstrip(");").split()
    return words, variables


def _value(formula: str, variables: Mapping[str, str]) -> str:
    """The value of ``A * $B``; the formula itself if it has no value."""
    numbers = re.sub(
        r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], name[0]), formula
    )
    if re.fullmatch(r"[\d\s()+*/-]{1,99}", numbers) and "**" not in numbers:
        with suppress(SyntaxError, TypeError, ZeroDivisionError):
            return str(eval(numbers.replace("/", "//").strip()))
    return f"$(({formula}))"
