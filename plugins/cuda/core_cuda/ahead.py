"""Compiles Triton's kernels ahead of their first launch, several at a time.

Most of a kernel's compilation is outside of Python: passes and code generation in Triton's library, ptxas and the C
compiler in processes of their own. So threads share the work of as many cores. What a kernel is compiled for is known
without running anything: dtypes, alignments and a few numbers, which tensors on device "meta" have too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import _async_compile as in_threads
from triton.runtime import driver

from core.common.kernel_compilers import BeginKernels
from core_cuda.ops.launching import INTERPRETED, instead_of_launching
from core_cuda.ops.registration import CODE_OF


@contextmanager
def compiling_ahead() -> Iterator[BeginKernels]:
    """Give what begins the kernels of a call, and leave when all are there; see `KernelCompiler.ahead`."""
    if INTERPRETED or in_threads.active_mode.get() is not None:
        yield _begin if not INTERPRETED else _pass_over
        return
    # The launch of a kernel that did not compile compiles it again, and says what is wrong.
    with (
        ThreadPoolExecutor(_num_threads(), "core-triton") as pool,
        in_threads.AsyncCompileMode(_Launchable(pool), ignore_errors=True),
    ):
        yield _begin


class _Launchable:
    """What `AsyncCompileMode` takes of an executor; beside each kernel it has made what launches it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """Begin to compile a kernel."""
        return self._pool.submit(_launchable, compile_kernel)


def _launchable(compile_kernel: Callable[[], Any]) -> Any:
    """Return a compiled kernel; Triton has the C compiler make what launches it, and finds that on disk afterwards.

    The GPU is not asked for anything here: the stream of another thread may be captured.
    """
    kernel = compile_kernel()
    with suppress(Exception):  # whoever launches the kernel is told
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _begin(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    if fn in CODE_OF:
        with instead_of_launching(_compile), torch.no_grad(), _Launching():  # type: ignore[no-untyped-call]
            fn(**arguments)


class _Launching(TorchDispatchMode):
    """Runs the code of kernels, which may call others, on device "meta" too, where torch runs their fakes instead."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one op."""
        code = CODE_OF.get(func)
        if code is None:
            return func(*args, **(kwargs or {}))
        with self:
            return code(*args, **(kwargs or {}))


def _compile(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    kernel.warmup(*args, grid=grid, **options)


def _pass_over(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Begin nothing: the interpreter compiles nothing."""


def _num_threads() -> int:
    return len(os.sched_getaffinity(0))
