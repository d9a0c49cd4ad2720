"""Which warnings are errors in the tests of this repository, of the example vendor and of a new plugin."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from core.host.discovery import Discovery
from core.scaffold.names import choose_names
from core.scaffold.writing import render

ROOT = Path(__file__).resolve().parents[2]
SETTING = "filterwarnings"

# What the planted test file holds: `exec` gives a warning the module that it is to come from.
PLANTED = """
import warnings

import pytest

WARN = "warnings.warn(text, kind)"
OURS = {ours!r}
OTHERS = {others!r}


def warn(module, text, kind):
    exec(WARN, {{"__name__": module, "warnings": warnings, "text": text, "kind": kind}})


@pytest.mark.parametrize("module", OURS)
@pytest.mark.parametrize("kind", [RuntimeWarning, DeprecationWarning, {user}])
def test_ours_is_an_error(module, kind):
    with pytest.raises(kind, match="planted"):
        warn(module, "planted", kind)


@pytest.mark.parametrize("module", OTHERS)
def test_others_is_none(module):
    warn(module, "planted", UserWarning)
    if module not in OURS:
        warn(module, "planted", DeprecationWarning)


def test_what_dynamo_says_of_python_3_13_0_is_none():
    text = "Guards may run slower on Python 3.13.0. Consider upgrading to Python 3.13.1+."
    warn("torch._dynamo.guards", text, RuntimeWarning)


def test_a_file_left_open_is_an_error():
    with pytest.raises(pytest.PytestUnraisableExceptionWarning):
        warn("gc", "planted", pytest.PytestUnraisableExceptionWarning)
    with pytest.raises(ResourceWarning):
        warn("subprocess", "subprocess 1 is still running", ResourceWarning)


def test_what_stands_in_no_module_is_an_error():
    with pytest.raises({user}):
        exec(WARN, {{"warnings": warnings, "text": "planted", "kind": {user}}})
"""
OTHERS = ["torch._dynamo.guards", "transformers.utils", "triton.runtime.interpreter", "subprocess", "corelib", "simple"]
OURS = {
    "the repository": [
        "core",
        "core.host.selection",
        "core_cuda.ops.norm.norms",
        "tests.host.test_host",
        "plugins.npu.tests.conftest",
        "simulator",
    ],
    "the example vendor": ["core_acme", "core_acme.ops", "core.host.selection", "tests.test_ops"],
    "a new plugin": ["core_wave", "core_wave.ops", "core.host.selection", "tests.test_ops"],
}


def settings(name: str) -> list[str]:
    if name == "a new plugin":
        text = render(choose_names("wave", Discovery(entries=(), warnings=())))["pyproject.toml"]
    else:
        folder = {"the repository": ROOT, "the example vendor": ROOT / "examples" / "acme_device"}[name]
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    found: list[str] = tomllib.loads(text)["tool"]["pytest"]["ini_options"][SETTING]
    return found


@pytest.mark.parametrize("name", OURS)
def test_our_warnings_are_errors_and_those_of_others_are_not(name: str, tmp_path: Path) -> None:
    # A vendor's torch extension, written in C++, warns at the line of the Python code that called torch.
    user, others = ("FutureWarning", [*OTHERS, *OURS[name]]) if name == "a new plugin" else ("UserWarning", OTHERS)
    (tmp_path / "test_planted.py").write_text(PLANTED.format(ours=OURS[name], others=others, user=user))
    lines = "".join(f"    {line}\n" for line in settings(name))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{SETTING} =\n{lines}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_planted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "Guards may run slower" in done.stdout  # shown, though no error


def test_every_module_of_the_repository_counts_as_ours() -> None:
    """A module is imported by the name that it has below a folder of `pythonpath`."""
    patterns = [line.removeprefix("error:::") for line in settings("the repository") if line.startswith("error:::")]
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    names: set[str] = set()
    for folder in (ROOT / path for path in options["pythonpath"]):
        names |= {path.stem for path in folder.glob("*.py")}
        names |= {path.parent.name for path in folder.glob("[a-z]*/*.py")}
    assert {"core", "conftest", "tests", "simulator", "core_acme", "fake_npu", "interpreted"} <= names
    assert sorted(name for name in names if not any(re.match(pattern, name) for pattern in patterns)) == []
