"""Shared by the scripts that fetch sources of others: pip, sha256, and folders under .cache.

pip checks the digest of each archive and refuses another; nothing of an archive is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from checkout import CACHE

LARGEST = 1 << 20  # bytes of one file


def fail(what: str) -> SystemExit:
    """The exception to raise, with the script's name."""
    return SystemExit(f"{Path(sys.argv[0]).name}: {what}")


def pip(
    arguments: list[str], wanted: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> None:
    """Run pip for these requirements alone: ``name==version`` -> sha256, several with spaces."""
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        rows = [" --hash=sha256:".join([name, *wanted[name].split()]) for name in wanted]
        requirements.write_text("\n".join(rows))
        command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes"]
        command += ["--requirement", str(requirements)]
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode != 0:
        errors = re.findall("^ERROR.*", done.stderr, re.MULTILINE)
        raise fail(f"cannot fetch {', '.join(wanted)}: {(errors or [done.stderr])[0]}")


@contextmanager
def whole(folder: str) -> Iterator[Path]:
    """A new folder that becomes ``.cache/FOLDER`` when the block ends, whole or not at all."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".fetch-") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        yield new
        try:
            os.rename(new, CACHE / folder)
        except OSError as error:
            if not (CACHE / folder).is_dir():  # another process was faster
                raise fail(f"cannot write {CACHE / folder}: {error}") from error


def keep(
    folder: str,
    wanted: str,
    digest: str,
    pattern: str,
    options: list[str],
    environment: Mapping[str, str] | None = None,
    whole_with: str = "",
) -> None:
    """Put the files of an archive whose path matches under ``.cache/FOLDER``, by their group 1.

    Does nothing where that is done. A folder that an earlier pattern left without ``whole_with``
    is replaced.
    """
    if (CACHE / folder / whole_with).is_dir():
        return
    with tempfile.TemporaryDirectory() as scratch, whole(folder) as new:
        pip(["download", "--dest", scratch, *options], {wanted: digest}, environment)
        (archive,) = Path(scratch).iterdir()
        for path, content in _files(archive, re.compile(pattern)):
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(content)
        if not any(new.iterdir()) or not (new / whole_with).is_dir():
            raise fail(f"{wanted} has not the files it should have")
        shutil.rmtree(CACHE / folder, ignore_errors=True)


def _files(archive: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    """Path and content of each regular file that matches and is not too large."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                match = pattern.fullmatch(info.filename)  # allows no path that leaves the folder
                if match and info.file_size <= LARGEST:
                    yield match[1], wheel.read(info)
        return
    with tarfile.open(archive) as source:
        for member in source:
            match = pattern.fullmatch(member.name)
            if match is None or not member.isreg() or member.size > LARGEST:
                continue
            file = source.extractfile(member)
            if file is not None:
                yield match[1], file.read()
