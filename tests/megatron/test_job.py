"""Launch lines and sizes become what initialize_model_parallel would be asked. No torch."""

from contextlib import suppress

import pytest

from compat.megatron.job import Job, JobError, from_line, from_sizes

SCRIPT = """
#!/bin/bash
GPUS_PER_NODE=8          # on each
NUM_NODES=${SLURM_NNODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE * $NUM_NODES))
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size=2 --sequence-parallel
    --num-layers 32 --num-layers-per-virtual-pipeline-stage 4
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NUM_NODES} pretrain_gpt.py \\
    ${MODEL_PARALLEL_ARGS[@]} --use-tp-pp-dp-mapping \\
    --tp-comm-overlap --data-path "a b" --lr 1e-4
"""


def test_a_script_is_understood_as_the_shell_would():
    job = from_line(SCRIPT)
    assert (job.world_size, job.ranks_per_host, job.user_buffers) == (32, 8, True)
    assert job.arguments == {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 4,
        "order": "tp-cp-ep-pp-dp",
    }


def test_quotes_go_over_lines_and_around_sums():
    job = from_line(
        'GPUS=8 WORLD="$((GPUS * 4))"\nARGS="\n  --tensor-model-parallel-size 4 # "\n'
        'torchrun --nproc-per-node=$GPUS --nnodes="$((WORLD / GPUS))" x.py $ARGS # don\'t\n'
    )
    assert (job.world_size, job.arguments) == (32, {"tensor_model_parallel_size": 4})


@pytest.mark.parametrize("form", ["$({})", "`{}`", "$(({}))", "; {};", "| {}", "${{X:-$({})}}"])
def test_a_launch_line_runs_nothing(tmp_path, form):
    command = form.format(f"touch {tmp_path}/run") + f" $((__import__('os').mkdir('{tmp_path}/d')))"
    with suppress(JobError):
        from_line(f"A={command} torchrun --nproc-per-node 4 x.py {command}")
    assert not [*tmp_path.iterdir()]


def test_the_head_of_a_slurm_script_says_where_the_ranks_are():
    head = "#!/bin/bash\n#SBATCH -N 16\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
    line = "srun torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE x.py --tp 4"
    job = from_line(head + line)
    assert (job.world_size, job.ranks_per_host) == (64, 4)
    assert from_line(head + "srun python x.py").world_size == 64


@pytest.mark.parametrize(
    ("line", "world", "per_host"),
    [
        ("torchrun --nproc-per-node 4 train.py", 4, 4),
        ("torchrun --nnodes=16 --nproc-per-node=8 train.py", 128, 8),
        ("srun -N 4 --ntasks-per-node 8 python train.py -n 3", 32, 8),
        ("srun -n 64 --nodes 8 python train.py", 64, 8),
        ("srun -N16 -n128 --ntasks-per-node=8 python train.py -n3", 128, 8),
        ("#SBATCH -N4\nsrun torchrun --nnodes $SLURM_NNODES --nproc-per-node 4 train.py", 16, 4),
        ("mpirun -np 16 python train.py", 16, 8),
        ("mpirun --np 16 python train.py", 16, 8),
        ("deepspeed --num_gpus 8 --num_nodes 2 train.py", 16, 8),
        ("WORLD_SIZE=24 python train.py --gpus-per-node 6", 24, 6),
        ("python train.py --world-size 4", 4, 4),
    ],
)
def test_where_the_ranks_are_is_read_from_each_launcher(line, world, per_host):
    job = from_line(line)
    assert (job.world_size, job.ranks_per_host) == (world, per_host)


def test_ranks_that_do_not_fit_on_the_hosts_are_refused():
    with pytest.raises(JobError, match=r"64 ranks do not fit on 4 hosts of 8, which are 32"):
        from_line("srun -N 4 -n 64 --ntasks-per-node 8 python train.py")
    assert from_line("srun -N 4 -n 30 --ntasks-per-node 8 python train.py").world_size == 30


def test_settings_beside_the_line_win_over_it_and_spare_reading_it():
    line = "torchrun --nnodes $NNODES --nproc-per-node 8 x.py --tensor-model-parallel-size $TP"
    assert from_line(line, world_size=64, tp=4, nnodes=8).arguments == {
        "tensor_model_parallel_size": 4
    }
    assert from_line(line, world_size=64, tp=4, gpus_per_node=4).world_size == 64


def test_sizes_and_a_line_that_mean_the_same_are_the_same_job():
    line = "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 "
    line += "--context-parallel-size 2 --expert-model-parallel-size 2 --disable-gloo-process-groups"
    sizes = from_sizes(world_size=64, gpus_per_node=8, tp=4, cp=2, ep=2, no_gloo=True)
    assert from_line(line) == sizes
    assert sizes.arguments["create_gloo_process_groups"] is False
    assert from_sizes(world_size=8, no_gloo=False, order=None).arguments == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--tp 4", "the number of ranks is missing"),
        ("torchrun --nproc-per-node gpu x.py", "--nproc-per-node must be a whole number"),
        ("--world-size 8 --tp $TP", "which the launch line does not set"),
        ("--world-size 8 --tp", "--tp has no value"),
        ("--world-size 8 --tp --pp 2", "--tp has no value"),
        ("--world-size 8 --name 'x", "Close its quotes"),
        ("--world-size 0", "--world-size must be at least 1"),
        ("--world-size 8 --pp 2 --num-layers-per-virtual-pipeline-stage 3", "--num-layers"),
        ("--world-size $((9**99)) --tp 2", "which the launch line does not set"),
    ],
)
def test_what_cannot_be_read_is_told_with_the_flag(line, said):
    with pytest.raises(JobError, match=said.replace("$", r"\$")):
        from_line(line)


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
