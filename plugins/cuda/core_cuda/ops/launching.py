"""The one way in which the plugin's Triton kernels are launched, and how they overlap with the kernel before them.

Overlap is what CUDA calls programmatic dependent launch (compute capability 9.0 and newer): a kernel's blocks may
start while the kernel before it still runs, up to `wait_for_inputs`, which returns once all of that is written. A step
of one token is hundreds of kernels of a few microseconds, of which starting takes a good part.

The rule (CUDA Programming Guide, "Programmatic Dependent Launch"; PTX ISA, `griddepcontrol`): a wait ends when the
kernel before has ended and its writes are visible, and says nothing of those before it. So every kernel that may
overlap waits, in every thread and on every way through it: before it stores, before it reads what a kernel of a step
may have written, before it ends. `tools/cuda/check_overlap.py` holds the compiled kernels to it. What they read before
they wait is listed as `READ_EARLY` beside them. Nor does it say anything of other streams: see `order_fully`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the host, as the tests of a machine without a GPU have it."""


@dataclass(frozen=True, slots=True)
class Early:
    """Why a kernel may read through one of its arguments before `wait_for_inputs`.

    A module of kernels lists these as `READ_EARLY`, by the names of kernel and argument. Without the options: no kernel
    of a step writes there.
    """

    why: str
    #: whether what is read may be out of date: it decides what is fetched, and is read anew after the wait
    guess: bool = False
    #: whether what a guess leads to is also used after the wait, where it turns out to be what is read then
    confirmed: bool = False
    #: the kernel that is launched just before this one, and starts it only after a wait for all that wrote there
    after: str = ""


_FULLY_ORDERED: set[int] = set()
"""Streams whose next kernel is to overlap with none."""

_OVERLAP_CAPABILITY = (9, 0)
_DESCRIPTOR_CAPABILITY = (9, 0)
_INTERPRETED_MULTIPROCESSORS = 8
_INTERPRETED_CAPABILITY = (9, 0)
_INTERPRETED_SHARED_BYTES = 227 * 1024  # as at compute capability 9.0
Launched = Callable[[Any, tuple[int, ...], tuple[Any, ...], Mapping[str, Any]], None]
"""Takes a launch: kernel, grid, arguments, and options with all that `launch` adds."""
_INSTEAD: ContextVar[Launched | None] = ContextVar("instead_of_launching", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel on the current stream; a grid with a size of zero launches nothing.

    options: keyword arguments of the kernel, `num_warps`, `num_stages`. A kernel that takes the constant OVERLAP is
    told whether it may overlap; it must then keep the rule above.
    """
    if 0 in grid:
        return
    instead = _INSTEAD.get()
    if "OVERLAP" in kernel.arg_names:
        options["OVERLAP"] = can_overlap()
        if may_overlap() if instead is None else can_overlap():  # what is not launched is nobody's next kernel
            options["launch_pdl"] = True
    if instead is None:
        kernel[grid](*args, **options)
    else:
        instead(kernel, grid, args, options)


@contextmanager
def instead_of_launching(do: Launched) -> Iterator[None]:
    """Have launches of this thread inside the block do this in place of running a kernel."""
    token = _INSTEAD.set(do)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def takes_host_tensors() -> bool:
    """Tell whether kernels take tensors in the host's memory: in the interpreter, or where none is launched."""
    return INTERPRETED or _INSTEAD.get() is not None


def order_fully(stream: int) -> None:
    """Have the next kernel on this stream start after all that the stream waits for has ended.

    To be called where a stream has been told to wait for another one: a kernel that overlaps says of one kernel that it
    may still run, the one before it on its stream. stream: as `torch.cuda.Stream.cuda_stream` has it.
    """
    _FULLY_ORDERED.add(stream)


def may_overlap() -> bool:
    """Return whether the kernel launched next on the current stream may overlap; to be asked once for each launch."""
    if not can_overlap():
        return False
    if _FULLY_ORDERED and (stream := torch.cuda.current_stream().cuda_stream) in _FULLY_ORDERED:
        _FULLY_ORDERED.discard(stream)
        return False
    return True


@functools.cache
def can_overlap() -> bool:
    """Return whether the current GPU can start a kernel's blocks before the kernel before it has ended."""
    return not INTERPRETED and capability() >= _OVERLAP_CAPABILITY


def has_descriptors() -> bool:
    """Return whether the current GPU loads tiles by tensor descriptors (TMA); the interpreter does."""
    return capability() >= _DESCRIPTOR_CAPABILITY


@functools.cache
def capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU, which says what instructions it has; 9.0 if interpreted."""
    return _INTERPRETED_CAPABILITY if INTERPRETED else torch.cuda.get_device_capability()


@functools.cache
def num_multiprocessors() -> int:
    """Return the number of streaming multiprocessors of the current GPU."""
    return _INTERPRETED_MULTIPROCESSORS if INTERPRETED else int(_properties().multi_processor_count)


@functools.cache
def shared_bytes() -> int:
    """Return the most shared memory that a program may have on the current GPU, in bytes.

    It differs by more than the generation: 163 KiB at compute capability 8.0, 99 at 8.6 and 8.9, 227 at 9.0 and 10.0,
    99 at 12.0. So configurations that no table knows are cut to it.
    """
    return _INTERPRETED_SHARED_BYTES if INTERPRETED else int(_properties().shared_memory_per_block_optin)


def shared_bytes_of_two() -> int:
    """Return the most shared memory that each of two programs on one multiprocessor may have, in bytes."""
    return shared_bytes() // 2 - 1024  # CUDA keeps 1 KiB of each program's


def num_stages(most: int, tile: int) -> int:
    """Return how many stages a loop of matrix products may have, whose tiles of so many bytes take `most` together.

    Units that read shared memory themselves, those of compute capability 9 to 11, need the tile of each stage there.
    The others read registers: there a stage's tile has left shared memory when its turn comes.
    """
    return most // tile + (0 if has_shared_operands() else 1)


def has_shared_operands() -> bool:
    """Return whether the matrix units of the current GPU read operands from shared memory."""
    return 9 <= capability()[0] < 12


def _properties() -> Any:
    return torch.cuda.get_device_properties(torch.cuda.current_device())


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Block until the kernels before this one have written their results."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the blocks of the next kernel start; `wait_for_inputs` makes them wait before they read results."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def fetch(places):
    """Fetch the 128 bytes around each of these places into the L2 cache, and wait for nothing; not in the interpreter.

    What a kernel before may still be writing can be fetched too, if it is read after `wait_for_inputs`.
    """
    tl.inline_asm_elementwise(
        "{ .reg .u64 g; cvta.to.global.u64 g, $1; prefetch.global.L2 [g]; mov.u32 $0, 0; }",
        "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
