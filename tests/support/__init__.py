"""What tests share: real ranks, stock Megatron, other projects' own classes, pages of the docs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = (f"{ROOT}/hypergrid/", f"{ROOT}/compat/")  # what the path of a file of ours begins with
