"""Launch lines and scripts: the job is read as bash would start it, or refused by name."""

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from compat.cli.bash import commands
from compat.cli.launch import script_of
from compat.cli.source import from_line, started
from compat.planned.job import JobError, from_sizes

SCRIPTS = Path(__file__).parent / "launch"
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
RUN = "torchrun --nproc-per-node 8 pretrain_gpt.py"


@pytest.mark.parametrize(
    ("name", "ranks", "arguments"),
    [
        (
            "mixtral_16",
            16,
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
            },
        ),
        (
            "llama_128",
            128,
            {
                "tensor_model_parallel_size": 8,
                "pipeline_model_parallel_size": 4,
                "context_parallel_size": 2,
            },
        ),
        (
            "llama_16384",
            16384,
            {
                "tensor_model_parallel_size": 8,
                "pipeline_model_parallel_size": 16,
                "virtual_pipeline_model_parallel_size": 4,  # (126 + 2) / 16 / 2
                "order": "tp-cp-ep-dp-pp",
            },
        ),
    ],
)
def test_a_slurm_script_gives_the_ranks_and_the_arguments_of_its_job(name, ranks, arguments):
    left_open = {
        "mixtral_16": {"SLURM_JOB_ID": "7", "PROFILE": "0"},
        "llama_128": {"DAY": "2026-01-01"},
        "llama_16384": {"SLURM_NODEID": "0", "MASTER_ADDR": "dgx1", "@": ""},
    }
    text = (SCRIPTS / f"{name}.sh").read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    with pytest.raises(JobError, match="which the text does not decide"):
        from_line(text)
    job = from_line(text, left_open[name])
    assert (job.world_size, job.ranks_per_host, job.arguments) == (ranks, 8, arguments)
    assert not job.flags["not read"]
    job.plan()


BASH = """
A=3 B="x y" C='$A' D=
ARR=(one "two three" $B "")
ARR+=(four$A "$B"z)
E="${A}-$A $B" F=${D:-${A}0} G=${U:-7} I=$((A * (4 + 2) / 4 % 3)) J=${ARR[1]};
[[ $A == 3 ]] && K=yes || K=no
if [ "$A" -gt 3 ]; then L=1; elif [[ $C != x ]]; then L=2; else L=3; fi
[ -z "$D" ] && M=empty
B+=" z"
show "${ARR[@]}" / ${ARR[*]} / "${ARR[*]}" / pre$B"post $A" a\\ b "$E" $F $G $I "$J" $D "$D" $C
bash -c "show $K $L \\"$M\\" 2>&1 end"
eval "show \\$A"
"""


def test_words_are_those_that_bash_makes_of_them():
    show = 'show() { printf "<%s>" "$@"; echo; }; export -f show\n'
    done = subprocess.run(["bash", "-c", show + BASH], capture_output=True, text=True, check=True)
    texts = [[word.text for word in each.words] for each in commands(BASH, takes_defaults=True)[0]]
    ours = ["".join(f"<{text}>" for text in each[each.index("show") + 1 :]) for each in texts]
    assert sorted(ours) == sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    "script",
    [
        "X=2x\nTP=${X%x}",
        "X=TP\nTP=${!X}",
        "TP=$(nproc)",
        "TP=$((2 ** 2))",
        "[ -f x ] && TP=4",
        "[[ 2 == [1-3] ]] && TP=4",
        "case $X in 1) TP=4 ;; esac",
        "for i in $X; do TP=$i; done",
        "while [ -f x ]; do TP=4; done",
        "if grep x y; then TP=4; fi",
        "cp x y || TP=4",
        "source env.sh",
        "module load cuda",
        "printf -v TP 4",
        "TP=$1",
        "read TP",
        "unset $X",
        "TP=$RANDOM",
    ],
)
def test_what_is_not_followed_is_refused_where_the_launch_uses_it(script):
    text = f"TP=2\n{script}\n{RUN} --tp $TP"
    where = rf"\(line {text.count(chr(10)) + 1}\), which the text does not decide"
    with pytest.raises(JobError, match=f"--tp is .* {where}.* Add --set"):
        from_line(text)
    assert from_line(text, {"TP": "8"}).arguments == {"tensor_model_parallel_size": 8}


@pytest.mark.parametrize(
    "command",
    ["declare -n R=TP", "declare -A M", "declare -i TP", "shopt -s lastpipe", "trap 'TP=4' DEBUG"],
)
def test_what_changes_how_all_later_words_are_read_is_refused_with_its_line(command):
    with pytest.raises(JobError, match=r"line 2 of the launch line, .*, cannot be followed"):
        from_line(f"TP=2\n{command}\n{RUN} --tp $TP")


@pytest.mark.parametrize(
    "script",
    [
        "[[ TP=8 -eq 8 ]]",
        "X=TP=8\n[[ X -eq 8 ]]",
        "X=TP=8\necho $((X))",
        "X=TP=8\nA[X]=1",
        "X=TP=8\nfor ((i = X; i < 3; i++)); do :; done",
        "time TP=8",
        "wait -p TP",
        "hash -p /bin/true torchrun",
        "torchrun() { TP=8; }\nunset -f torchrun",
    ],
)
def test_assignments_that_do_not_look_like_one_leave_no_old_value(script):
    with suppress(JobError):
        job = from_line(f"TP=2\n{script}\n{RUN} --tp $TP")
        assert job.arguments == {"tensor_model_parallel_size": 8}


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


def test_a_line_that_lost_the_backslash_before_it_is_refused():
    line = "torchrun --nproc-per-node 8 pretrain_gpt.py --tp 4\n --pp 2\n"
    with pytest.raises(JobError, match=r"line 2 of the launch line begins with a flag. Join it"):
        from_line(line)
    assert from_line(line.replace("\n", "\\\n", 1)).arguments["pipeline_model_parallel_size"] == 2


def test_quotes_go_over_lines_and_around_sums():
    job = from_line(
        'GPUS=8 WORLD="$((GPUS * 4))"\nARGS="\n  --tensor-model-parallel-size 4 # "\n'
        'torchrun --nproc-per-node=$GPUS --nnodes="$((WORLD / GPUS))" x.py $ARGS # don\'t\n'
    )
    assert (job.world_size, job.arguments) == (32, {"tensor_model_parallel_size": 4})


def test_the_head_of_a_slurm_script_says_where_the_ranks_are():
    head = "#!/bin/bash\n#SBATCH -N 16\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
    line = "srun torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE x.py --tp 4"
    job = from_line(head + line)
    assert (job.world_size, job.ranks_per_host) == (64, 4)
    one_each = from_line(head + "srun python x.py")  # a task for each host, with its four GPUs
    assert (one_each.world_size, one_each.ranks_per_host) == (16, 1)
    assert from_line("echo\n" + head + RUN.replace("8", "2")).world_size == 2  # SLURM stops there


@pytest.mark.parametrize(
    ("line", "world", "per_host"),
    [
        ("torchrun --nproc-per-node 4 train.py", 4, 4),
        ("torchrun --nnodes=16 --nproc-per-node=8 train.py", 128, 8),
        ("torchrun --nnodes 2 train.py", 2, 1),
        ("python -m torch.distributed.run --nproc-per-node 4 -m train --tp 2", 4, 4),
        ("python3 -u /opt/bin/torchrun --nproc_per_node=4 train.py", 4, 4),
        ("srun -N 4 --ntasks-per-node 8 python train.py -n 3", 32, 8),
        ("srun -n 64 --nodes 8 python train.py", 64, 8),
        ("srun -N16 -n128 --ntasks-per-node=8 python train.py -n3", 128, 8),
        ("srun -N 4 -n 4 torchrun --nnodes 4 --nproc-per-node 8 train.py", 32, 8),
        ("#SBATCH -N4\nsrun torchrun --nnodes $SLURM_NNODES --nproc-per-node 4 train.py", 16, 4),
        ("mpirun --np 16 -npernode 4 python train.py", 16, 4),
        ("deepspeed --num_gpus 8 --num_nodes 2 train.py", 16, 8),
        ("accelerate launch --num_processes 16 --num_machines 4 train.py", 16, 4),
        ("python train.py --world-size 4", 4, 4),
        ("python prepare.py --out x\n" + RUN, 8, 8),
        ("mkdir -p x || exit 1\ncd x && " + RUN + " > log 2>&1 &", 8, 8),
        ("run() {\n  " + RUN + " $@\n}\nrun", 8, 8),
    ],
)
def test_where_the_ranks_are_is_read_from_each_launcher(line, world, per_host):
    job = from_line(line)
    assert (job.world_size, job.ranks_per_host) == (world, per_host)


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
    assert job.arguments.get("order") == ("pp-tp-dp" if "order" in started_by else None)


def test_ranks_that_do_not_fit_on_the_hosts_are_refused():
    with pytest.raises(JobError, match=r"64 ranks, which do not fit on 4 hosts of 8"):
        from_line("srun -N 4 -n 64 --ntasks-per-node 8 python train.py")
    assert from_line("srun -N 4 -n 30 --ntasks-per-node 8 python train.py").world_size == 30


def test_settings_beside_the_line_win_over_it_and_spare_reading_it():
    line = "torchrun --nnodes $NNODES --nproc-per-node 8 x.py --tensor-model-parallel-size $TP"
    assert from_line(line, world_size=64, tp=4).arguments == {"tensor_model_parallel_size": 4}
    assert from_line(line, world_size=64, tp=4, gpus_per_node=4).world_size == 64
    assert from_line(line, {"NNODES": "8", "TP": "4"}).world_size == 64


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


@pytest.mark.parametrize(
    ("flags", "virtual"),
    [
        ("--num-layers 126 --num-layers-per-virtual-pipeline-stage 8", None),
        (
            "--num-layers 126 --num-layers-per-virtual-pipeline-stage 2 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            4,
        ),
        ("--num-virtual-stages-per-pipeline-rank 3", 3),
    ],
)
def test_virtual_stages_are_counted_as_megatron_counts_them(flags, virtual):
    line = f"torchrun --nnodes 16 --nproc-per-node 8 x.py --pipeline-model-parallel-size 16 {flags}"
    if virtual is None:
        with pytest.raises(JobError, match="multiple of 16 stages x 8, got 126"):
            from_line(line)
    else:
        found = from_line(line).arguments.get("virtual_pipeline_model_parallel_size")
        assert found == virtual


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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--tp 4", "the number of ranks is missing"),
        ("WORLD_SIZE=24 python train.py", "the number of ranks is missing"),
        ("torchrun --nproc-per-node gpu x.py", "--nproc-per-node must be a whole"),
        ("torchrun --nnodes 2:4 --nproc-per-node 8 x.py", "--nnodes must be a whole number"),
        ("torchrun --nproc-per-node eight x.py", "--nproc-per-node must be a whole number"),
        ("accelerate launch --config_file a.yaml x.py", "--config_file (line 1) may hold sizes"),
        ("deepspeed --hostfile hosts x.py", "--hostfile (line 1) may hold sizes"),
        ("srun python x.py", "srun is not told the number of ranks"),
        ("#SBATCH --nodes=2-4\nsrun --ntasks-per-node 8 python x.py", "srun is not told the"),
        ("--world-size 8 --tp $TP", "--tp is $TP (line 1), which the text does not decide. Add "
         "--set TP=VALUE."),
        (f"N=$(nproc)\n{RUN} --tp $N", "--tp is $(nproc) (line 2), which the text does not decide. "
         "Add --set N=VALUE."),
        (f"{RUN} --tp $(nproc)", "--tp is $(nproc) (line 1), which only the job can tell"),
        (f"if [ $X = 1 ]; then T=4; fi\n{RUN} --tp $T", "--tp is $T (line 2), which the text does"),
        (f"A=(--tp 2)\nif [ -f x ]; then A+=(--pp 4); fi\n{RUN} ${{A[@]}}",
         "The launch line uses $A (line 3), which the text does not decide: line 2 may assign it. "
         "Add --set A=VALUE."),
        (f"for T in 1 2; do\n{RUN} --tp $T; done", "start different jobs"),
        (f"for T in $TS; do\n{RUN} --tp $T; done",
         "--tp is $T (line 2), which the text does not decide: the loop in line 1 may change it"),
        (f"{RUN} $MODEL_ARGS", "The launch line uses $MODEL_ARGS (line 1)"),
        (f"if [ $X = 1 ]; then {RUN} --tp 2; else {RUN} --tp 4; fi", "lines 1 and 1 of the launch "
         "line start different jobs. Paste one of them, or decide by --set NAME=VALUE which is "
         "started."),
        ("srun bash run.sh", "the launch line starts no Python program"),
        (f"{RUN} --tensor-modle-parallel-size 8", "--tensor-modle-parallel-size (line 1) may "
         "hold sizes"),
        ("--world-size 8 --tp", "--tp has no value"),
        ("--world-size 8 --tp --pp 2", "--tp has no value"),
        ("--world-size 8 --name 'x", "Close its quotes"),
        ("--world-size 0", "--world-size must be from 1 to"),
        ("--world-size 8 --pp 2 --num-layers-per-virtual-pipeline-stage 3", "--num-layers"),
        ("--world-size $((9**99)) --tp 2", "which only the job can tell"),
        ("A=xxxxxxxx\n" + "A=$A$A\n" * 40 + RUN, "A of the launch line is longer than"),
        (f"A={'x' * 200_000}\n{RUN}", "the launch line is longer than"),
        ("( " * 3000 + RUN + " )" * 3000, "the launch line is nested too deeply"),
        ("x\ud800", "the launch line is not valid Unicode"),
        ("x\U000f0005", "private use area"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told_with_the_flag(line, said):
    with pytest.raises(JobError) as error:
        from_line(line)
    assert said in str(error.value)
