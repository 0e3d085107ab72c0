"""What tests share: real ranks, stock Megatron, other projects' own classes, pages of the docs."""

import re
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
