"""The statements of a script as a tree, which shfmt reads: https://github.com/mvdan/sh.

A node is a dict with the fields of shfmt's ``syntax`` package, such as ``{"Type": "CallExpr",
"Assigns": [...], "Args": [...]}``. Fields that are false or empty are absent.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeAlias

from compat.cli.bash.values import LONGEST, ScriptError
from hypergrid.messages import install_command

Node: TypeAlias = dict[str, Any]

# Memory in KiB and output in blocks of 512 bytes: a tree of n nested commands takes n * n bytes.
_BOUNDED = 'ulimit -v 1500000; ulimit -f 65536; exec "$0" "$@"'
_SECONDS = 4
# A message of a hole repeats these as they are written.
_WRITTEN = {"ArithmExp", "CmdSubst", "DblQuoted", "ExtGlob", "ParamExp", "ProcSubst", "SglQuoted"}


@lru_cache(32)
def statements_of(text: str, line: int = 0) -> list[Node]:
    """The statements of a script, or of a text that is run in a line of it."""
    if len(text) > LONGEST:
        raise ScriptError(f"the launch line is longer than {LONGEST:,} characters.")
    if re.search(r"(?<!\\)\\[ \t]+\n", text):
        raise ScriptError("the launch line has a blank between a backslash and the line's end.")
    if re.search("[\ud800-\udfff\0]", text):
        raise ScriptError("the launch line is not valid Unicode.")
    if "\r" in text:
        raise ScriptError(
            "the launch line has carriage returns, which bash takes for parts of words. Convert it "
            "to lines that end as on Linux."
        )
    _check_comments(text)
    source = text.encode()

    def node_of(fields: Node) -> Node:
        if isinstance(fields.get("Op"), int):
            raise ScriptError("shfmt is older than 3.14. Install shfmt-py of the extra cli.")
        # ${ command; } runs in this shell, and only from bash 5.3 on.
        if "TempFile" in fields or "ReplyVar" in fields:
            raise ScriptError("the launch line has ${ command; }, which cannot be followed.")
        if "Pos" in fields:
            fields["Line"] = line or fields["Pos"]["Line"]
        if fields.get("Type") in _WRITTEN:
            # Offsets are in bytes.
            written = source[fields["Pos"]["Offset"] : fields["End"]["Offset"]]
            fields["Written"] = written.decode()
        return fields

    tree = json.loads(_json_of(source), object_hook=node_of)
    statements: list[Node] = tree.get("Stmts", [])
    return statements


def _json_of(source: bytes) -> bytes:
    """The tree of a script, from shfmt."""
    # First the one that pip has installed beside this Python.
    program = shutil.which("shfmt", path=sysconfig.get_path("scripts")) or shutil.which("shfmt")
    if program is None:
        raise ImportError(f"reading launch lines needs shfmt-py: {install_command('cli')}.")
    command = ["sh", "-c", _BOUNDED, program, "--language-dialect", "bash", "--to-json"]
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command,
                input=source,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ScriptError("the launch line is nested too deeply.") from None
        output.seek(0)
        if done.returncode == 0:
            return output.read()
    # <standard input>:3:8: reached EOF without closing quote "
    complaint = re.match(r"(?:<standard input>:)?(\d+):\d+: (.*)", done.stderr.decode())
    if complaint is None:
        raise ScriptError("the launch line is nested too deeply.")
    raise ScriptError(
        f"line {complaint[1]} of the launch line cannot be read as bash: {complaint[2]}. Close its "
        f"quotes and brackets, or write it simpler."
    )


def _check_comments(text: str) -> None:
    """Refuse a comment in a command that ends in a backslash: shfmt reads on, and bash does not.

    ``torchrun a \\``, ``# b \\``, ``c``, each on its line, are two commands, of which one is ``c``.
    """
    comment = re.search(r"(?m)^(?![ \t]*#).*(\\\n[ \t]*|[ \t;&|()<>`])#.*\\$", text)
    if comment is not None:
        number = text.count("\n", 0, comment.end()) + 1
        raise ScriptError(
            f"line {number} of the launch line has a comment that ends in a backslash. Leave "
            f"the comment out, which ends the command."
        )


def nodes_in(node: object) -> Iterator[Node]:
    """A node and those below it, without what substitutions run."""
    if isinstance(node, dict):
        yield node
        if node.get("Type") in ("CmdSubst", "ProcSubst"):
            return
        for below in node.values():
            yield from nodes_in(below)
    elif isinstance(node, list):
        for below in node:
            yield from nodes_in(below)


def literal_of(word: Node) -> str:
    """The text of a word that has no quotes and no expansions; "" of others, and of sums."""
    match word:
        case {"Parts": [{"Type": "Lit", "Value": str(text)}]}:
            return text
    return ""
