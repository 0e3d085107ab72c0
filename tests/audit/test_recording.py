"""The audit on eight real ranks: what it counts, warns of and forbids, and what it leaves."""

import json
from collections import Counter

import pytest

from compat import audit
from hypergrid.analysis.audit import read
from tests.support import warm

DEMO = "--tp 2 --pp 2 --ep 2 --num-experts 4 --layers 2 --sequence-parallel --steps 2"
DEMO += " --global-batch-size 4 --seq-length 32"
PROGRAMS = ("wrong_states", "forbidden", "private_globals", f"counted {DEMO}", f"recorded {DEMO}")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank saw in each program, and the recording of it."""
    directory = tmp_path_factory.mktemp("audit")
    done = warm.run("-m", "tests.support.audited", str(directory), *PROGRAMS)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    folders = {program.split()[0]: (said[program], directory) for program in said}
    return {
        name: (results, read(at / name) if (at / name).is_dir() else None)
        for name, (results, at) in folders.items()
    }


def test_the_count_of_each_getter_on_the_demos_training_equals_an_independent_one(seen):
    (counts, _), (_, found) = seen["counted"], seen["recorded"]
    assert len(counts) == len(found.ranks) == found.processes == 8
    assert found.names() == dict(sum(map(Counter, counts), Counter()))
    assert len(found.names()) > 30 and found.reads > 1000
    phases = Counter()
    for site in found.sites:
        phases.update(site.phases)
        assert site.ranks <= 8 and sum(site.groups.values()) == site.count
    assert phases.keys() == {"construction", "forward", "backward", "elsewhere"}
    assert not found.problems and not found.unread


def test_a_module_that_reads_another_state_is_told_with_both_names(seen):
    saw, found = seen["wrong_states"]
    others = [each for each in found.problems if each.kind == "another state"]
    at = "tensor model parallel group of 'actor' at megatron/core/tensor_parallel/cross_entropy.py:"
    for built in ("built under", "given groups of"):
        told = [each for each in others if each.text.startswith(f"Head {built} 'critic' read {at}")]
        assert len(told) == 5 and all(each.ranks == (*range(8),) for each in told)
        assert told[0].example == "rank 0 got the ranks [0, 1] instead of [0, 1, 2, 3]"
        assert "or pass pg_collection.tp" in told[0].text
    assert len(others) == 10
    warned, strict = saw[6]
    assert sum(f"Head built under 'critic' read {at}" in text for text in warned) == 5
    assert strict.startswith("rank 6 got the ranks [6, 7] instead of [4, 5, 6, 7]: Head built")


def test_a_read_without_activate_and_one_in_backward_after_it_are_kinds_of_their_own(seen):
    _, found = seen["wrong_states"]
    kinds = {each.kind: each for each in found.problems if each.kind != "another state"}
    assert kinds.keys() == {"no activate() is open", "activate() has ended"}
    text = kinds["no activate() is open"].text
    assert "read context parallel group by get_context_parallel_group() while no act" in text
    assert "got that of no state, of the states 'actor', 'critic'" in text
    ended = kinds["activate() has ended"]
    assert "in backward, after activate() of 'actor' has ended" in ended.text and ended.reads == 8


def test_forbid_names_the_line_and_the_field_to_pass_and_ends(seen):
    for rank, (everything, loss, private) in enumerate(seen["forbidden"][0]):
        assert f"rank {rank}: megatron.core.tensor_parallel." in everything
        assert "forbid('megatron.core.tensor_parallel.*') does not allow" in everything
        assert "cross_entropy used get_tensor_model_parallel_group() of parallel_state at " in loss
        assert "What to do: pass pg_collection.tp. To allow it for now: forbid(" in loss
        assert "allow=['megatron.core.tensor_parallel.cross_entropy:get_tensor" in loss
        assert "used _TENSOR_MODEL_PARALLEL_GROUP of parallel_state" in private
        assert "forbid('__main__')" in private


@pytest.mark.parametrize(
    ("modules", "allow", "kind", "text"),
    [
        ((), (), ValueError, "needs at least one pattern"),
        ("", (), ValueError, "invalid value in modules: ''"),
        (["a.*", 3], (), TypeError, "invalid value in modules: 3 is no string"),
        ("a.*", [None], TypeError, "invalid value in allow: None is no string"),
    ],
)
def test_patterns_that_match_nothing_are_refused(modules, allow, kind, text):
    with pytest.raises(kind, match=text):
        audit.forbid(modules, allow=allow)


def test_private_globals_and_names_imported_before_are_seen_and_nothing_is_left(seen):
    saw, found = seen["private_globals"]
    assert saw == [["module", False, "torch.nn.modules.module"]] * 8
    assert found.processes == 8  # that recorded twice each
    sites = {(site.name, site.writes): site for site in found.sites}
    assert all(site.count == 8 and site.function == "private_globals" for site in sites.values())
    assert sites.keys() == {
        ("is_initialized", False),
        ("get_context_parallel_world_size", False),
        ("_TENSOR_MODEL_PARALLEL_GROUP", False),
        ("_CONTEXT_PARALLEL_GROUP", False),
        ("_MPU_TENSOR_MODEL_PARALLEL_RANK", True),
        ("get_tensor_model_parallel_rank", False),
        ("set_tensor_model_parallel_rank", True),
    }
    assert sites["is_initialized", False].phases == {"before initialisation": 8}
    assert sites["_CONTEXT_PARALLEL_GROUP", False].groups == {"CONTEXT_PARALLEL_GROUP": 8}


SCRIPT = """
from megatron.core import parallel_state as mpu
mpu.is_initialized()
"""


def test_the_launcher_and_the_environment_record_to_the_end_of_the_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = ("-m", "compat.launch")
    given = {"--audit": tmp_path / "flag", "HYPERGRID_AUDIT": tmp_path / "variable"}
    done = warm.run(*launch, "--audit", str(given["--audit"]), str(script), RANK="3")
    assert done.returncode == 0, done.stderr
    variable = {"HYPERGRID_AUDIT": str(given["HYPERGRID_AUDIT"])}
    done = warm.run(*launch, str(script), **variable)
    assert done.returncode == 0, done.stderr
    for directory, ranks in zip(given.values(), [(3,), (0,)], strict=True):
        found = read(directory)
        assert found.ranks == ranks
        (site,) = (site for site in found.sites if site.module == "__main__")
        assert (site.file, site.line, site.function) == ("script.py", 3, "<module>")


def test_a_directory_that_cannot_be_made_ends_the_launcher_with_a_sentence(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "file"
    script.write_text(SCRIPT)
    file.write_text("")
    for command in (["--audit", str(file)], ["--no-swap", "--audit", str(tmp_path / "d")]):
        done = warm.run("-m", "compat.launch", *command, str(script))
        assert done.returncode == 2 and "compat.launch: " in done.stderr
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_an_audit_none_of_it_is_loaded():
    code = "import sys, compat.parallel_state; print([m for m in sys.modules if 'audit' in m])"
    assert warm.run("-c", code).stdout == "[]\n"
