"""Reports as runs would leave them, without running anything."""

from __future__ import annotations

import math
import random

from core.device import PluginInfo
from core_conformance.case import AREAS, MAX_LEVEL
from core_conformance.outcome import Measurement, Outcome, Status
from core_conformance.report.report import Environment, Report
from core_conformance.rules.levels import reached

PLUGIN = PluginInfo(
    device="acme",
    distribution="acme-device",
    version="0.1.0",
    entry_point="core_acme.plugin",
    probe_entry_point="core_acme.probe:probe",
    requires_core=">=0.1",
)
ENVIRONMENT = Environment(
    device_name="Acme One",
    capabilities={
        "device_name": "Acme One",
        "dtypes": ["bfloat16", "float32"],
        "modes": ["full", "piecewise"],
        "fp64": False,
        "deterministic": True,
        "update": False,
        "extra": {"driver": "7.1", "cores": 8},
        "unprofitable": {"merge_linears": "slower here"},
    },
    versions={"core": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "triton": None},
    driver="driver 7.1",
    platform="Linux",
    workers=2,
)
EVERY_STATUS = (
    Outcome(id="host/probe", status="pass", elapsed_s=0.2),
    Outcome(id="torch/gelu/float32", status="crash", reason="the process died of SIGSEGV", detail="Fatal error\n"),
    Outcome(id="torch/add/float32", status="timeout", reason="longer than 120 s"),
    Outcome(
        id="ops/rms_norm/bfloat16/rows-7",
        status="fail",
        reason="out: rms error 3.1 times its bound",
        detail="Traceback (most recent call last):\n  …\nAssertionError",
        elapsed_s=1.25,
        measurements=(
            Measurement(name="out", criterion="T1", ratio=3.1, reason="rms", dtype="bfloat16", num_elements=4096),
            Measurement(name="residual", criterion="T0", ratio=0.0, dtype="bfloat16", num_elements=4096),
            Measurement(name="codes", criterion="T0", ratio=math.inf, reason="3 differ", dtype="int8", num_elements=9),
        ),
        notes=("ran on fused_rms_norm",),
    ),
    Outcome(id="ops/rotary/float64", status="not-supported", reason="float64 is not among its dtypes"),
    Outcome(id="fakes/rotary", status="xfail", reason="known, until 0.2", elapsed_s=0.5),
    Outcome(id="graphs/replay/one", status="xpass", reason="listed as an expected failure: known", elapsed_s=2.0),
    Outcome(id="models/llama", status="skip", reason="transformers is not installed"),
)


def report(
    outcomes: tuple[Outcome, ...] = EVERY_STATUS, *, level: int = MAX_LEVEL, chosen: tuple[str, ...] = ()
) -> Report:
    """Return the report of a run with these outcomes."""
    proven, obstacles = reached(outcomes, complete=not chosen, level=level)
    return Report(
        name="acme",
        plugin=PLUGIN,
        environment=ENVIRONMENT,
        level=level,
        fuzz=3,
        seed=7,
        started="2026-01-02T03:04:05Z",
        elapsed_s=65.5,
        outcomes=outcomes,
        cases={outcome.id: f"what {outcome.id} shows" for outcome in outcomes},
        reached=proven,
        obstacles=obstacles,
        chosen=chosen,
    )


def passing(level: int = MAX_LEVEL) -> Report:
    """Return the report of a run in which every area up to a level has one case, and that passes."""
    areas = [area for area, (own, _) in AREAS.items() if own <= level]
    return report(tuple(Outcome(id=f"{area}/x", status="pass", elapsed_s=0.5) for area in areas), level=level)


def large(num_cases: int = 600, num_measurements: int = 10_000, *, broken: bool = False) -> Report:
    """Return a report of many cases. broken: every one of them failed, with a long traceback."""
    draw = random.Random(0)
    each = num_measurements // num_cases
    return report(tuple(_case(number, each, draw, broken) for number in range(num_cases)))


def _case(number: int, num_measurements: int, draw: random.Random, broken: bool) -> Outcome:
    area = list(AREAS)[number % len(AREAS)]
    status: Status = "fail" if broken or number % 97 == 0 else "not-supported" if number % 23 == 0 else "pass"
    dtype = ("bfloat16", "float16", "float32")[number // 8 % 3]
    measured = []
    for index in range(0 if status == "not-supported" else num_measurements):
        wrong = broken or (status == "fail" and index == 0)
        ratio = draw.uniform(1.5, 900) if wrong else draw.choice((0.0, min(draw.lognormvariate(-1.5, 0.7), 0.99)))
        reason = "rms error above its bound" if wrong else ""
        item = Measurement(
            name=f"layer {index}, output", criterion="T1", ratio=ratio, reason=reason, dtype=dtype, num_elements=8192
        )
        measured.append(item)
    return Outcome(
        id=f"{area}/subject-{number % 31}/{dtype}/variant-{number}",
        status=status,
        reason={"fail": "layer 0: above its bound", "not-supported": "mode 'piecewise' is not offered"}.get(status, ""),
        detail="Traceback (most recent call last):\n" + "  frame of some module\n" * 200 if status == "fail" else "",
        elapsed_s=draw.uniform(0.01, 3),
        measurements=tuple(measured),
    )
