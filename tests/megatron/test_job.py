"""Sizes become what initialize_model_parallel would be asked. No torch."""

import pytest

from compat.planned.job import Job, JobError, from_sizes


def test_a_setting_that_is_not_given_or_off_is_no_argument():
    assert from_sizes(world_size=8, no_gloo=False, order=None).arguments == {}


def test_a_job_that_megatron_refuses_is_refused_in_its_words():
    with pytest.raises(JobError, match="world size 8 is not divisible by"):
        from_sizes(world_size=8, tp=3).plan()
    with pytest.raises(JobError, match="does not end in pp"):
        from_sizes(world_size=16, tp=2, ep=4, pp=2, order="tp-pp-ep-dp").plan()


def test_an_order_that_megatron_refuses_has_no_layouts():
    job = from_sizes(world_size=16, tp=2, ep=4, pp=2)
    assert job.layouts("tp-pp-ep-dp") is None
    assert job.layouts("tp-ep-dp-pp")["expert"].dim_size("ep") == 4


def test_what_was_taken_for_granted_is_said():
    assert from_sizes(world_size=64).assumed == (
        "8 ranks on each host; --gpus-per-node changes it",
    )
    assert isinstance(from_sizes(world_size=64, gpus_per_node=4), Job)
    assert from_sizes(world_size=64, gpus_per_node=4).assumed == ()
