"""Triton as a `KernelCompiler` of core: its count of compiled kernels, its folder, and its version."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock, Thread
from typing import Any

from core.common.kernel_compilers import BeginKernels, Count, KernelCompiler


@contextmanager
def counting() -> Iterator[Count]:
    """Count by Triton's listener, which also hears of kernels that it finds on disk; 0 where Triton is not loaded."""
    compiled, lock = 0, Lock()  # kernels are compiled by several threads
    knobs: Any = getattr(sys.modules.get("triton"), "knobs", None)
    previous = knobs.compilation.listener if knobs is not None else None

    def hear(**event: Any) -> None:
        nonlocal compiled
        with lock:
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


def begin_key() -> Thread:
    """Begin to compute, in a thread that is returned, what Triton adds to the name of every kernel on disk.

    Triton hashes its library of some hundred MB for it, before its first kernel: 0.3 to 0.5 s, most of it outside of
    Python, so that weights are read meanwhile.
    """
    cache: Any = importlib.import_module("triton.runtime.cache")  # here: two threads that import it wait for each other

    def compute() -> None:
        with suppress(Exception):  # the kernel that needs it says what is wrong
            cache.triton_key()

    thread = Thread(target=compute, name="triton-key", daemon=True)
    thread.start()
    return thread


def _ahead() -> AbstractContextManager[BeginKernels]:
    from core_cuda.ahead import compiling_ahead  # imports Triton, which a device without kernels need not have

    return compiling_ahead()


TRITON = KernelCompiler(
    name="triton", counting=counting, folder_variable="TRITON_CACHE_DIR", package="triton", ahead=_ahead
)
