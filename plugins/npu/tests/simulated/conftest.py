"""For tests of the real torch_npu: skipped with the reason outside of the simulated runtime; each leaves it clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator import runtime

FOLDER = Path(__file__).parent
REASON = "needs torch_npu under the simulated ACL runtime: make test-npu-sim"

# torch_npu says these of its own choices, once in a process, at whatever op comes first.
EXPECTED_WARNINGS = (
    "Cannot create tensor with internal format",
    "Device do not support double dtype",
    "The current CANN and Soc versions",
)


class _SkippedModule(pytest.Module):
    """A test module that is not imported, since its imports need what is not here."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip every module of this folder where this process does not run under the simulated runtime."""
    if runtime.is_simulated():
        return None
    return _SkippedModule.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test of this folder, so that `-m npu_sim` finds it."""
    if item.path.is_relative_to(FOLDER):
        item.add_marker(pytest.mark.npu_sim)
        for message in EXPECTED_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture(autouse=True)
def clean_runtime() -> Iterator[None]:
    """Begin each test with an empty log, and end it without work, failures or kernels left over from it."""
    import torch

    # torch_npu leaves the stream of a failed capture current.
    torch.npu.set_stream(torch.npu.default_stream())
    torch.npu.synchronize()
    runtime.clear()
    yield
    pending = runtime.forget_failures()
    torch.npu.synchronize()
    assert not pending, f"{pending} injected failures never happened"
