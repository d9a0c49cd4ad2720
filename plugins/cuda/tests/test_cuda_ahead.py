"""core_cuda/ahead.py: what is compiled from stand-ins, in threads, is what the launches of the same calls take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

from core_cuda import ahead
from core_cuda.compiler import TRITON
from core_cuda.ops import launching

ROOT = Path(__file__).resolve().parents[3]
PATHS = (".", "plugins/cuda", "plugins/cpu", "examples/acme_device")


def told(folder: Path, *words: str) -> dict[str, Any]:
    """Return what the worker prints; its kernels are compiled into the folder, for a GPU that need not be there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in PATHS)}
    environment |= {"TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("ahead_worker.py")), *words]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.interpreter
def test_kernels_begun_ahead_are_those_that_calls_launch(tmp_path: Path) -> None:
    found = told(tmp_path)
    kernels = {"norm_kernel", "decode_kernel", "hopper_kernel", "_row_kernel", "_gate_kernel", "_argmax_kernel"}
    assert set(found["launched"]) >= kernels
    assert found["ahead"] >= len(set(found["launched"])) and found["later"] == 0
    assert found["threads"] == ["core-triton"]
    assert found["unaligned"] == 1  # an address that no stand-in had


@pytest.mark.interpreter
def test_all_kernels_of_a_model_are_compiled_ahead_of_its_first_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    found = told(tmp_path, "model")
    assert found["ahead"] == found["compiled"] > 10 and not found["notes"]


@pytest.mark.parametrize("interpreted", [True, False])
def test_the_interpreter_compiles_nothing_ahead(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def launched(rows: int) -> None:
        asked.append(rows)

    monkeypatch.setattr(ahead, "INTERPRETED", interpreted)
    monkeypatch.setitem(ahead.CODE_OF, launched, launched)
    assert TRITON.ahead is not None
    with TRITON.ahead() as begin:
        begin(launched, {"rows": 4})
        begin(abs, {"rows": 4})  # no kernel of the plugin
    assert asked == ([] if interpreted else [4])


@pytest.mark.parametrize("fails", [True, False])
def test_what_launches_a_kernel_is_made_beside_it_and_its_error_is_left_to_the_launch(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, object]] = []

    def launcher(src: object, metadata: object) -> None:
        made.append((src, metadata))
        if fails:
            raise OSError("no C compiler")

    monkeypatch.setattr(ahead, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher)))
    kernel = SimpleNamespace(src="source", metadata="metadata")
    assert ahead._launchable(lambda: kernel) is kernel and made == [("source", "metadata")]


def test_launches_are_replaced_inside_the_block_alone() -> None:
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        arg_names = ("x",)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launched.append(("real", grid, args, options))

    kernel = Kernel()
    with launching.instead_of_launching(lambda kernel, *given: launched.append(("instead", *given))):
        launching.launch(kernel, (1,), 7, num_warps=4)
        launching.launch(kernel, (0,), 7)
    launching.launch(kernel, (2,), 8)
    assert launched == [("instead", (1,), (7,), {"num_warps": 4}), ("real", (2,), (8,), {})]
