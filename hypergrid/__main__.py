"""The command ``hypergrid``; says what to install where the ``cli`` extra is missing."""

from __future__ import annotations

import sys

from hypergrid.messages import install_command


def main() -> None:
    """Run the command line."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        how = install_command("cli")
        print(f"hypergrid: the command line needs {error.name}: {how}", file=sys.stderr)
        sys.exit(2)
    from hypergrid.cli.app import app

    app(prog_name="hypergrid")


if __name__ == "__main__":
    main()
