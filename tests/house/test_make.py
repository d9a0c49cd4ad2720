"""The Makefile: which tests its targets run, with which Python, and in which folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = "plugins/npu/tests/simulated/simulator/test_build.py"
# What a `make test` that runs these tests may have been given hands on to a make within.
GIVEN = {
    "ARGS",
    "DOCS_VENV",
    "EXTRAS",
    "NPU_VENV",
    "PYTHON",
    "RAY_VENV",
    "RUN_EXTRAS",
    "TRITON_VENV",
    "VENV",
    "WORKERS",
}
CHOOSE = ROOT / "tools" / "choose_python.sh"


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key not in GIVEN}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def tool(path: Path, script: str) -> Path:
    """Write an executable that runs a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def python(path: Path, version: str, *, ensurepip: bool = True) -> Path:
    """Write what answers the questions of choose_python.sh as a Python of this version would."""
    old = tuple(map(int, version.split("."))) < (3, 11)
    answers = {
        "*print*": f"echo {version}",
        "*sys.exit*": f"exit {int(old)}",
        "*ensurepip*": f"exit {int(not ensurepip)}",
    }
    cases = " ".join(f"{pattern}) {answer} ;;" for pattern, answer in answers.items())
    return tool(path, f'case "$2" in {cases} *) echo "$@" >> "$0.log" ;; esac')


def chosen(path: Path, name: str = "") -> tuple[str, str]:
    """Return what choose_python.sh prints with this folder as PATH: the choice, and what it says."""
    done = subprocess.run(["/bin/sh", CHOOSE, name], env={"PATH": str(path)}, capture_output=True, text=True)
    assert (done.returncode == 0) == bool(done.stdout)
    assert len(done.stderr.splitlines()) <= 1
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        ("", "plugins/npu/tests"),
        ("-k word -x", "plugins/npu/tests -k word -x"),
        ("-k plugins --ignore=plugins/npu/tests/data", "plugins/npu/tests -k plugins --ignore=plugins/npu/tests/data"),
        (FILE, FILE),
        (f"-x ./{FILE}::test_a", f"-x ./{FILE}::test_a"),
        (str(ROOT / FILE), str(ROOT / FILE)),
    ],
)
def test_a_path_narrows_the_tests_of_the_simulated_npu(arguments: str, ends: str) -> None:
    shown = make("-n", "test-npu-sim", f"ARGS={arguments}").stdout
    assert " ".join(shown.split()).endswith(f"--dist loadfile {ends}")


def test_python3_is_used_where_it_can_be(tmp_path: Path) -> None:
    python(tmp_path / "python3", "3.11.7")
    python(tmp_path / "python3.13", "3.13.0")
    assert chosen(tmp_path) == ("python3", "")


def test_the_newest_tested_python_stands_in_for_an_old_one_and_that_is_said(tmp_path: Path) -> None:
    python(tmp_path / "python3", "3.9.18")
    python(tmp_path / "python3.11", "3.11.7")
    python(tmp_path / "python3.12", "3.12.1")
    tool(tmp_path / "python3.13", "exit 127")  # as a shim of a version manager that has not chosen it
    assert chosen(tmp_path) == ("python3.12", "== python3 is Python 3.9.18: using python3.12 (3.12.1)")


def test_a_python_that_can_make_no_environment_is_passed_over(tmp_path: Path) -> None:
    python(tmp_path / "python3", "3.11.2", ensurepip=False)
    python(tmp_path / "python3.12", "3.12.1")
    name, said = chosen(tmp_path)
    assert name == "python3.12" and "without the modules venv and ensurepip" in said and "python3.11-venv" in said


def test_a_newer_python_than_the_tested_ones_is_used_and_that_is_said(tmp_path: Path) -> None:
    python(tmp_path / "python3", "3.19.0")
    assert chosen(tmp_path) == ("python3", "== python3 is Python 3.19.0, which nobody tested core with")


def test_no_python_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    python(tmp_path / "python3", "3.9.18")
    name, said = chosen(tmp_path)
    assert name == "" and all(part in said for part in ("needs Python 3.11 or newer", "3.9.18", "make PYTHON=/path/to"))
    assert "python3 is not there" in chosen(tmp_path / "empty")[1]


def test_a_python_asked_for_by_name_is_used_or_refused(tmp_path: Path) -> None:
    python(tmp_path / "python3", "3.12.1")
    old = str(python(tmp_path / "old", "3.10.13"))
    name, said = chosen(tmp_path, old)
    assert name == "" and said.endswith(f"{old} is Python 3.10.13")
    assert chosen(tmp_path, str(tmp_path / "python3")) == (str(tmp_path / "python3"), "")


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    old = python(tmp_path / "a b" / "old", "3.10.13")
    done = make("run", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0 and f"{old} is Python 3.10.13" in done.stderr
    assert not (tmp_path / "venv").exists() and not old.with_name("old.log").exists()


def test_the_pythons_that_make_looks_for_are_those_that_the_project_claims() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(lines))
    text = CHOOSE.read_text(encoding="utf-8")
    assert f'tested="{" ".join(reversed(claimed))}"' in text and f"(tested: {', '.join(claimed)})" in text


def test_the_targets_work_in_a_folder_whose_name_has_spaces(tmp_path: Path) -> None:
    checkout = tmp_path / "a b" / "core"
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/choose_python.sh"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "examples" / "acme_device").mkdir(parents=True)
    log = tmp_path / "log"
    script = f'echo "$(pwd): $(basename "$0") $*" >> "{log}"'
    # An interpreter that "makes" the environment: all of its tools write down how they were called.
    tools = 'for each in python core ruff mypy; do cp "$0" "$3/bin/$each"; done'
    made = f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; {tools}; fi'
    tool(checkout / "py thon", f'case "$2" in *print*) echo 3.12.1 ;; esac\n{made}\n{script}')
    for target in ("run", "test", "check"):
        done = make(target, f"PYTHON={checkout / 'py thon'}", cwd=checkout)
        assert done.returncode == 0, done.stdout + done.stderr
    calls = log.read_text()
    acme = checkout / "examples" / "acme_device"
    assert f"{checkout}: core run --device auto\n" in calls
    assert f"{checkout}: python -m pytest --numprocesses" in calls and f"{acme}: python -m pytest --num" in calls
    assert f"{checkout}: ruff check ." in calls and f"{acme}: mypy" in calls
    # `run` does without what the tests need, and installs nothing once that is there.
    installed = re.findall(r"pip install .*--editable \.\[(.*)\]", calls)
    assert installed == ["hf,serve", "hf,dev,conformance"]
    (checkout / ".venv" / ".installed-to-run").unlink()
    assert make("test", cwd=checkout).returncode == 0 and make("run", cwd=checkout).returncode == 0
    assert re.findall(r"pip install .*\[(.*)\]", log.read_text()) == [*installed, "hf,serve"]


def test_compiled_modules_are_kept_whatever_the_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    shown = make("--eval", 'shown: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"', "shown")
    assert shown.stdout == "[]\n", shown.stderr
