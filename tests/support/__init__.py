"""Shared by tests: real ranks, stock Megatron, other projects' own classes, pages of the docs.

Ranks
    forked          a world of forked ranks: `on_ranks`, `run_ranks`, `from_all`, `total`
    groups          the groups of the current Megatron state: do they connect who they should?
    warm            Python commands without a start of Python
    backends        backends over gloo, as outside code registers them
    nccl_rules      a backend over gloo that keeps NCCL's rules
    deep_ep         DeepEP's buffers over gloo groups, and who waits in them
    counting        a store that counts what a rank does in it
Oracles
    stock           Megatron's own modules, of each release
    forerunners     the classes that ours replaces in other projects
    te_on_cpu       Transformer Engine, without a GPU
Hangs and failures
    programs        programs of many ranks: written as lines of text, or random with a fault in one
    hanging         real ranks that make such calls, or train the demo's GPT, and hang
    simulation      runs a program without ranks, and writes its dumps
    laws            measures the verdicts on these dumps, and on some of them
    recorded        the files that a rank leaves: flight recorder, stacks, groups
    faults          the fault injector: one fault on one rank in one operation, and the laws
    hostile         garbled and absurd files for the command line
    cluster_scripts scripts of clusters and what they launch; what bash makes of one command
Programs and pages
    audited, consumers, holding, te_program         programs over megatron-core or its neighbours
    pages, commands, run_pages                      the blocks of README and docs, run
"""

import re
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = (f"{ROOT}/hypergrid/", f"{ROOT}/compat/")  # what the path of a file of ours begins with


def own_lines(text):
    """What was printed, without the connections that the gloo of torch 2.9 prints."""
    return re.sub(r"(?m)^\[Gloo\].*\n", "", text)


def own_keys(store):
    """The keys of hypergrid's in the store; none with torch 2.9, which lists no keys."""
    listed = store.list_keys() if hasattr(store, "list_keys") else []
    return [key for key in listed if "hypergrid/" in key]


def script_module(name):
    """A file of ``scripts/`` as a module; its main() is not run."""
    folder = str(ROOT / "scripts")
    loader = SourceFileLoader(name.removesuffix(".py"), f"{folder}/{name}")
    spec = spec_from_loader(loader.name, loader)
    module = module_from_spec(spec)
    sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    sys.path.remove(folder)
    return module


def table(file):
    """The rows of a text file under ``tests/``, by their cells: ``a | b`` is ["a", "b"]."""
    lines = (ROOT / "tests" / file).read_text().splitlines()
    return [re.split(r" +\| +", line) for line in lines if line and not line.startswith("#")]
