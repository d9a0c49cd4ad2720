"""Measures what a device can do at best, in the same run: by a large copy, by reading, by a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from core.device import Device

_COPY_BYTES = (256 * 2**20, 2**30)
_SIZES = (512, 1024, 2048, 4096, 8192)
_ENOUGH_S = 2e-3
_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates."""

    #: Bytes read plus bytes written by a copy on the device.
    bytes_per_s: float
    #: Operations of a product of square matrices; a multiplication and an addition count as two.
    flops_per_s: float
    #: Size of the copy.
    copy_bytes: int
    #: Rows of the matrices.
    matmul_size: int
    #: Dtype of the matrices: the model's, or float32 where products of that are faster, as on processors that have no
    #: instructions for narrow floats. Kernels may widen.
    dtype: str
    #: Bytes per second of reading alone, by threads; empty where the device measures none.
    reads: Mapping[int, float] = field(default_factory=dict)

    @property
    def most_bytes_per_s(self) -> float:
        """The fastest that bytes were moved: what the floor counts with, as a step mostly reads."""
        return max(self.bytes_per_s, *self.reads.values(), 0.0)

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        fields = asdict(self)
        return {**fields, "reads": {str(threads): rate for threads, rate in self.reads.items()}}


def measure_rates(
    device: Device,
    dtype: torch.dtype,
    *,
    copy_bytes: tuple[int, ...] = _COPY_BYTES,
    sizes: tuple[int, ...] = _SIZES,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure all, each the best of several runs; sizes grow until one run takes long enough to be measured."""
    reads = device.parts.read_rates
    num_bytes, bandwidth = _bandwidth(device, copy_bytes, clock)
    wide = dtype.itemsize < 4 and torch.float32 in device.capabilities.dtypes
    products = {each: _products(device, each, sizes, clock) for each in (dtype, *([torch.float32] if wide else []))}
    fastest = max(products, key=lambda each: products[each][1])
    size, flops = products[fastest]
    return Rates(
        bytes_per_s=bandwidth,
        flops_per_s=flops,
        copy_bytes=num_bytes,
        matmul_size=size,
        dtype=str(fastest).removeprefix("torch."),
        reads={} if reads is None else reads(),
    )


def _bandwidth(device: Device, sizes: tuple[int, ...], clock: Callable[[], float]) -> tuple[int, float]:
    memory = device.parts.memory()
    free = memory.total_bytes - memory.used_bytes
    fitting = [size for size in sizes if 4 * size <= free] or [min(sizes)]
    for size in fitting:
        source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
        target = torch.empty_like(source)
        elapsed = _best(device, partial(target.copy_, source), clock)
        if elapsed >= _ENOUGH_S:
            break
    return size, 2 * size / elapsed


def _products(
    device: Device, dtype: torch.dtype, sizes: tuple[int, ...], clock: Callable[[], float]
) -> tuple[int, float]:
    best = (0, 0.0)
    for size in sizes:
        # Random values: with zeros some devices draw less power and keep a higher clock.
        left, right = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
        elapsed = _best(device, partial(torch.matmul, left, right), clock)
        best = max(best, (size, 2 * size**3 / elapsed), key=lambda found: found[1])
        if elapsed >= _ENOUGH_S:
            break
    return best


def _best(device: Device, run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of one run: queued back to back, so that waiting for the device is not counted each time."""
    run()
    device.synchronize()
    times = []
    for _ in range(_REPEATS):
        start = clock()
        for _ in range(_REPEATS):
            run()
        device.synchronize()
        times.append((clock() - start) / _REPEATS)
    return max(min(times), 1e-12)
