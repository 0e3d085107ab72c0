"""What megatron-core 0.12 and 0.13 ask of a pipeline through an encoder and a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compat.megatron.encoder import warn_of_its_end


def _deprecated(name: str) -> None:
    warn_of_its_end(f"{name} is", stacklevel=4)


class EncoderGetters:
    """Answers from the rank at which the pipeline was split, or the stage that ends the encoder.

    All stages are inside both where nothing was split.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # the slots of the state

        def __getattr__(self, name: str) -> Any: ...

    def get_pipeline_model_parallel_split_rank(self) -> int | None:
        return self._PIPELINE_MODEL_PARALLEL_SPLIT_RANK

    def get_pipeline_model_parallel_decoder_start(self) -> int | None:
        _deprecated("get_pipeline_model_parallel_decoder_start")
        return self._PIPELINE_MODEL_PARALLEL_DECODER_START

    def is_pipeline_stage_before_split(self, rank: int | None = None) -> bool:
        _deprecated("is_pipeline_stage_before_split")
        stage, split = self._stage(rank), self._PIPELINE_MODEL_PARALLEL_SPLIT_RANK
        return stage is None or split is None or stage < split

    def is_pipeline_stage_after_split(self, rank: int | None = None) -> bool:
        _deprecated("is_pipeline_stage_after_split")
        stage, split = self._stage(rank), self._PIPELINE_MODEL_PARALLEL_SPLIT_RANK
        return stage is None or split is None or stage >= split

    def is_pipeline_stage_at_split(self) -> bool:
        _deprecated("is_pipeline_stage_at_split")
        stage = self._via.get_pipeline_model_parallel_rank()
        before = self._via.is_pipeline_stage_before_split(stage)
        return before and self._via.is_pipeline_stage_after_split(stage + 1)

    def is_inside_encoder(self, rank: int | None = None) -> bool:
        _deprecated("is_inside_encoder")
        stage, start = self._stage(rank), self._PIPELINE_MODEL_PARALLEL_DECODER_START
        # Without an encoder of its own the first stage holds it beside the decoder's begin.
        return stage is None or (stage == 0 if start is None else stage < start)

    def is_inside_decoder(self, rank: int | None = None) -> bool:
        _deprecated("is_inside_decoder")
        stage, start = self._stage(rank), self._PIPELINE_MODEL_PARALLEL_DECODER_START
        return stage is None or start is None or stage >= start

    def _stage(self, rank: int | None) -> int | None:
        """The stage that is asked about; None where the pipeline has one stage alone."""
        if self._via.get_pipeline_model_parallel_world_size() == 1:
            return None
        stage: int = self._via.get_pipeline_model_parallel_rank() if rank is None else rank
        return stage
