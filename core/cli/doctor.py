"""`core doctor`: imports and opens every plugin, each in a process of its own, and says which one is broken and why."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import typer

from core._version import __version__
from core.cli.devices import plugin_json
from core.cli.output import console, print_json, print_warnings
from core.cli.output import status as telling
from core.cli.reports.entries import Entry, print_entries
from core.host.bytecode import uncompiled
from core.host.probing import DeviceScan, DeviceStatus
from core.host.workers.worker import Asked, WorkerResult
from core.settings import Settings

Verdict = Literal["pass", "fail", "unavailable", "skipped"]

_TIMEOUT_S = 120.0
_PACKAGES = ("torch", "pluggy", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on one plugin."""

    status: DeviceStatus
    verdict: Verdict
    #: Product name of an opened device, else the cause of the verdict.
    detail: str
    hint: str = ""
    error: dict[str, Any] | None = None
    traceback: str = ""
    warnings: tuple[str, ...] = ()


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON (core.doctor/1)."),
    timeout_s: float = typer.Option(_TIMEOUT_S, "--timeout-s", min=1.0, help="Seconds each plugin may take to open."),
) -> None:
    """Import and open every plugin in a process of its own; exit with 1 if one is broken."""
    with telling("probing devices", quiet=as_json) as say:
        with DeviceScan(Settings.from_environment(), ask_torch=True) as scan:
            statuses = scan.statuses()
            warnings = scan.warnings
        say("importing and opening each plugin")
        diagnoses = diagnose(statuses, timeout_s)
    warnings += tuple(warning for diagnosis in diagnoses for warning in diagnosis.warnings)
    warnings += tuple(filter(None, (uncompiled(),)))
    if as_json:
        print_json(
            "core.doctor/1",
            versions=versions(),
            plugins=[_diagnosis_json(diagnosis) for diagnosis in diagnoses],
            warnings=list(warnings),
        )
    else:
        _print_text(diagnoses)
        print_warnings(warnings)
    if any(diagnosis.verdict == "fail" for diagnosis in diagnoses):
        raise typer.Exit(1)


def versions() -> dict[str, str | None]:
    """Return the versions that decide what works, from metadata; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0], "core": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def diagnose(statuses: tuple[DeviceStatus, ...], timeout_s: float) -> list[Diagnosis]:
    """Open each plugin that may be loaded, all at once, and judge every status."""
    with Asked() as asked:
        for status in statuses:
            if status.outcome is not None:
                name = status.plugin.device
                asked.ask(name, "core.host.doctor_worker", device=name, timeout_s=timeout_s)
        results = asked.results()
    return [_judge(status, results.get(status.plugin.device)) for status in statuses]


def _judge(status: DeviceStatus, result: WorkerResult | None) -> Diagnosis:
    if status.outcome is None or result is None:
        verdict: Verdict = "skipped" if status.state == "blocked" else "fail"
        return Diagnosis(status=status, verdict=verdict, detail=status.reason, hint=status.hint)
    warnings = _warnings(status)
    if status.outcome.failed:
        detail, hint, output = status.reason, status.hint, status.outcome.output
    elif result.answer is None:
        detail, output = f"opening it {result.problem}", result.output
        hint = f"report it to the author of {status.plugin.distribution}"
    else:
        return _from_answer(status, result.answer, warnings)
    return Diagnosis(status=status, verdict="fail", detail=detail, hint=hint, traceback=output, warnings=warnings)


def _from_answer(status: DeviceStatus, answer: dict[str, Any], warnings: tuple[str, ...]) -> Diagnosis:
    if answer["status"] == "pass":
        return Diagnosis(status=status, verdict="pass", detail=answer["device_name"], warnings=warnings)
    # A probe that says yes although the device does not open misleads `auto`, so that plugin or its installation is
    # broken. A plugin without a probe promised nothing.
    promised = status.state == "available" and status.device_count is not None
    unavailable = answer["status"] == "unavailable" and not promised
    error: dict[str, Any] = answer["error"]
    return Diagnosis(
        status=status,
        verdict="unavailable" if unavailable else "fail",
        detail=error["found"],
        hint=error["remedy"],
        error=error,
        # The traceback of an absent device tells nobody anything.
        traceback="" if unavailable else answer["traceback"],
        warnings=warnings,
    )


def _warnings(status: DeviceStatus) -> tuple[str, ...]:
    if status.outcome is None or not status.outcome.imported_torch:
        return ()
    return (f"the probe of plugin {status.plugin} imports torch, which makes every `core devices` slow",)


def _diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "device": diagnosis.status.plugin.device,
        "plugin": plugin_json(diagnosis.status.plugin),
        "verdict": diagnosis.verdict,
        "state": diagnosis.status.state,
        "detail": diagnosis.detail,
        "hint": diagnosis.hint,
        "error": diagnosis.error,
        "traceback": diagnosis.traceback,
    }


def _print_text(diagnoses: list[Diagnosis]) -> None:
    print("  ".join(f"{name} {number or '(not installed)'}" for name, number in versions().items()))
    print_entries(console(), ("device", "verdict", "plugin"), map(_entry, diagnoses))


def _entry(item: Diagnosis) -> Entry:
    return Entry(
        cells=(item.status.plugin.device, item.verdict, str(item.status.plugin)),
        state=item.verdict,
        sentences=(item.detail, item.hint and f"to do: {item.hint}"),
        raw=item.traceback.splitlines(),
    )
