"""ParallelState: the groups and numbers of one model's parallel layout; a job may hold several."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from compat import nccl
from compat.getters import NUMBERS, Getters, missing
from compat.megatron_groups import ROWS
from compat.request import Planned, Request
from hypergrid.agreement import agree
from hypergrid.plan import GroupPlan
from hypergrid.pool import GroupPool

_COLLNET = "NCCL_COLLNET_ENABLE"
# What UCC needs, and whether the user's own value wins.
_UCC_ENVIRONMENT = {
    "TORCH_UCC_BLOCKING_WAIT": ("none", True),
    "UCC_EC_CUDA_STREAM_TASK_MODE": ("driver", True),
    "UCX_TLS": ("ib,cuda_copy", True),
    "NSYS_UCP_COMM_PARAMS": ("1", False),
    "UCX_RNDV_THRESH": ("0", False),
    "UCX_NET_DEVICES": ("all", False),
    "UCC_CL_BASIC_TLS": ("^sharp,nccl", False),
}

GROUP_SLOTS = tuple(
    dict.fromkeys(
        name for row in ROWS for name in (row.slot, row.gloo and row.slot + "_GLOO") if name
    )
)
RANK_SLOTS = tuple(row.ranks for row in ROWS if row.ranks)
OVERRIDE_SLOTS = tuple(dict.fromkeys(n.override for n in NUMBERS.values() if n.override))
OTHER_SLOTS = (
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_GLOBAL_MEMORY_BUFFER",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    "_global_process_group_list",
)
SLOTS = frozenset((*GROUP_SLOTS, *RANK_SLOTS, *OVERRIDE_SLOTS, *OTHER_SLOTS))
_SOURCES = frozenset((*OVERRIDE_SLOTS, *(n.group for n in NUMBERS.values())))


class ParallelState(Getters):
    """What one ``initialize_model_parallel`` built.

    Its attributes are named as upstream's private globals (``_TENSOR_MODEL_PARALLEL_GROUP`` ...)
    and may be written, as outside code does: the getters see it. A fresh object has no groups;
    :meth:`create` gives one that has.
    """

    _global_process_group_list: list[ProcessGroup | None] | None
    _GLOBAL_MEMORY_BUFFER: Any
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER: Any

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.__dict__.update(dict.fromkeys(SLOTS), _HYBRID_DP_CP_GROUPS={})
        self.__dict__.update(dict.fromkeys(NUMBERS), _numbered={})
        self.request: Request | None = None
        self._pool: GroupPool | None = None
        self._extra_all_gather_groups = 0

    @classmethod
    def create(cls, **arguments: Any) -> ParallelState:
        """Build the groups for the arguments of ``initialize_model_parallel``.

        *Collective* over the window of ranks that the arguments lay out. If anything fails, the
        groups made so far are given back and the environment is as before.

        Raises
        ------
        As ``compat.parallel_state.initialize_model_parallel``.
        """
        request = Request(**arguments)
        request.check()
        return cls.from_request(request)

    @classmethod
    def from_request(cls, request: Request) -> ParallelState:
        """As :meth:`create`, for a request that was checked already."""
        request.check_groups()
        state = cls()
        state._build(request)
        return state

    @property
    def plan(self) -> GroupPlan | None:
        """The groups of this state as data."""
        return None if self.request is None else self.request.plan

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        if name in _SOURCES:
            self._renumber()

    def __repr__(self) -> str:
        if self.request is None:
            return "ParallelState(not initialized)"
        rank = dist.get_rank() if dist.is_initialized() else -1
        layout = self.request.decoder
        here = layout.coordinate(rank) if rank in layout else "outside the window"
        return f"ParallelState(rank {rank} at {here} of {layout!r})"

    def take_overrides(self, before: ParallelState) -> None:
        """Keep what ``set_*`` was told before there were groups, as upstream does."""
        for slot in OVERRIDE_SLOTS:
            self.__dict__[slot] = getattr(before, slot)
        self._renumber()

    def note_group(self, group: ProcessGroup) -> None:
        """Let :meth:`update_pg_timeout` reach a group that the caller made and owns."""
        if self._global_process_group_list is None:
            self._global_process_group_list = [None]
        self._global_process_group_list.append(group)

    def destroy(self) -> None:
        """Give back all groups of this state and forget everything. *Local*; twice is once."""
        _release_megatron_buffers()
        if self._pool is not None:
            self._pool.destroy()
        self._clear()

    def _build(self, request: Request) -> None:
        # Options before anything else: a bad NCCL file must refuse before a group exists.
        options = {p.group.label: self._nccl_options(p, request) for p in request.planned}
        with _restored_on_failure(_COLLNET, *_UCC_ENVIRONMENT):
            os.environ.pop(_COLLNET, None)
            if request.pipeline_model_parallel_comm_backend == "ucc":
                _prepare_ucc()
            rank = dist.get_rank()
            self._global_process_group_list = [None]  # None is the default group
            if rank in request.decoder:
                agreement = agree(request.decoder.ranks, request.proposal(), request.timeout)
                self._pool = GroupPool(agreement)
                try:
                    self._make_groups(request, rank, options)
                except BaseException:
                    self._pool.destroy()
                    raise
        self.request = request
        if request.virtual_pipeline_model_parallel_size is not None:
            size = request.virtual_pipeline_model_parallel_size
            self._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
            self._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = size
        self._set_global_memory_buffer()
        self._renumber()

    def _make_groups(self, request: Request, rank: int, options: dict[str, Any]) -> None:
        assert self._pool is not None
        slots, everything = self.__dict__, self.__dict__["_global_process_group_list"]
        planned = request.planned
        for at, p in enumerate(planned):
            sharp = request.sharp_group is not None and p.row.sharp == request.sharp_group
            if sharp:
                os.environ[_COLLNET] = "1"
            mine = request.plan.mine(p.group, rank)
            made = self._pool.make(
                p.group.label,
                mine,
                lambda p=p: request.plan.all(p.group),  # type: ignore[misc]
                backend=p.group.backend,
                timeout=None if p.group.timeout is None else timedelta(seconds=p.group.timeout),
                pg_options=options[p.group.label],
            )
            everything += made
            for group, (name, ranks) in zip(made, mine.items(), strict=True):
                self._place(p, group, name, ranks, rank)
            if sharp and (at + 1 == len(planned) or planned[at + 1].row.sharp != p.row.sharp):
                self._finish_sharp(request.sharp_group)
        for alias in request.aliases:
            for suffix in ("", "_GLOO") if alias.gloo else ("",):
                slots[alias.slot + suffix] = slots[alias.same_as + suffix]
                if alias.same_as in self._numbered:
                    self._numbered[alias.slot] = self._numbered[alias.same_as]

    def _place(
        self, p: Planned, group: ProcessGroup, name: str, ranks: tuple[int, ...], rank: int
    ) -> None:
        slots = self.__dict__
        if p.row.fan == "sizes":
            slots[p.slot][p.key] = group
        elif p.row.fan == "levels":
            slots[p.slot] = [*(slots[p.slot] or []), group]
        else:
            slots[p.slot] = group
            self._numbered[p.slot] = (group, sorted(ranks).index(rank), len(ranks))
            if p.row.ranks and p.slot == p.row.slot:
                chosen = p.chosen and p.chosen[int(name.rpartition("#")[2])]
                slots[p.row.ranks] = chosen or list(ranks)

    def _nccl_options(self, p: Planned, request: Request) -> Any:
        if p.group.options is None:
            return None
        return nccl.get_nccl_options(p.row.options, request.nccl_configs)

    def _finish_sharp(self, name: str | None) -> None:
        # NCCL connects on first use, and SHARP serves whatever connects while it is switched on.
        slot = next(row.slot for row in ROWS if row.sharp == name and row.sharp_barrier)
        group = self.__dict__[slot]
        if group is not None:
            dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
            torch.cuda.synchronize()
        os.environ.pop(_COLLNET, None)

    def _renumber(self) -> None:
        # A number is known for the groups that this state made; of a group that somebody else
        # put into a slot, only the group can tell, each time it is asked.
        slots, numbered = self.__dict__, self._numbered
        for name, (override, slot, kind) in NUMBERS.items():
            number = None if override is None else slots[override]
            if number is None and slots[slot] is not None:
                group, rank, size = numbered.get(slot, (None, None, None))
                if group is slots[slot]:
                    number = rank if kind == "rank" else size
            slots[name] = number

    def get_global_memory_buffer(self) -> Any:
        """Megatron's ``GlobalMemoryBuffer``, made when it is first asked for."""
        buffer = self._group("_GLOBAL_MEMORY_BUFFER")
        if isinstance(buffer, LazyBuffer):
            buffer = self.__dict__["_GLOBAL_MEMORY_BUFFER"] = buffer.make()
        return buffer

    def _set_global_memory_buffer(self) -> None:
        if self._GLOBAL_MEMORY_BUFFER is not None:
            raise AssertionError("the global memory buffer is already initialized.")
        buffer = LazyBuffer()
        loaded = "megatron.core.utils" in sys.modules
        self._GLOBAL_MEMORY_BUFFER = buffer.make() if loaded else buffer

    def destroy_global_memory_buffer(self) -> None:
        """Forget the memory buffer."""
        self._GLOBAL_MEMORY_BUFFER = None

    def _set_global_symmetric_memory_buffer(self) -> None:
        if self._GLOBAL_SYMMETRIC_MEMORY_BUFFER is not None:
            raise AssertionError("the global symmetric memory buffer is already initialized.")
        from megatron.core.utils import GlobalSymmetricMemoryBuffer

        self._GLOBAL_SYMMETRIC_MEMORY_BUFFER = GlobalSymmetricMemoryBuffer(
            size_in_mb=256, process_group=self.get_tensor_model_parallel_group()
        )

    def get_global_symmetric_memory_buffer(self) -> Any:
        """Megatron 0.16's buffer for inference; only where it was set up."""
        return self._group("_GLOBAL_SYMMETRIC_MEMORY_BUFFER")

    def destroy_global_symmetric_memory_buffer(self) -> None:
        """Forget the symmetric memory buffer."""
        self._GLOBAL_SYMMETRIC_MEMORY_BUFFER = None

    def update_pg_timeout(self, timeout: timedelta, pg: ProcessGroup | None = None) -> None:
        """Set ``timeout`` on ``pg``, or on every group that was made. *Collective* over ``pg``."""
        from torch.distributed import distributed_c10d as c10d

        dist.barrier(pg)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for group in [pg] if pg is not None else self._global_process_group_list or [None]:
            c10d._set_pg_timeout(timeout, group)

    def create_all_gather_groups(
        self,
        for_expert_parallelism: bool = False,
        timeout: timedelta | None = None,
        nccl_comm_cfgs: nccl.Configs | None = None,
    ) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """A second communicator over data x context parallel ranks, and over expert data ones.

        In the order and window that this state was built with. The second is None unless
        ``for_expert_parallelism`` and there is expert parallelism. *Collective* over the window.
        """
        if self.request is None:
            raise RuntimeError(
                "create_all_gather_groups() needs an initialized state: call "
                "initialize_model_parallel() first."
            )
        if self._pool is None:
            return None, None
        configs, layouts = nccl_comm_cfgs or {}, self.request.layouts
        wanted = [("decoder", "dp-cp", "dp_cp", "DATA_PARALLEL_GROUP_WITH_CP_AG")]
        if for_expert_parallelism and self.get_expert_model_parallel_world_size() > 1:
            wanted.append(("expert", "dp", "ep_dp", "EXPERT_DATA_PARALLEL_GROUP_AG"))
        made: list[ProcessGroup | None] = []
        self._extra_all_gather_groups += 1
        for grid, dims, section, label in wanted:
            name = f"{label}#{self._extra_all_gather_groups}"
            (group,) = self._pool.make(
                name,
                {name: tuple(layouts[grid].group(dist.get_rank(), dims))},
                lambda grid=grid, dims=dims: layouts[grid].groups(dims).tolist(),  # type: ignore[misc]
                timeout=timeout,
                pg_options=nccl.get_nccl_options(section, configs),
                group_desc=label,
            )
            self.note_group(group)
            made.append(group)
        return made[0], made[1] if len(made) > 1 else None


class LazyBuffer:
    """Stands where the memory buffer will be, so that initialising imports no megatron."""

    def make(self) -> Any:
        try:
            from megatron.core.utils import GlobalMemoryBuffer
        except ImportError as error:
            raise missing("_GLOBAL_MEMORY_BUFFER") from error
        return GlobalMemoryBuffer()


@contextmanager
def _restored_on_failure(*names: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        raise


def _prepare_ucc() -> None:
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise AssertionError(
            "the UCC backend needs CUDA_DEVICE_MAX_CONNECTIONS larger than 1, it is 1: with one "
            "connection its communication cannot overlap. Unset it or raise it."
        )
    for name, (value, users_wins) in _UCC_ENVIRONMENT.items():
        os.environ[name] = os.environ.get(name, value) if users_wins else value


def _release_megatron_buffers() -> None:
    # Upstream's own teardown does this; what was never loaded has nothing to give back.
    fused = sys.modules.get("megatron.core.transformer.moe.fused_a2a")
    symmetric = sys.modules.get("megatron.core.inference.symmetric_memory")
    for owner, name in (
        (fused, "nccl_ep_finalize"),
        (getattr(symmetric, "SymmetricMemoryManager", None), "destroy"),
    ):
        with suppress(Exception):  # what cannot be released must not keep groups alive
            getattr(owner, name, lambda: None)()


# The state that module-level callers speak to.
current = ParallelState()
