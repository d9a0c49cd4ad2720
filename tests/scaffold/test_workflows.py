"""The workflows here and of a new plugin: their commands exist, and run in an environment like that of a runner.

What is shown here is what bash does with the steps, not what GitHub does with the files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from core.cli import COMMANDS, _app
from core.host.discovery import discover
from core.scaffold.names import choose_names
from core.scaffold.writing import render, write
from core.settings import Settings
from tests.scaffold.workflows import ROOT, Job, Step, environment, job_of, read, run

OWN = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workflows") / "wave"
    write(render(choose_names("wave", discover(Settings.from_environment({})))), folder)
    return folder


def unknown(command: str) -> list[str]:
    """Return the `core` commands, and options of them, that a shell text has and the command line has not."""
    found = []
    for name, rest in re.findall(r"\bcore +([\w-]+)([^;|>&]*)", command.replace("\\\n", " ")):
        if name == "--version":
            continue
        if name not in COMMANDS:
            found.append(name)
            continue
        parser: Any = typer.main.get_command(_app(name))
        known = {option for each in parser.commands[name].params for option in each.opts}
        found += [f"{name} {option}" for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest) if option not in known]
    return found


def test_an_option_that_is_gone_is_seen() -> None:
    assert unknown('core conformance --device "$D" --jnuit x && core devcies; core --version') == [
        "conformance --jnuit",
        "devcies",
    ]


def test_each_command_of_a_workflow_exists(plugin: Path) -> None:
    commands = [
        step["run"]
        for path in [*OWN, *plugin.glob(".github/workflows/*.yml")]
        for job in read(path)["jobs"].values()
        for step in job.get("steps", ())
        if "run" in step
    ]
    assert sum("core conformance --device" in command for command in commands) == 1
    assert not [each for command in commands for each in unknown(command)]
    # An input in the text of a command would be code that a caller writes.
    assert not [command for command in commands if "${{" in command]


def test_the_release_checks_what_make_dist_checks() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    steps = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["build"]["steps"]
    text = "\n".join(step.get("run", "") for step in steps)
    commands = re.findall(r"python (-m (?:build|twine)|tools/releases/check_dist\.py) ([^\n]*dist\S*)", text)
    assert len(commands) == 3
    assert all(f'/python" {program} {rest.split(" --tag")[0]}' in makefile for program, rest in commands)


def test_the_caller_gives_what_the_workflow_declares(plugin: Path) -> None:
    job = job_of(plugin / ".github" / "workflows" / "conformance.yml", "conformance")
    assert job.env["DEVICE"] == "wave" and job.env["LEVEL"] == "2" and job.env["XFAIL"] == "xfail.toml"
    assert job.env["CORE"].startswith("core[hf,conformance]>=") and job.env["INSTALL"] == ""
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8").partition("## In your CI")[2]
    declared = read(ROOT / ".github" / "workflows" / "conformance.yml")["on"]["workflow_call"]["inputs"]
    assert re.findall(r"^\| `([\w-]+)` \|", page.partition("\n## ")[0], re.M) == list(declared)


def test_what_follows_a_failure_is_what_always_runs(tmp_path: Path) -> None:
    steps = [
        Step(name=name, command=text, always=name == "c")
        for name, text in zip("abc", ("false", "true", "true"), strict=True)
    ]
    ran = [
        (step.name, done.returncode) for step, done in run(Job(steps=tuple(steps)), tmp_path, {"PATH": "/usr/bin:/bin"})
    ]
    assert ran == [("a", 1), ("c", 0)]


@pytest.mark.exhaustive  # minutes: the tests of the new plugin, and the suite
def test_the_steps_run_in_a_clean_folder(plugin: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    env = environment(tmp_path / "environment", wheels)
    for file, name in (("ci.yml", "check"), ("conformance.yml", "conformance")):
        for step, done in run(job_of(plugin / ".github" / "workflows" / file, name), plugin, env):
            assert done.returncode == 0, f"{step.name}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    report = plugin / "conformance-report"
    assert json.loads((report / "report.json").read_text(encoding="utf-8"))["reached"] == 2
    assert json.loads((report / "badge.json").read_text(encoding="utf-8"))["message"] == "level 2, wave-device 0.1.0"
    assert "LEVEL 2 OF 3" in (tmp_path / "environment" / "summary.md").read_text(encoding="utf-8")
    # Below the level asked for the job fails, and the report is there all the same.
    proof = job_of(plugin / ".github" / "workflows" / "conformance.yml", "conformance")
    broken = replace(proof, env={**proof.env, "LEVEL": "0"})
    package = next(plugin.glob("core_*/plugin.py"))
    package.write_text(package.read_text(encoding="utf-8").replace("def core_open_device(", "def core_open_devise("))
    ended = {step.name: done.returncode for step, done in run(broken, plugin, env)}
    assert ended["Prove the device"] == 1 and ended["Show the report"] == 0
    assert json.loads((report / "report.json").read_text(encoding="utf-8"))["reached"] is None
