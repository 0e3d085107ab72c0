"""Files that people hand in: of bounded size and depth, and of the types that a schema says."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hypergrid.messages import install_command

LONGEST = 32 << 20  # bytes of a file
_DEEPEST_YAML = 20
T = TypeVar("T")


class FileError(ValueError):
    """A file that cannot be read; the message says what was expected of it."""


def bytes_of(path: str | Path) -> bytes:
    """The content of the file; at most ``LONGEST`` bytes are read. OSError as from ``open``."""
    if str(path) == "-":
        content = sys.stdin.buffer.read(LONGEST + 1)
    else:
        try:
            # Without O_NONBLOCK, opening a named pipe waits until somebody writes to it.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ValueError as error:  # a null byte in the name
            raise FileError(f"there is no such file: {error}.") from None
        with open(descriptor, "rb") as file:
            # A pipe or /dev/zero may have no end.
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError(f"{path} is not a regular file. Give one, or - for the input.")
            content = file.read(LONGEST + 1)
    # One byte more was asked for than is allowed.
    if len(content) > LONGEST:
        raise FileError(f"{path} is larger than {LONGEST >> 20} MiB, which is too large.")
    return content


def replace(path: Path, data: bytes) -> None:
    """Write a file beside it under a random name, then rename it: no link is followed. OSError."""
    random_name = f"{path.name}.{secrets.token_hex(8)}.part"
    temporary = path.with_name(random_name)
    # O_EXCL and O_NOFOLLOW: a file or link of that name, put there by somebody else, is refused.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o666), "wb") as file:
        try:
            file.write(data)
            # What is not written yet is written here, or fails here.
            file.close()
            os.replace(temporary, path)
        except OSError:  # such as a full disk, where each byte counts
            with suppress(OSError):
                temporary.unlink()
            raise


def check_private(directory: Path) -> None:
    """Raise PermissionError if every user may replace the files in a directory."""
    # With the sticky bit, as /tmp has it, a user may replace only files of their own.
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(
            f"every user may replace the files in {directory}: chmod +t or o-w, or name another."
        )


def check_yaml(text: str, most_aliases: int = 0) -> None:
    """Refuse YAML that is nested too deeply, or whose aliases could stand for endless values.

    Reads the events of the parser, before anything is built of them: the builders recurse, and the
    C one ends the process. ValueError; ``yaml.YAMLError`` if it is no YAML. Needs PyYAML.
    """
    import yaml

    depth = 0
    aliases = 0
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > _DEEPEST_YAML:
            raise ValueError(f"nested more than {_DEEPEST_YAML} deep")
        if aliases > most_aliases:
            raise ValueError(f"more than {most_aliases} aliases")


def decoded(text: str | bytes, kind: type[T], title: str) -> T:
    """JSON as an object of that type: of dataclasses, of TypedDicts, or of plain types.

    FileError, which calls the text ``title``, on anything else. Needs msgspec.
    """
    try:
        import msgspec
    except ImportError:
        raise ImportError(f"reading a file needs msgspec: {install_command('cli')}.") from None
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise FileError(f"{title} is nested too deeply.") from None
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.rows[0].chunk`"
        reason = str(error).replace(". - at", " - at").replace(" - at `$", ", at `")
        reason = reason.replace("`.", "`")
        reason = f"{reason[:1].lower()}{reason[1:300]}"
        raise FileError(f"{title} is not valid: {reason}.") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise FileError(f"{title} is not JSON: {str(error)[:300]}.") from None
