"""A job of Kubernetes in YAML: what its pods start, and on how many hosts."""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

from compat.planned.job import JobError
from hypergrid.messages import install_command

KINDS = ("PyTorchJob", "MPIJob", "JobSet")


class Pods(NamedTuple):
    """A launch line that each of some pods runs, and how many pods there are."""

    line: str
    pods: int
    variables: dict[str, str]  # that the operator sets in each pod
    slots: int | None = None  # ranks of each worker of an MPIJob


def is_manifest(text: str) -> bool:
    """Whether a text is a manifest of Kubernetes."""
    return re.search(r"(?m)^apiVersion:", text) is not None


def pods_of(text: str) -> Pods:
    """The pods that start a job. JobError if the manifest does not decide them."""
    try:
        import yaml
    except ImportError:
        raise ImportError(f"reading YAML needs PyYAML: {install_command('cli')}.") from None
    if "&" in text and re.search(r"(?m)[:-]\s+&\w", text):
        raise JobError("the manifest has YAML anchors, which are not read. Write them out.")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise JobError(f"the manifest cannot be read: {error}") from None
    jobs = [document for document in documents if document.get("kind") in KINDS]
    if len(jobs) != 1:
        raise JobError(
            f"the manifest has {len(jobs)} jobs of {', '.join(KINDS)}. Give one of them."
        )
    try:
        return _OF_KIND[jobs[0]["kind"]](jobs[0]["spec"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise JobError(f"the {jobs[0]['kind']} cannot be read: {error} is missing.") from None


def _line(template: Any) -> str:
    """The command of a pod's only container, as a launch line."""
    containers = template["spec"]["containers"]
    if len(containers) != 1:
        raise JobError(
            f"a pod has {len(containers)} containers; one is read. Leave out the others."
        )
    container = containers[0]
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not words:
        raise JobError("the command of the pods is in their image. Paste its launch line.")
    given = {row["name"]: row.get("value") for row in container.get("env") or ()}
    line = " ".join(shlex.quote(str(word)) for word in words)
    for name, value in given.items():
        if value is not None:
            line = line.replace(f"$({name})", str(value))
    if re.search(r"\$\(\w+\)", line) and "-c" not in words:
        raise JobError("the command of the pods uses variables that the manifest does not give.")
    exports = [
        f"export {name}={shlex.quote(str(value))}; "
        for name, value in given.items()
        if value is not None
    ]
    return "".join(exports) + line


def _count(of: Any, key: str, default: int | None = None) -> int:
    value = of.get(key, default)
    if not isinstance(value, int) or value < 0:
        raise JobError(f"{key} of the manifest must be a whole number, got {value!r}.")
    return value


def _pytorch(spec: Any) -> Pods:
    if "elasticPolicy" in spec:
        raise JobError("the number of pods of an elastic job is open. Give --world-size.")
    replicas = spec["pytorchReplicaSpecs"].values()
    lines = {_line(replica["template"]) for replica in replicas}
    if len(lines) != 1:
        raise JobError(
            "the pods of the PyTorchJob start different commands. Paste one launch line."
        )
    count = sum(_count(replica, "replicas", 1) for replica in replicas)
    variables = {"PET_NNODES": str(count)}
    per_pod = spec.get("nprocPerNode")
    if per_pod is not None:
        variables["PET_NPROC_PER_NODE"] = str(per_pod)
    variables["WORLD_SIZE"] = str(count)
    return Pods(lines.pop(), count, variables)


def _mpi(spec: Any) -> Pods:
    replicas = spec["mpiReplicaSpecs"]
    workers = _count(replicas["Worker"], "replicas", 1)
    line = _line(replicas["Launcher"]["template"])
    return Pods(line, workers, {}, _count(spec, "slotsPerWorker", 1))


def _jobset(spec: Any) -> Pods:
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    count = _count(replicated, "replicas", 1) * _count(job, "parallelism", 1)
    return Pods(_line(job["template"]), count, {})


_OF_KIND = {"PyTorchJob": _pytorch, "MPIJob": _mpi, "JobSet": _jobset}
