"""Backends over gloo, as outside code registers them: one suspends as NCCL does."""

import torch.distributed as dist


def register(name, parts, devices=("cpu",), **methods):
    """Register a backend with further methods; its instances are listed in ``parts``."""
    kind = type(name, (dist.ProcessGroupGloo,), methods)

    def create(store, rank, size, timeout):
        parts.append(kind(store, rank, size, timeout))
        return parts[-1]

    dist.Backend.register_backend(name, create, devices=[*devices])


def splitting(name, parts):
    """Register a backend for "cuda" off which torch splits new groups, as it does with NCCL's."""

    def perform_nocolor_split(self, device):
        self.without_a_color = getattr(self, "without_a_color", 0) + 1

    register(name, parts, devices=["cuda"], perform_nocolor_split=perform_nocolor_split)


def native(calls, parts, fails=lambda number: None):
    """Register "native", which suspends 1000 bytes; the n-th instance writes into ``calls``.

    What ``fails(n)`` returns is its error.
    """

    def note(operation):
        def call(self):
            if operation == "suspend" and (why := fails(parts.index(self))):
                raise RuntimeError(why)
            calls.append((operation, parts.index(self)))

        return call

    stats = {"suspend": 1000, "suspended": 0, "persist": 5, "total": 1005}
    methods = {"suspend": note("suspend"), "resume": note("resume")}
    register("native", parts, **methods, memory_stats=lambda self: stats)
