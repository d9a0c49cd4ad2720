"""The switches for passes that subcommands share: `--pass`, `--only-pass`, `--no-pass` and `--no-passes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from core.errors import UsageError

if TYPE_CHECKING:
    from core.compilation.rewrite.order import PassSwitches

WITH_PASS: Any = typer.Option(
    [], "--pass", metavar="NAME", help="Run this pass although the device finds it unprofitable; repeatable."
)
ONLY_PASS: Any = typer.Option([], "--only-pass", metavar="NAME", help="Run this pass and no other; repeatable.")
NO_PASS: Any = typer.Option([], "--no-pass", metavar="NAME", help="Leave this pass out; repeatable.")
NO_PASSES: Any = typer.Option(False, "--no-passes", help="Run no pass at all.")
"""Defaults of a subcommand's parameters `with_pass`, `only_pass`, `no_pass` and `no_passes`."""


def pass_switches(with_pass: list[str], only_pass: list[str], no_pass: list[str], no_passes: bool) -> PassSwitches:
    """Return the switches as data; raises `UsageError` where `--no-passes` stands beside a name.

    Whether the names exist is known only with the passes: `PassSwitches.select` and `PassManager` refuse others.
    """
    if no_passes and (with_pass or only_pass or no_pass):
        given = "--pass" if with_pass else "--only-pass" if only_pass else "--no-pass"
        raise UsageError(
            f"--no-passes with {given}",
            found="the one leaves out every pass, the other chooses among them",
            remedy="give one of the two",
        )
    from core.compilation.rewrite.order import PassSwitches

    only = () if no_passes else tuple(only_pass) or None
    return PassSwitches(only=only, disable=tuple(no_pass), enable=tuple(with_pass))
