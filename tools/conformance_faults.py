"""Run the conformance suite on the example device with each planted fault, and write docs/conformance-faults.md.

    python tools/conformance_faults.py [--only NAME …] [--check]

A fault's own area is run first; only where it passes there, the whole suite. `--check` writes nothing and fails unless
every fault is rejected.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from core_acme.faults import FAULTS, VARIABLE, Fault

from documentation.pages import ROOT, render
from example_vendor import environment

PAGE = ROOT / "docs/conformance-faults.md"
_BAD = ("fail", "crash", "timeout", "xpass")

Rejection = dict[str, Any]
"""A case of core.conformance/1 that found a fault."""


def run_suite(fault: str, *arguments: str) -> list[Rejection]:
    """Run `core conformance --device acme` with a fault and return the cases that reject it."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        command = [sys.executable, "-m", "core", "conformance", "--device", "acme", "--json", str(target)]
        variables = environment(Path(folder), **{VARIABLE: fault})
        ended = subprocess.run(
            [*command, "--workers", "1", "--threads", "1", *arguments], env=variables, capture_output=True, text=True
        )
        if not target.exists():
            raise RuntimeError(f"{fault}: no report\n{ended.stdout}{ended.stderr}")
        cases = json.loads(target.read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["status"] in _BAD]


def rejections(fault: str) -> list[Rejection]:
    """Return the cases that reject a fault: those of its area, or of the whole suite where these pass."""
    return run_suite(fault, "--case", f"{FAULTS[fault].area}/*") or run_suite(fault)


def page(found: dict[str, list[Rejection]]) -> str:
    """Return the page, with a table for each area."""
    tables: dict[str, list[tuple[Fault, list[Rejection]]]] = {}
    for fault, cases in found.items():
        tables.setdefault(FAULTS[fault].area, []).append((FAULTS[fault], cases))
    return render("conformance-faults.md.jinja", count=len(found), tables=tables)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Names of faults; all unless given.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail unless all are rejected.")] = False,
    jobs: Annotated[int, typer.Option(help="Faults run at once.")] = 2,
) -> None:
    """Reject every planted fault, and write down by what."""
    found = {}
    names = only or list(FAULTS)
    with ThreadPoolExecutor(jobs) as pool:
        for fault, cases in zip(names, pool.map(rejections, names), strict=True):
            found[fault] = cases
            print(f"{fault}: {cases[0]['id'] + f' and {len(cases) - 1} more' if cases else 'NOT REJECTED'}", flush=True)
    if not check and only is None:
        PAGE.write_text(page(found), encoding="utf-8")
    num_rejected = sum(map(bool, found.values()))
    print(f"{num_rejected} of {len(found)} rejected")
    if num_rejected < len(found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
