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
from typing import Any, NamedTuple, TypeAlias

from compat.cli.bash.values import LONGEST, ScriptError, names_in
from hypergrid.messages import install_command

Node: TypeAlias = dict[str, Any]

_ASSIGNING = names_in("= := += -= *= /= %= &= |= ^= <<= >>= ++ --")

# Memory in KiB and output in blocks of 512 bytes: a tree of n nested commands takes n * n bytes.
_BOUNDED = 'ulimit -v 1500000; ulimit -f 65536; exec "$0" "$@"'
_SECONDS = 4
# A message of a hole repeats these as they are written.
_WRITTEN = {"ArithmExp", "CmdSubst", "ExtGlob", "ParamExp", "ProcSubst"}


class _Position(NamedTuple):
    Offset: int  # in bytes
    Line: int
    Col: int


@lru_cache(32)
def statements_of(text: str) -> list[Node]:
    """The statements of a script. ScriptError if it is not bash."""
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

    def node_of(fields: Node) -> Node | _Position:
        if fields.keys() == set(_Position._fields):
            return _Position(**fields)
        if isinstance(fields.get("Op"), int):
            raise ScriptError("shfmt is older than 3.14. Install shfmt-py of the extra cli.")
        # ${ command; } runs in this shell, and only from bash 5.3 on.
        if "TempFile" in fields or "ReplyVar" in fields:
            raise ScriptError("the launch line has ${ command; }, which cannot be followed.")
        node = {}
        for name, value in fields.items():
            if not isinstance(value, _Position) and name not in ("Comments", "Last"):
                node[name] = value
        if "Pos" in fields:
            start = fields["Pos"]
            node["Line"] = start.Line
            if fields.get("Type") in _WRITTEN:
                node["Written"] = source[start.Offset : fields["End"].Offset].decode()
        return node

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
    goes_on = False  # whether the line continues a command
    for number, line in enumerate(text.split("\n"), start=1):
        is_comment = line.lstrip().startswith("#") and not goes_on
        if not is_comment and re.search(r"(?:^|[\s;&|()<>`])#.*\\$", line):
            raise ScriptError(
                f"line {number} of the launch line has a comment that ends in a backslash. Leave "
                f"the comment out, which ends the command."
            )
        goes_on = line.endswith("\\") and not is_comment


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


def texts_in(node: object) -> set[str]:
    """The names and the texts in a node."""
    texts = set()
    for below in nodes_in(node):
        text = below.get("Value")
        if isinstance(text, str):
            texts.add(text)
    return texts


def literal_of(word: Node) -> str:
    """The text of a word that has no quotes and no expansions; "" of others, and of sums."""
    parts = word.get("Parts", [])
    if len(parts) == 1 and parts[0]["Type"] == "Lit":
        text: str = parts[0].get("Value", "")
        return text
    return ""


def pattern_of(word: Node) -> str | None:
    """A pattern of bash, such as ``a*``, as a regular expression; None if it is not read.

    Read are literal texts, quoted ones, ``*``, ``?`` and ``[0-9]``.
    """
    pattern = ""
    for part in word.get("Parts", []):
        text = part.get("Value", "")
        if part["Type"] == "Lit" and re.fullmatch(r"(?:[\w./:=,@%*?-]|\[0-9\])*", text):
            escaped = re.escape(text).replace(r"\[0\-9\]", "[0-9]")
            pattern += escaped.replace(r"\*", ".*").replace(r"\?", ".")
        elif part["Type"] == "SglQuoted" and "Dollar" not in part:
            pattern += re.escape(text)
        elif part["Type"] == "DblQuoted" and "Dollar" not in part:
            quoted = {"Parts": part.get("Parts", [])}
            if quoted["Parts"] and not re.fullmatch(r"[^\\]+", literal_of(quoted)):
                return None
            pattern += re.escape(literal_of(quoted))
        else:
            return None
    return pattern


def is_assigning(node: Node) -> bool:
    """Whether a node assigns: ``${X:=8}``, ``X = 8`` in a sum."""
    return node.get("Op") in _ASSIGNING and node.get("Type") != "BinaryTest"
