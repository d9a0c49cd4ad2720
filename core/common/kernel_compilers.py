"""Compilers of kernels, as data: what a device compiles with, so that `core` can count it and keep what it made."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Count = Callable[[], int]
"""Returns how many kernels were compiled so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelForms:
    """For which models kernels are built that no model has asked for yet."""

    dtypes: tuple[torch.dtype, ...]
    #: features of an attention head
    head_sizes: tuple[int, ...]
    #: whether some of their layers see a window of latest positions alone
    window: bool = False
    #: whether some of their layers cap scores softly
    softcap: bool = False


Build = Callable[[KernelForms], Iterable[str]]
"""Builds kernels into the folder that the compiler's variable names, and yields the name of each that lies there then.

Raises `UsageError` where they can't be built on this machine."""

BeginKernels = Callable[[Callable[..., Any], Mapping[str, Any]], None]
"""Begins to compile the kernels that a call of an op's implementation launches, and returns; runs nothing on a device.

Takes the function (`OpImplementation.fn`) and every argument of the op by name. Tensors are on device "meta": they have
the shape, strides and dtype of the call's, `data_ptr()` tells how far from 16 bytes theirs begin, and there is no
content. What the compiler has no kernels of is passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCompiler:
    """A compiler that makes kernels of a device while programs are compiled or run."""

    #: name of the compiler's folder beside the compile cache
    name: str
    #: entered around a compile: gives the count of kernels compiled in the block, without those found on disk
    counting: Callable[[], AbstractContextManager[Count]]
    #: the environment variable that says where the compiler keeps kernels, read when it compiles; "" if it keeps none
    folder_variable: str = ""
    #: says why the compiler can't keep kernels in a folder, "" where it can
    refuses: Callable[[str], str] = lambda folder: ""
    #: the Python package whose version the compile cache takes as the compiler's version; "" if torch's version covers
    #: it
    package: str = ""
    #: builds the kernels ahead of any model; None where only a call says what they are
    build: Build | None = None
    #: entered while programs are prepared: gives what begins kernels ahead of their first launch, several at a time,
    #: and is left when all of these are there. A launch inside the block waits for its own kernel. None where kernels
    #: are compiled by what launches them
    ahead: Callable[[], AbstractContextManager[BeginKernels]] | None = None


@contextmanager
def counting_kernels(compilers: Iterable[KernelCompiler]) -> Iterator[Count]:
    """Yield a function that counts the kernels all these compilers made in the block. Call it before the block ends."""
    with ExitStack() as stack:
        counts = [stack.enter_context(compiler.counting()) for compiler in compilers]
        yield lambda: sum(count() for count in counts)


@contextmanager
def _counting_inductor() -> Iterator[Count]:
    """Count the graphs that Inductor compiled because its own cache did not have them."""
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
"""The compiler of torch itself, which every device has."""
