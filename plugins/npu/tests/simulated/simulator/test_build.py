"""Building the simulated runtime: reused when fresh, and a clear error where it cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from simulator import build, launch


def test_a_fresh_build_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.build()
    assert (folder / build.RUNTIME_LIBRARY).is_file()
    monkeypatch.setenv("PATH", "")
    assert build.build() == folder, "no tool is needed for what is there"


def test_builds_are_kept_in_the_repositorys_cache() -> None:
    assert build.CACHE.parts[-2:] == (".cache", "npu-sim")
    assert (build.CACHE.parents[1] / "pyproject.toml").is_file()


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no gcc, nm, readelf on PATH; to do: install gcc and binutils"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_says_why_it_cannot_build_and_ends_with_status_3(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": "", "ASCEND_SIM_CACHE": str(tmp_path)}
    command = [sys.executable, launch.__file__, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == launch.CANNOT_BUILD
    assert "no gcc, nm, readelf" in done.stderr


@pytest.mark.parametrize("given", [None, "2"])
def test_the_launcher_keeps_the_callers_queue(given: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TASK_QUEUE_ENABLE"}
    environment |= {} if given is None else {"TASK_QUEUE_ENABLE": given}
    show = "import os; print(os.environ['TASK_QUEUE_ENABLE'])"
    command = [sys.executable, launch.__file__, "--", sys.executable, "-S", "-c", show]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == (given or "0")


def test_what_torch_npu_wants_is_read_from_its_binaries() -> None:
    wanted = build.find_wanted(build.find_wheel())
    assert {"libascendcl.so", "libhccl.so", "libopapi.so", "libnnopbase.so", "libatb.so"} <= set(wanted.libraries)
    assert not {"libc.so.6", "libtorch.so", "libtorch_npu.so"} & set(wanted.libraries)
    assert {"aclrtMalloc", "aclrtMemcpyAsync", "_ZN3atb13CreateContextEPPNS_7ContextE"} <= set(wanted.linked)
    assert "aclmdlRICaptureBegin" in wanted.optional
    assert {"aclnnAdd", "aclnnAddGetWorkspaceSize"} <= set(wanted.kernels)
    assert {"AtbMLA", "AtbMLAGetWorkspaceSize", "AtbRingMLA"} <= set(wanted.kernels)


@pytest.mark.slow
def test_two_builds_at_once_leave_one_result(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build.build, [tmp_path, tmp_path])
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == [first.name], "no half-made folder stays"
    assert (first / "lib64" / build.KERNEL_LIBRARY).is_file()
