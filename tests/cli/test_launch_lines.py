"""Launch commands: the job is read by the rules of its programs, or refused with a remedy."""

from pathlib import Path

import pytest

from compat.cli.launch import job_of, taken_apart
from compat.cli.line import Command, command_of
from compat.cli.world import head_of
from compat.planned.checks import stages_of
from compat.planned.job import JobError, from_sizes
from tests.cli.test_cli import run
from tests.support import ROOT

HERE = Path(__file__).parent
# Commands, and behind --> a part of what is said of each.
LINES = HERE.joinpath("lines.txt").read_text().rstrip("\n").split("\n\n")
# A command of ours, its refusal, the remedied command and what that prints.
REFUSALS = [
    block.splitlines()
    for block in HERE.joinpath("refusals.txt").read_text().rstrip("\n").split("\n\n")
    if not block.startswith("#")
]
RUN = "torchrun --nproc-per-node 8 pretrain_gpt.py"


def job_in(line, **flags):
    """The job of a pasted line."""
    return job_of(command_of(line), **flags)


def in_words(job):
    arguments = [f"{name}={value}" for name, value in job.arguments.items()]
    return f"{job.world_size} ranks, {job.ranks_per_host} on each host: {' '.join(arguments)}"


@pytest.mark.parametrize("line", [line for line in LINES if "\n--> " in line])
def test_a_line_is_read_by_the_rules_of_its_programs(line):
    command, _, expected = line.partition("\n--> ")
    assert expected in in_words(job_in(command))


@pytest.mark.parametrize("block", REFUSALS, ids=lambda block: block[0])
def test_a_refusal_names_a_remedy_that_works(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, refusal, remedied, answer = block
    assert refusal in run(command, 2)
    assert answer in run(remedied.removeprefix("-> "), prints_first=True)


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (f"{RUN} --save {'x' * 200_000}", "the launch line is longer than"),
        (f"{RUN} \\\n--tp 4\n--pp 2", "a shell would not leave '--pp' of"),
        (f"{RUN} \\\r\n--tp 4", "a shell would not leave '--tp' of"),
        (f"{RUN}\r\n", "a shell would not leave 'pretrain_gpt.py\\r' of"),
        (f"{RUN} --save \\", "a shell would not leave '\\\\' of"),
        (f"{RUN} ~/x", "a shell would not leave '~/x' of"),
        (f"{RUN} *.json", "a shell would not leave '*.json' of"),
        (f"{RUN} # none", "a shell would not leave '#' of"),
        (f"{RUN} 'a'$X\"b\"", "a shell would not leave '\\'a\\'$X\"b\"'"),
    ],
)
def test_a_line_that_only_a_shell_can_read_is_refused_by_name(line, refusal):
    with pytest.raises(JobError) as caught:
        command_of(line)
    assert refusal in str(caught.value)


def test_lines_joined_by_backslashes_and_posix_quotes_are_read():
    line = f"{RUN} --tp 4 \\\n  --save 'a \"b' --load \"c\\\"d\\e\" --split a\\ b ''"
    words = [*RUN.split(), "--tp", "4", "--save", 'a "b', "--load", 'c"d\\e', "--split", "a b", ""]
    assert command_of(line).words == words


HEAD = "#!/bin/bash\n#SBATCH -N 16\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        (HEAD, {"SLURM_NNODES": "16", "SLURM_NTASKS": "16", "SLURM_GPUS_ON_NODE": "4"}),
        (f"echo\n{HEAD}", {}),  # SLURM reads no further
        ("#SBATCH --nodes=2-4\n", {}),
        ("#SBATCH -n 16 --gpus-per-task=1", {"SLURM_NTASKS": "16", "SLURM_GPUS_PER_TASK": "1"}),
        ("#SBATCH --gres=gpu:h100:8 -J 'a b' # -N 4", {"SLURM_GPUS_ON_NODE": "8"}),
    ],
)
def test_the_head_of_a_slurm_script_sets_what_slurm_sets(script, variables):
    of_slurm = head_of(script)
    assert variables.items() <= of_slurm.items()
    assert bool(variables) == bool(of_slurm)


def test_a_job_of_several_parts_is_refused():
    with pytest.raises(JobError, match="several parts"):
        head_of("#SBATCH -N 2 -n 16\n#SBATCH hetjob\n#SBATCH -N 1")


@pytest.mark.parametrize(
    ("started_by", "script"),
    [
        ("pretrain_gpt.py", "pretrain_gpt.py"),
        ("-m my.training", "my.training"),
        ("-m compat.launch --order pp-tp-dp pretrain_gpt.py", "pretrain_gpt.py"),
        ("-m compat.launch --order pp-tp-dp --shadow -m my.training", "my.training"),
        ("--no-python hypergrid-launch --order=pp-tp-dp pretrain_gpt.py", "pretrain_gpt.py"),
        ("--no-python bin/hypergrid-launch --order pp-tp-dp -m my.training", "my.training"),
    ],
)
def test_the_script_and_its_words_are_told_from_the_launchers(started_by, script):
    words = f"torchrun --nproc-per-node 8 {started_by} --lr 1 --pp 2".split()
    launch = taken_apart(words)
    assert (launch.script, [*launch.words]) == (script, ["--lr", "1", "--pp", "2"])
    assert ("order" in job_of(Command(words)).arguments) == ("order" in started_by)


def test_a_step_of_srun_that_says_otherwise_than_its_job_is_refused_in_a_script_too(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("export SLURM_NNODES=4 SLURM_NTASKS=32\nsrun -N 2 python p.py --tp 2\n")
    answer = run(f"plan --run {script}", 2, prints_first=True)
    assert "srun is told otherwise by SLURM_NNODES=4." in answer


def test_settings_beside_a_command_win_over_it():
    assert job_in(f"{RUN} --tp 8", world_size=64, tp=4).arguments == {
        "tensor_model_parallel_size": 4
    }
    job = job_in("srun --nodelist=a1 python x.py", world_size=64, gpus_per_node=4)
    assert (job.world_size, job.ranks_per_host) == (64, 4)
    job = job_in("WORLD_SIZE=24 LOCAL_WORLD_SIZE=8 python x.py", gpus_per_node=4)
    assert (job.world_size, job.ranks_per_host) == (24, 4)


def test_sizes_and_a_command_that_mean_the_same_are_the_same_job():
    line = "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 "
    line += "--context-parallel-size 2 --expert-model-parallel-size 2 --disable-gloo-process-groups"
    sizes = from_sizes(world_size=64, gpus_per_node=8, tp=4, cp=2, ep=2, no_gloo=True)
    assert job_in(line) == sizes
    assert sizes.arguments["create_gloo_process_groups"] is False


def test_each_flag_is_used_known_to_have_no_effect_or_named_as_not_known():
    assert job_in(f"{RUN} --tensor-model-parallel-size 2 --lr 1e-4 --bf16 --my-flag 3").flags == {
        "used": ["--nproc-per-node 8", "--tensor-model-parallel-size 2"],
        "without effect": ["--lr", "--bf16"],
        "not read": ["--my-flag"],
        "stray": [],
        "without value": [],
    }


def test_the_model_and_the_batch_are_read_and_change_no_group():
    model = "--num-layers 32 --num-experts 8 --num-attention-heads 16 --global-batch-size 64"
    job = job_in(f"{RUN} {model} --hidden-size 512 --seq-length 128")
    sizes = {"num-layers": 32, "num-experts": 8, "num-attention-heads": 16}
    assert job.settings.items() >= {**sizes, "global-batch-size": 64}.items()
    assert job.flags["used"] == ["--nproc-per-node 8"]
    assert {"--num-experts", "--hidden-size"} <= {*job.flags["without effect"]}
    assert job.flags["not read"] == [] and job.plan() == job_in(RUN).plan()


@pytest.mark.parametrize(
    "text",
    [
        *("Et", "Et|L", "Ett|t|tL", "Et*2|t*13|L", "E|(t|)*7L", "E(tt|t,)*3|m", "Et,t|mL"),
        *("E(t|)*2(tt|)*13L", "E||L", "Et|*4L", "E|(tt|t|)*2|t,|L", "Em*2|t*2,|tt|"),
    ],
)
def test_the_stages_of_a_layout_are_counted_as_megatron_counts_them(text):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    assert stages_of(text) == PipelineParallelLayerLayout.get_num_stages_from_str(text)
