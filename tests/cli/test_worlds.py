"""Where the ranks of a launch are: by each launcher's own rules, or refused."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from compat.cli.app import app
from compat.cli.source import from_line
from compat.planned.flags import flags_of
from compat.planned.job import JobError

RUN = "torchrun --nproc-per-node 8 p.py"
PYTORCH = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  {extra}
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      template:
        spec:
          containers:
          - command: ["bash", "-c"]
            args: ["torchrun {flags} p.py --tp $TP"]
            env: [{{name: TP, value: "2"}}]
"""
MPI = """apiVersion: kubeflow.org/v2beta1
kind: MPIJob
spec:
  slotsPerWorker: 8
  mpiReplicaSpecs:
    Launcher: {template: {spec: {containers: [{command: [mpirun, -n, "32", python, p.py]}]}}}
    Worker: {replicas: 4}
"""
JOBSET = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  replicatedJobs:
  - replicas: 2
    template:
      spec:
        parallelism: 2
        template:
          spec: {containers: [{command: [torchrun, --nnodes=4, --nproc-per-node=8, p.py]}]}
"""


@pytest.mark.parametrize(
    ("text", "world", "per_host"),
    [
        ("PET_NNODES=4 PET_NPROC_PER_NODE=8 torchrun p.py", 32, 8),
        ("export PET_NNODES=4\ntorchrun --nproc_per_node=8 p.py", 32, 8),
        ("PET_NNODES=4 torchrun --nnodes 2 --nproc-per-node 8 p.py", 16, 8),
        ("timeout 60 numactl -N 0 nohup " + RUN, 8, 8),
        (PYTORCH.format(extra="", flags="--nproc-per-node=8"), 32, 8),
        (PYTORCH.format(extra='nprocPerNode: "8"', flags=""), 32, 8),
        (MPI, 32, 8),
        (JOBSET, 32, 8),
    ],
)
def test_ranks_are_those_that_the_launcher_starts(text, world, per_host):
    job = from_line(text)
    assert (job.world_size, job.ranks_per_host) == (world, per_host)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("PET_NNODES=4\ntorchrun --nproc-per-node 8 p.py", "perhaps not exported"),
        ("torchrun --nnodes 2:4 --nproc-per-node 8 p.py", "--nnodes must be a whole number"),
        ("torchrun --nnodes 2:2 --nproc-per-node 8 p.py", "--nnodes must be a whole number"),
        ("torchrun --nproc-per 4 p.py", "--nproc-per of torchrun (line 1) is not known"),
        ("srun --nodelist=dgx[01-04] --ntasks-per-node=8 python p.py", "--nodelist (line 1) may"),
        (
            "#SBATCH --nodelist=dgx[01-04]\n#SBATCH -n 32\nsrun python p.py",
            "srun is not told the number of ranks and of hosts",
        ),
        ("srun " + RUN, "srun does not start it once on each"),
        ("srun --export=ALL,PET_NNODES=2 -N 1 " + RUN, "--export (line 1) may hold sizes"),
        ("mpirun -x PET_NNODES=2 -np 2 -npernode 1 " + RUN, "-x (line 1) may hold sizes"),
        ("mpirun -np 2 -npernode 2 python a.py : -np 2 python b.py", "another part of the job"),
        ("mpirun -np 16 --map-by ppr:8:node python p.py", "--map-by (line 1) may hold sizes"),
        ("mpirun -H a:4,b:4 python p.py", "-H (line 1) may hold sizes"),
        ("env PET_NNODES=2 " + RUN, "env (line 1) is not known"),
        ("#SBATCH -N 4 --ntasks-per-node 8\nsrun -N 2 python p.py", "Give it --ntasks"),
        ("python p.py gpt.yaml", "gpt.yaml (line 1) may hold sizes"),
        ("srun --ntasks-per-node 8 " + RUN, "srun does not start it once on each"),
        (
            "#SBATCH -N 2\n#SBATCH --ntasks-per-node 8\nsrun " + RUN,
            "srun does not start it once on each",
        ),
        ("#SBATCH -N 4\nsrun " + RUN, "torchrun expects 1 hosts, and srun does not"),
        ("#SBATCH -N 2 -n 16\n#SBATCH hetjob\n#SBATCH -N 1\nsrun python p.py", "several parts"),
        ("srun -N2 -n16 : -N1 -n4 python p.py", "another part of the job"),
        ("#SBATCH -N 4 -n 32\nsrun -N 2 python p.py", "Give it --ntasks"),
        ("srun -N 2 --ntasks-per-gpu 1 python p.py", "--ntasks-per-gpu (line 1) may hold"),
        ("srun -n 16 python p.py", "srun is not told the number of ranks and of hosts"),
        ("srun --frobnicate 2 python p.py", "--frobnicate of srun (line 1) is not known"),
        ("mpirun -np 16 --hostfile hosts python p.py", "--hostfile (line 1) may hold sizes"),
        ("mpirun -np 16 python p.py", "mpirun is not told the number of ranks and of hosts"),
        ("pdsh -w h[1-4] " + RUN, "pdsh (line 1) is not known, nor how often it starts"),
        ("deepspeed --num_gpus 8 p.py", "deepspeed is not told the number of ranks"),
        ("torchrun \u2013nproc-per-node 8 p.py", "begins with a dash of another kind"),
        (PYTORCH.format(extra="", flags="--nnodes=2 --nproc-per-node=8"), "4 pods"),
        (PYTORCH.format(extra="elasticPolicy: {}", flags=""), "elastic"),
        ("apiVersion: v1\nkind: Pod\n", "has 0 jobs of PyTorchJob, MPIJob, JobSet"),
        ("apiVersion: [\nkind: JobSet\n", "the manifest cannot be read"),
        ("apiVersion: v1\nkind: JobSet\n", "the manifest cannot be read"),
    ],
)
def test_ranks_that_the_text_does_not_decide_are_refused(text, said):
    with pytest.raises(JobError) as error:
        from_line(text)
    assert said in str(error.value)
    given = from_line(RUN, world_size=64, gpus_per_node=4)
    assert (given.world_size, given.ranks_per_host) == (64, 4)


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("model.tensor_model_parallel_size=4", {"tensor_model_parallel_size": 4}),
        ("++model.pipeline_model_parallel_size=4", {"pipeline_model_parallel_size": 4}),
        ("trainer.precision=bf16 model.sequence_parallel=True", {}),
        ('--data-path "$DATA" --save=$OUT/x', {}),
        ('--load "$(ls -t | head)" --seed $((RANDOM % 7))0 --tp 4'[:29], {}),
    ],
)
def test_overrides_are_read_and_words_that_change_nothing_may_be_unknown(line, arguments):
    assert from_line(f"{RUN} {line}").arguments == arguments


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--yaml-cfg gpt.yaml", "--yaml-cfg (line 1) may hold sizes"),
        ("--my-config x", "--my-config (line 1) may hold sizes"),
        ("--settings sizes.toml", "--settings (line 1) may hold sizes"),
        ("model.my_parallel_degree=2", "may hold sizes"),
        ("--hybrid-layer-pattern 'M|M'", "--hybrid-layer-pattern (line 1) may hold"),
        ("--data-path $DATA", "--data-path is $DATA (line 1)"),
        ('--my-flag "$X"', "--my-flag is $X (line 1)"),
        ('"$X"', "The launch line uses $X (line 1)"),
        ("--lr $LR --tp $TP $MORE", "Add --set LR=VALUE. --tp is $TP (line 1), which the text does "
         "not decide. Add --set TP=VALUE. The launch line uses $MORE"),
    ],
)  # fmt: skip
def test_what_could_carry_sizes_is_refused(line, said):
    with pytest.raises(JobError) as error:
        from_line(f"{RUN} {line}")
    assert said in str(error.value)


def test_characters_beyond_the_parsers_tables_are_only_text():
    """The grammar's scanner crashes at them behind a brace, with the whole process."""
    line = "X='\U0001f600\u4e2d'\neval echo {\U0001f600..$Y} {\u4e2d} {$X}\n" + RUN + " --name '$X'"
    code = f"from compat.cli.source import from_line; print(from_line({line!r}).world_size)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_the_list_of_torchruns_flags_is_that_of_its_parser():
    from torch.distributed.run import get_args_parser

    rows = {name: row for name, row in flags_of("torchrun").items() if row.kind != "variable"}
    rows.pop("use-env", None)
    for action in get_args_parser()._actions:
        names = {name.lstrip("-").replace("_", "-") for name in action.option_strings}
        for name in names - {"h", "help"}:
            row = rows.pop(name)
            assert row.values == ("0" if action.nargs == 0 else "1"), name
    assert set(rows) <= {"numa-binding", "shutdown-timeout", "virtual-local-rank",
                         "signals-to-handle", "duplicate-stdout-filters",
                         "duplicate-stderr-filters"}  # fmt: skip  # of newer torch


def test_the_list_of_our_launchers_flags_is_that_of_its_parser():
    from compat.launch import CHOICES, SWITCHES

    names = {"order", "m", "audit", *CHOICES, *SWITCHES}
    assert set(flags_of("ours")) == names


def test_flags_of_python_are_known_to_python():
    for name, row in flags_of("python").items():
        if row.values == "0" and len(name) == 1 and row.kind != "starts" and name != "x":
            command = [sys.executable, f"-{name}", "-c", ""]
            assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0, name


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ("--world-size 8 --ep 4 --experts 6", ["num-experts"]),
        ("--world-size 8 --tp 4 --heads 6", ["num-attention-heads"]),
        ("--world-size 8 --pp 4 --layers 30", ["num-layers"]),
        ("--world-size 8 --pp 4 --vp 2 --layers 12", ["num-layers"]),
        (
            "--world-size 8 --tp 2 --micro-batch-size 2 --global-batch-size 12",
            ["global-batch-size"],
        ),
        ("--world-size 8 --tp 2 --vp 1 --layers 7 --heads 4 --experts 3", []),
    ],
)
def test_what_megatrons_own_checks_refuse_is_a_finding(flags, rules):
    done = CliRunner().invoke(app, ["check", *flags.split()])
    assert done.exit_code == (1 if rules else 0), done.output
    for rule in rules:
        assert f"error: {rule}\n" in done.output and "Megatron refuses" in done.output


@pytest.mark.parametrize("command", ["plan", "check", "parity", "show"])
def test_the_commands_refuse_what_the_call_refuses(command):
    flags = "--world-size 64 --tp 8 --vp 4"
    done = CliRunner().invoke(app, [command, *flags.split()])
    assert done.exit_code == 2
    assert (
        "virtual_pipeline_model_parallel_size=4 needs pipeline_model_parallel_size > 1"
        in done.output
    )


def test_a_script_is_an_argument_of_its_own(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("A=(2 4 8)\n" + RUN + " --tp ${A[$SLURM_ARRAY_TASK_ID]}\n")
    flags = [str(script), "--set", "SLURM_ARRAY_TASK_ID=1"]
    done = CliRunner().invoke(app, ["check", *flags])
    assert done.exit_code == 0 and "tp=4" in done.output
    missing = CliRunner().invoke(app, ["check", str(tmp_path / "no.sh")])
    assert missing.exit_code == 2 and "there is no file" in missing.output
    pasted = CliRunner().invoke(app, ["plan", "--from-args", "no.sh"])
    assert pasted.exit_code == 2 and "there is no file no.sh" in pasted.output


def test_a_default_is_taken_only_where_it_is_asked_for_and_said(tmp_path):
    line = RUN + " --tp ${TP:-4}"
    refused = CliRunner().invoke(app, ["plan", "--from-args", line])
    assert refused.exit_code == 2 and "Add --set TP=VALUE" in refused.output
    taken = CliRunner().invoke(app, ["plan", "--from-args", line, "--defaults"])
    assert taken.exit_code == 0 and "assumed: TP=4, its default" in taken.output


def test_the_flags_of_a_layout_stand_in_the_help_of_one_command():
    helps = {name: CliRunner().invoke(app, [name, "--help"]).output for name in ("plan", "show")}
    assert "--gpus-per-node" in helps["plan"] and "--gpus-per-node" not in helps["show"]
    assert "--layers" not in CliRunner().invoke(app, ["parity", "--help"]).output


def test_the_page_opens_with_the_view_and_the_dim_that_were_asked_for(tmp_path):
    page = tmp_path / "page.html"
    flags = f"show --world-size 16 --tp 2 --ep 4 --view expert --by ep --html {page}"
    assert CliRunner().invoke(app, flags.split()).exit_code == 0
    assert '"offered":["expert","decoder"]' in page.read_text() and '"by":"ep"' in page.read_text()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from compat.cli.app import app
plan, page = sys.argv[1:]
sizes = "--world-size 16 --tp 2"
lines = [f"plan {sizes} --json", f"show {sizes}", f"show {sizes} --html {page}", f"check {sizes}"]
for line in lines:
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, (line, done.output)
for command in (["diff", sizes, sizes], ["plan", "--from-args", "torchrun x.py --tp 1"]):
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (command, done.output)
done = CliRunner().invoke(app, ["diagnose", plan])
assert done.exit_code == 2 and "has no dump of a rank" in done.output, done.output
"""


def test_the_command_line_runs_without_torch(tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
