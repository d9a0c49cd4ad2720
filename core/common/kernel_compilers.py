"""Compilers of kernels, as data: what a device compiles with, so that `core` can count it and keep what it made."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

Count = Callable[[], int]
"""Returns how many kernels were compiled so far."""


def _takes_any(folder: str) -> str:
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCompiler:
    """A compiler that makes kernels of a device while programs are compiled or run.

    name: of its folder beside the compile cache. counting: enter it around a compile; it gives the count of kernels
    that were compiled in the block, those found compiled on disk left out. folder_variable: the environment variable
    that tells the compiler where to keep kernels, read when it compiles; "" where it keeps none. refuses: says why it
    can't keep them in a folder, "" where it can. package: the Python package whose version stands for its code in the
    compile cache; "" where that is torch's.
    """

    name: str
    counting: Callable[[], AbstractContextManager[Count]]
    folder_variable: str = ""
    refuses: Callable[[str], str] = _takes_any
    package: str = ""


@contextmanager
def counting_kernels(compilers: Iterable[KernelCompiler]) -> Iterator[Count]:
    """Give the count of kernels that all of these compile in the block; ask for it before the block ends."""
    with ExitStack() as stack:
        counts = [stack.enter_context(compiler.counting()) for compiler in compilers]
        yield lambda: sum(count() for count in counts)


@contextmanager
def _counting_inductor() -> Iterator[Count]:
    """Count graphs that Inductor's own cache did not have, each of which it compiles as a whole."""
    before = _inductor_misses()
    yield lambda: _inductor_misses() - before


def _inductor_misses() -> int:
    """Return how many graphs Inductor has compiled in this process rather than found; 0 where it is not loaded."""
    if "torch._inductor" not in sys.modules:
        return 0
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    counters = dynamo.counters["inductor"] if dynamo is not None else {}
    return int(counters.get("fxgraph_cache_miss", 0) + counters.get("fxgraph_cache_bypass", 0))


def _unquoted(folder: str) -> str:
    if shlex.quote(folder) == folder:
        return ""
    return f"Inductor can't compile below {folder!r}: it does not quote such names"


INDUCTOR = KernelCompiler(
    name="inductor", counting=_counting_inductor, folder_variable="TORCHINDUCTOR_CACHE_DIR", refuses=_unquoted
)
"""torch's own, which every device has."""
