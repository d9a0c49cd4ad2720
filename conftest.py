"""For all tests: Triton's interpreter where there is no NVIDIA GPU, and a collector that does not walk old objects."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from core_cuda.probe import probe

# Here and not beside the kernels' tests: Triton decides it when it is imported, and torch may import it earlier.
if not probe().available:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """Each capture has the collector run first: spare it what torch and the modules before have left in the process."""
    gc.collect()
    gc.freeze()
    yield
