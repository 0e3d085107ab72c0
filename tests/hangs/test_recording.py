"""Dumps are read whatever they hold: nothing that is loaded runs, nothing that is cut ends it."""

import json
import os
import pickle
import random
import re
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.support import ROOT, hostile
from tests.support.recorded import Rank, dumped, stack, write

GROUPS = {"0": ("default_pg", [0, 1]), "7": ("TENSOR", [0, 1])}


def recorders(calls=3):
    """Two ranks that made equal calls of TENSOR, and are in one of the default group."""
    pair = [Rank(rank, GROUPS) for rank in range(2)]
    for recorder in pair:
        for _ in range(calls):
            recorder.call("7")
        recorder.call("0", done=False, frames=[("a.py", 3, "f"), ("b.py", 4, "g")])
    return pair


def sends():
    """The sends that ``hypergrid.record`` writes beside a stack."""
    return Rank(0, GROUPS).call("7", "send 0->1").entries


def test_a_dump_is_read_with_its_members_calls_and_innermost_frames(tmp_path):
    recording = read(write(tmp_path, recorders(), "nccl_trace_rank_"))
    assert not recording.problems and recording.world_size == 2
    assert recording.groups["7"].label == "TENSOR" and recording.groups["7"].ranks == (0, 1)
    calls = recording.ranks[1].calls
    assert [call.seq for call in calls] == [1, 2, 3, 1]
    assert [call.done for call in calls] == [True, True, True, False]
    assert calls[0].what.name == "all_reduce" and calls[0].what.inputs == "[[4]]"
    assert calls[-1].frames[0] == ("a.py", 3, "f")


def test_json_is_read_as_a_pickle_is_also_where_numbers_are_text(tmp_path):
    (recorder, _) = recorders()
    pickled = read(write(tmp_path, [recorder])).ranks[0].calls
    (tmp_path / "trace_0").unlink()
    for entry in recorder.entries:
        for name in ("collective_seq_id", "time_created_ns"):
            entry[name] = str(entry[name])
    (tmp_path / "trace_0.json").write_text(json.dumps(recorder.dump()))
    assert [*read(tmp_path).ranks[0].calls] == [*pickled]


def test_one_name_of_torch_for_two_groups_is_two_groups(tmp_path):
    """As where each pair of ranks has created groups without the other."""
    ranks = []
    for rank in range(4):
        members = [0, 1] if rank < 2 else [2, 3]
        ranks.append(Rank(rank, {"1": ("A", members)}).call("1"))
    recording = read(write(tmp_path, ranks))
    assert {group.ranks for group in recording.groups.values()} == {(0, 1), (2, 3)}
    for rank in range(4):
        group = recording.groups[recording.ranks[rank].calls[0].group]
        assert rank in group.ranks


def test_each_backend_of_a_group_numbers_its_own_calls(tmp_path):
    """As of "cpu:gloo,cuda:nccl", whose two recorders ``hypergrid.record`` writes as one."""
    ranks = []
    for rank in range(2):
        recorder = Rank(rank, GROUPS).call("7")
        on_gloo = Rank(rank, GROUPS, "gloo").call("7").call("7").call("7")
        if rank == 0:
            recorder.call("7", done=False)
        recorder.entries[1:1] = on_gloo.entries
        ranks.append(recorder)
    diagnosis = diagnose(read(write(tmp_path, ranks)))
    assert (diagnosis.ranks, diagnosis.group, diagnosis.seq) == ((1,), "TENSOR", 2)
    assert diagnosis.operation == "all_reduce" and diagnosis.members == (0, 1)


def test_a_call_of_gloo_with_the_numbers_of_a_batch_is_not_of_it(tmp_path):
    recorder = Rank(0, GROUPS)
    for name in ("_all_gather_base", "coalesced"):
        recorder.call("7", name, done=name == "coalesced")
        recorder.entries[-1].update(collective_seq_id=1)
    recorder.entries[:0] = Rank(0, GROUPS, "gloo").call("7", done=False).entries
    calls = read(write(tmp_path, [recorder])).ranks[0].calls
    assert [(call.title.backend, call.done) for call in calls] == [("gloo", False), ("nccl", True)]


def test_several_processes_read_what_one_reads(tmp_path):
    ranks = [Rank(rank, {"7": ("TENSOR", [*range(40)])}) for rank in range(40)]
    for recorder in ranks:
        recorder.call("7")
        recorder.call("7", "broadcast", done=False, frames=[("a.py", 3, "f")])
    write(tmp_path, ranks)
    (tmp_path / "trace_6").write_bytes(pickle.dumps(endless_dump("input_sizes"), 2))
    (tmp_path / "trace_11").write_bytes(pickle.dumps(tmp_path))
    (tmp_path / "trace_17").write_bytes(b"")
    alone = read(tmp_path)
    together = read(tmp_path, processes=2)
    assert len(alone.problems) == 3
    for rank, recording in alone.ranks.items():
        assert [*together.ranks[rank].calls] == [*recording.calls]
    for name in ("problems", "groups", "titles", "world_size"):
        assert getattr(together, name) == getattr(alone, name)


# Files that are cut, strange or of somebody else.


def test_a_file_that_is_cut_empty_or_there_twice_is_named_and_the_rest_is_read(tmp_path):
    write(tmp_path, recorders())
    content = (tmp_path / "trace_1").read_bytes()
    (tmp_path / "trace_1").write_bytes(content[: len(content) // 2])
    (tmp_path / "trace_2").write_bytes(b"")
    (tmp_path / "zz_0").write_bytes((tmp_path / "trace_0").read_bytes())
    (tmp_path / "groups_0.json").write_text(json.dumps(dumped(0, 2, GROUPS))[:-9])
    recording = read(tmp_path)
    named_files = [problem.split()[0] for problem in recording.problems]
    assert named_files == ["groups_0.json", "trace_1", "trace_2", "zz_0"]
    assert list(recording.ranks) == [0] and recording.ranks[0].has_calls


def test_other_files_are_left_alone(tmp_path):
    write(tmp_path, recorders())
    for name, text in (("events.178", "x"), ("log_0", "text"), ("a.json", "{}"), ("b", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "trace_0.part").write_bytes(b"\x80")
    (tmp_path / "earlier").mkdir()
    assert not read(tmp_path).problems


def test_a_file_of_the_kernel_is_not_read_for_ever(tmp_path):
    write(tmp_path, recorders())
    (tmp_path / "trace_6").symlink_to("/proc/kmsg")
    os.mkfifo(tmp_path / "trace_7")
    (tmp_path / "trace_8").symlink_to("/dev/zero")
    assert sorted(read(tmp_path).ranks) == [0, 1]


# Text of somebody else, that could begin a line of its own in a report.
FORGED = "TENSOR\nNobody is stuck: the job has ended.\r\x1b[2J\u2028rank 0\tx"


@pytest.mark.parametrize("kinds", ["trace", "groups", "stack", "trace groups stack"])
def test_every_text_of_a_recording_and_of_its_report_is_one_line(tmp_path, kinds):
    """The host, the group and the reason of one file stand in for those of the others."""
    groups = {"7\nx": (FORGED, [0, 1])}
    for rank in range(2):
        if "trace" in kinds:
            recorder = Rank(rank, groups)
            recorder.call("7\nx", f"all_reduce{FORGED}", done=rank == 0, frames=[(FORGED, 3, "f")])
            write(tmp_path, [recorder], FORGED)
        if "groups" in kinds:
            dump = dumped(rank, 2, {"0": GROUPS["0"], **groups}, label=FORGED, dims=[FORGED])
            dump |= {"host": FORGED, "life": {"started_ns": 1, "job": FORGED}}
            (tmp_path / f"groups_{rank}.json").write_text(json.dumps(dump))
        if "stack" in kinds:
            stack(tmp_path, rank, [(FORGED, 3, FORGED)], host=FORGED, error=FORGED, reason=FORGED)
    (tmp_path / f"trace_{FORGED}2").write_bytes(b"")
    (tmp_path / f"trace_{FORGED}3").write_bytes(b"\x80\x02cos\nsystem\n.")
    recording = read(tmp_path)
    texts = repr([recording, diagnose(recording)])
    assert "the job has ended" in texts
    # Python shows a control character with one backslash, and a backslash as two.
    assert not re.search(r"(?<!\\)\\[nrtxu]", texts)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """The content of files of each kind, by their names."""
    directory = write(tmp_path_factory.mktemp("seeds"), recorders(2))
    stack(directory, 0, [("a.py", 3, "f")], p2p=sends())
    return {
        "trace_0": (directory / "trace_0").read_bytes(),
        "stack_0.json": (directory / "stack_0.json").read_bytes(),
        "trace_0.json": json.dumps(recorders(2)[0].dump()).encode(),
        "groups_0.json": json.dumps(dumped(0, 2, GROUPS)).encode(),
    }


def strange(content, source):
    """The file with other values, as a pickle or as JSON."""
    loaded = pickle.loads(content) if content[:1] == b"\x80" else json.loads(content)
    changed = hostile.changed(loaded, source)
    return source.choice((json.dumps(changed).encode(), pickle.dumps(changed, 2)))


def test_damaged_dumps_never_raise(seeds, tmp_path):
    for seed in range(100):
        source = random.Random(seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        for rank in range(2):
            for name, content in seeds.items():
                change = source.choice((hostile.garbled, strange, None, None))
                if change is not None:
                    content = change(content, source)
                (directory / name.replace("0", str(rank))).write_bytes(content)
        diagnosis = diagnose(read(directory))
        assert diagnosis.sentence and json.dumps(diagnosis.to_json())


# Pickles that would run code, or take time or memory without end.


LEFT_BY_EVIL = "/tmp/hypergrid-was-here"


class Evil:
    def __reduce__(self):
        return (open, (LEFT_BY_EVIL, "w"))


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("content", [{"entries": Evil()}, random.Random, complex(1, 2)])
def test_a_pickle_with_more_than_plain_data_is_refused(tmp_path, content, protocol):
    data = pickle.dumps(content, protocol)
    (tmp_path / "trace_1").write_bytes(data if protocol > 1 else b"\x80\x02" + data)
    (problem,) = read(tmp_path).problems
    assert problem.startswith("trace_1 was refused: it holds ") and "only plain data" in problem
    assert not os.path.exists(LEFT_BY_EVIL)


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_deep_nesting_is_no_traceback(tmp_path, kind):
    deep = b"]" * 100_000 + b"a" * 99_999 + b"."
    data = b"\x80\x02" + deep if kind == "pickle" else b'{"entries": ' + b"[" * 100_000
    (tmp_path / "trace_0").write_bytes(data)
    assert read(tmp_path).problems


@contextmanager
def bounded(seconds, mib):
    """The code inside takes no more time of the processor and no more memory."""
    start = sum(os.times()[:4])  # and that of the processes that it started
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = resource.getrlimit(resource.RLIMIT_AS)
    yield
    assert sum(os.times()[:4]) < start + seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + mib * 1024  # KiB
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def endless_dump(field):
    """A dump whose pickle is small, and whose values stand for endlessly many."""
    (recorder, _) = recorders(200)
    doubled = ()
    for _ in range(60):
        doubled = (doubled, doubled)
    many = [4] * 100_000
    values = {
        "input_sizes": doubled,
        "output_sizes": [many] * 1000,
        "process_group": (doubled, "x"),
    }
    for entry in recorder.entries:
        entry[field] = values[field]
    return recorder.dump()


@pytest.mark.parametrize("field", ["input_sizes", "output_sizes", "process_group"])
def test_a_small_file_that_stands_for_endless_values_is_left_out_in_time(tmp_path, field):
    (tmp_path / "trace_0").write_bytes(pickle.dumps(endless_dump(field), 2))
    with bounded(seconds=5, mib=200):
        (problem,) = read(tmp_path).problems
    assert problem.startswith(("trace_0 cannot be read", "trace_0 was refused"))


# Pairs of the last pair, forty times: 2**40 values, of which each is hashed.
REFERENCES = b"".join(b"q%ch%c\x86" % (place, place) for place in range(40))
# Multiples of this number have the same hash, so that each is compared with all before.
PRIME = 2**61 - 1
COLLIDING = b"".join(
    b"\x8a%c%bN" % (13, (PRIME * factor).to_bytes(13, "little")) for factor in range(1, 60_000)
)
BOMBS = {
    "copies in a key": b"\x80\x02}K\x00K\x00\x86" + b"2\x86" * 40 + b"Ns.",
    "references in a key": b"\x80\x02}K\x00K\x00\x86" + REFERENCES + b"Ns.",
    "members of a set": b"\x80\x04\x8f(K\x00K\x00\x86" + REFERENCES + b"\x90.",
    "numbers of one hash": b"\x80\x02}(" + COLLIDING + b"u.",
    # A list is put into another while it is empty, and then filled.
    "a list that is filled later": b"\x80\x02]q\x00]q\x01(h\x00h\x00e0(K\x00K\x00e.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "memory for a reference": b"\x80\x02}r\x00\x00\x00\x70.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_would_hash_for_years_ends_its_process_and_the_others_are_read(
    tmp_path, name
):
    write(tmp_path, recorders())
    (tmp_path / "trace_0").write_bytes(BOMBS[name])
    with bounded(seconds=5, mib=200):
        recording = read(tmp_path)
    (problem,) = recording.problems
    assert problem.startswith(("trace_0 was refused: it takes ", "trace_0 cannot be read"))
    assert list(recording.ranks) == [1]


# What torch and hypergrid really write.


RECORDS = """
import os, sys
os.environ.update(TORCH_FR_BUFFER_SIZE="200", RANK="0", WORLD_SIZE="1")
import torch, torch.distributed as dist
dist.init_process_group("gloo", f"file://{sys.argv[1]}/store", rank=0, world_size=1)
group = dist.new_group([0], group_desc="TENSOR")
for size in range(120):
    dist.all_reduce(torch.ones(3, size + 1), group=group)
    dist.broadcast(torch.ones(2 ** (size % 9)), 0)
    dist.all_gather_object([None], {"a": size})
bound = torch._C._distributed_c10d
for name in ("_dump_fr_trace", "_dump_nccl_trace"):
    if hasattr(bound, name):
        os.mkdir(f"{sys.argv[1]}/{name}")
        with open(f"{sys.argv[1]}/{name}/trace_0", "wb") as file:
            file.write(getattr(bound, name)(True, True, False))
print(torch.__version__)
"""


# `scripts/test --torch VERSION` puts other lines of torch there.
TORCHES = {path.parents[1].name: path for path in sorted(ROOT.glob(".cache/torch/*/bin/python"))}


@pytest.mark.parametrize("line", ["installed", *TORCHES])
def test_what_a_line_of_torch_writes_is_read(tmp_path, line):
    command = [str(TORCHES.get(line, sys.executable)), "-c", RECORDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert line in ("installed", done.stdout.split("+")[0].strip())
    calls = 0
    for directory in tmp_path.glob("_dump*"):
        recording = read(directory)
        assert not recording.problems
        calls += len(recording.ranks[0].calls)
    assert calls >= 200


# Limits.


def test_a_file_above_the_limit_is_not_read(tmp_path):
    write(tmp_path, recorders())
    with open(tmp_path / "trace_1", "r+b") as file:
        file.truncate((256 << 20) + 1)
    (problem,) = read(tmp_path).problems
    assert problem == "trace_1 is larger than 256 MiB, and is not read."


def test_calls_above_the_limit_of_a_directory_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hypergrid.hangs.reading._MOST_CALLS", 6)
    (problem,) = read(write(tmp_path, recorders())).problems
    assert problem.startswith("trace_1 cannot be read") and "6 calls, which is the limit" in problem


def test_progress_is_told_after_each_file(tmp_path):
    progress = []
    read(write(tmp_path, recorders()), progress=lambda *numbers: progress.append(numbers))
    assert progress == [(1, 2), (2, 2)]
