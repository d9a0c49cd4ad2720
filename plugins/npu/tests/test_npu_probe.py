"""The NPU probe over planted file systems."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from core_npu.probe import probe


def plant(root: Path, *, nodes: int = 0, library: bool = False) -> None:
    (root / "dev").mkdir()
    (root / "dev" / "davinci_manager").touch()
    for number in range(nodes):
        (root / "dev" / f"davinci{number}").touch()
    if library:
        folder = root / "usr/local/Ascend/ascend-toolkit/latest/lib64"
        folder.mkdir(parents=True)
        (folder / "libascendcl.so").touch()


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package torch_npu be found."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_everything_missing_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plant(tmp_path)
    answer = probe(tmp_path, {})
    assert (answer.available, answer.device_count) == (False, 0)
    assert answer.reason == "no device node /dev/davinci*; no libascendcl.so (CANN); no package torch_npu"
    for remedy in ("Ascend driver", "set_env.sh", "torch_npu made for"):
        assert remedy in answer.hint


@pytest.mark.usefixtures("torch_npu")
def test_a_complete_machine_is_available(tmp_path: Path) -> None:
    plant(tmp_path, nodes=8, library=True)
    answer = probe(tmp_path, {})
    assert (answer.available, answer.device_count, answer.hint) == (True, 8, "")
    assert "libascendcl.so" in answer.reason


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "LD_LIBRARY_PATH"])
def test_the_library_is_found_where_the_environment_points(tmp_path: Path, variable: str) -> None:
    plant(tmp_path, nodes=1)
    folder = tmp_path / "cann" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libascendcl.so").touch()
    value = folder if variable == "LD_LIBRARY_PATH" else folder.parent
    assert probe(tmp_path, {variable: str(value)}).available
    assert not probe(tmp_path, {}).available


@pytest.mark.usefixtures("torch_npu")
def test_the_visible_devices_count(tmp_path: Path) -> None:
    plant(tmp_path, nodes=8, library=True)
    assert probe(tmp_path, {"ASCEND_RT_VISIBLE_DEVICES": "0,3"}).device_count == 2
    hidden = probe(tmp_path, {"ASCEND_RT_VISIBLE_DEVICES": ""})
    assert not hidden.available and "hides every device" in hidden.reason
