"""Stands in for DeepEP: its buffers over a group, and who waits for whom in them; on gloo.

Construction, dispatch and the destructor of a buffer talk to all ranks of its group, as DeepEP's
do. ``freed`` has the groups of buffers whose destructor reached all of these ranks.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from tests.support import ROOT
from tests.support.forked import total

freed = []


class Buffer:
    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=False):
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.explicitly_destroy = explicitly_destroy
        total(group)

    @staticmethod
    def get_dispatch_config(size):
        hint = lambda *_: 1  # noqa: E731
        return SimpleNamespace(get_nvl_buffer_size_hint=hint, get_rdma_buffer_size_hint=hint)

    get_combine_config = get_dispatch_config

    def destroy(self):
        assert self.explicitly_destroy
        self._release()

    def __del__(self):
        if not self.explicitly_destroy:
            self._release()

    def _release(self):
        total(self.group)
        freed.append(self.group)


class HybridEPBuffer(Buffer):
    def __init__(self, group, **_):
        super().__init__(group)

    def dispatch_with_permute(self, hidden, **_):
        hidden = hidden.clone()
        dist.all_reduce(hidden, group=self.group)
        return hidden, torch.ones(1), None, torch.ones(1), "handle"


def load_fused_a2a(release):
    """Megatron's own ``fused_a2a`` of a release, over these buffers, where the job would find it.

    Only for a process of its own.
    """
    utils = ModuleType("megatron.core.utils")
    utils.internal_api = lambda thing: thing
    sys.modules["megatron.core.utils"] = utils
    sys.modules["deep_ep"] = sys.modules[__name__]
    sys.modules["deep_ep.utils"] = ModuleType("deep_ep.utils")
    vars(sys.modules["deep_ep.utils"]).update(EventHandle=None, EventOverlap=None)
    name = "megatron.core.transformer.moe.fused_a2a"
    file = ROOT / f".cache/megatron-core-{release}" / f"{name.replace('.', '/')}.py"
    module = sys.modules[name] = ModuleType(name)
    exec(compile(file.read_text(), file, "exec"), vars(module))
    del sys.modules["megatron.core.utils"]
    return module
