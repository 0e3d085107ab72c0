"""Trains a small GPT with experts on four ranks; prints which names of megatron-core hold groups.

    python -m tests.support.holding

A name is that of a module's global, of a class's attribute or of a function, and holds a group if
Python's garbage collector reaches one from it.
"""

import functools
import gc
import json
import sys
import types
import warnings

import compat

compat.install()
from compat.verification import on_cpu  # noqa: E402 - torch is adapted before megatron is imported

on_cpu.adapt()
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402

from compat.verification.gpt import small_gpt, uneven_batch  # noqa: E402
from compat.verification.layout import Layout  # noqa: E402
from compat.verification.step import Task, run_variants  # noqa: E402
from tests.support import forked  # noqa: E402

EXPERTS = {
    "num_moe_experts": 4,
    "add_bias_linear": False,
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}
OUTSIDE = (types.ModuleType, type, types.FunctionType, types.FrameType, torch.Tensor)


def reaches_a_group(value):
    """Whether a group is among what ``value`` refers to, directly or through other objects."""
    seen = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, ProcessGroup):
            return True
        if id(value) in seen or isinstance(value, OUTSIDE):
            continue
        seen.add(id(value))
        waiting.extend(gc.get_referents(value))
    return False


def roots(module):
    """Names of a module, and the objects that each keeps."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", module.__name__) != module.__name__:
            continue  # imported from there
        if isinstance(value, type):
            for attribute, of_class in vars(value).items():
                yield f"{name}.{attribute}", kept_by(of_class)
        else:
            yield name, kept_by(value)


def kept_by(value):
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return [value]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*vars(function).values(), *cells]


def holders():
    found = set()
    for name, module in [*sys.modules.items()]:
        if name.startswith("megatron.core") and module.__name__.startswith("megatron.core"):
            for path, kept in roots(module):
                if any(map(reaches_a_group, kept)):
                    found.add(f"{name} {path}")
    return found


def train(rank):
    from megatron.core import parallel_state

    layout = Layout(cp=2, dp=2, ep=2, options=EXPERTS)
    build = functools.partial(small_gpt, model={"position_embedding_type": "rope"})
    run_variants(Task(build, uneven_batch(2, 2)), layout, None)
    trained = holders()
    parallel_state.destroy_model_parallel()
    return {"trained": sorted(trained), "destroyed": sorted(holders())}


if __name__ == "__main__":
    print(json.dumps(forked.run_ranks(4, train)[0]))
