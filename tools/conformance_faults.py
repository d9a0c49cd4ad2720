"""Run the conformance suite on the example device with each planted fault, and write docs/conformance-faults.md.

    python tools/conformance_faults.py [--only NAME …] [--check]

A fault's own area is run first; only where it passes there, the whole suite. `--check` writes nothing and fails unless
every fault is rejected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from core_acme.faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/conformance-faults.md"
_ALONE = ("--workers", "1", "--threads", "1")
_BAD = ("fail", "crash", "timeout", "xpass")

app = typer.Typer(add_completion=False)


def run_suite(fault: str, *arguments: str) -> dict[str, Any]:
    """Run `core conformance --device acme` with a fault ("" for none) and return its report."""
    environment = {**os.environ, "ACME_FAULT": fault} if fault else dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        command = [sys.executable, "-m", "core", "conformance", "--device", "acme", "--json", str(target), *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not target.exists():
            raise RuntimeError(f"{fault}: no report\n{ended.stdout}{ended.stderr}")
        report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return report


def rejected_by(fault: str) -> tuple[list[dict[str, Any]], str]:
    """Return the cases that reject a fault, and what was run to find them."""
    area = FAULTS[fault].area
    for arguments in (("--case", f"{area}/*", *_ALONE), _ALONE):
        cases = [case for case in run_suite(fault, *arguments)["cases"] if case["status"] in _BAD]
        if cases:
            return cases, f"area {area}" if arguments is not _ALONE else "all"
    return [], "all"


def row(fault: str, cases: list[dict[str, Any]], where: str) -> str:
    """Return one line of the table."""
    what = FAULTS[fault].what
    if not cases:
        return f"| `{fault}` | {what} | **not rejected** | 0 | |"
    first = cases[0]
    reason = " ".join(first["reason"].split()).replace("|", "\\|")
    reason = reason if len(reason) <= 160 else f"{reason[:157]}…"
    return f"| `{fault}` | {what} | `{first['id']}` | {len(cases)} | {reason} |"


def page(rows: dict[str, list[str]], honest: dict[str, Any], versions: dict[str, Any]) -> str:
    """Return the page."""
    reached = honest["reached"]
    count = sum(len(lines) for lines in rows.values())
    lines = [
        "# Planted faults",
        "",
        "Written by `tools/conformance_faults.py`: do not edit. The example device (`examples/acme_device`) is told",
        "to be wrong in one way (`ACME_FAULT=name`), and the suite is run on it: first the area in which the fault",
        "lies, and everything only where that finds nothing. A fault that no case rejects is a hole in the suite.",
        "",
        f"Without a fault the device reaches level {reached}: {honest['counts']['pass']} cases pass, "
        f"{honest['counts']['not-supported']} are declared not supported. torch {versions['torch']}, "
        f"transformers {versions['transformers']}, suite {honest['suite']}.",
        "",
        f"{count} faults; rejecting cases are counted within the area that was run.",
    ]
    for area, table in rows.items():
        lines += ["", f"## {area}", "", "| fault | what is wrong | first case to reject it | cases | it says |"]
        lines += ["|---|---|---|---|---|", *table]
    return "\n".join(lines) + "\n"


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Names of faults; all unless given.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail unless all are rejected.")] = False,
    jobs: Annotated[int, typer.Option(help="Faults run at once.")] = 2,
) -> None:
    """Reject every planted fault, and write down by what."""
    names = only or list(FAULTS)
    missed = []
    rows: dict[str, list[str]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for fault, (cases, where) in zip(names, pool.map(rejected_by, names), strict=True):
            rows.setdefault(FAULTS[fault].area, []).append(row(fault, cases, where))
            missed += [] if cases else [fault]
            print(f"{fault}: {cases[0]['id'] + f' and {len(cases) - 1} more' if cases else 'NOT REJECTED'}", flush=True)
    if not check and only is None:
        honest = run_suite("")
        PAGE.write_text(page(rows, honest, honest["environment"]["versions"]), encoding="utf-8")
    print(f"{len(names) - len(missed)} of {len(names)} rejected")
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
