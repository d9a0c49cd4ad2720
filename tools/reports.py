"""Write every report below docs/ that this machine can write: `make reports`, or ARGS=cpu for one of them.

    python tools/reports.py [NAME …] [--pages] [--npu-python PYTHON]

A run of the conformance suite becomes docs/conformance/DEVICE.json, one line a case, and DEVICE.md, which is rendered
from it. A record of other hardware stays as it is, and its page names the cases that the suite has gained since.
`--pages` runs nothing and renders these pages anew. The tools in `_TOOLS` write the other reports; the page of a sweep
names the model types of the installed transformers that it lacks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from documentation.pages import ROOT, render
from example_vendor import SOURCE, environment, install

FOLDER = ROOT / "docs/conformance"
SWEEPS = tuple(ROOT / "docs" / name for name in ("coverage.md", "architectures.md", "architectures-cuda.md"))
HERE = ("cpu", "acme")
"""The devices that every machine has: their reports are of the suite as it is, or a test fails."""
SIMULATED = "npu"
_TOOLS = {
    "faults": ("conformance_faults.py",),
    "coverage": ("sweep_coverage.py", "--report", "docs/coverage.md", "--held-out"),
    "architectures": ("sweep_architectures.py", "--report", "docs/architectures.md"),
}
REPORTS = (*HERE, SIMULATED, *_TOOLS)
_LAUNCHER = "plugins/npu/simulator/launch.py"

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """What a record and the suite of today do not have in common, by id."""

    #: Cases that the suite gives the device today and the recorded run did not have.
    missing: tuple[str, ...]
    #: Cases of the recorded run that the suite does not give the device any more.
    gone: tuple[str, ...]
    #: Number of cases that the suite gives the device today.
    total: int


def record(document: Mapping[str, Any]) -> Record:
    """Return what is kept of a document of core.conformance/1: all but texts and measurements of what passed.

    A case that passed is its worst ratio, null where nothing was measured; any other is its status and reason.
    """
    kept = ("device", "plugin", "environment", "level", "reached", "chosen", "seed", "started")
    cases = {case["id"]: _outcome(case) for case in document["cases"]}
    return {name: document[name] for name in kept} | {"elapsed_s": round(document["elapsed_s"], 1), "cases": cases}


def _outcome(case: Mapping[str, Any]) -> Any:
    if case["status"] == "pass":
        return None if case["worst_ratio"] is None else float(f"{case['worst_ratio']:.3g}")
    return ["excused" if case["excused"] else case["status"], case["reason"]]


def record_text(kept: Record) -> str:
    """Return a record as JSON, with one line for each field and each case."""
    cases = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kept['cases'][name])}" for name in sorted(kept["cases"]))
    fields = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in kept.items() if name != "cases")
    return f'{{\n{fields} "cases": {{\n{cases}\n }}\n}}\n'


def cases_today(kept: Record) -> list[str]:
    """Return the ids of the cases that the suite has today for the device of a record.

    A device that is not on this machine is stood in for: by the capabilities of the record, and by what its plugin
    implements of the canonical ops. Passes that a plugin registers are asked of the device itself, where it is here.
    """
    from core.common.conformance import ConformanceProfile
    from core.host.selection import conformance_profile, select_device
    from core_conformance.runner.suite import collect

    if kept["device"] in HERE:
        device = select_device(kept["device"])
        return [case.id for case in collect(device, conformance_profile(device))]
    return [case.id for case in collect(_stand_in(kept), ConformanceProfile())]


def _stand_in(kept: Record) -> Any:
    import torch

    from core.capabilities import Capabilities
    from core.host.selection import select_device

    told = dict(kept["environment"]["capabilities"])
    told["dtypes"] = frozenset(getattr(torch, name) for name in told["dtypes"])
    device = select_device(HERE[0])
    modes = tuple(told.pop("modes"))
    implementations = import_module(f"{kept['plugin']['entry_point'].partition('.')[0]}.implementations")
    parts = replace(device.parts, capabilities=Capabilities(modes=modes, **told))
    ops = implementations.IMPLEMENTATIONS
    return replace(device, name=kept["device"], parts=parts, ops=ops, fakes=(), passes=())


def compare(kept: Record, today: Collection[str]) -> Gap:
    """Return how a record differs from the suite of today.

    What a device that is stood in for has beyond `today` is no difference: cases of its plugin's own passes.
    """
    recorded, given = set(kept["cases"]), set(today)
    gone = recorded - given if kept["device"] in HERE else set()
    return Gap(
        missing=tuple(sorted(given - recorded)), gone=tuple(sorted(gone)), total=len(recorded | given) - len(gone)
    )


def page(kept: Record, gap: Gap) -> str:
    """Return the page of a record."""
    from core_conformance.case import AREAS, MAX_LEVEL

    areas = []
    for area, (level, covers) in AREAS.items():
        cases = {name: found for name, found in kept["cases"].items() if name.partition("/")[0] == area}
        if cases:
            ratios = [(found, name) for name, found in cases.items() if isinstance(found, float)]
            areas.append((area, level, covers, counts(cases), *max(ratios, default=(None, ""))))
    declared: dict[tuple[str, str], list[str]] = {}
    for name, found in kept["cases"].items():
        if isinstance(found, list):
            declared.setdefault(tuple(found), []).append(name)
    return render(
        "conformance-report.md.jinja",
        report=kept,
        gap=gap,
        counts=counts(kept["cases"]),
        areas=areas,
        declared={key: folded(names) for key, names in declared.items()},
        missing=folded(gap.missing),
        max_level=MAX_LEVEL,
        here=kept["device"] in HERE,
    )


def counts(cases: Mapping[str, Any]) -> Counter[str]:
    """Return the number of cases of each status."""
    return Counter(found[0] if isinstance(found, list) else "pass" for found in cases.values())


def folded(names: Collection[str]) -> list[str]:
    """Return ids, those that differ only in their last part as one: `ops/x/{float16,float32}`."""
    ends: dict[str, list[str]] = {}
    for name in names:
        stem, _, end = name.rpartition("/")
        ends.setdefault(stem, []).append(end)
    return [f"{stem}/" + (last[0] if len(last) == 1 else f"{{{','.join(last)}}}") for stem, last in ends.items()]


def stale(folder: Path, today: Mapping[str, Collection[str]]) -> list[str]:
    """Return what is wrong with the committed reports of these devices, a line each with the command that mends it.

    today: device -> the cases that the suite has for it.
    """
    wrong = []
    for device, ids in today.items():
        kept = json.loads((folder / f"{device}.json").read_text(encoding="utf-8"))
        gap = compare(kept, ids)
        written = (folder / f"{device}.md").read_text(encoding="utf-8")
        if device in HERE and (gap.missing or gap.gone):
            lacks, too_many = (", ".join(folded(names)) or "none" for names in (gap.missing, gap.gone))
            why = f"lacks {lacks}, has {too_many} too many"
            wrong.append(f"docs/conformance/{device}.json is of another suite: {why}; make reports ARGS={device}")
        elif written != page(kept, gap):
            wrong.append(f"docs/conformance/{device}.md does not say what its record does; make reports ARGS=--pages")
    return wrong


def with_missing_types(text: str, types: Collection[str]) -> str:
    """Return the page of a sweep with a line behind its versions that names the model types it lacks of these."""
    known = set(re.findall(r"^(?:\| |- )`([^`]+)`", text, re.MULTILINE))
    missing = sorted(set(types) - known)
    told = f"\n\n**Behind**: it lacks {len(missing)} of the {len(types)} model types of today: {', '.join(missing)}."
    plain = re.sub(r"\n\n\*\*Behind\*\*.*", "", text)
    return re.sub(r"^core \S+, torch .*", lambda line: line[0] + told, plain, flags=re.M) if missing else plain


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print what is being written and how long it took."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    yield
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)


def run_suite(device: str, command: list[str], folder: Path) -> None:
    """Run the suite on a device and keep its record; raise `RuntimeError` where it proves less than level 3."""
    target = folder / "report.json"
    arguments = ["-m", "core", "conformance", "--device", device, "--json", str(target)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment(folder), stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"the suite fails on {device} (exit code {done.returncode}); its report stays as it was")
    text = record_text(record(json.loads(target.read_text(encoding="utf-8"))))
    (FOLDER / f"{device}.json").write_text(text, encoding="utf-8")


def write_pages(folder: Path) -> None:
    """Render the page of every record, and say on those of the sweeps what they lack.

    folder: makes the example device known to this process.
    """
    from core.engine.models.tiny import causal_lm_types

    for path in SWEEPS:
        path.write_text(with_missing_types(path.read_text(encoding="utf-8"), causal_lm_types()), encoding="utf-8")
    install(folder)
    sys.path[:0] = [str(folder), str(SOURCE)]
    for path in sorted(FOLDER.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        path.with_suffix(".md").write_text(page(kept, compare(kept, cases_today(kept))), encoding="utf-8")


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(REPORTS)}; all unless given.")] = None,
    pages: Annotated[bool, typer.Option("--pages", help="Run nothing: render the pages of the records.")] = False,
    npu_python: Annotated[Path, typer.Option(help="Python that has torch_npu.")] = Path(".venv-npu/bin/python"),
) -> None:
    """Write the reports."""
    unknown = sorted({*(names or ())} - {*REPORTS})
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)} is none of {', '.join(REPORTS)}")
    for name in () if pages else names or REPORTS:
        if name == SIMULATED and not npu_python.exists():
            print(f"== {name}: skipped, no {npu_python} is here (make .venv-npu/.installed); its report stays")
            continue
        with timed(name), tempfile.TemporaryDirectory() as folder:
            if name in _TOOLS:
                script, *arguments = _TOOLS[name]
                command = [sys.executable, str(ROOT / "tools" / script), *arguments]
                subprocess.run(command, cwd=ROOT, env=environment(Path(folder)), check=True)
            else:
                own = [sys.executable]
                launched = [str(npu_python), _LAUNCHER, "--devices", "2", "--", str(npu_python)]
                run_suite(name, launched if name == SIMULATED else own, Path(folder))
    with timed("pages"), tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder))


if __name__ == "__main__":
    typer.run(main)
