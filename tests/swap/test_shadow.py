"""A shadow run: stock runs the job, and what hypergrid would have created is compared with it."""

import datetime
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from compat import members_only
from compat.megatron import releases, sources
from compat.swap import answers, shadow
from tests.parity.repairs import replaced
from tests.shadows import running
from tests.shadows.__main__ import differing
from tests.support import ROOT, warm
from tests.support.forked import open_groups, run_ranks
from tests.support.stock import MAIN, NEWEST, following, have_stock, load_stock, source

NEWEST_AND_BRANCHES = [*NEWEST]
for branch in ("main", "dev"):
    absent = pytest.mark.skipif(not have_stock(branch), reason=f"no {branch} under .cache")
    NEWEST_AND_BRANCHES.append(pytest.param(branch, marks=[pytest.mark.long, absent]))
TODAY = f"{datetime.date.today():%Y%m%d}"
# Sizes of an initialisation, and edits of stock's source: the sizes that show it, what is replaced,
# and the new text.
BROKEN = json.loads((ROOT / "tests" / "swap" / "shadow.json").read_text())
# Edits that no caller can see: arguments of the initialisation, what is replaced (null: it is added
# to the end), and the new text.
SAME = json.loads((ROOT / "tests" / "swap" / "no_difference.json").read_text())


def shadowing(release, *arguments):
    """Lines of ``python -m tests.parity.shadowing``."""
    done = warm.run(
        *("-m", "tests.parity.shadowing", release, *arguments),
        cwd=str(ROOT),
        timeout=600,
        HYPERGRID_MEGATRON_RELEASE=release,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("release", MAIN)
def test_beside_stock_it_finds_no_difference(release):
    assert [*filter(None, shadowing(release, "-n", "30", "--seed", TODAY))] == ["done"]


JOB = """
    import datetime, os, sys, time
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from megatron.core import parallel_state

    rank = int(os.environ["RANK"])
    if "late" in sys.argv and rank > 1:
        parallel_state.timedelta = lambda minutes: datetime.timedelta(minutes=minutes + 1)
    if "nothing" in sys.argv:
        sys.exit()
    dist.init_process_group("gloo")
    if "fails" in sys.argv:
        raise ValueError("before the first initialisation")
    if "killed" in sys.argv and rank == 2:
        # Stock calls it at the end: all groups exist.
        parallel_state._set_global_memory_buffer = lambda: os.kill(os.getpid(), 9)
    before = c10d._world.group_count
    begun = time.monotonic()
    try:
        parallel_state.initialize_model_parallel(3 if "refused" in sys.argv else 2, 2)
    finally:
        print(f"rank {rank} waited {time.monotonic() - begun:.1f} s", flush=True)
    if rank == 0:
        print(f"{parallel_state.__name__} made {c10d._world.group_count - before} groups")
    if "killed" not in sys.argv:
        dist.barrier()
        dist.destroy_process_group()
"""


FORKING = """
    import os, socket, sys, threading
    from compat import launch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="4")
    children = []
    for rank in range(4):
        child = os.fork()
        if not child:
            os.environ["RANK"] = str(rank)
            launch.main(sys.argv[1:])
            # As Python does when it ends.
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            sys.exit()
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    print("statuses", statuses)
    sys.exit(any(statuses))
"""

FORKED = ("ranks.py",)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def run_job(tmp_path, *arguments, fails=False, launch=FORKED, **environment):
    job = tmp_path / "job.py"
    job.write_text(textwrap.dedent(JOB))
    (tmp_path / "ranks.py").write_text(textwrap.dedent(FORKING))
    flags = [argument for argument in arguments if argument.startswith("--")]
    words = [argument for argument in arguments if argument not in flags]
    done = warm.run(*launch, *flags, str(job), *words, cwd=str(tmp_path), **environment)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_stock_runs_the_job_and_one_line_says_that_nothing_differs(tmp_path):
    running.write_tree(tmp_path, MAIN[0], source(MAIN[0]))  # imported by each of torchrun's ranks
    out = run_job(tmp_path, "--shadow", launch=(*TORCHRUN, "-m", "compat.launch"))
    (line,) = (line for line in out.splitlines() if line.startswith("hypergrid"))
    assert line.startswith(
        "hypergrid (shadow): would have created the same groups on all 4 ranks: 20 groups on this "
        "one, 53 -> 20 calls of new_group. Compared: names, arguments and defaults of the replaced "
    )
    assert "megatron.core.parallel_state made 53 groups" in out


def test_a_difference_is_told_by_rank_and_field_and_the_job_goes_on(tmp_path):
    out = run_job(tmp_path, "--shadow", "late")
    assert "(shadow): would differ from stock on 2 of 4 ranks. Stock's groups are used." in out
    for rank in (2, 3):
        assert (
            f"rank {rank}: TENSOR_MODEL_PARALLEL_GROUP of ranks [2, 3]: timeout is 0:31:00 with "
            f"stock, and would be 0:30:00." in out
        )
    assert "megatron.core.parallel_state made 53 groups" in out


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("nothing", "rank 0: nothing was compared: the script did not call"),
        ("refused", "nothing was compared: initialize_model_parallel failed, RuntimeError: "),
        ("fails", "rank 0: nothing was compared: the script did not call"),
    ],
)
def test_a_run_without_an_initialisation_says_so_in_one_line(tmp_path, argument, why):
    out = run_job(tmp_path, "--shadow", argument, fails=argument != "nothing")
    (line,) = (line for line in out.splitlines() if line.startswith("hypergrid"))
    assert why in line


def test_a_killed_rank_makes_the_run_undecided_and_nobody_waits_for_it(tmp_path):
    out = run_job(tmp_path, "--shadow", "killed", fails=True)
    assert "undecided: the same groups on 3 of 4 ranks; not answered: 2. Compared" in out
    assert "on all" not in out
    assert "statuses [0, 0, 9, 0]" in out


def shadowed(release, sizes, replace=None, edits=()):
    """Differences that a shadow run finds on one real rank beside an edited stock."""
    reports = []
    answers.report = lambda *report: reports.append(report)
    edit = replaced(*edits) if edits else str
    stock = load_stock(release, edit)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "parallel_state.py").write_text(edit(source(release)))
        Path(folder, "hyper_comm_grid.py").write_text(source(release, "hyper_comm_grid.py"))
        releases.SOURCE = sources.read(Path(folder))
    shadow.watch(stock)
    if replace:
        replace(stock)
    new_group = dist.new_group
    try:
        if replace is through_any:
            dist.new_group = lambda *args, **kwargs: new_group(*args, **kwargs)
        stock.initialize_model_parallel(**sizes)
    finally:
        dist.new_group = new_group
    # A rank that closes its groups breaks the connections that a slower rank still opens.
    dist.barrier()
    stock.destroy_model_parallel()
    # Stock keeps its groups open, and each gloo group has threads.
    for group in set(open_groups()) - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    del stock, group
    gc.collect()
    assert len(os.listdir("/proc/self/task")) < 40, "the shadow run keeps groups of stock"
    ((_, _, _, differences),) = reports
    return differences


def through_any(stock):
    """torch.distributed.new_group is replaced by a function of any arguments."""


def with_a_timeout(stock):
    plain = stock.create_group

    def create_group(ranks=None, timeout=None, *args, **kwargs):
        return plain(ranks, timeout or datetime.timedelta(days=208), *args, **kwargs)

    stock.create_group = create_group


def for_members(stock):
    plain = stock.create_group

    @members_only
    def create_group(ranks, **kwargs):
        return plain(ranks, **kwargs)

    stock.create_group = create_group


def with_ranks_of_another_order(stock):
    class Generator(stock.RankGenerator):
        def get_ranks(self, token):
            lists = [super().get_ranks(token)]
            dist.broadcast_object_list(lists, src=0)
            return lists[0]

    stock.RankGenerator = Generator


def wrapping(*names, has_signature=True):
    """One of the functions of these names, which stock has."""

    def replace(stock):
        name = next(name for name in names if hasattr(stock, name))
        plain = getattr(stock, name)

        def wrapper(*args, **kwargs):
            return plain(*args, **kwargs)

        setattr(stock, name, functools.wraps(plain)(wrapper) if has_signature else wrapper)

    return replace


with_any_arguments = wrapping("create_group", has_signature=False)
LISTS = "generate_masked_orthogonal_rank_groups"
REPLACEMENTS_OF_CLIENTS = {
    "experts": [
        *(with_a_timeout, with_any_arguments, for_members, through_any),
        wrapping("get_nccl_options"),
        wrapping("get_tensor_model_parallel_group"),
        wrapping("_set_global_memory_buffer"),
    ],
    "interleaved": [
        *(with_a_timeout, with_ranks_of_another_order, through_any),
        wrapping("default_embedding_ranks"),
        wrapping("default_position_embedding_ranks"),
        wrapping("initialize_model_parallel"),
    ],
    "context": [
        *(with_a_timeout, wrapping(LISTS, has_signature=False), through_any),
        wrapping("create_hierarchical_groups"),
    ],
    "hybrid": [
        *(with_any_arguments, with_ranks_of_another_order),
        wrapping("create_hybrid_dp_cp_groups", "create_dynamic_dp_cp_groups"),
    ],
}


def of_clients(rank, release):
    text = source(release)
    differences = []
    for name, replacements in REPLACEMENTS_OF_CLIENTS.items():
        # The branch dev has no hybrid groups, and its dynamic ones need CUDA.
        sizes = {key: size for key, size in BROKEN["sizes"][name].items() if f"    {key}: " in text}
        for replace in replacements:
            differences += shadowed(release, sizes, replace)
    return differences


def check_clients(release):
    """In a process that follows ``release``."""
    assert run_ranks(4, of_clients, release, timeout=120) == [[]] * 4
    print("done")


def in_a_process_of(release, check):
    code = f"from tests.swap import test_shadow; test_shadow.{check}({release!r})"
    done = warm.run("-c", code, timeout=400, **following(release))
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.mark.parametrize("release", NEWEST_AND_BRANCHES)
def test_functions_that_clients_replace_are_no_false_alarm(release):
    in_a_process_of(release, "check_clients")


def beside_broken_copies(rank, release):
    """By name of the edit: the differences that this rank finds."""
    text = source(release)
    differences = {}
    for name, (size_name, *edit) in BROKEN["edits"].items():
        sizes = BROKEN["sizes"][size_name]
        # A branch may lack an argument.
        has_arguments = all(f"    {argument}: " in text for argument in sizes)
        if edit[0] in text and has_arguments:
            differences[name] = shadowed(release, sizes, edits=[edit])
    return differences


def check_broken_copies(release):
    """In a process that follows ``release``."""
    results = run_ranks(4, beside_broken_copies, release, timeout=200)
    tried = set(results[0])
    noticed = set()
    for differences_of_edit in results:
        for name, differences in differences_of_edit.items():
            if differences:
                noticed.add(name)
    assert noticed == tried, tried - noticed
    assert len(noticed) >= 30, len(noticed)
    created = "MORE of ranks [0, 1]: stock creates it, and hypergrid would not"
    for rank, differences_of_edit in enumerate(results):
        # Ranks 0 and 1 have it in the list of all groups too.
        assert differences_of_edit["a group more"][:1] == ([created] if rank < 2 else [])
    print("done")


@pytest.mark.parametrize("release", NEWEST_AND_BRANCHES)
def test_each_difference_of_a_broken_copy_of_stock_is_noticed_on_some_rank(release):
    in_a_process_of(release, "check_broken_copies")


def edited(text, old, new):
    """The text with ``new`` in place of ``old``, or at its end if that is None."""
    assert old is None or old in text, old
    return text + new if old is None else text.replace(old, new)


def both_sides(tmp_path, release, arguments, text):
    """An edited stock with a shadow run beside it, and swapped: both sides."""
    running.write_tree(tmp_path, release, text)
    texts = (source(release), text)
    return [running.pretended(tmp_path, swapped, arguments, texts) for swapped in (False, True)]


def unseen(tmp_path, release, arguments, text):
    """An edit that no caller sees is no difference, and no refusal."""
    stock, swapped = both_sides(tmp_path, release, arguments, text)
    assert differing(stock.dumps, swapped.dumps, stock.dumps) == []
    assert stock.differences == []


def in_few_texts(release):
    """The arguments of an initialisation, and a text with all edits of SAME that it takes."""
    texts = []
    for arguments, *edit in SAME.values():
        for number, (others, text) in enumerate(texts):
            if arguments == others and (edit[0] is None or edit[0] in text):
                texts[number] = (arguments, edited(text, *edit))
                break
        else:
            texts.append((arguments, edited(source(release), *edit)))
    return texts


def test_edits_that_no_caller_sees_are_no_difference_and_no_refusal(tmp_path):
    """Each of them alone is tried by ``scripts/test --long``."""
    texts = in_few_texts(MAIN[1])
    assert len(texts) == 5
    for number, (arguments, text) in enumerate(texts):
        unseen(tmp_path / str(number), MAIN[1], arguments, text)


@pytest.mark.long
@pytest.mark.parametrize("release", MAIN)
@pytest.mark.parametrize("name", SAME)
def test_an_edit_that_no_caller_sees_is_no_difference_and_no_refusal(tmp_path, release, name):
    arguments, *edit = SAME[name]
    unseen(tmp_path, release, arguments, edited(source(release), *edit))


@pytest.mark.parametrize("release", MAIN)
def test_a_default_of_none_that_only_stocks_body_explains_is_refused_when_it_is_used(
    tmp_path, release
):
    edit = ("create_gloo_process_groups: bool = True", "create_gloo_process_groups: bool = None")
    stock, swapped = both_sides(tmp_path, release, {}, edited(source(release), *edit))
    for dump in swapped.dumps:
        assert dump["initialisation"] == "TypeError"
        assert "create_gloo_process_groups=None is the default of this Megatron" in dump["error"]
    assert "the swap would refuse, TypeError: create_gloo" in stock.differences[0]


@pytest.mark.parametrize(
    "releases",
    [pytest.param(MAIN[1:], id="newest"), pytest.param((), id="all", marks=pytest.mark.long)],
)
def test_random_edits_are_the_same_exactly_where_callers_see_the_same(releases):
    """Of the newest release; ``scripts/test --long`` edits the others and the branches too."""
    command = [sys.executable, "scripts/shadow_fuzz", "-n", "4", "--torchrun", "0", "--seed", TODAY]
    for release in releases:
        command += ["--release", release]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 edits" in done.stdout


def test_other_import_hooks_stay_in_place(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (tmp_path / "hook.py").write_text(
        "import importlib.machinery, sys\n"
        "class Loader(importlib.machinery.SourceFileLoader):\n"
        "    def get_data(self, path):\n"
        "        return b'def initialize_model_parallel(): return 3'\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'megatron.core.parallel_state':\n"
        "            file = 'hooked.py'\n"
        "            return importlib.util.spec_from_file_location(\n"
        "                name, file, loader=Loader(name, file))\n"
        "import importlib.util\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    code = (
        "import hook; from compat.swap import shadow; shadow.install()\n"
        "from megatron.core import parallel_state as ps\n"
        "print(ps.initialize_model_parallel.__wrapped__())\n"
    )
    done = warm.run("-c", code, cwd=str(tmp_path), PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout.splitlines()[0] == "3", done.stderr


def test_arguments_that_hypergrid_refuses_are_a_difference_and_no_error(fake_world, monkeypatch):
    stock = ModuleType("stock")
    stock.initialize_model_parallel = lambda new_axis_size: "what stock returns"
    reports = []
    monkeypatch.setattr(answers, "report", lambda *report: reports.append(report))
    shadow.watch(stock)
    fake_world(2)
    assert stock.initialize_model_parallel(new_axis_size=2) == "what stock returns"
    ((_, ranks, _, (difference,)),) = reports
    assert list(ranks) == [0, 1]
    assert "the swap would refuse, TypeError" in difference
    assert "new_axis_size" in difference
