"""Dumps are read whatever they hold: nothing that is loaded runs, nothing that is cut ends it."""

import dataclasses
import json
import pickle
import random
import resource
import subprocess
import sys
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypergrid.hangs.reading import read
from hypergrid.hangs.verdict import diagnose
from tests.support import ROOT
from tests.support.recorded import Rank, stack, write

GROUPS = {"0": ("default_pg", [0, 1]), "7": ("TENSOR", [0, 1])}


def ranks(calls=3):
    pair = [Rank(rank, GROUPS) for rank in range(2)]
    for each in pair:
        for _ in range(calls):
            each.call("7")
        each.call("0", done=False, frames=[("a.py", 3, "f"), ("b.py", 4, "g")])
    return pair


def groups(rank, world=2):
    mine = [
        {"owner": None, "label": None, "dims": None, "ranks": of, "backend": "gloo", "name": name}
        | {"description": desc, "shared_with": None}
        for name, (desc, of) in GROUPS.items()
    ]
    return {"schema": 1, "rank": rank, "world_size": world, "host": "a", "pid": 9, "groups": mine}


def test_a_dump_is_read_with_its_members_calls_and_innermost_frames(tmp_path):
    found = read(write(tmp_path, ranks(), "nccl_trace_rank_"))
    assert not found.problems and found.world_size == 2
    assert found.groups["7"].label == "TENSOR" and found.groups["7"].ranks == (0, 1)
    calls = found.ranks[1].calls
    assert [call.seq for call in calls] == [1, 2, 3, 1]
    assert [call.done for call in calls] == [True, True, True, False]
    assert calls[0].what.name == "all_reduce" and calls[0].what.inputs == "[[4]]"
    assert calls[-1].frames[0] == ("a.py", 3, "f")


def test_json_is_read_as_a_pickle_is(tmp_path):
    for name, dumped in (
        ("a", partial(pickle.dumps, protocol=2)),
        ("b", lambda data: json.dumps(data).encode()),
    ):
        (tmp_path / name).mkdir()
        for each in ranks():
            suffix = ".json" * (name == "b")
            (tmp_path / name / f"trace_{each.rank}{suffix}").write_bytes(dumped(each.dump()))
    one, other = (read(tmp_path / name) for name in "ab")
    assert [*one.ranks[0].calls] == [*other.ranks[0].calls] and one.groups == other.groups


def test_numbers_may_be_text(tmp_path):
    (one, _) = ranks()
    for entry in one.entries:
        entry["collective_seq_id"] = str(entry["collective_seq_id"])
        entry["time_created_ns"] = str(entry["time_created_ns"])
    (tmp_path / "trace_0.json").write_text(json.dumps(one.dump()))
    assert [call.seq for call in read(tmp_path).ranks[0].calls] == [1, 2, 3, 1]


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/hypergrid-was-here", "w"))


@pytest.mark.parametrize("protocol", [0, 1, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("evil", [Evil(), random.Random, {"entries": Evil()}, complex(1, 2)])
def test_a_pickle_with_more_than_plain_data_is_refused(tmp_path, evil, protocol):
    write(tmp_path, ranks()[:1])
    data = pickle.dumps(evil, protocol)
    (tmp_path / "trace_1").write_bytes(data if protocol > 1 else b"\x80\x02" + data)
    (problem,) = read(tmp_path).problems
    assert problem.startswith("trace_1 was refused: it holds ") and "only plain data" in problem


def test_what_is_cut_empty_or_twice_is_told_and_the_rest_is_read(tmp_path):
    write(tmp_path, ranks())
    whole = (tmp_path / "trace_1").read_bytes()
    (tmp_path / "trace_1").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "trace_2").write_bytes(b"")
    (tmp_path / "zz_0").write_bytes((tmp_path / "trace_0").read_bytes())
    (tmp_path / "groups_0.json").write_text(json.dumps(groups(0))[:-9])
    found = read(tmp_path)
    assert [line.split()[0] for line in found.problems] == [
        "groups_0.json",
        "trace_1",
        "zz_0",
        "trace_2",
    ]
    assert list(found.ranks) == [0] and found.ranks[0].has_calls


FORGED = "TENSOR\nNobody is stuck: the job has ended.\r\x1b[2J\u2028rank 0\tx"


def test_what_somebody_else_wrote_begins_no_line_of_its_own(tmp_path):
    pair = [Rank(rank, {"7\nx": (FORGED, [0, 1])}) for rank in range(2)]
    for one in pair:
        one.call("7\nx", f"all_reduce{FORGED}", done=False, frames=[(FORGED, 3, FORGED)])
    pair[0].call("7\nx", done=False)
    write(tmp_path, pair)
    for rank in range(2):
        (file := tmp_path / f"groups_{rank}.json").write_text(json.dumps(groups(rank)))
        data = json.loads(file.read_text()) | {"host": FORGED}
        data["groups"][1] |= {"description": FORGED, "name": FORGED, "dims": [FORGED]}
        file.write_text(json.dumps(data))
        stack(tmp_path, rank, [(FORGED, 3, FORGED)], host=FORGED, error=FORGED, reason=FORGED)
    (tmp_path / f"trace_{FORGED}2").write_bytes(b"")
    (tmp_path / f"trace_{FORGED}3").write_bytes(b"\x80\x02cos\nsystem\n.")
    found = read(tmp_path)
    report = str(diagnose(found))
    assert "the job has ended" in report
    lines = [*report.splitlines(), *(part for text in found.problems for part in text.split("\n"))]
    assert not [line for line in lines if line.lstrip().startswith("Nobody is stuck")]
    assert not set("\r\x1b\u2028\t") & set(report + "".join(found.problems))


def _texts(value):
    """Every text in what was read."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _texts(getattr(value, part.name))
    elif isinstance(value, dict):
        yield from _texts([*value.items()])
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _texts(part)


def test_every_text_of_a_recording_is_one_line(tmp_path):
    """The host, the group and the reason of one file stand in for those of the others."""
    for name, alone in (("host", {"host": FORGED}), ("label", {}), ("stack", {"host": FORGED})):
        directory = tmp_path / name
        directory.mkdir()
        if name == "stack":
            stack(directory, 0, [(FORGED, 3, FORGED)], **alone, error=FORGED, reason=FORGED)
        else:
            data = groups(0) | alone
            data["life"] = {"started_ns": 1, "job": FORGED}
            data["groups"][1] |= {"label": FORGED, "name": FORGED, "dims": [FORGED]}
            (directory / f"groups_{FORGED}0.json").write_text(json.dumps(data))
        texts = [*_texts(read(directory))]
        assert any("the job has ended" in text for text in texts)
        assert not [text for text in texts if set("\n\r\x1b\u2028\t") & set(text)]


def test_a_file_beyond_the_limit_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("hypergrid.hangs.reading._MOST_FILES", 1)
    for number in range(2):
        (tmp_path / f"{FORGED}{number}").touch()
    (text,) = [text for text in read(tmp_path).problems if "the limit is 1 files" in text]
    assert "\n" not in text


def test_other_files_are_left_alone(tmp_path):
    write(tmp_path, ranks())
    for name, text in (("events.178", "x"), ("log_0", "text"), ("a.json", "{}"), ("b", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "trace_0.part").write_bytes(b"\x80")
    (tmp_path / "earlier").mkdir()
    assert not read(tmp_path).problems


def test_one_name_of_torch_for_two_groups_is_two_groups(tmp_path):
    pairs = {"1": ("A", [0, 1])}, {"1": ("A", [2, 3])}
    every = [Rank(rank, pairs[rank // 2]).call("1", done=rank < 2) for rank in range(4)]
    found = read(write(tmp_path, every))
    assert {key: group.ranks for key, group in found.groups.items()} == {
        "1@0,1": (0, 1),
        "1@2,3": (2, 3),
    }
    groups = [found.ranks[rank].calls[0].group for rank in range(4)]
    assert groups == ["1@0,1", "1@0,1", "1@2,3", "1@2,3"]


def test_a_pickle_cannot_ask_for_more_memory_than_its_size_explains(tmp_path):
    (tmp_path / "trace_0").write_bytes(b"\x80\x02}r\x00\x00\x00\x70.")
    before, limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.RLIMIT_AS
    old = resource.getrlimit(limits)
    (problem,) = read(tmp_path).problems
    assert "trace_0" in problem and resource.getrlimit(limits) == old
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)


def sources(tmp_path):
    write(tmp_path, ranks(2))
    for rank in range(2):
        (tmp_path / f"groups_{rank}.json").write_text(json.dumps(groups(rank)))
        stack(tmp_path, rank, [("a.py", 3, "f")], p2p=ranks(1)[0].call("7", "send 0->1").entries)
    pickled = (tmp_path / "trace_0").read_bytes()
    text = json.dumps(ranks(2)[0].dump()).encode()
    rest = [((tmp_path / name).read_bytes(), name) for name in ("groups_0.json", "stack_0.json")]
    return [(pickled, "trace_0"), (text, "trace_0.json"), *rest]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("seeds"))


VALUES = (None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x", "1->9", [], [[]], {}, [None], "|")


def damaged(data, source):
    """A copy with a few bytes changed, cut out or doubled."""
    some = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(some) or 1)
        kind = source.randrange(4)
        if kind == 0:
            some[at : at + 1] = bytes([source.randrange(256)])
        elif kind == 1:
            del some[at : at + source.randint(1, 40)]
        elif kind == 2:
            some[at:at] = some[at // 2 : at // 2 + source.randint(1, 40)]
        else:
            del some[at:]
    return bytes(some)


def strange(value, source, depth=0):
    """The same structure with some values of another type."""
    if source.random() < 0.02:
        return source.choice(VALUES)
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if source.random() > 0.01}
        return {k: strange(v, source, depth + 1) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [strange(each, source, depth + 1) for each in value]
    return value


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_damaged_dumps_never_raise(seeds, tmp_path_factory, seed):
    source = random.Random(seed)
    directory = tmp_path_factory.mktemp("damaged")
    for rank in range(2):
        for data, name in seeds:
            if source.random() < 0.5:
                if source.random() < 0.5:
                    data = damaged(data, source)
                else:
                    loaded = pickle.loads(data) if data[:1] == b"\x80" else json.loads(data)
                    other = strange(loaded, source)
                    data = pickle.dumps(other, 2)
                    data = data if source.random() < 0.5 else json.dumps(other).encode()
            (directory / name.replace("0", str(rank))).write_bytes(data)
    recording = read(directory)
    found = diagnose(recording)
    assert found.sentence and json.dumps(found.to_json())


def test_sends_of_a_group_without_a_name_are_left_out_with_their_file(tmp_path):
    write(tmp_path, ranks())
    strange = ranks(1)[0].call("7", "send 0->1").entries
    strange[-1]["process_group"] = [["7"], "TENSOR"]
    stack(tmp_path, 0, [("a.py", 3, "f")], p2p=strange)
    found = read(tmp_path)
    assert "stack_0.json cannot be read" in found.problems[0]
    assert diagnose(found).sentence


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_deep_nesting_is_no_traceback(tmp_path, kind):
    deep = b"]" * 100_000 + b"a" * 99_999 + b"."
    data = b"\x80\x02" + deep if kind == "pickle" else b'{"entries": ' + b"[" * 100_000
    (tmp_path / "trace_0").write_bytes(data)
    assert read(tmp_path).problems


def repeated(kind):
    """A small pickle whose values stand for endlessly many."""
    (one, _) = ranks(200)
    value = ()
    for _ in range(60):
        value = (value, value)
    many = [4] * 100_000
    for entry in one.entries:
        if kind == "doubled":
            entry["input_sizes"] = value
        elif kind == "doubled in a list":
            entry["input_sizes"] = [[value]]
        elif kind == "shared":
            entry["input_sizes"] = entry["output_sizes"] = [many] * 1000
        elif kind == "frames":
            entry["frames"] = [{"filename": "a" * 10_000, "line": 1, "name": value}] * 100_000
        elif kind == "group":
            entry["process_group"] = (value, "x")
    dump = one.dump()
    if kind == "members":
        dump["pg_config"] = {str(i): {"desc": "x", "ranks": many} for i in range(3000)}
    return pickle.dumps(dump, 2)


@pytest.mark.parametrize(
    "kind", ["doubled", "doubled in a list", "shared", "frames", "group", "members"]
)
def test_a_small_file_that_stands_for_endless_values_is_left_out_in_time(tmp_path, kind):
    (tmp_path / "trace_0").write_bytes(repeated(kind))
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (problem,) = read(tmp_path).problems
    assert problem.startswith(("trace_0 cannot be read", "trace_0 was refused"))
    assert time.process_time() < begun + 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (200 << 10)  # KiB


# Pairs of the last pair, forty times: 2**40 values, of which each is hashed.
START, PAIRED = b"\x80\x02}K\x00K\x00\x86", 40
BY_COPIES = START + b"2\x86" * PAIRED
BY_REFERENCES = START + b"".join(b"q%ch%c\x86" % (i, i) for i in range(PAIRED))
LONG_WORD = (2**61 - 1).bit_length() // 8 + 6
# Multiples of this number have the same hash, so that each is compared with all before.
COLLIDING = b"".join(
    b"\x8a%c%bN" % (LONG_WORD, ((2**61 - 1) * i).to_bytes(LONG_WORD, "little"))
    for i in range(1, 60_000)
)
BOMBS = {
    "copies in a key": BY_COPIES + b"Ns.",
    "references in a key": BY_REFERENCES + b"Ns.",
    "references in keys of one call": START[:3] + b"(" + BY_REFERENCES[3:] + b"Nu.",
    "long references": START
    + b"".join(b"r%c\0\0\0j%c\0\0\0\x86" % (i, i) for i in range(PAIRED))
    + b"Ns.",
    "members of a set": b"\x80\x04\x8f(" + BY_REFERENCES[3:] + b"\x90.",
    "members of a set, in protocol 2": b"\x80\x02\x8f(" + BY_REFERENCES[3:] + b"\x90.",
    "triples": b"\x80\x02}K\x00"
    + b"".join(b"q%ch%ch%c\x87" % (i, i, i) for i in range(PAIRED))
    + b"Ns.",
    "numbers of one hash": b"\x80\x02}(" + COLLIDING + b"u.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_that_would_hash_for_years_is_refused_before_it_is_loaded(tmp_path, bomb):
    (tmp_path / "trace_0").write_bytes(BOMBS[bomb])
    begun = time.process_time()
    (problem,) = read(tmp_path).problems
    assert problem.startswith("trace_0 was refused: it holds ")
    assert time.process_time() < begun + 5


# A list is put into another a million times while it is empty, and then filled; a list in itself.
CHANGED = {
    "filled later": b"\x80\x02]q\x00]q\x01(" + b"h\x00" * 9 + b"e0(" + b"K\x00" * 9 + b"e.",
    "filled where it is": b"\x80\x02]q\x00(](" + b"h\x00" * 9 + b"e" + b"K\x00" * 9 + b"e.",
    "in itself": b"\x80\x02]q\x00h\x00a.",
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_list_that_grows_after_it_was_used_is_refused(tmp_path, kind):
    (tmp_path / "trace_0").write_bytes(CHANGED[kind])
    (problem,) = read(tmp_path).problems
    assert problem.startswith("trace_0 was refused: it holds ")


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
TORCHES = {p.parents[1].name: p for p in sorted(ROOT.glob(".cache/torch/*/bin/python"))}


@pytest.mark.parametrize("line", ["installed", *TORCHES])
def test_what_a_line_of_torch_writes_is_read(tmp_path, line):
    python = TORCHES.get(line, sys.executable)
    command = [str(python), "-c", RECORDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert line in ("installed", done.stdout.split("+")[0].strip())
    calls = 0
    for directory in tmp_path.glob("_dump*"):
        found = read(directory)
        assert not found.problems
        calls += sum(len(rank.calls) for rank in found.ranks.values())
    assert calls >= 200


def test_what_hypergrid_writes_of_all_kinds_of_calls_is_read(tmp_path):
    """Two dumps as one, as where NCCL and gloo have a recorder each; floats and long numbers."""
    (one, _) = ranks(300)
    for number, entry in enumerate(one.entries):
        entry |= {"duration_ms": number / 3, "op_id": number << 40, "thread_id": 2**63 + number}
        entry["input_sizes"] = [[number] * (number % 5)]
    dump = json.loads(json.dumps(one.dump()))
    dump["pg_config"] |= {str(n): {"name": str(n), "desc": "x", "ranks": "[]"} for n in range(300)}
    data = pickle.dumps(dump, 2)
    (tmp_path / "trace_0").write_bytes(data)
    found = read(tmp_path)
    assert not found.problems and len(found.ranks[0].calls) == len(one.entries)


def test_a_file_above_the_limit_is_not_read(tmp_path):
    write(tmp_path, ranks())
    with open(tmp_path / "trace_1", "r+b") as file:
        file.truncate((256 << 20) + 1)
    (problem,) = read(tmp_path).problems
    assert problem == "trace_1 is larger than 256 MiB, and is not read."


def test_calls_above_the_limit_of_a_directory_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hypergrid.hangs.reading._MOST_CALLS", 6)
    (problem,) = read(write(tmp_path, ranks())).problems
    assert problem.startswith("trace_1 cannot be read") and "6 calls, which is the limit" in problem


def test_several_processes_read_what_one_reads(tmp_path):
    everyone = [Rank(rank, {"7": ("TENSOR", [*range(40)])}) for rank in range(40)]
    for one in everyone:
        for _ in range(3 - one.rank // 39):
            one.call("7")
        one.call("7", "broadcast", done=False, frames=[("a.py", 3, "f")])
    write(tmp_path, everyone)
    (tmp_path / "trace_6").write_bytes(repeated("doubled"))
    (tmp_path / "trace_11").write_bytes(pickle.dumps(tmp_path))
    (tmp_path / "trace_17").write_bytes(b"")
    alone, together = read(tmp_path), read(tmp_path, processes=2)
    assert together.problems == alone.problems and len(alone.problems) == 3
    assert [[*each.calls] for each in together.ranks.values()] == [
        [*each.calls] for each in alone.ranks.values()
    ]
    assert (together.groups, together.titles, together.world_size) == (
        *(alone.groups, alone.titles),
        alone.world_size,
    )


def test_operations_of_a_batch_have_its_state(tmp_path):
    """NCCL's recorder has the state of a batch apart from its sends and receives."""
    (one, _) = ranks(0)
    for done in (True, False):
        for name in ("send 0->1", "recv 0<-1", "coalesced"):
            one.call("7", name, done=done and name == "coalesced", seq=1 + (not done))
            one.entries[-1].update(is_p2p=True, p2p_seq_id=1 + (not done), collective_seq_id=0)
    found = read(write(tmp_path, [one])).ranks[0].calls
    assert [(call.what.name, call.done) for call in found if call.p2p] == [
        ("send", True),
        ("recv", True),
        ("send", False),
        ("recv", False),
    ]
