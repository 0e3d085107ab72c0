"""The programs by name: what is tried, where."""

from __future__ import annotations

from dataclasses import replace

from tests.clients import (
    Program,
    megatron_bridge,
    megatron_tools,
    mindspeed,
    mindspeed_llm,
    ms_swift,
    nvrx,
    slime,
)

EIGHT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}
UNEVEN = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}

PROGRAMS = {
    "ms-swift: a timeout for every group": Program(ms_swift.a_timeout_for_every_group),
    "ms-swift: groups of its own": Program(ms_swift.groups_of_its_own),
    "MindSpeed: six functions wrapped": Program(mindspeed.six_functions_wrapped),
    "MindSpeed: forgotten by hand": Program(mindspeed.forgotten_by_hand),
    "MindSpeed: groups of its own": Program(mindspeed.options_set_afterwards),
    "MindSpeed-LLM: ranks in another order": Program(mindspeed_llm.ranks_in_another_order),
    "MindSpeed-LLM: pipelines that share a stage": Program(
        mindspeed_llm.pipelines_that_share_a_stage, world=6, sizes=UNEVEN
    ),
    "MindSpeed-LLM: groups written anew": Program(mindspeed_llm.groups_written_anew),
    "slime: groups closed and made anew": Program(slime.groups_closed_and_made_anew),
    "Megatron-Bridge: components with groups of their own": Program(
        megatron_bridge.components_with_groups_of_their_own, world=8
    ),
    "Megatron-Bridge: groups of a component for a while": Program(
        megatron_bridge.groups_of_a_component_for_a_while, world=8, sizes=EIGHT
    ),
    "Megatron-Bridge: arguments by the signature": Program(
        megatron_bridge.arguments_by_the_signature
    ),
    "Megatron's tools: a converter that loads": Program(
        megatron_tools.a_converter_that_loads, world=0
    ),
    "Megatron's tools: a converter that saves": Program(
        megatron_tools.a_converter_that_saves, world=1
    ),
    "Megatron's tests: getters and globals mocked": Program(megatron_tools.a_test_that_mocks),
    "Megatron's tests: numbers and groups before": Program(
        megatron_tools.numbers_and_groups_before
    ),
    "NVRx: begun anew in the process": Program(nvrx.begun_anew_in_the_process),
}

FOUR = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
REAL = {
    "ms-swift: a timeout for every group": replace(
        PROGRAMS["ms-swift: a timeout for every group"],
        world=4,
        sizes=FOUR | {"pipeline_model_parallel_size": 1},
    ),
    "MindSpeed-LLM: ranks in another order": replace(
        PROGRAMS["MindSpeed-LLM: ranks in another order"], world=4, sizes=FOUR
    ),
    "MindSpeed-LLM: pipelines that share a stage": replace(
        PROGRAMS["MindSpeed-LLM: pipelines that share a stage"], meet=False
    ),
    "slime: groups closed and made anew": replace(
        PROGRAMS["slime: groups closed and made anew"], world=4, sizes=FOUR
    ),
}
