"""A job of Kubernetes in YAML: what its pods start, and how many pods there are."""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

from compat.planned.job import JobError
from hypergrid.files import check_yaml
from hypergrid.messages import install_command


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
    try:
        check_yaml(text)
        jobs = []
        for manifest in yaml.safe_load_all(text):
            # Beside the job a file may have a volume, a service, or an empty part.
            if manifest and manifest.get("kind") in _OF_KIND:
                jobs.append(manifest)
        if len(jobs) != 1:
            raise ValueError(f"it has {len(jobs)} jobs of {', '.join(_OF_KIND)}")
        return _OF_KIND[jobs[0]["kind"]](jobs[0]["spec"])
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(
            f"the manifest cannot be read: {error}. Give the launch line of its pods instead."
        ) from None


def _line(template: Any) -> str:
    """The command of a pod's only container, with its variables, as a launch line."""
    containers = template["spec"]["containers"]
    if len(containers) != 1:
        raise ValueError(f"a pod has {len(containers)} containers, and one is read")
    container = containers[0]
    command = container.get("command") or ()
    arguments = container.get("args") or ()
    words = [*command, *arguments]
    line = shlex.join(str(word) for word in words)
    if "$(" in line and "-c" not in words:
        raise ValueError("the command has variables of Kubernetes, $(NAME), which are not read")
    exports = ""
    for variable in container.get("env") or ():
        # A variable without a value is the cluster's: a secret, a field of the pod.
        if "value" in variable:
            value = shlex.quote(str(variable["value"]))
            exports += f"export {variable['name']}={value}; "
    return exports + line


def _pytorch(spec: Any) -> Pods:
    if "elasticPolicy" in spec:
        raise ValueError("the number of pods of an elastic job is open")
    lines = set()
    count = 0
    for replica in spec["pytorchReplicaSpecs"].values():
        lines.add(_line(replica["template"]))
        count += int(replica.get("replicas", 1))
    if len(lines) != 1:
        raise ValueError("its pods start different commands")
    # The operator sets them, and torchrun reads them.
    variables = {"PET_NNODES": str(count)}
    if "nprocPerNode" in spec:
        variables["PET_NPROC_PER_NODE"] = str(spec["nprocPerNode"])
    return Pods(lines.pop(), count, variables)


def _mpi(spec: Any) -> Pods:
    replicas = spec["mpiReplicaSpecs"]
    line = _line(replicas["Launcher"]["template"])
    workers = int(replicas["Worker"]["replicas"])
    return Pods(line, workers, {}, int(spec["slotsPerWorker"]))


def _jobset(spec: Any) -> Pods:
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    # Each of its jobs has as many pods as run at once.
    jobs = int(replicated.get("replicas", 1))
    pods_of_job = int(job.get("parallelism", 1))
    return Pods(_line(job["template"]), jobs * pods_of_job, {})


_OF_KIND = {"PyTorchJob": _pytorch, "MPIJob": _mpi, "JobSet": _jobset}
