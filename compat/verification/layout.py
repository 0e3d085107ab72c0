"""A layout to verify: sizes of the dims, and the options of megatron-core that go with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

# Our short name of each dim: megatron-core's argument.
SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
DIMS = ("tp", "cp", "pp", "dp", "vp", "ep", "etp")
# megatron-core refuses these without tensor parallelism.
_OF_TP = ("sequence_parallel", "distribute_saved_activations")
# Megatron-FSDP, by both of its names, and FSDP2: plain data parallelism would run instead.
FULLY_SHARDED = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
LOSS_PER_TOKEN = "calculate_per_token_loss"
# The optimizer keeps float32 copies of parameters that say they have one of these types.
MIXED_PRECISION = {"bf16": "torch.cuda.BFloat16Tensor", "fp16": "torch.cuda.HalfTensor"}
INSTANCES = "num_distributed_optimizer_instances"
RECOMPUTATION = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "distribute_saved_activations",
)
# How several ranks work together, and not what they compute.
OF_SEVERAL = (
    *_OF_TP,
    "use_distributed_optimizer",
    INSTANCES,
    "overlap_grad_reduce",
    "overlap_param_gather",
    "data_parallel_random_init",
    "average_in_collective",
    "bucket_size",
    "moe_token_dispatcher_type",
    "moe_shared_expert_overlap",
    "cross_entropy_loss_fusion",
    *MIXED_PRECISION,
    *RECOMPUTATION,
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dims of one job, and options of megatron-core's configurations.

    Parameters
    ----------
    tp, cp, pp, dp : int
        Sizes of the tensor, context, pipeline and data-parallel dims; the world has their product.
    vp : int, optional
        Model chunks on each pipeline rank (virtual pipeline).
    ep : int
        Ranks over which experts are distributed, out of tp x cp x dp.
    etp : int, optional
        Tensor-parallel ranks of each expert; tp unless given.
    order : str
        Dims from fastest to slowest, as ``initialize_model_parallel`` takes them.
    options : mapping of str
        Fields of ``TransformerConfig``, ``DistributedDataParallelConfig`` or ``OptimizerConfig``,
        such as ``{"sequence_parallel": True}``.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int | None = None
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in DIMS:
            size = getattr(self, name)
            if size is None and name in ("vp", "etp"):
                continue
            # bool is a kind of int.
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {size!r}, in {self}.")
        if self.vp is not None and self.pp == 1:
            raise ValueError(f"vp={self.vp} needs a pipeline of several ranks, in {self}.")
        # The ranks of a stage are divided once more, by experts.
        stage_size = self.tp * self.cp * self.dp
        per_expert = self.ep * (self.etp or self.tp)
        if stage_size % per_expert:
            raise ValueError(
                f"ep x etp = {per_expert} does not divide tp x cp x dp = {stage_size}, in {self}."
            )

    def __str__(self) -> str:
        words = []
        for name in (*DIMS, "order"):
            value = getattr(self, name)
            if value != getattr(Layout, name):
                words.append(f"{name}={value}")
        for name, value in sorted(self.options.items()):
            words.append(name if value is True else f"{name}={_text(value)}")
        return " ".join(words) or "one rank"

    # Options are a mapping, which has no hash.
    def __hash__(self) -> int:
        return hash(str(self))

    def __getstate__(self) -> dict[str, Any]:
        """For a process that reads a report: it may not have the modules of functions."""
        options = {name: _text(value) for name, value in self.options.items()}
        return {**vars(self), "options": options}

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sizes as megatron-core's ``initialize_model_parallel`` and its configurations take."""
        return {name: getattr(self, short) for short, name in SIZES.items()}

    def fields_of(self, configuration: type) -> dict[str, Any]:
        """Options that are fields of one of megatron-core's configurations."""
        names = configuration.__dataclass_fields__  # type: ignore[attr-defined]
        return {name: value for name, value in self.options.items() if name in names}

    def alone(self) -> Layout:
        """One rank that computes the same."""
        return Layout(options=self.without(*OF_SEVERAL).options)

    def without(self, *names: str) -> Layout:
        """The layout without some options."""
        kept = {name: value for name, value in self.options.items() if name not in names}
        return replace(self, options=kept)

    def smaller(self) -> Iterator[tuple[str, Layout]]:
        """Each dim or option that can be taken away, and the layout without it.

        Example: of tp=3, first tp=1, then tp=2. The loss per token comes last: without it context
        parallelism differs by itself.
        """
        changes: dict[str, dict[str, Any]] = {}
        # Chunks first: a pipeline that has them cannot be taken away.
        for name in ("vp", "etp", "dp", "pp", "cp", "ep", "tp", "order"):
            value = getattr(self, name)
            least = getattr(Layout, name)
            if value != least:
                changes[f"{name}={value}"] = {name: least}
            if least == 1 and value > 2:
                changes[f"{name} > 2"] = {name: 2}
        # False comes before True: the loss per token is the last.
        for name in sorted(self.options, key=LOSS_PER_TOKEN.__eq__):
            changes[name] = {"options": self.without(name).options}
        for name, change in changes.items():
            try:
                layout = replace(self, **change)
            except ValueError:
                # Such a layout does not exist: experts, say, that fewer ranks do not divide.
                continue
            if layout.tp == 1:
                layout = layout.without(*_OF_TP)
            yield name, layout


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of ``patterns``, which may have asterisks."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _text(value: Any) -> Any:
    """The name of a function, and any other value as it is."""
    return getattr(value, "__name__", value)
