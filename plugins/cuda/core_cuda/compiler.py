"""Triton as a `KernelCompiler` of core: its count of compiled kernels, its folder, and its version."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.common.kernel_compilers import Count, KernelCompiler


@contextmanager
def counting() -> Iterator[Count]:
    """Count by Triton's listener, which also hears of kernels that it finds on disk; 0 where Triton is not loaded."""
    compiled = 0
    knobs: Any = getattr(sys.modules.get("triton"), "knobs", None)
    previous = knobs.compilation.listener if knobs is not None else None

    def hear(**event: Any) -> None:
        nonlocal compiled
        compiled += not event.get("cache_hit", False)
        if previous is not None:
            previous(**event)

    if knobs is not None:
        knobs.compilation.listener = hear
    try:
        yield lambda: compiled
    finally:
        if knobs is not None:
            knobs.compilation.listener = previous


TRITON = KernelCompiler(name="triton", counting=counting, folder_variable="TRITON_CACHE_DIR", package="triton")
