"""Copies weights from the host's memory to the GPU by several threads, through pinned memory."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import torch
from torch import Tensor

_PIECE = 16 * 2**20
"""Bytes of one copy, and of each of a thread's two buffers."""
_MOST_THREADS = 8
_FEWEST_BYTES = 2**28
"""From this total on threads gain more than they and their pinned memory take to be made."""


def copy_in(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the host's tensors on the GPU, in order, valid for all work that is queued from now on.

    CUDA copies memory that is not pinned, as a mapped file is, by one thread, at 6 to 9 GB/s. Here each of up to eight
    threads copies into pinned memory while the GPU fetches what it copied before. Raises `torch.OutOfMemoryError`.
    """
    dense = [each.is_cpu and each.layout == torch.strided and each.is_contiguous() for each in tensors]
    if sum(each.nbytes for each, is_dense in zip(tensors, dense, strict=True) if is_dense) < _FEWEST_BYTES:
        return [each.to(device) for each in tensors]
    with torch.inference_mode(False):  # the threads are not in that mode, and may not write to tensors made in it
        found = [
            torch.empty_like(each, device=device) if is_dense else each.to(device)
            for each, is_dense in zip(tensors, dense, strict=True)
        ]
        jobs = deque(
            job
            for source, target, is_dense in zip(tensors, found, dense, strict=True)
            if is_dense
            for job in pieces(source, target)
        )
        caller = torch.cuda.current_stream(device)
        count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(count, thread_name_prefix="copy-in") as threads:
            for done in [threads.submit(_copy, jobs, caller) for _ in range(count)]:
                done.result()
    return found


def pieces(source: Tensor, target: Tensor) -> list[tuple[int, Tensor]]:
    """Return the address of each piece of a contiguous tensor, and the bytes (n,) uint8 of another to copy it to."""
    if not source.numel():
        return []
    parts = target.view(-1).view(torch.uint8).split(_PIECE)
    return [(source.data_ptr() + number * _PIECE, part) for number, part in enumerate(parts)]


def _copy(jobs: deque[tuple[int, Tensor]], caller: torch.cuda.Stream) -> None:
    """Copy pieces until none is left; return when the GPU has them."""
    stream = torch.cuda.Stream(caller.device)
    stream.wait_stream(caller)  # what is queued there may still use memory that the targets got
    buffers = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    fetched = [torch.cuda.Event() for _ in buffers]
    with torch.cuda.stream(stream):
        for buffer, event in cycle(zip(buffers, fetched, strict=True)):
            try:
                address, target = jobs.popleft()
            except IndexError:
                break
            event.synchronize()
            ctypes.memmove(buffer.data_ptr(), address, target.numel())  # without Python's lock
            target.copy_(buffer[: target.numel()], non_blocking=True)
            event.record()
    stream.synchronize()
