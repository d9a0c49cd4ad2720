"""`core new-plugin`: write a vendor package that installs, runs and passes the conformance suite, to be filled in."""

from __future__ import annotations

from pathlib import Path

import typer

from core.cli.output import print_json


def new_plugin(
    name: str = typer.Argument("", help="Device name: what users will write after --device.", show_default=False),
    torch_device: str = typer.Option(
        "", help="Start from torch's accelerator of this type, not from a simulation; NAME may be left out then."
    ),
    into: Path | None = typer.Option(None, help="New or empty folder; default: ./NAME-device."),
    vendor: str = typer.Option("", help="Who makes the device, for metadata and README; default: from NAME."),
    package: str = typer.Option("", help="Import package; default: core_NAME."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON (core.new-plugin/1)."),
) -> None:
    """Write a complete device plugin, for a simulated device or one that torch drives, to be replaced part by part."""
    from core.errors import UsageError
    from core.host.discovery import discover
    from core.scaffold.names import choose_names
    from core.scaffold.writing import render, write
    from core.settings import Settings

    if not (name or torch_device):
        raise UsageError("a new plugin", found="no name for its device", remedy="give NAME, or --torch-device TYPE")
    installed = discover(Settings.from_environment())
    device = name or torch_device
    names = choose_names(device, installed, package=package, vendor=vendor, torch_device=torch_device)
    target = (Path(names.distribution) if into is None else into).absolute()
    files = render(names)
    write(files, target)
    commands = next_commands(names.device, target)
    if as_json:
        print_json(
            "core.new-plugin/1",
            device=names.device,
            distribution=names.distribution,
            package=names.package,
            folder=str(target),
            files=sorted(files),
            next=commands,
        )
        return
    print(f"{len(files)} files written to {target}:")
    print("\n".join(f"  {path}" for path in sorted(files)))
    print("\nnext:")
    print("\n".join(f"  {command}" for command in commands))


def next_commands(device: str, folder: Path) -> list[str]:
    """Return the commands that install the package, run it and prove it, for a shell."""
    import shlex

    return [
        f"cd {shlex.quote(str(folder))}",
        "pip install --editable '.[dev]'",
        f"core run --device {device}",
        f"core conformance --device {device} --level 2",
    ]
