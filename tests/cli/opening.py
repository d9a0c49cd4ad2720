"""A subcommand that opens a device as `core run` does, and imports neither torch nor an engine before that."""

from __future__ import annotations

import typer

CALL = "import sys; from core.cli import COMMANDS, main;COMMANDS['run'] = 'tests.cli.opening:opening'; sys.exit(main())"
"""Python code of the `core` command with it in the place of `run`."""


def opening(
    device: str = typer.Option(..., "--device"),
    as_json: bool = typer.Option(False, "--json"),
) -> int:
    from core.host.selection import select_device

    select_device(device)
    return 0
