"""The command ``hypergrid``; says what to install where the ``cli`` extra is missing.

The command line knows Megatron, so it is in ``compat/cli``: this file alone of the core imports it.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from hypergrid.messages import install_command

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Output(io.FileIO):
    """Standard output. What comes after its reader has gone, as ``head -1`` does, is dropped.

    So the command ends with the status of its answer, also under ``set -o pipefail``.
    """

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def main() -> None:
    """Run the command line."""
    if sys.stdout is not None:
        buffered = io.BufferedWriter(_Output(sys.stdout.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(
            buffered,
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.isatty(),
        )
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        how = install_command("cli")
        print(f"hypergrid: the command line needs {error.name}: {how}", file=sys.stderr)
        sys.exit(2)
    try:
        from compat.cli.app import app
    except ValueError as error:  # a variable of the environment that is invalid for any command
        print(f"hypergrid: {error}", file=sys.stderr)
        sys.exit(2)
    app(prog_name="hypergrid")


if __name__ == "__main__":
    main()
