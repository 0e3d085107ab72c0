"""The job that torchrun starts: initialise, and leave this rank's dump in a folder."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from tests.shadows.dumping import dump_rank
from tests.support.stock import source

if __name__ == "__main__":
    out, arguments, release = sys.argv[1:]
    file = Path(out, f"{os.environ['RANK']}.pickle")
    edited = Path(out).parent / "megatron" / "core" / "parallel_state.py"
    try:
        from megatron.core import parallel_state
    except Exception as error:
        file.write_bytes(pickle.dumps({"import": type(error).__name__, "error": str(error)[:400]}))
        sys.exit()
    dist.init_process_group("gloo")
    texts = (source(release), edited.read_text())
    dump = dump_rank(parallel_state, json.loads(arguments), texts, pretend=False)
    file.write_bytes(pickle.dumps(dump))
    dist.barrier()
    dist.destroy_process_group()
