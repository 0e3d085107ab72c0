"""The audit on eight real ranks: what it counts, warns of and forbids, and what it leaves.

Bugs of megatron-core, by the numbers of NVIDIA/Megatron-LM's pull requests, are rebuilt over the
releases that have them: found, and silent where fixed.
"""

import json
import os
import shutil
from collections import Counter
from functools import cache

import pytest
import torch

from compat import audit
from compat import parallel_state as ps
from compat.audit import log
from compat.audit.recordings import read
from compat.state import ParallelState
from tests.support import ROOT, forked, stock, table, warm

PROGRAMS = ("wrong_states", "forbidden", "private_globals", "every_getter")


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """What each rank returned of each program over a release, and the recording."""

    @cache
    def run(release, *programs):
        if not stock.have_stock(release):
            pytest.skip(f"the source of megatron-core {release} is not here")
        directory = tmp_path_factory.mktemp(release)
        path = f"{ROOT / '.cache' / f'megatron-core-{release}'}{os.pathsep}{ROOT}"
        command = ("-W", "ignore", "-m", "tests.support.audited", str(directory), *programs)
        done = warm.run(*command, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        outcomes = {}
        for program, results in json.loads(done.stdout.splitlines()[-1]).items():
            folder = directory / program
            outcomes[program] = results, read(folder) if folder.is_dir() else None
        return outcomes

    return run


@pytest.fixture
def programs(audited):
    return audited("0.16.1", *PROGRAMS)


# 6099: the filter of duplicates in the norm of gradients falls back to the global tensor group.
# 7359: so does that of generalised tensor parallelism; no release has the repair yet.
@pytest.mark.parametrize(
    ("release", "group"),
    [
        ("0.15.3", "tensor model parallel group"),
        ("0.16.1", None),
        ("0.19.2", "gtp weight remat group"),
    ],
)
def test_a_second_models_norm_that_asks_the_first_ones_groups_is_found(audited, release, group):
    norms, recording = audited(release, "norm")["norm"]
    assert recording.releases == [release.rpartition(".")[0]]
    if group is None:
        assert not recording.problems
        assert all(right == wrong for right, wrong in norms)
        return
    (problem,) = recording.problems
    start = f"FP32Optimizer given groups of 'critic' read {group} of 'actor' at megatron/core/"
    assert problem.text.startswith(start)
    if release == "0.15.3":
        assert norms == [[pytest.approx(136**0.5), 12.0]] * 8


def test_each_getter_is_counted_once_for_each_call(programs):
    (names, *_), recording = programs["every_getter"]
    assert len(recording.ranks) == 8
    assert len(names) > 50
    counts = sum((names for _, names in recording.names_by_file()), Counter())
    assert counts == dict.fromkeys(names, 8)
    for site in recording.sites:
        assert sum(site.groups.values()) == site.count
    assert not recording.unread


def test_a_module_that_reads_another_state_is_named_with_both_states(programs):
    results, recording = programs["wrong_states"]
    problems = [problem for problem in recording.problems if problem.kind == "another state"]
    assert len(problems) == 10
    at = "tensor model parallel group of 'actor' at megatron/core/tensor_parallel/cross_entropy.py:"
    for built in ("built under", "given groups of"):
        start = f"Head {built} 'critic' read {at}"
        of_kind = [problem for problem in problems if problem.text.startswith(start)]
        assert len(of_kind) == 5
        for problem in of_kind:
            assert problem.ranks == set(range(8))
        assert of_kind[0].example == "rank 0 got the ranks [0, 1] instead of [0, 1, 2, 3]"
        assert "or pass pg_collection.tp" in of_kind[0].text
    warned, strict_error = results[6]
    assert sum(f"Head built under 'critic' read {at}" in text for text in warned) == 5
    expected = "rank 6 got the ranks [6, 7] instead of [4, 5, 6, 7]: Head built"
    assert strict_error.startswith(expected)


def test_a_read_without_activate_and_one_in_backward_after_it_are_kinds_apart(programs):
    _, recording = programs["wrong_states"]
    problem_of_kind = {problem.kind: problem for problem in recording.problems}
    text = problem_of_kind["no activate() is open"].text
    assert "read context parallel group by get_context_parallel_group() while no act" in text
    assert "got that of no state, of the states 'actor', 'critic'" in text
    ended = problem_of_kind["activate() has ended"]
    assert "in backward, after activate() of 'actor' has ended" in ended.text
    assert ended.reads == 8
    assert len(problem_of_kind) == 3


def test_forbid_names_the_line_and_the_field_to_pass_and_ends(programs):
    results, _ = programs["forbidden"]
    for rank, (everything, loss, private) in enumerate(results):
        assert f"rank {rank}: megatron.core.tensor_parallel." in everything
        assert "forbid('megatron.core.tensor_parallel.*') does not allow" in everything
        assert "cross_entropy used get_tensor_model_parallel_group of parallel_state at " in loss
        assert "What to do: pass pg_collection.tp. To allow it for now: forbid(" in loss
        assert "allow=['megatron.core.tensor_parallel.cross_entropy:get_tensor" in loss
        assert "used _TENSOR_MODEL_PARALLEL_GROUP of parallel_state" in private
        assert "forbid('__main__')" in private


@pytest.mark.parametrize(("patterns", "error", "text"), table("audit/patterns.txt"))
def test_patterns_that_match_nothing_are_refused(patterns, error, text):
    modules, allow = eval(patterns)
    with pytest.raises(eval(error), match=text):
        audit.forbid(modules, allow=allow)


@forked.on_ranks(2)
def test_another_group_of_the_same_ranks_is_named_as_that(rank):
    class Layer(torch.nn.Module):
        def forward(self):
            return ps.get_tensor_model_parallel_rank()

    one = ParallelState.create(name="one")
    other = ParallelState.create(name="other")
    with audit.strict():
        with one.activate():
            layer = Layer()
        with other.activate(), pytest.raises(audit.WrongStateError) as caught:
            layer()
    text = f"got another group of the same ranks [{rank}]: Layer built under 'one'"
    assert text in str(caught.value)
    assert type(ps).__name__ == "module"  # strict has ended


@forked.on_ranks(1)
def test_an_object_with_groups_of_two_states_belongs_to_neither(rank):
    class Both:
        def __init__(self, *states):
            for number, state in enumerate(states):
                setattr(self, f"group_{number}", state.get_tensor_model_parallel_group())

        def read(self):
            return ps.get_tensor_model_parallel_rank()

    states = [ParallelState.create(name=name) for name in ("one", "other")]
    reader = Both(*states)
    with audit.strict():
        for state in states:
            with state.activate():
                assert reader.read() == 0


def test_what_megatrons_own_helper_reads_is_read_by_its_caller(tmp_path):
    def function_of(module, source):
        names = {"__name__": module, "ps": ps}
        exec(source, names)
        return names

    helper = function_of("megatron.core.process_groups_config", "def read(): ps.is_initialized()")
    user = function_of("user", "def call(read): read()")
    with audit.recording(tmp_path):
        user["call"](helper["read"])
    (site,) = read(tmp_path).sites
    assert (site.module, site.function) == ("user", "call")


def test_private_globals_and_names_imported_before_are_seen_and_nothing_is_left(programs):
    results, recording = programs["private_globals"]
    assert results == [["module", False, "torch.nn.modules.module"]] * 8
    assert len(recording.ranks) == 8  # each recorded twice
    sites = {site.name: site for site in recording.sites}
    for site in recording.sites:
        assert (site.count, site.function) == (8, "private_globals")
    assert len(sites) == 7
    written = {"_MPU_TENSOR_MODEL_PARALLEL_RANK", "set_tensor_model_parallel_rank"}
    assert {site.name for site in recording.sites if site.writes} == written
    assert sites["is_initialized"].states == {"none": 8}
    assert sites["_CONTEXT_PARALLEL_GROUP"].groups == {"CONTEXT_PARALLEL_GROUP": 8}


SCRIPT = """
from megatron.core import parallel_state as mpu
mpu.is_initialized()
"""


@pytest.mark.parametrize(
    ("flag", "environment"), [("--audit audit", {}), ("", {"HYPERGRID_AUDIT": "audit"})]
)
def test_the_launcher_and_the_environment_record_to_the_end_of_the_process(
    tmp_path, flag, environment
):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = f"-m compat.launch {flag} script.py".split()
    done = warm.run(*command, cwd=tmp_path, RANK="3", **environment)
    assert done.returncode == 0, done.stderr
    recording = read(tmp_path / "audit")
    assert recording.ranks == [3]
    (site,) = (site for site in recording.sites if site.module == "__main__")
    assert (site.file, site.line, site.function) == ("script.py", 3, "<module>")


def test_without_an_audit_none_of_it_is_loaded():
    code = "import sys, compat.parallel_state; print([m for m in sys.modules if 'audit' in m])"
    assert warm.run("-c", code).stdout == "[]\n"


def test_a_directory_that_goes_away_is_warned_of_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "_EVERY", 0.0)
    with audit.recording(tmp_path / "left"):
        shutil.rmtree(tmp_path / "left")
        with pytest.warns(RuntimeWarning, match="is not written: .*No such file"):
            assert [ps.is_initialized(), ps.is_initialized()] == [False, False]
        (tmp_path / "left").mkdir()
    assert read(tmp_path / "left").reads == 2


@pytest.mark.parametrize("suffix", [".part", ".json"])
def test_a_link_that_another_user_put_there_is_not_written_through(tmp_path, suffix):
    private = tmp_path / "private"
    private.touch()
    written = log.Log(tmp_path / "audit")
    written.write()
    (file,) = (tmp_path / "audit").iterdir()
    file.with_suffix(suffix).unlink(missing_ok=True)
    file.with_suffix(suffix).symlink_to(private)
    written.close()
    assert private.read_text() == ""
    assert file.is_file() and not file.is_symlink()


def test_a_directory_where_every_user_may_replace_files_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"every user may replace the files in .*chmod \+t"):
        log.Log(tmp_path)
    tmp_path.chmod(0o1777)
    log.Log(tmp_path).close()


def test_a_process_that_is_killed_leaves_what_it_read_until_then(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "_EVERY", 0.0)
    with audit.recording(tmp_path):
        for count in (1, 2, 3):
            ps.is_initialized()
            assert read(tmp_path).reads == count


def test_a_signal_handler_may_read(tmp_path):
    code = f"""import signal, time
from compat import audit, parallel_state
handled = []
def handle(*_):
    handled.append(parallel_state.is_initialized())
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
signal.signal(signal.SIGALRM, handle)
with audit.recording({str(tmp_path)!r}):
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    end = time.monotonic() + 2
    while time.monotonic() < end: parallel_state.is_initialized()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
assert handled"""
    done = warm.run("-c", code, timeout=30)
    assert done.returncode == 0, done.stderr


def test_compiled_code_runs_as_without_an_audit_and_is_not_seen(tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return x + ps.is_initialized() + (ps._TENSOR_MODEL_PARALLEL_GROUP is None)

    layer = Layer()
    for _ in range(2):
        with audit.recording(tmp_path):
            compiled = torch.compile(layer, backend="eager", fullgraph=True)
            assert compiled(torch.ones(1)) == compiled(torch.ones(1)) == 2
        assert compiled(torch.ones(1)) == 2
    assert read(tmp_path).sites == []
