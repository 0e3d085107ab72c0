"""The reader of scripts beside bash itself: never other words than bash starts, or a refusal."""

import collections
import os
import subprocess

import pytest

from hypergrid.cli.bash import ScriptError, commands
from tests.cli.scripts_of_bash import CONSTRUCTS, scripts

SEED = int(os.environ.get("SEED", 43))
LAUNCHERS = ("torchrun", "srun", "python")
STUB = """#!/bin/bash
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n\\0'; } >> "${0%/*}/started"
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs a script in bash in an empty directory; the words of each program that it starts."""
    programs = tmp_path_factory.mktemp("programs")
    for name in LAUNCHERS:
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    empty = tmp_path_factory.mktemp("empty")
    path = f"PATH={programs}:{os.environ['PATH']}"

    def run(script):
        started = programs / "started"
        started.write_bytes(b"")
        command = ["env", "-i", path, "bash", "--norc", "-c", script]
        subprocess.run(
            command,
            cwd=empty,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
        calls = started.read_text().split("\n\0")
        return [call.split("\0")[:-1] for call in calls[:-1]]

    return run


def read(script):
    """The words of each program that the reader sees started; None if it refuses to say."""
    try:
        found = [command.words for command in commands(script)[0]]
    except ScriptError:
        return None
    launched = [words for words in found if words[0].text in LAUNCHERS or words[0].holes]
    if any(word.holes for words in launched for word in words):
        return None
    return [[word.text for word in words] for words in launched]


def test_500_scripts_start_what_bash_starts_or_are_refused(start):
    refused = collections.Counter()
    shown = collections.Counter()
    wrong = []
    decided = 0
    for script, constructs, is_decided in scripts(500, seed=SEED):
        shown.update(constructs)
        ours = read(script)
        theirs = start(script)
        decided += is_decided
        if ours is None:
            refused.update(constructs if is_decided else ())
            refused["all"] += is_decided
        elif ours != theirs:
            wrong.append((script, ours, theirs))
    assert not wrong, (
        "\n\n".join(f"{s}ours {o}\nbash {t}" for s, o, t in wrong[:5]) + f"\n{len(wrong)}"
    )
    assert all(shown[construct] >= 30 for construct in CONSTRUCTS)
    print(f"{refused['all']} of {decided} refused", refused)
    # 286 of 412 are refused with this seed: what is not followed is refused, and never guessed.
    assert refused["all"] <= decided * 0.72, refused
