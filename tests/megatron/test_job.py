"""Sizes become what initialize_model_parallel would be asked. No torch."""

from compat.planned.job import from_sizes


def test_a_setting_that_is_not_given_or_off_is_no_argument():
    assert from_sizes(world_size=8, no_gloo=False, order=None).arguments == {}


def test_what_was_taken_for_granted_is_said():
    assert from_sizes(world_size=64).assumed == (
        "8 ranks on each host; --gpus-per-node changes it",
    )
    assert from_sizes(world_size=64, gpus_per_node=4).assumed == ()
