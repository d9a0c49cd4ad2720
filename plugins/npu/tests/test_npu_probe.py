"""The NPU probe over planted file systems: everything that can be missing, by name, with what to do about it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from core_npu import probe as module
from core_npu.probe import SIMULATED, find_runtime, probe

CANN = "usr/local/Ascend/ascend-toolkit/latest/lib64"
LIBRARIES = ("libascendcl.so", "libhccl.so")


def plant(root: Path, *, nodes: int = 0, driver: bool = True, libraries: tuple[str, ...] = ()) -> None:
    (root / "dev").mkdir()
    if driver:
        (root / "dev" / "davinci_manager").touch()
    for number in range(nodes):
        (root / "dev" / f"davinci{number}").touch()
    if libraries:
        put(root / CANN, *libraries)


def put(folder: Path, *libraries: str, content: bytes = b"\x7fELF") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in libraries:
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the package torch_npu be found; the versions of the distributions may be changed."""
    versions = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0.post1"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module.metadata, "version", version)
    return versions


def test_everything_missing_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plant(tmp_path, driver=False)
    answer = probe(tmp_path, {})
    assert (answer.available, answer.device_count) == (False, 0)
    assert answer.reason == (
        "no driver (/dev/davinci_manager is missing); no CANN (libascendcl.so, libhccl.so); no package torch_npu"
    )
    for remedy in ("Ascend driver and firmware", "set_env.sh", "torch_npu made for"):
        assert remedy in answer.hint


@pytest.mark.usefixtures("torch_npu")
def test_a_complete_machine_is_available(tmp_path: Path) -> None:
    plant(tmp_path, nodes=8, libraries=LIBRARIES)
    answer = probe(tmp_path, {})
    assert (answer.available, answer.device_count, answer.hint) == (True, 8, "")
    assert answer.reason == f"CANN at {tmp_path / CANN / 'libascendcl.so'}"


@pytest.mark.usefixtures("torch_npu")
def test_a_driver_without_a_device_is_no_missing_driver(tmp_path: Path) -> None:
    plant(tmp_path, libraries=LIBRARIES)
    answer = probe(tmp_path, {})
    assert "the driver is there, and no device node" in answer.reason and "container" in answer.hint


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"])
def test_the_libraries_are_found_where_the_environment_points(tmp_path: Path, variable: str) -> None:
    plant(tmp_path, nodes=1)
    folder = put(tmp_path / "cann" / "lib64", *LIBRARIES)
    value = folder if variable == "LD_LIBRARY_PATH" else folder.parent
    assert probe(tmp_path, {variable: str(value)}).available
    assert not probe(tmp_path, {}).available


@pytest.mark.usefixtures("torch_npu")
def test_the_loaders_path_comes_first(tmp_path: Path) -> None:
    plant(tmp_path, nodes=1, libraries=LIBRARIES)
    first = put(tmp_path / "first", *LIBRARIES)
    runtime = find_runtime(tmp_path, {"LD_LIBRARY_PATH": f"/nowhere{os.pathsep}{first}"})
    assert runtime is not None and runtime.path.parent == first


@pytest.mark.usefixtures("torch_npu")
def test_half_a_toolkit_is_named(tmp_path: Path) -> None:
    plant(tmp_path, nodes=1, libraries=("libascendcl.so",))
    answer = probe(tmp_path, {})
    assert not answer.available and "lacks libhccl.so" in answer.reason and "whole CANN toolkit" in answer.hint


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(("visible", "count"), [("0,3", 2), (" 7 ", 1), ("0,1,", 2)])
def test_the_visible_devices_count(tmp_path: Path, visible: str, count: int) -> None:
    plant(tmp_path, nodes=8, libraries=LIBRARIES)
    assert probe(tmp_path, {"ASCEND_RT_VISIBLE_DEVICES": visible}).device_count == count


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(
    ("visible", "phrase"),
    [("", "hides every device"), (",", "hides every device"), ("0,8", "names 8, and there are 8"), ("x", "names x")],
)
def test_visible_devices_that_are_none_are_refused(tmp_path: Path, visible: str, phrase: str) -> None:
    plant(tmp_path, nodes=8, libraries=LIBRARIES)
    answer = probe(tmp_path, {"ASCEND_RT_VISIBLE_DEVICES": visible})
    assert not answer.available and phrase in answer.reason


def test_a_torch_npu_for_another_torch_is_named(tmp_path: Path, torch_npu: dict[str, str]) -> None:
    plant(tmp_path, nodes=1, libraries=LIBRARIES)
    torch_npu["torch"] = "2.12.1+cpu"
    answer = probe(tmp_path, {})
    assert answer.reason == "torch_npu 2.13.0.post1 is made for torch 2.13, and torch 2.12.1+cpu is installed"
    assert answer.hint == "install torch_npu 2.12, or torch 2.13"
    del torch_npu["torch_npu"]  # a package without metadata: what it is made for, its import will tell
    assert probe(tmp_path, {}).available


@pytest.mark.usefixtures("torch_npu")
def test_a_torch_npu_that_breaks_torch_is_told_with_the_way_out(tmp_path: Path) -> None:
    plant(tmp_path, nodes=1)
    answer = probe(tmp_path, {})
    assert "without CANN `import torch` fails by it" in answer.reason
    assert "until then set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in answer.hint
    assert "import torch" not in probe(tmp_path, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).reason


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(("value", "loads"), [(None, True), ("1", True), ("0", False), ("", False), ("true", False)])
def test_torch_loads_its_backends_where_it_says_so(tmp_path: Path, value: str | None, loads: bool) -> None:
    plant(tmp_path, nodes=1)
    answer = probe(tmp_path, {} if value is None else {"TORCH_DEVICE_BACKEND_AUTOLOAD": value})
    assert ("`import torch` fails" in answer.reason) is loads


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("entry", ["x" * 300, "/".join(["x" * 200] * 30)])
def test_a_place_that_no_file_can_have_holds_none(tmp_path: Path, entry: str) -> None:
    plant(tmp_path, nodes=1, libraries=LIBRARIES)
    assert probe(tmp_path, {"LD_LIBRARY_PATH": f"/{entry}"}).available
    answer = probe(tmp_path / "dev", {"LD_LIBRARY_PATH": f"/{entry}"})
    assert f"/{entry[:9]}" in answer.reason and "File name too long" in answer.reason


@pytest.mark.usefixtures("torch_npu")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, nodes=1)
    folder = put(tmp_path / "closed", *LIBRARIES)
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)  # root may read everything
    answer = probe(tmp_path, {"LD_LIBRARY_PATH": str(folder)})
    assert not answer.available and f"{folder / LIBRARIES[0]}: Permission denied" in answer.reason


@pytest.mark.usefixtures("torch_npu")
def test_a_library_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, nodes=1, libraries=LIBRARIES)
    opened = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == LIBRARIES[0]:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    answer = probe(tmp_path, {})
    assert not answer.available and f"{LIBRARIES[0]}: Permission denied" in answer.reason


class TestSimulatedRuntime:
    @pytest.fixture
    def environ(self, tmp_path: Path) -> dict[str, str]:
        plant(tmp_path, nodes=8, libraries=LIBRARIES)
        folder = put(tmp_path / "sim", *LIBRARIES, content=b"\x7fELF" + b"." * 5000 + b"\0ascend_sim_version\0")
        return {"LD_LIBRARY_PATH": str(folder), "ASCEND_SIM_DEVICES": "2"}

    @pytest.mark.usefixtures("torch_npu")
    def test_it_is_refused_where_nobody_asked_for_it(self, tmp_path: Path, environ: dict[str, str]) -> None:
        for more in ({}, {SIMULATED: "0"}, {SIMULATED: ""}):
            answer = probe(tmp_path, environ | more)
            assert not answer.available and "is a simulation for tests" in answer.reason
            assert f"for tests, set {SIMULATED}=1" in answer.hint

    @pytest.mark.usefixtures("torch_npu")
    def test_it_is_named_as_such_where_it_was(self, tmp_path: Path, environ: dict[str, str]) -> None:
        answer = probe(tmp_path, environ | {SIMULATED: "1"})
        assert (answer.available, answer.device_count) == (True, 2)
        assert answer.reason.startswith("SIMULATED runtime, for tests, at")

    @pytest.mark.usefixtures("torch_npu")
    @pytest.mark.parametrize("count", ["0", "", "x"])
    def test_it_may_have_no_device(self, tmp_path: Path, environ: dict[str, str], count: str) -> None:
        answer = probe(tmp_path, environ | {SIMULATED: "1", "ASCEND_SIM_DEVICES": count})
        assert not answer.available and f"ASCEND_SIM_DEVICES={count!r}" in answer.reason

    @pytest.mark.usefixtures("torch_npu")
    def test_an_empty_library_is_none(self, tmp_path: Path) -> None:
        plant(tmp_path, nodes=1)
        runtime = find_runtime(tmp_path, {"LD_LIBRARY_PATH": str(put(tmp_path / "x", *LIBRARIES, content=b""))})
        assert runtime is not None and not runtime.simulated


def test_the_probe_imports_neither_torch_nor_torch_npu() -> None:
    code = "import sys, core_npu.probe as p; p.probe(); print(sorted({'torch', 'torch_npu'} & sys.modules.keys()))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.strip() == "[]"
