"""What runs for each change: `.ci/run`, and beside it the jobs of a workflow, which leave nothing out that it names."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
RUN = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands_of_jobs() -> str:
    """Return the commands of all jobs."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    return "\n".join(step["run"] for job in jobs.values() for step in job["steps"] if "run" in step)


def test_what_a_change_leaves_to_other_jobs_runs_in_one() -> None:
    commands = commands_of_jobs()
    left = re.findall(r"a job of its own.*\(make ([\w-]+)\)", RUN)
    assert len(left) >= 5
    assert [target for target in left if not re.search(rf"make {target}\b", commands)] == []
    assert ".ci/run" in commands


def test_jobs_and_the_run_of_a_change_make_what_there_is() -> None:
    made = set(re.findall(r"make ([\w-]+)", RUN + commands_of_jobs()))
    assert {"test", "check", "docs", "test-slow"} <= made
    assert made <= TARGETS


def test_each_of_the_makefiles_tests_is_in_the_run_or_in_a_job_or_told_to_be_left_out() -> None:
    told = RUN + commands_of_jobs()
    tests = {target for target in TARGETS if target.startswith("test-")} - {"test-all"}
    assert {target for target in tests if not re.search(rf"make {target}\b", told)} == set()
