"""The switches for passes that subcommands share: `--only-pass`, `--no-pass` and `--no-passes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from core.errors import UsageError

if TYPE_CHECKING:
    from core.common.passes.switches import PassSwitches

ONLY_PASS: Any = typer.Option([], "--only-pass", metavar="NAME", help="Run this pass and no other; repeatable.")
NO_PASS: Any = typer.Option([], "--no-pass", metavar="NAME", help="Leave this pass out; repeatable.")
NO_PASSES: Any = typer.Option(False, "--no-passes", help="Run no pass at all.")
"""Defaults of a subcommand's parameters `only_pass`, `no_pass` and `no_passes`."""


def pass_switches(only_pass: list[str], no_pass: list[str], no_passes: bool) -> PassSwitches:
    """Return the switches as data; raises `UsageError` where `--no-passes` stands beside a name.

    Whether the names exist is known only with the passes: `PassSwitches.select` and `PassManager` refuse others.
    """
    from core.common.passes.switches import PassSwitches

    if no_passes and (only_pass or no_pass):
        given = "--only-pass" if only_pass else "--no-pass"
        raise UsageError(
            f"--no-passes with {given}",
            found="the one leaves out every pass, the other chooses among them",
            remedy="give one of the two",
        )
    return PassSwitches(only=() if no_passes else tuple(only_pass) or None, disable=tuple(no_pass))
