"""tools/check_install.py: what it finds, what it says, and when it is due; pip resolves planted wheels, offline."""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = {"triton": "==3.7.1"}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("check_install")


def wheel(folder: Path, name: str, version: str, requires: dict[str, str] | None = None) -> None:
    """Write a wheel that holds metadata alone."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {other}{pin}" for other, pin in (requires or {}).items()]
    lines += ["Provides-Extra: hf", ""]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: planted\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a pip that knows planted wheels alone: `planted` needs torch, which pins its triton."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "planted", "1.0", {"torch": ">=2.11"})
    wheel(folder, "torch", "2.13.0", TORCH)
    for version in ("3.6.0", "3.7.1"):
        wheel(folder, "triton", version)
    known = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return known | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


def extras(scripts: Any, pin: str = "", **fields: Any) -> Any:
    """Return a set that asks for the planted package, with its pins in a file."""
    return scripts.Extras(
        names="hf", project="planted", constraints=(pin,) if pin else (), modules=("planted",), **fields
    )


def pinned(folder: Path, line: str) -> str:
    path = folder / "pins.txt"
    path.write_text(f"{line}\n")
    return str(path)


@pytest.mark.slow
def test_what_fits_together_resolves(scripts: Any, index: dict[str, str], tmp_path: Path) -> None:
    said = scripts.resolve(sys.executable, extras(scripts, pinned(tmp_path, "triton==3.7.1")), index)
    assert said.startswith("3 packages resolved in ")


def test_a_pin_that_contradicts_torch_is_told_in_one_line(scripts: Any, index: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(scripts.Failed) as caught:
        scripts.resolve(sys.executable, extras(scripts, pinned(tmp_path, "triton==3.6.0")), index)
    text = str(caught.value)
    assert "torch 2.13.0 depends on triton==3.7.1" in text and "(constraint) triton==3.6.0" in text
    assert text.startswith("pip can't resolve it: ") and "\n" not in text


@pytest.mark.slow
def test_an_extra_without_wheels_is_refused_as_expected_or_is_a_failure(scripts: Any, index: dict[str, str]) -> None:
    refusal = "No matching distribution found for torch"
    absent = extras(scripts, machines=("abacus",), refusal=refusal)
    with pytest.raises(scripts.Failed, match=r"which install_sets\.py says it can't"):
        scripts.resolve(sys.executable, absent, index)
    for path in Path(index["PIP_FIND_LINKS"]).glob("torch-*"):
        path.unlink()
    assert "as expected: No matching distribution found for torch" in scripts.resolve(sys.executable, absent, index)
    with pytest.raises(scripts.Failed, match="was to refuse it with 'No matching distribution found for ipex'"):
        wrong = extras(scripts, machines=("abacus",), refusal="No matching distribution found for ipex")
        scripts.resolve(sys.executable, wrong, index)
    with pytest.raises(scripts.Failed, match=f"pip can't resolve it: .*{refusal}"):
        scripts.resolve(sys.executable, extras(scripts), index)


@pytest.mark.slow
def test_wheels_of_this_machine_are_out_of_sight(
    scripts: Any, index: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the environment names, and those that pip's own configuration does."""
    configured = tmp_path / "pip.conf"
    configured.write_text(f"[global]\nfind-links = {index['PIP_FIND_LINKS']}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configured))
    for given in (index["PIP_FIND_LINKS"], None):
        monkeypatch.setenv("PIP_FIND_LINKS", given) if given else monkeypatch.delenv("PIP_FIND_LINKS")
        (tmp_path / str(given is None)).mkdir()
        seen = scripts.public(tmp_path / str(given is None)) | {"PIP_NO_INDEX": "1"}
        with pytest.raises(scripts.Failed, match="No matching distribution found for planted"):
            scripts.resolve(sys.executable, extras(scripts), seen)
        here = dict(os.environ) | {"PIP_NO_INDEX": "1"}
        assert "3 packages" in scripts.resolve(sys.executable, extras(scripts), here)


def test_each_package_needs_a_pin_and_torch_has_to_be_the_public_one(scripts: Any) -> None:
    versions = {"torch": "2.13.0", "typing_extensions": "4.16.0", "core": "0.1.0", "pip": "23.2.1"}
    scripts.compare(versions, {"torch": "2.13.0", "typing-extensions": "4.16.0"})
    scripts.compare(versions, {})  # a set without pins
    with pytest.raises(scripts.Failed, match=r"do not pin what was installed: typing_extensions==4\.16\.0"):
        scripts.compare(versions, {"torch": "2.13.0"})
    with pytest.raises(scripts.Failed, match=r"torch 2\.13\.0\+cpu is no public wheel"):
        scripts.compare(versions | {"torch": "2.13.0+cpu"}, {})


def test_a_command_that_fails_is_named_with_the_end_of_what_it_says(scripts: Any) -> None:
    program = "print('first'); print('second'); raise SystemExit('no device')"
    with pytest.raises(scripts.Failed, match=r"exits with 1: .*no device"):
        scripts.call([sys.executable, "-c", program], dict(os.environ))


def test_the_program_of_the_readme_is_found(scripts: Any) -> None:
    compile(scripts.example(), "README.md", "exec")
    assert "core.compile(" in scripts.example()


def test_pythons_that_are_not_here_are_named(
    scripts: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = scripts.find_pythons([own, "3.98", "3.99"])
    assert list(found) == [own] and found[own].version.startswith(own)
    assert "no usable Python 3.98 or 3.99 is on PATH or in pyenv" in capsys.readouterr().out
    with pytest.raises(scripts.Failed, match=r"none of the claimed Pythons is here: 3\.99"):
        scripts.find_pythons(["3.99"])


def test_pythons_of_pyenv_and_of_the_path_are_found(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def plant(path: Path, version: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)

    plant(tmp_path / "pyenv" / "versions" / "3.98.1" / "bin" / "python", "3.98.1")
    plant(tmp_path / "bin" / "python3.99", "3.99.2")
    plant(tmp_path / "bin" / "python3.98", "command not found")  # as a shim of pyenv's
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    found = scripts.find_pythons(["3.98", "3.99"])
    assert {each.version for each in found.values()} == {"3.98.1", "3.99.2"}


def test_a_python_that_nobody_claims_is_refused(scripts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.main(["--python", "3.9"]) == 1
    assert "FAILED: --python 3.9: pyproject.toml claims 3.11, " in capsys.readouterr().out


def test_the_check_is_due_until_each_python_here_is_noted_with_these_requirements(
    scripts: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {version: scripts.Python(version=f"{version}.7", path="") for version in scripts.claimed()[:2]}
    monkeypatch.setattr(scripts, "NOTE", tmp_path / "installed.json")
    monkeypatch.setattr(scripts, "check", lambda pythons, *, resolve_only: None)
    monkeypatch.setattr(scripts, "_find", here.get)

    def due() -> tuple[bool, str]:
        capsys.readouterr()
        return scripts.main(["--due"]) == 0, capsys.readouterr().out

    assert due()[0]
    assert scripts.main(["--due", "--resolve-only"]) == 0
    assert scripts.main(["--resolve-only"]) == 0 and due()[0]
    assert scripts.main(["--due", "--resolve-only"]) == 1  # what CI asks
    assert scripts.main(["--python", "3.11"]) == 0
    assert due() == (True, "make check-install is due: installed.json does not note Python 3.12\n")
    assert scripts.main(["--python", "3.12"]) == 0
    said = "it passed for these requirements on 3.11.7, 3.12.7; Python 3.13 is not here\n"
    assert due() == (False, f"skipped: make check-install; {said}")
    here["3.13"] = scripts.Python(version="3.13.0", path="")
    assert due()[0] and scripts.main([]) == 0 and not due()[0]
    monkeypatch.setattr(scripts, "digest", lambda: "another")
    assert due()[0]


def test_the_digest_is_of_requirements_and_pins_and_of_nothing_else(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_sets = importlib.import_module("install_sets")
    for name in ("pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    monkeypatch.setattr(install_sets, "ROOT", tmp_path)
    known = {install_sets.digest()}

    def after(name: str, old: str, new: str) -> str:
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new, 1))
        return str(install_sets.digest())

    assert after("pyproject.toml", "[tool.ruff]\n", "[tool.ruff]\n# shown\n") in known
    assert after("constraints.txt", "triton==", "# of torch\ntriton==") in known
    for name, old, new in (
        ("constraints.txt", "triton==3.7.1", "triton==3.6.0"),
        ("constraints-cuda.txt", "ninja==", "ninja==9"),
        ("pyproject.toml", "pluggy>=1.7", "pluggy>=1.6"),
        ("pyproject.toml", "triton>=3.6", "triton>=3.5"),
    ):
        made = after(name, old, new)
        assert made not in known
        known.add(made)
