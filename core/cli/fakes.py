"""`core fakes`: the fake kernels that a device's plugin declares, and whether each was registered; `--check` tests
fakes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, get_args

import typer

from core.cli.output import print_json
from core.host.plugin_metadata import AUTO

if TYPE_CHECKING:
    from core.common.fakes import FakeOp, FakeResult
    from core.verify.fakes.checks import LibraryCheck, OpCheck

_TIMEOUT_S = 20.0


def fakes(
    device: str = typer.Option(AUTO, help="Device name."),
    check: str | None = typer.Option(
        None,
        metavar="LIB",
        help="Test the fakes of an op library: a module, a .so or .py file, or a namespace of ops.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON (core.fakes/1)."),
    timeout_s: float = typer.Option(_TIMEOUT_S, "--timeout-s", min=0.1, help="Seconds one call of a kernel may take."),
) -> None:
    """List declared fake kernels, or test an op library's fakes against its kernels; exit with 1 if one lies."""
    if check is None:
        from core.host.selection import select_device

        opened = select_device(device)
        if as_json:
            declared = [fake_json(*each) for each in opened.fakes]
            print_json("core.fakes/1", device=str(opened), fakes=declared, check=None)
        else:
            _print_declared(str(opened), opened.fakes)
        return
    from core.verify.fakes.checks import check_library

    checked = check_library(check, device, timeout_s=timeout_s)
    if as_json:
        ops = [op_json(each) for each in checked.ops]
        print_json("core.fakes/1", device=checked.device, fakes=[], check={"library": checked.library, "ops": ops})
    else:
        _print_check(checked)
    if any(each.verdict == "lies" for each in checked.ops):
        raise typer.Exit(1)


def fake_json(fake: FakeOp, result: FakeResult) -> dict[str, Any]:
    """Return one element of `fakes` in core.fakes/1."""
    return {
        "op": fake.op,
        "rule": str(fake).partition(" -> ")[2],
        "samples": fake.samples is not None,
        "applied": result.applied,
        "reason": result.reason,
    }


def op_json(check: OpCheck) -> dict[str, Any]:
    """Return one element of `check.ops` in core.fakes/1."""
    return {
        "op": check.op,
        "schema": check.schema,
        "verdict": check.verdict,
        "declared": check.declared,
        "calls": check.calls,
        "lies": [{"call": each.call, "what": each.what} for each in check.lies],
        "reason": check.reason,
    }


def _print_declared(device: str, declared: tuple[tuple[FakeOp, FakeResult], ...]) -> None:
    print(f"device {device}: {len(declared)} fakes declared, {sum(result.applied for _, result in declared)} applied")
    for fake, result in declared:
        print(f"{'applied' if result.applied else 'not applied':<13}{fake}")
        print(f"{'':<13}{result.reason}")


def _print_check(checked: LibraryCheck) -> None:
    from core.verify.fakes.checks import FakeVerdict

    print(f"op library {checked.library} on device {checked.device}")
    for each in checked.ops:
        kind = "declared" if each.declared else "guessed"
        calls = f"  ({each.calls} {kind} call{'s' * (each.calls != 1)})" if each.calls else ""
        print(f"{each.verdict:<12}{each.op}{calls}")
        for lie in each.lies:
            print(f"{'':<12}{lie.what}")
            print(f"{'':<14}in {lie.call}")
        if each.reason:
            print(f"{'':<12}{each.reason}")
    verdicts = Counter(each.verdict for each in checked.ops)
    print(", ".join(f"{kind}: {verdicts[kind]}" for kind in get_args(FakeVerdict)) + f"; of {len(checked.ops)} ops")
