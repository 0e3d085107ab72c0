"""Networks and orders of hosts as text: SLURM's files and hostlists, YAML and JSON. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from hypergrid.files import FileError, converted, decoded, text_of
from hypergrid.layout import LayoutError
from hypergrid.messages import install_command, shown
from hypergrid.network.levels import MOST_HOSTS, Network

_LONGEST_NAME = 255  # characters
_HOST = r"[^][,\s]+(?:\[[\d,-]+\][^][,\s]*)*"
# Of several switches of a level there is a hostlist, of none nothing.
_ADDRESS = r"[][\w,-]+(\.[][\w,-]*)*\.[\w-]+(\s+[a-z]+(\.[a-z]+)+)?"
_LISTED = r"([^\s:={}\[\]]+)(?:\s+slots=(\d{1,6})|:(\d{1,6}))?(?:\s+max[-_]slots=\d+)?"
_SWITCHES = ("rack", "pod")  # what the levels of a tree of switches are called, innermost first


def read(path: Path, per_host: int) -> Network:
    """The network in a file: YAML or JSON, SLURM's topology.conf, or what scontrol prints of it.

    Or a hostfile, or what ``kubectl get nodes -o json`` prints. ``per_host`` is for hosts of which
    the file does not say how many GPUs they have. SLURM's addresses (a line ``SLURM_TOPOLOGY_ADDR``
    for each host, its pattern behind it) are read too.
    LayoutError if it is none of these.
    """
    try:
        return _parsed(text_of(path), per_host)
    except (LayoutError, FileError) as error:
        raise LayoutError(f"{path} is not a valid network: {error}") from None


def _parsed(text: str, per_host: int) -> Network:
    # As SLURM does: without its comment a line goes on where it ends with a backslash.
    joined = re.sub(r"\\[^\S\n]*\n", "", re.sub("#.*", "", text))
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    if any(re.match(r"(?i)(switch|block)name\s*=", line) for line in lines):
        return _slurm(lines, per_host)
    if not lines:
        raise LayoutError("it is empty.")
    if all(re.fullmatch(_ADDRESS, line) for line in lines):
        nodes = {line.split()[0].rpartition(".")[2] for line in lines}
        if len(nodes) == len(lines) or any(" " in line for line in lines):
            return from_addresses(lines, per_host)  # else names with their domain
    listed = [re.fullmatch(_LISTED, line) for line in lines]
    if all(listed):
        return _of_hostfile([found.groups() for found in listed if found], per_host)
    data = _loaded(text)
    is_kubernetes = isinstance(data, Mapping) and "items" in data
    return from_data(_of_kubernetes(data) if is_kubernetes else data, per_host)


def _of_hostfile(lines: Sequence[Sequence[str | None]], per_host: int) -> Network:
    """Of lines ``name``, ``name slots=8``, ``name:8``; a name on several lines has their sum."""
    gpus: dict[str, int] = {}
    each = per_host if len({name for name, *_ in lines}) == len(lines) else 1
    for name, *many in lines:
        told = next((int(n) for n in many if n), each)
        gpus[str(name)] = gpus.get(str(name), 0) + told
    _refuse_many(len(gpus))
    return Network(tuple(gpus), tuple(gpus.values()))


def _of_kubernetes(data: Mapping[str, Any]) -> dict[str, Any]:
    """The hosts with GPUs of what ``kubectl get nodes -o json`` prints."""
    hosts = []
    for node in converted(data, _Nodes, "it").items:
        gpus = node.status.allocatable.get("nvidia.com/gpu", "0")
        clique = node.metadata.labels.get("nvidia.com/gpu.clique")
        if gpus != "0":
            host = {"name": node.metadata.name, "gpus": gpus}
            hosts.append(host | ({"nvlink": clique} if clique else {}))
    return {"hosts": hosts}


@dataclass
class _Metadata:
    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class _Status:
    allocatable: dict[str, str] = field(default_factory=dict)


@dataclass
class _Node:
    metadata: _Metadata
    status: _Status


@dataclass
class _Nodes:
    items: list[_Node]


def _loaded(text: str) -> Any:
    if text.lstrip().startswith(("{", "[")):
        return decoded(text, dict[str, Any], "it")
    try:
        import yaml
    except ImportError:
        raise LayoutError(
            f"reading YAML needs PyYAML: {install_command('topology')}. JSON with the same keys "
            f"needs nothing."
        ) from None
    try:
        # Texts alone, and no merged mappings: neither dates nor bombs.
        return yaml.load(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    except (yaml.YAMLError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise LayoutError(f"it is not YAML: {why}.") from None


@dataclass
class _File:
    hosts: list[dict[str, str | int]]
    bandwidth: dict[str, float] = field(default_factory=dict)


def from_data(data: Any, per_host: int) -> Network:
    """The network of ``{"hosts": [{"name": "a", "gpus": 8, "nvlink": "d0"}], "bandwidth": {}}``.

    Each other key of a host is a level. LayoutError on anything else.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("hosts"), list):
        raise LayoutError(
            "it has no list `hosts:` of entries such as {name: a, gpus: 8, nvlink: d0, rack: r0}. "
            "With SLURM give topology.conf, or what `scontrol show topology` prints."
        )
    unknown = sorted(map(str, data.keys() - {"hosts", "bandwidth"}))
    if unknown:
        raise LayoutError(f"unknown key {shown(unknown[0])}; allowed: hosts, bandwidth.")
    _refuse_many(len(data["hosts"]))
    if sum(len(each) for each in data["hosts"] if isinstance(each, Mapping)) > 8 * MOST_HOSTS:
        raise LayoutError("the hosts have too many levels.")  # also one with many names in YAML
    try:
        file = converted(data, _File, "it")
    except FileError as error:
        raise LayoutError(str(error)) from None
    levels = dict.fromkeys(key for host in file.hosts for key in host)
    for host in file.hosts:
        for level in ("name", *levels):
            if host.get(level, per_host if level == "gpus" else "") == "":
                raise LayoutError(
                    f"the host {shown(host.get('name'))} has no {shown(level)}. Name it for every "
                    f"host, or for none."
                )
    return Network(
        tuple(str(host["name"]) for host in file.hosts),
        tuple(_gpus(host.get("gpus", per_host)) for host in file.hosts),
        {
            level: tuple(str(host[level]) for host in file.hosts)
            for level in levels
            if level not in ("name", "gpus")
        },
        file.bandwidth,
    )


def _gpus(given: str | int) -> Any:
    return int(given) if isinstance(given, str) and re.fullmatch(r"\d{1,9}", given) else given


def _slurm(lines: Iterable[str], per_host: int) -> Network:
    """Of lines ``SwitchName=s0 Nodes=a[0-3]``, ``SwitchName=s2 Switches=s[0-1]``, ``BlockName``."""
    above: dict[str, str] = {}
    leaf, block = dict[str, str](), dict[str, str]()
    for line in lines:
        pairs = re.findall(
            r'\b(\w+)\s*=\s*"?(?!\w+\s*=)([^\s"]+)', line
        )  # "Nodes= Size=4": no nodes
        said = {key.lower(): value for key, value in pairs}
        nodes = expanded(said["nodes"]) if "nodes" in said else []
        if "blockname" in said:
            _put(nodes, block, "blocks", said["blockname"])
        elif "switchname" in said and "switches" in said:
            above.update(dict.fromkeys(expanded(said["switches"]), said["switchname"]))
        elif "switchname" in said:
            _put(nodes, leaf, "switches", said["switchname"])
    hosts = list(dict.fromkeys((*leaf, *block)))
    for host in hosts:
        for kind, of_host in (("switch", leaf), ("block", block)):
            if of_host and host not in of_host:
                raise LayoutError(f"no {kind} has the host {shown(host)}, and others have one.")
    units = {"nvlink": tuple(block[host] for host in hosts)} if block else {}
    if leaf:
        units |= _levels([_chain(leaf[host], above) for host in hosts])
    return Network(tuple(hosts), (per_host,) * len(hosts), units)


def _put(nodes: Iterable[str], units: dict[str, str], kind: str, unit: str) -> None:
    for node in nodes:
        if units.setdefault(node, unit) != unit:
            raise LayoutError(
                f"the host {shown(node)} is in the {kind} {units[node]} and {unit}. Name it in one."
            )


def _chain(switch: str, above: Mapping[str, str]) -> list[str]:
    chain = [switch]
    while chain[-1] in above:
        if above[chain[-1]] in chain:
            raise LayoutError(f"the switch {shown(switch)} is above itself.")
        chain.append(above[chain[-1]])
    return chain


def _levels(chains: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Levels of each host's switches; the outermost stands for those that a host lacks."""
    depth = max(map(len, chains))
    names = [*_SWITCHES, *(f"switch{i}" for i in range(len(_SWITCHES), depth))]
    return {
        name: tuple(chain[min(i, len(chain) - 1)] for chain in chains)
        for i, name in enumerate(names[:depth])
    }


def from_addresses(lines: Iterable[str], per_host: int) -> Network:
    """Of each host's ``SLURM_TOPOLOGY_ADDR``: ``core.leaf2.a17``, or ``block0.a17 block.node``.

    Behind it may stand ``SLURM_TOPOLOGY_ADDR_PATTERN``; without one all but the node are switches.
    """
    hosts, chains, blocks = list[str](), list[list[str]](), list[str]()
    for line in lines:
        address, _, pattern = line.partition(" ")
        *units, host = address.split(".")
        kinds = pattern.strip().split(".")[:-1] if pattern else ["switch"] * len(units)
        if len(kinds) != len(units):
            raise LayoutError(f"the address {shown(address)} is not of the form {shown(pattern)}.")
        pairs = [*zip(units, kinds, strict=True)]
        hosts.append(host)
        blocks += [name for name, kind in pairs if kind == "block"]
        # Switches of equal names under different ones above are different switches.
        names = [".".join(units[: i + 1]) for i, (_, kind) in enumerate(pairs) if kind != "block"]
        chains.append(names[::-1])
    units_of: dict[str, tuple[str, ...]] = {}
    if blocks:
        if len(blocks) != len(hosts):
            raise LayoutError("each host must be in one block, or none.")
        units_of["nvlink"] = tuple(blocks)
    if all(chains):
        units_of |= _levels(chains)
    elif any(chains):
        raise LayoutError("some hosts have a switch and others none.")
    return Network(tuple(hosts), (per_host,) * len(hosts), units_of)


def expanded(hostlist: str) -> list[str]:
    """The names of a SLURM hostlist: ``"a[01-03,7],b2"`` is a01, a02, a03, a7, b2."""
    if not re.fullmatch(rf"\s*{_HOST}(,\s*{_HOST})*\s*", hostlist):
        raise LayoutError(f"{shown(hostlist)} is not a hostlist such as a[01-18],b3.")
    names: list[str] = []
    for part in re.finditer(_HOST, hostlist):
        if len(re.sub(r"\[.*?\]", "", part[0])) > _LONGEST_NAME:
            raise LayoutError(f"the host {shown(part[0])} has too long a name.")
        pieces = re.split(r"\[([^]]*)\]", part[0])
        choices = [[p] if i % 2 == 0 else _numbers(p, hostlist) for i, p in enumerate(pieces)]
        _refuse_many(len(names) + math.prod(map(len, choices)))
        names += map("".join, product(*choices))
    return names


def _numbers(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not all(re.fullmatch(r"\d{1,18}", n) for n in (first, last)) or int(first) > int(last):
            raise LayoutError(f"{shown(whole)} is not a hostlist such as a[01-18],b3.")
        _refuse_many(int(last) - int(first) + 1)
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _refuse_many(hosts: int) -> None:
    if hosts > MOST_HOSTS:
        raise LayoutError(f"{hosts} hosts are too many: at most {MOST_HOSTS} can be planned.")


def hostlist(names: Iterable[str]) -> str:
    """The shortest hostlist that ``expanded`` reads as ``names``, in their order."""
    runs: list[tuple[str, list[str]]] = []  # what is before the number, and the numbers
    for name in names:
        head = name.rstrip("0123456789")
        digits = name[len(head) :]
        last = runs[-1] if runs else None
        if digits and last is not None and last[0] == head and last[1][0]:
            last[1].append(digits)
        else:
            runs.append((head, [digits]))
    return ",".join(head + _bracketed(digits) for head, digits in runs)


def _bracketed(numbers: list[str]) -> str:
    spans: list[list[str]] = []
    for number in numbers:
        before = spans[-1][-1] if spans else ""
        if before and number == str(int(before) + 1).zfill(len(before)):
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return numbers[0] if len(numbers) == 1 else f"[{','.join(map('-'.join, spans))}]"


# How an order of hosts is written down, by what reads it.
FORMATS: dict[str, Callable[[Network], str]] = {
    "hostfile": lambda network: "\n".join(
        f"{name} slots={n}" for name, n in zip(network.hosts, network.ranks, strict=True)
    ),
    "hostlist": lambda network: hostlist(network.hosts),
    "slurm": lambda network: "\n".join(
        name for name, n in zip(network.hosts, network.ranks, strict=True) for _ in range(n)
    ),
}
