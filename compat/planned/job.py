"""A job that is planned without running it, from sizes with short names or from a launch line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from math import prod
from typing import Any

from compat.megatron.planning import Request
from compat.swap import order
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
    "_with_embedding": (_YES, "account-for-embedding-in-pipeline-split"),
    "_with_loss": (_YES, "account-for-loss-in-pipeline-split"),
    # Where the ranks are; launchers have their own flags.
    "_world": (_NUMBER, "world-size"),
    "_hosts": (_NUMBER, "nnodes"),
    "_per_host": (_NUMBER, "gpus-per-node"),
    "_nvlink_domain": (_NUMBER, "nvlink-domain"),
    # The model and the batch.
    "_experts": (_NUMBER, "num-experts experts"),
    "_micro_batch": (_NUMBER, "micro-batch-size"),
    "_batch": (_NUMBER, "global-batch-size"),
    "_heads": (_NUMBER, "num-attention-heads"),
}
_OF_MODEL = ("_experts", "_micro_batch", "_batch", "_heads")  # change no group
_KEYS = {flag: key for key, (_, flags) in _SETTINGS.items() for flag in flags.split()}
# By launcher, the flags that give the number of ranks and hosts.
_LAUNCHERS = {
    launcher: {flag: key for key, flags in table.items() for flag in flags.split()}
    for launcher, table in {
        "torchrun": {"_hosts": "nnodes", "_per_host": "nproc-per-node"},
        "srun": {"_hosts": "N nodes", "_world": "n ntasks", "_per_host": "ntasks-per-node"},
        "mpirun": {"_world": "n np", "_per_host": "npernode ppn N"},
        "deepspeed": {"_hosts": "num-nodes", "_per_host": "num-gpus"},
        "accelerate": {"_hosts": "num-machines", "_world": "num-processes"},
    }.items()
}
_NAMES = {
    **{name: name for name in _LAUNCHERS},
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    "mpiexec": "mpirun",
}
_OURS = ("compat.launch", "hypergrid-launch")  # their flags come before the script
# Flags to give where a launcher's line does not say the number of ranks.
_RANKS = {
    "srun": "--ntasks, or --nodes and --ntasks-per-node",
    "mpirun": "-n",
    "deepspeed": "--num_gpus and --num_nodes instead of a hostfile",
    "accelerate": "--num_processes instead of a configuration file",
}
# Variables of a script that take the place of a flag; SLURM's are srun's alone.
_VARIABLES = {"WORLD_SIZE": "_world", "HYPERGRID_ORDER": "order"}
_OF_SRUN = {
    "SLURM_NNODES": "_hosts",
    "SLURM_NTASKS": "_world",
    "SLURM_NTASKS_PER_NODE": "_per_host",
}
_GPUS = "SLURM_GPUS_ON_NODE"
VARIABLES = (*_VARIABLES, *_OF_SRUN, _GPUS)
# Flags of Megatron and of launchers that do not change the groups, by their first words;
# and variables whose name says that they hold flags.
_WITHOUT_EFFECT = re.compile(
    r"(accumulate|adam|adlr|apply|async|attention|audit|auto|bf16|bias|bert|check|ckpt|clear|clip|"
    r"config|container|cpu|cpus|cross-entropy|cuda|data|dataloader|ddp|decay|decoupled|delay|"
    r"deterministic|disable-(?!gloo)|dist-ckpt|dataset|defer|distribute|embedding|empty|enable|end|eod|eval|exit|"
    r"exp|export|external|ffn|fim|finetune|first-last|fp16|fp32|fp4|fp8|full|fused|grad|gradient|"
    r"group-query|hidden|high-priority|hysteresis|inference|init|initial|iterations|job|keep|kill|"
    r"kv|label|l$|"
    r"load|local|log|logging|loss|lr|main|make|manual|mask|master|max|mem|merge|min|mla|mmap|mock|"
    r"moe|mpi|mscale|mtp|muon|nccl|no-(?!gloo)|node-rank|non|norm|"
    r"normalization|num-dataset|num-query|num-workers|openai|optimizer|output|overlap|override|"
    r"partition|"
    r"position|pretrained|profile|q-lora|qk|rampup|rdzv|recompute|record|redirects|report|rerun|"
    r"reset|rotary|rope|safe|save|seed|seq|sft|shadow|short|"
    r"skip|split|squared|start|step|swiglu|te-|"
    r"tensorboard|test|tee|time|timing|tokenizer|tp-comm|train|transformer|u$|untie|use-(?!sharp|tp-)|"
    r"v-head|valid|verbose|vocab|wait|wandb|warmup|weight|window|yaml|wgrad)"
)
_HOLDS_FLAGS = re.compile(r"(?i)args|opt|flags|param|extra|conf|cmd|launch")


class JobError(ValueError):
    """A job that cannot be read or planned; the message says what to write instead."""


@dataclass(frozen=True)
class Job:
    """A job as planned: its arguments of ``initialize_model_parallel``, and where its ranks are."""

    arguments: Mapping[str, Any]  # of initialize_model_parallel, those that were given
    world_size: int
    ranks_per_host: int = RANKS_PER_HOST
    nvlink_domain: int | None = None  # GPUs; None: no more than a host
    # Of the model and the batch, by Megatron's flag: {"num-experts": 8}.
    model: Mapping[str, int] = field(default_factory=dict)
    user_buffers: bool = False  # whether Transformer Engine's are on (--tp-comm-overlap)
    assumed: tuple[str, ...] = field(default=(), compare=False)  # in sentences
    # The flags of a launch line, by "used", "without effect" and "not known".
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

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
        """The job's layouts under another order, or None where Megatron refuses that order."""
        try:
            return replace(self, arguments={**self.arguments, "order": order}).request().layouts
        except JobError:
            return None


@dataclass(frozen=True)
class Word:
    """A word of a command that starts a job, and what its text does not decide."""

    text: str
    line: int = 0
    unknown: str = ""  # "$NNODES", "$(wc -l < hosts)"
    name: str = ""  # of the variable that is not known
    assumed: tuple[str, ...] = ()  # "TP=8": defaults that were taken
    condition: str = ""  # the word is there only where this holds


def weight(words: Sequence[Word]) -> int:
    """How much of a job a command is: 0 without a Python program, 4 with a launcher and sizes."""
    owned = list(_owned(words))
    if all(owner for _, owner in owned):
        return 0
    flags = (word.text.partition("=")[0] for word, owner in owned if not owner)
    sizes = any(flag[:2] == "--" and flag[2:].replace("_", "-") in _KEYS for flag in flags)
    return 1 + 2 * sizes + any(owner in _LAUNCHERS for _, owner in owned)


def script_of(words: Sequence[Word]) -> tuple[str, list[str]]:
    """The script or module that a command starts, "" if it has none, and the words after it.

    JobError if the text leaves one of these words open.
    """
    own = [word for word, owner in _owned(words) if not owner]
    if own and own[0].text.rpartition("/")[2] in _OURS:
        pairs = enumerate(pairwise(own), 1)
        starts = (i for i, (a, b) in pairs if a.text == "-m" or b.text.endswith(".py"))
        own = own[next(starts, len(own)) :]
    script = own.pop(0).text if own and not own[0].text.startswith("-") else ""
    for word in own:
        if word.unknown:
            raise _undecided(word.text, word)
    return script, [word.text for word in own]


def by_default(default: str) -> str:
    """The assumption, in words, that a variable has its default ``NAME=VALUE``."""
    return f"{default}, its default; --set {default.partition('=')[0]}=VALUE changes it"


def _owned(words: Sequence[Word]) -> Iterator[tuple[Word, str]]:
    """Each word with the launcher whose flags are read there; "" for those of the script."""
    owner = "" if words[0].text.startswith("-") else "shell"
    for before, word in zip(("", *(word.text for word in words)), words, strict=False):
        name = word.text.rpartition("/")[2]
        is_module = before == "-m" and name not in _NAMES
        if owner and (name.endswith(".py") or name in _OURS or is_module):
            owner = ""  # from here on: the script's own flags
        elif owner:
            owner = _NAMES.get(name, owner)
        yield word, owner


def from_words(
    words: Sequence[Word], variables: Mapping[str, Word] | None = None, **given: Any
) -> Job:
    """The job that a command starts: with a launcher's flags, and Megatron's.

    The innermost launcher decides the number of ranks; ``variables`` are those of the script, such
    as SLURM's. ``given`` are settings that override the command's, named as flags with ``_`` for
    ``-``: ``tp=4``.

    Raises JobError on a value that is missing, not a number, or not decided by the text.
    """
    variables, overrides, owned = variables or {}, _by_key(given), list(_owned(words))
    launcher = next((owner for _, owner in owned[::-1] if owner in _LAUNCHERS), "")
    written: dict[str, tuple[str, list[Word]]] = {}
    flags: dict[str, list[str]] = {"used": [], "without effect": [], "not known": []}
    i = 0
    while i < len(owned):
        (word, owner), i = owned[i], i + 1
        flag, has_value, value = word.text.partition("=")
        if owner and re.fullmatch(r"-[A-Za-z]\d+", flag):  # -N16
            flag, has_value, value = flag[:2], "=", flag[2:]
        long = flag.lstrip("-").replace("_", "-")
        known = _KEYS if not owner else _LAUNCHERS.get(owner, {}) if owner == launcher else {}
        key = known.get(long) if flag.startswith("-") else None
        if key is None:
            if word.unknown and not word.text and _HOLDS_FLAGS.search(word.name):
                raise _undecided("The launch line", word)
            if not owner and flag.startswith("--"):
                flags["without effect" if _WITHOUT_EFFECT.match(long) else "not known"].append(flag)
            continue
        takes, values = _SETTINGS[key][0], [replace(word, text=value)]
        if takes not in (_YES, _NO) and not has_value:
            stop = i + (len(owned) if takes == _NUMBERS else 1)
            while i < min(stop, len(owned)) and not owned[i][0].text.startswith("--"):
                values.append(owned[i][0])
                i += 1
            if len(values) == 1:
                raise JobError(f"{flag} has no value in the launch line. Write a number after it.")
        written[key] = (flag, values)
    for name, key in (_VARIABLES | _OF_SRUN if launcher == "srun" else _VARIABLES).items():
        if name in variables and not (launcher and name == "WORLD_SIZE"):
            written.setdefault(key, (name, [variables[name]]))
    settings, assumed = dict(overrides), list[str]()
    if "_world" not in overrides:
        _refuse_likeness(flags["not known"], overrides)
    for key, (flag, values) in written.items():
        spared = key in overrides or ("_world" in overrides and key == "_hosts")
        # A line may leave to variables what changes no group.
        if not spared and not (key in _OF_MODEL and any(word.unknown for word in values)):
            settings[key] = _read(key, flag, values, variables)
            if key in _OF_MODEL:
                flags["without effect"].append(flag)
            else:
                flags["used"].append(
                    " ".join(filter(None, (flag, *(word.text for word in values))))
                )
            assumed += [by_default(text) for word in values for text in word.assumed]
    if launcher == "torchrun" and "_world" not in settings:
        settings = {"_hosts": 1, "_per_host": 1, **settings}
    elif launcher and not settings.keys() & {"_world", "_per_host"}:
        raise JobError(f"{launcher} is not told the number of ranks. Give {_RANKS[launcher]}.")
    job = _job(settings)
    return replace(job, assumed=(*job.assumed, *dict.fromkeys(assumed)), flags=flags)


def from_sizes(**given: Any) -> Job:
    """The job with these settings, named as flags with ``_`` for ``-``: ``tp=4, world_size=64``."""
    return _job(_by_key(given))


def _by_key(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = {_KEYS[name.replace("_", "-")]: v for name, v in given.items() if v is not None}
    switches = {key for key in settings if _SETTINGS[key][0] in (_YES, _NO)}
    on = {key: _SETTINGS[key][0] == _YES for key in switches if settings[key]}
    return {key: value for key, value in settings.items() if key not in switches} | on


def _read(key: str, flag: str, words: Sequence[Word], variables: Mapping[str, Word]) -> Any:
    """A setting's value from the words after ``flag``."""
    takes, texts = _SETTINGS[key][0], [text for word in words for text in word.text.split()]
    for word in words:
        if word.condition:
            raise JobError(
                f"{flag} is given only if {word.condition} (line {word.line}), which the launch "
                f"line does not decide. Paste it without the condition, or with --set NAME=VALUE."
            )
        if word.unknown:
            raise _undecided(flag, word)
    if takes in (_YES, _NO):
        return takes == _YES
    if takes == _TEXT:
        return " ".join(texts)
    if key == "_per_host" and texts in (["gpu"], ["auto"]):
        if _GPUS not in variables:
            raise JobError(
                f"{flag} {texts[0]} is the number of GPUs of the host, which the launch line does "
                f"not say. Give it by --gpus-per-node."
            )
        return _read(key, _GPUS, [variables[_GPUS]], {})
    if key == "_hosts" and re.fullmatch(r"\d+[:-]\d+", " ".join(texts)):
        raise JobError(
            f"{flag} {texts[0]} leaves the number of hosts open until the job runs. Give one of "
            f"them by --world-size."
        )
    numbers = [int(text) for text in texts if re.fullmatch(r"-?\d{1,18}", text)]
    if len(numbers) < len(texts) or not numbers or (takes == _NUMBER and len(numbers) > 1):
        raise JobError(f"{flag} must be a whole number, got {shown(' '.join(texts))}.")
    return numbers if takes == _NUMBERS else numbers[0]


def _undecided(what: str, word: Word) -> JobError:
    said = f"{what} is {word.unknown}" if what.startswith("-") else f"{what} uses {word.unknown}"
    where = f" (line {word.line})" if word.line else ""
    if word.name:
        return JobError(
            f"{said}{where}, which the text does not decide. Add --set {word.name}=VALUE."
        )
    return JobError(f"{said}{where}, which only the job can tell. Write its value in its place.")


def _refuse_likeness(unknown: Sequence[str], overrides: Mapping[str, Any]) -> None:
    """A flag that is almost one that decides something is misspelt: Megatron refuses it too."""
    long = [flag for flag, key in _KEYS.items() if len(flag) > 8 and key not in overrides]
    for flag in unknown:
        like = get_close_matches(flag[2:].replace("_", "-"), long, 1, 0.88)
        if like:
            raise JobError(f"{flag} is no flag of Megatron. Did you mean --{like[0]}?")


def _job(settings: Mapping[str, Any]) -> Job:
    """The job of all settings."""
    arguments = {key: value for key, value in settings.items() if not key.startswith("_")}
    assumed = []
    if "order" not in arguments:
        found, source = order.resolve_order(TP_PP_DP if settings.get("_tp_pp_dp") else None)
        if found is not None:
            arguments["order"] = found
            assumed += [f"the order {found}, from {source}"] * ("argument" not in source)
    per_host, hosts, world = (settings.get(key) for key in ("_per_host", "_hosts", "_world"))
    if world is None and per_host is not None:
        world = per_host * (1 if hosts is None else hosts)
        if hosts is None:
            assumed.append(f"the {world} ranks of one host are the whole job")
    if world is None:
        least = _ranks_of_a_replica(arguments)
        of = f" (a multiple of {least}, the product of the sizes)" if least > 1 else ""
        raise JobError(
            f"the number of ranks is missing. Give --world-size{of}, or torchrun's --nnodes and "
            f"--nproc-per-node."
        )
    if per_host is None:
        per_host = -(-world // hosts) if hosts else min(RANKS_PER_HOST, world)
        if not hosts:
            assumed.append(f"{per_host} ranks on each host; --gpus-per-node changes it")
    for name, value in (("world-size", world), ("gpus-per-node", per_host)):
        if value < 1:
            raise JobError(f"--{name} must be at least 1, got {value}.")
    if hosts is not None and settings.get("_per_host") is not None and world > per_host * hosts:
        raise JobError(
            f"{world} ranks do not fit on {hosts} hosts of {per_host}, which are "
            f"{per_host * hosts}. Change one of the three numbers."
        )
    _add_virtual_stages(arguments, settings)
    model = {}
    for key in ("_layers", *_OF_MODEL):
        if key in settings:
            flag = _SETTINGS[key][1].split()[0]
            model[flag] = settings[key]
    return Job(
        arguments,
        world,
        per_host,
        settings.get("_nvlink_domain"),
        model,
        bool(settings.get("_user_buffers")),
        tuple(assumed),
    )


def _ranks_of_a_replica(arguments: Mapping[str, Any]) -> int:
    names = ("tensor_model", "pipeline_model", "context")
    return prod(arguments.get(f"{name}_parallel_size", 1) for name in names)


def _add_virtual_stages(arguments: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set the number of virtual stages from their layers, as Megatron does; none with one stage."""
    stages = arguments.get("pipeline_model_parallel_size", 1)
    name = "virtual_pipeline_model_parallel_size"
    if stages == 1:
        arguments.pop(name, None)
        return
    layers, each = settings.get("_layers"), settings.get("_layers_per_stage")
    if each is not None and name not in arguments:
        more = sum(bool(settings.get(key)) for key in ("_with_embedding", "_with_loss"))
        if layers is None or each < 1 or (layers + more) % (stages * each):
            counted = f"{layers} + {more} for the embedding and the loss" if more else layers
            raise JobError(
                f"--num-layers-per-virtual-pipeline-stage {each} needs a --num-layers that is a "
                f"multiple of {stages} stages x {each}, got {counted}."
            )
        arguments[name] = (layers + more) // stages // each
    if arguments.get(name) == 1:
        del arguments[name]
