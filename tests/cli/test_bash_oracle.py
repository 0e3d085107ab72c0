"""The reader of scripts beside bash itself: never other words than bash starts, or a refusal."""

import collections
import os
import signal
from pathlib import Path

import pytest

from tests.support import bash_scripts
from tests.support.bash_scripts import (
    CONSTRUCTS,
    bash,
    launches_of_reader,
    nested_scripts,
    outcome,
    scripts,
    started_by_reader,
)

FORMS = Path(bash_scripts.__file__).with_name("bash_forms.txt")  # scripts between lines of ===
SEED = int(os.environ.get("SEED", 43))


def test_500_scripts_start_what_bash_starts_or_are_refused():
    times = collections.Counter()
    outcomes = collections.Counter()
    with bash() as start:
        for script, constructs, is_decided in scripts(500, seed=SEED):
            times.update(constructs)
            words = started_by_reader(script)
            expected = start(script)
            result = outcome(expected, words, is_decided)
            assert result != "wrong", f"{script}reader {words}\nbash {expected}"
            outcomes[result] += 1
    assert min(times[construct] for construct in CONSTRUCTS) >= 30
    # The constructs are those of bash, most of which no launch script has.
    assert outcomes["refused"] <= 0.62 * (outcomes["refused"] + outcomes["right"]), outcomes


def test_each_launch_of_300_nested_scripts_is_one_that_the_reader_has():
    """As far as the reader says that it knows a word."""
    read = 0
    with bash() as start:
        for script in nested_scripts(300, seed=SEED):
            launches = launches_of_reader(script)
            if launches is None:
                continue
            for words in start(script):
                call = "".join(f"\0{word}" for word in words)
                assert any(launch.fullmatch(call) for launch in launches), f"{script}{words}"
            read += 1
    assert read >= 250, read


def test_ways_of_writing_are_read_as_bash_reads_them_or_refused():
    outcomes = collections.Counter()
    with bash() as start:
        for form in FORMS.read_text().split("\n===\n"):
            expected = sorted(start(f"{form}\n"))
            words = started_by_reader(f"{form}\n")
            result = outcome(expected, words and sorted(words), is_decided=True)
            assert result != "wrong", f"{form}\nreader {words}\nbash {expected}"
            outcomes[result] += 1
    assert outcomes["right"] >= 60, outcomes


STARS = "*a" * 20
LOOPS = "while read a; do for b in $X; do X=$X$a; " * 12 + "done; done; " * 12
DOUBLED = "".join(f"X{i}='X{i + 1}+X{i + 1}'\n" for i in range(40))


@pytest.mark.parametrize(
    "script",
    [
        f"X={'a' * 3000}\ncase $X in {STARS}b) torchrun y;; esac",
        f"{LOOPS}torchrun y",
        f"{DOUBLED}X40=1\ntorchrun $((X0))",
        "f() { f & f; }; f",
    ],
    ids=["case", "loops", "sums", "calls"],
)
def test_a_script_that_grows_as_it_is_read_ends_in_seconds(script):
    def too_late(*_):
        raise TimeoutError("it is still read after ten seconds")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(10)
    try:
        started_by_reader(f"{script}\n")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "opening", ["'", '"', "$(", "${X", "$((", "`", "A=(", "{ ", "( ", "[[ ", "<<E"]
)
def test_what_is_opened_and_not_closed_is_refused(opening):
    assert started_by_reader(f"{opening}x\ntorchrun y\n") is None
