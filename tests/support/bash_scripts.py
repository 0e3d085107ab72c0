"""Bash scripts made by chance: each construct changes a size of the launch at the script's end."""

from __future__ import annotations

import os
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compat.cli.bash import ScriptError, commands

LAUNCHERS = ("torchrun", "srun", "python")
# In place of a launcher: it appends its name and its arguments to a file, in one write, as two may
# run at the same time.
STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" $'\\n' >> "${0%/*}/started"
"""

# By construct, in bash_scripts.txt: snippets that change NAME, which was V before; W and U are
# other numbers. One with a "?" before it depends on more than its text: the environment, files,
# programs.


def _constructs() -> dict[str, list[str]]:
    constructs: dict[str, list[str]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line.startswith("# "):
            snippets = constructs.setdefault(line[2:], [])
        else:
            snippets.append(re.sub(r"\\(.)", lambda found: _ESCAPED[found[1]], line))
    return constructs


_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}
CONSTRUCTS = _constructs()
NAMES = ("TP", "PP", "CP", "N", "G")
LAUNCHES = (
    "torchrun --nnodes $N --nproc-per-node $G p.py --tensor-model-parallel-size $TP "
    "--pipeline-model-parallel-size $PP --context-parallel-size $CP",
    "torchrun --nnodes=${N} --nproc_per_node=${G} p.py --tensor-model-parallel-size=${TP} "
    "--pipeline-model-parallel-size ${PP} --context-parallel-size=$CP",
    'ARGS="--tensor-model-parallel-size $TP --context-parallel-size $CP"\n'
    'torchrun --nnodes "$N" --nproc-per-node "$G" p.py $ARGS --pipeline-model-parallel-size $PP',
    "ARGS=(--tensor-model-parallel-size $TP --context-parallel-size $CP)\nARGS+=(--lr 1)\n"
    'torchrun --nnodes "$N" --nproc-per-node $G p.py "${ARGS[@]}" '
    "--pipeline-model-parallel-size $PP",
    "launch() {\n  torchrun --nnodes $N --nproc-per-node $G p.py "
    '"$@" --pipeline-model-parallel-size $PP\n}\n'
    "launch --tensor-model-parallel-size $TP --context-parallel-size $CP",
    'CMD="torchrun --nnodes $N --nproc-per-node $G p.py --tensor-model-parallel-size $TP '
    '--context-parallel-size $CP --pipeline-model-parallel-size $PP"\neval "$CMD"',
)


def scripts(count: int, seed: int) -> list[tuple[str, set[str], bool]]:
    """Scripts, each with its constructs and whether its text alone decides what it launches."""
    chance = random.Random(seed)
    made = []
    names = list(CONSTRUCTS)
    for number in range(count):
        # Every construct comes as often as any other.
        chosen = [names[(number * 2 + i) % len(names)] for i in (0, 1)]
        lines = [f"{name}={chance.randint(2, 8)}" for name in NAMES]
        is_decided = True
        for construct in chosen:
            snippet = chance.choice(CONSTRUCTS[construct])
            is_decided &= not snippet.startswith("?")
            snippet = snippet.lstrip("? ").replace("NAME", chance.choice(NAMES))
            snippet = snippet.replace("W", str(chance.randint(2, 9)))
            snippet = snippet.replace("U", str(chance.randint(2, 9)))
            snippet = snippet.replace("V", str(chance.randint(2, 9)))
            lines.append(snippet)
        lines.append(chance.choice(LAUNCHES))
        made.append(("\n".join(lines) + "\n", set(chosen), is_decided))
    return made


# A statement of nested ones: BODY, in a loop LOOP, in a shell of its own SHELL. COND is a
# condition, NAME a variable, DIGIT a number, DEPTH another one in each loop around others.
NESTING = """
if COND; then BODY; fi
if COND; then BODY; elif COND; then BODY; else BODY; fi
for NAME in 1 $NAME; do LOOP; done
for NAME in $UNKNOWN; do LOOP; done
for ((iDEPTH = 0; iDEPTH < 2; iDEPTH++)); do LOOP; done
nDEPTH=0; while [ $nDEPTH -lt 2 ]; do nDEPTH=$((nDEPTH + 1)); LOOP; done
until [ -d / ]; do LOOP; done
case $NAME in 2) BODY ;; 3 | 4) BODY ;; *) BODY ;; esac
case $NAME in [12]) BODY ;; 3) BODY ;; esac
( SHELL )
{ SHELL; } | cat
{ BODY; } > /dev/null
{ BODY; } > /nonexistent/x
COND && { BODY; }
COND || { BODY; }
""".strip().split("\n")
CONDITIONS = """
[ -f /nonexistent ]
[ -d / ]
true
! true
[ $NAME = 2 ]
[ "$NAME" -gt 3 ]
[[ $NAME == 2 ]]
[[ -n $NAME && $NAME == 2 ]]
[[ $NAME == 3 || ! $NAME == 2 ]]
((NAME > 3))
grep -q x /dev/null
""".strip().split("\n")
STEPS = """
NAME=DIGIT
NAME=$NAME
NAME=
NAME+=DIGIT
NAME=$((NAME + 1))
NAME=$1
NAME=(1 $NAME)
NAME=${NAME:-DIGIT}
: ${NAME:=DIGIT}
export NAME=DIGIT
read NAME <<< DIGIT
((NAME++))
unset NAME
eval "NAME=\\$NAME"
set -- DIGIT $NAME
shift
NAME=DIGIT > /nonexistent/x
NAME=DIGIT true
A+=($NAME)
exit
torchrun $NAME "$NAME" "${A[@]}"
""".strip().split("\n")


def nested_scripts(count: int, seed: int) -> Iterator[str]:
    """Scripts of statements in each other, of which some leave a function, a loop or the script."""
    chance = random.Random(seed)

    def statement(depth: int, leaving: Sequence[str]) -> str:
        is_nested = depth and chance.random() < 0.6
        template = chance.choice(NESTING if is_nested else [*STEPS, *leaving])

        def filled(part: re.Match[str]) -> str:
            match part[0]:
                case "COND":
                    return re.sub(
                        "NAME", lambda _: chance.choice(NAMES[:3]), chance.choice(CONDITIONS)
                    )
                case "NAME":
                    return chance.choice(NAMES[:3])
                case "DIGIT":
                    return str(chance.randint(1, 5))
                case "DEPTH":
                    return str(depth)
                case "LOOP":
                    return several(depth - 1, [*leaving, "break", "continue"])
                case "SHELL":
                    return several(depth - 1, ["exit"])
            return several(depth - 1, leaving)

        return re.sub("COND|NAME|DIGIT|DEPTH|LOOP|SHELL|BODY", filled, template)

    def several(depth: int, leaving: Sequence[str]) -> str:
        return "; ".join(statement(depth, leaving) for _ in range(chance.randint(1, 3)))

    for _ in range(count):
        lines = [
            "TP=2 PP=4 CP= A=(1)",
            f"f() {{ {several(2, ['local TP=3', 'return', 'return 1'])}; }}",
        ]
        for _ in range(4):
            lines.append(chance.choice(["f 2 3", "f || PP=5", several(3, ["f 3"])]))
        yield "\n".join([*lines, 'torchrun $TP "$PP" $CP "${A[@]}"']) + "\n"


@contextmanager
def bash() -> Iterator[Callable[[str], list[list[str]]]]:
    """Runs scripts in bash under ``env -i`` in an empty directory; gives the words it starts."""
    with tempfile.TemporaryDirectory() as programs, tempfile.TemporaryDirectory() as empty:
        for name in LAUNCHERS:
            Path(programs, name).write_text(STUB)
            Path(programs, name).chmod(0o755)
        record = Path(programs, "started")
        path = f"PATH={programs}:{os.environ['PATH']}"

        def start(script: str) -> list[list[str]]:
            record.write_bytes(b"")
            subprocess.run(
                ["env", "-i", path, "bash", "--norc", "-c", script],
                cwd=empty,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=20,
                check=False,
            )
            calls = record.read_bytes().decode(errors="replace").split("\n\0")
            return [call.split("\0")[:-1] for call in calls[:-1]]

        yield start


def started_by_reader(script: str) -> list[list[str]] | None:
    """The words of each program that the reader sees started; None if it refuses to say."""
    try:
        words_of_commands = [command.words for command in commands(script)[0]]
    except ScriptError:
        return None
    launches = [
        words for words in words_of_commands if words[0].text in LAUNCHERS or words[0].holes
    ]
    if any(word.holes for words in launches for word in words):
        return None
    return [[word.text for word in words] for words in launches]


def launches_of_reader(script: str) -> list[re.Pattern[str]] | None:
    """The programs that the reader sees started, as patterns of their words, each behind a NUL.

    A word that it does not know may be any words. None if it refuses the script.
    """
    try:
        words_of_commands = [command.words for command in commands(script)[0]]
    except ScriptError:
        return None
    launches = []
    for words in words_of_commands:
        patterns = [
            r"(\x00[^\x00]*)*" if word.holes else rf"\x00{re.escape(word.text)}" for word in words
        ]
        launches.append(re.compile("".join(patterns), re.DOTALL))
    return launches


def outcome(expected: list[list[str]], words: list[list[str]] | None, is_decided: bool) -> str:
    """How the reader did beside bash, in one word or two."""
    if words is None:
        return "refused" if is_decided else "rightly refused"
    if words == expected:
        return "right"
    # Launches that may happen or not: commands refuse them unless they start the same job.
    if len({tuple(launch) for launch in words}) > 1 and all(call in words for call in expected):
        return "refused"
    return "wrong"
