"""Launch lines and scripts: the job is read as bash would start it, or refused by name."""

from contextlib import suppress
from pathlib import Path

import pytest

from compat.cli.launch import script_of
from compat.cli.source import from_line, started
from compat.planned.job import JobError, from_sizes

HERE = Path(__file__).parent
# Scripts, and behind --> a part of what is said of each.
LINES = HERE.joinpath("lines.txt").read_text().rstrip("\n").split("\n\n")
RUN = "torchrun --nproc-per-node 8 pretrain_gpt.py"


def answer(script):
    """The job of a script in words, or why it is refused."""
    try:
        job = from_line(script)
    except JobError as error:
        return str(error)
    arguments = [f"{name}={value}" for name, value in job.arguments.items()]
    return f"{job.world_size} ranks, {job.ranks_per_host} on each host: {' '.join(arguments)}"


@pytest.mark.parametrize("line", [line for line in LINES if "\n--> " in line])
def test_a_line_is_read_by_the_rules_of_its_programs_or_refused_by_name(line):
    script, _, expected = line.partition("\n--> ")
    assert expected in answer(script)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=xxxxxxxx\n" + "A=$A$A\n" * 40 + RUN, "A of the launch line is longer than"),
        (f"A={'x' * 200_000}\n{RUN}", "the launch line is longer than"),
        ("( " * 3000 + RUN + " )" * 3000, "the launch line is nested too deeply"),
        ("f() { f; }; f", "the launch line is nested too deeply"),
        ("x\ud800", "the launch line is not valid Unicode"),
        ("x\U000f0005", "private use area"),
        ("TP=8\r\n" + RUN, "the launch line has carriage returns"),
        ("torchrun \u2013nproc-per-node 8 p.py", "begins with a dash of another kind"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_by_name(script, expected):
    assert expected in answer(script)


@pytest.mark.parametrize(
    ("name", "left_open", "ranks", "sizes"),
    [
        (
            "mixtral_16",
            {"SLURM_JOB_ID": "7", "PROFILE": "0"},
            16,
            {"tp": 2, "pp": 4, "vp": 2, "ep": 2},
        ),
        ("llama_128", {"DAY": "2026-01-01"}, 128, {"tp": 8, "pp": 4, "cp": 2}),
        (
            "llama_16384",
            {"SLURM_NODEID": "0", "MASTER_ADDR": "dgx1", "@": ""},
            16384,
            {"tp": 8, "pp": 16, "vp": 4, "order": "tp-cp-ep-dp-pp"},  # (126 + 2) / 16 / 2
        ),
    ],
)
def test_a_slurm_script_gives_the_ranks_and_the_arguments_of_its_job(name, left_open, ranks, sizes):
    script = (HERE / "launch" / f"{name}.sh").read_text()
    assert "which the text does not decide" in answer(script)
    job = from_line(script, left_open)
    assert job.arguments == from_sizes(world_size=ranks, **sizes).arguments
    assert (job.world_size, job.ranks_per_host) == (ranks, 8)
    assert not job.flags["not read"]
    job.plan()


@pytest.mark.parametrize(
    "script",
    [
        "X=2x\nTP=${X/x}",
        "X=TP\nTP=${!X}",
        "TP=$(nproc)",
        "TP=$((2 ** -2))",
        "[ -f x ] && TP=4",
        "[[ 2 == [1-3] ]] && TP=4",
        "case $X in 1) TP=4 ;; esac",
        "for i in $X; do TP=$i; done",
        "while [ -f x ]; do TP=4; done",
        "if grep x y; then TP=4; fi",
        "cp x y || TP=4",
        "source env.sh",
        "module load cuda",
        "TP=$1",
        "read TP",
        "unset $X",
        "TP=$RANDOM",
        "wait -p TP",
        "unset TP",
        "printf -v TP 8",
        "((TP++))",
        "for ((TP = 0; TP < 8; TP++)); do :; done",
        "TP=(2 4); TP=${TP[1]}",
        "TP=$(echo 4)",
        "X=4x; TP=${X%x}",
        "TP=4 > log",
        "export $(cat env)",
    ],
)
def test_what_is_not_followed_is_refused_where_the_launch_uses_it(script):
    text = f"TP=2\n{script}\n{RUN} --tp $TP"
    line = text.count("\n") + 1
    refusal = answer(text)
    assert refusal.startswith("--tp is ")
    assert f"(line {line}), which the text does not decide" in refusal and "Add --set" in refusal
    assert from_line(text, {"TP": "8"}).arguments == {"tensor_model_parallel_size": 8}


SCRIPT = """
#!/bin/bash
GPUS_PER_NODE=8          # on each
NUM_NODES=${SLURM_NNODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE * $NUM_NODES))
ARGS="
  --log-interval 1 # "
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size=2 --sequence-parallel
    --num-layers 32 --num-layers-per-virtual-pipeline-stage 4
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes "$((WORLD_SIZE / 8))" pretrain_gpt.py $ARGS \\
    ${MODEL_PARALLEL_ARGS[@]} --use-tp-pp-dp-mapping \\
    --tp-comm-overlap --data-path "a b" --lr 1e-4 # don't
"""


def test_a_script_is_understood_as_the_shell_would():
    job = from_line(SCRIPT, defaults=True)
    assert (job.world_size, job.ranks_per_host, job.user_buffers) == (32, 8, True)
    assert job.arguments == {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 4,
        "order": "tp-cp-ep-pp-dp",
    }
    assert job.assumed == ("SLURM_NNODES=4, its default; --set SLURM_NNODES=VALUE changes it",)
    assert from_line(SCRIPT, {"SLURM_NNODES": "16"}).world_size == 128


@pytest.mark.parametrize("form", ["$({})", "`{}`", "$(({}))", "; {};", "| {}", "${{X:-$({})}}"])
def test_a_launch_line_runs_nothing(tmp_path, form):
    command = form.format(f"touch {tmp_path}/run") + f" $((__import__('os').mkdir('{tmp_path}/d')))"
    with suppress(JobError):
        from_line(f"A={command} torchrun --nproc-per-node 4 x.py {command}")
    assert not [*tmp_path.iterdir()]


HEAD = "#!/bin/bash\n#SBATCH -N 16\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
OF_HEAD = "srun torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE x.py"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (HEAD + OF_HEAD, "64 ranks, 4 on each"),
        (HEAD + "srun python x.py", "16 ranks, 1 on each"),  # a task, with all four GPUs
        (f"echo\n{HEAD}torchrun --nproc-per-node 2 x.py", "2 ranks, 2 on each"),  # SLURM stops
    ],
)
def test_the_head_of_a_slurm_script_says_where_the_ranks_are(script, expected):
    assert expected in answer(script)


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
    job, start = started(f"torchrun --nproc-per-node 8 {started_by} --lr 1 --pp 2")
    assert script_of(start.words) == (script, ["--lr", "1", "--pp", "2"])
    assert ("order" in job.arguments) == ("order" in started_by)


def test_settings_beside_the_line_win_over_it_and_spare_reading_it():
    line = "torchrun --nnodes $NNODES --nproc-per-node 8 x.py --tensor-model-parallel-size $TP"
    assert from_line(line, world_size=64, tp=4).arguments == {"tensor_model_parallel_size": 4}
    assert from_line(line, {"NNODES": "8", "TP": "4"}).world_size == 64
    job = from_line("srun --nodelist=a[1-4] python x.py", world_size=64, gpus_per_node=4)
    assert (job.world_size, job.ranks_per_host) == (64, 4)


def test_sizes_and_a_line_that_mean_the_same_are_the_same_job():
    line = "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 "
    line += "--context-parallel-size 2 --expert-model-parallel-size 2 --disable-gloo-process-groups"
    sizes = from_sizes(world_size=64, gpus_per_node=8, tp=4, cp=2, ep=2, no_gloo=True)
    assert from_line(line) == sizes
    assert sizes.arguments["create_gloo_process_groups"] is False


def test_each_flag_is_used_known_to_have_no_effect_or_named_as_not_known():
    flags = from_line(f"{RUN} --tensor-model-parallel-size 2 --lr 1e-4 --bf16 --my-flag 3").flags
    assert flags == {
        "used": ["--nproc-per-node 8", "--tensor-model-parallel-size 2"],
        "without effect": ["--lr", "--bf16"],
        "not read": ["--my-flag"],
    }


def test_the_model_and_the_batch_are_read_and_change_no_group():
    model = "--num-layers 32 --num-experts 8 --num-attention-heads 16 --global-batch-size 64"
    job = from_line(f'{RUN} {model} --micro-batch-size "$MBS" --hidden-size 512 --seq-length 128')
    assert job.model == {
        "num-layers": 32,
        "num-experts": 8,
        "num-attention-heads": 16,
        "global-batch-size": 64,
    }
    assert job.flags["used"] == ["--nproc-per-node 8", "--num-layers 32"]
    assert {"--num-experts", "--hidden-size"} <= {*job.flags["without effect"]}
    assert job.flags["not read"] == [] and job.plan() == from_line(RUN).plan()
