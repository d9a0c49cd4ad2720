"""The CUDA probe against planted driver libraries, compiled from a few lines of C."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from core_cuda.probe import probe

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to build a fake libcuda")

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Acme H1", size); return 0; }
int cuGetErrorString(int code, const char **text) { *text = "system driver mismatch"; return 0; }
"""


def build(folder: Path, *, init: int = 0, count: int = 2) -> str:
    source, library = folder / "driver.c", folder / "libfakecuda.so"
    source.write_text(DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-DINIT={init}", f"-DCOUNT={count}", str(source), "-o", str(library)], check=True
    )
    return str(library)


def test_a_missing_driver_is_named() -> None:
    answer = probe("libno_such_driver.so", {})
    assert (answer.available, answer.device_count) == (False, 0)
    assert "libno_such_driver.so" in answer.reason and "install the NVIDIA driver" in answer.hint


@needs_compiler
def test_devices_are_counted_and_described(tmp_path: Path) -> None:
    answer = probe(build(tmp_path), {})
    assert (answer.available, answer.device_count, answer.hint) == (True, 2, "")
    assert answer.reason == "Acme H1; the driver supports CUDA 12.8"


@needs_compiler
@pytest.mark.parametrize("value", ["", "-1", " "])
def test_hidden_devices_are_told(tmp_path: Path, value: str) -> None:
    answer = probe(build(tmp_path), {"CUDA_VISIBLE_DEVICES": value})
    assert not answer.available and f"CUDA_VISIBLE_DEVICES={value!r} hides every device" in answer.reason


@needs_compiler
@pytest.mark.parametrize(("init", "count"), [(100, 0), (0, 0)])
def test_a_driver_without_devices_is_told(tmp_path: Path, init: int, count: int) -> None:
    library = build(tmp_path, init=init, count=count)
    assert "finds no device" in probe(library, {}).reason
    answer = probe(library, {"CUDA_VISIBLE_DEVICES": "7"})
    assert not answer.available and "CUDA_VISIBLE_DEVICES='7'" in answer.reason


@needs_compiler
def test_a_driver_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    answer = probe(build(tmp_path, init=803), {})
    assert answer.reason == "the NVIDIA driver does not start: system driver mismatch (error 803)"
