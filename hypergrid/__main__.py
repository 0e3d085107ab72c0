"""The command ``hypergrid``; says what to install where the ``cli`` extra is missing.

The command line knows Megatron, so it is in ``compat/cli``: this file alone of the core imports it.
"""

from __future__ import annotations

import sys

from hypergrid.messages import install_command


def main() -> None:
    """Run the command line."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
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
