"""GitHub's workflow files, run by hand: the commands of a job, one after the other in bash, as a runner does it."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CALLED = re.compile(r"[\w.-]+/core/(\.github/workflows/[\w-]+\.yml)@v\S+")
_EXPRESSION = re.compile(r"\$\{\{ *(\w+)\.([\w-]+) *\}\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step that runs a command. always: also after a step that failed."""

    name: str
    command: str
    always: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The commands of a job with the variables that they see."""

    steps: tuple[Step, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def read(path: Path) -> dict[str, Any]:
    """Return a workflow; YAML takes its key `on` for a truth value."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in document.items()}


def job_of(path: Path, name: str) -> Job:
    """Return a job; what it calls in core's repository is read from there, with its inputs checked and filled in."""
    workflow = read(path)
    job = workflow["jobs"][name]
    if "uses" in job:
        called = CALLED.fullmatch(job["uses"])
        assert called is not None, job["uses"]
        return _called(read(ROOT / called[1]), job.get("with", {}))
    return _job(workflow, job, {})


def _called(workflow: dict[str, Any], given: Mapping[str, Any]) -> Job:
    declared = workflow["on"]["workflow_call"]["inputs"]
    assert given.keys() <= declared.keys(), f"inputs that are not declared: {given.keys() - declared.keys()}"
    missing = {each for each, rule in declared.items() if rule.get("required")} - given.keys()
    assert not missing, f"inputs that are required: {missing}"
    kinds = {"string": str, "number": int, "boolean": bool}
    wrong = [each for each, value in given.items() if type(value) is not kinds[declared[each]["type"]]]
    assert not wrong, f"inputs of another type than declared: {wrong}"
    inputs = {each: rule.get("default") for each, rule in declared.items()} | dict(given)
    (job,) = workflow["jobs"].values()
    return _job(workflow, job, inputs)


def _job(workflow: Mapping[str, Any], job: Mapping[str, Any], inputs: Mapping[str, Any]) -> Job:
    env = {**workflow.get("env", {}), **job.get("env", {})}
    steps = [each for each in job["steps"] if "run" in each]
    assert all(each.get("if", "always()") == "always()" for each in steps), "a condition that this can't judge"
    return Job(
        env={name: _filled(str(text), inputs) for name, text in env.items()},
        steps=tuple(
            Step(name=each.get("name", each["run"]), command=each["run"], always="if" in each) for each in steps
        ),
    )


def _filled(text: str, inputs: Mapping[str, Any]) -> str:
    def value(found: re.Match[str]) -> str:
        assert found[1] == "inputs", found[0]
        return str(inputs[found[2]])

    return _EXPRESSION.sub(value, text)


def run(job: Job, folder: Path, env: Mapping[str, str]) -> Iterator[tuple[Step, subprocess.CompletedProcess[str]]]:
    """Run the steps in a folder and yield each with how it ended; after a failure, only those that always run."""
    failed = False
    for step in job.steps:
        if failed and not step.always:
            continue
        # Without an index there is nothing that makes editable wheels.
        text = step.command.replace("--editable ", "")
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=folder, env={**env, **job.env}, capture_output=True, text=True, timeout=1800, check=False
        )
        failed = failed or done.returncode != 0
        yield step, done


def environment(folder: Path, wheels: Path) -> dict[str, str]:
    """Make an environment as a runner has it, and return its variables: what an index would have is here already.

    It sees the packages of this one but `core`, which pip takes from the folder of wheels.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    packages = folder / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # An editable installation of core is a file that names the checkout, beside its metadata.
        if not re.match(r"_?_?(editable__)?_?core[-_.]", entry.name):
            (packages / entry.name).symlink_to(entry)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    Path(site.stdout.strip(), "packages.pth").write_text(f"{packages}\n")
    for name in ("mypy", "pip", "pytest"):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{python}" -m {name} "$@"\n')
        script.chmod(0o755)
    (folder / "bin" / "ruff").symlink_to(Path(sys.executable).parent / "ruff")
    return {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_QUIET": "1",
        "OMP_NUM_THREADS": "1",
        "CORE_PROBE_TIMEOUT_S": "30",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
