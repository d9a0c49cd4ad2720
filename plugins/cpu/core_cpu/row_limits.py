"""Up to how many rows the kernel of `core::linear` multiplies on this machine: measured once for each build of it.

Where torch's product overtakes the kernel depends on the processor's instructions for each dtype, so it is measured and
not written down. All processes of a machine find the same limits, beside the build.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernel takes, in the order of the extension's `limit_rows`."""
NO_LIMIT = 1 << 31
_ROWS = (1, 4, 8, 16, 32, 64)
_WEIGHT = (1024, 1024)
_NUM_WEIGHTS = 8
"""Together larger than the second cache, as a model's are."""
_ROUNDS = 3
_GAIN = 1.05
"""How many times as fast as torch's product the kernel has to be."""
_limits: Mapping[torch.dtype, int] = MappingProxyType({})


def limits() -> Mapping[torch.dtype, int]:
    """Return the most rows of each dtype that the kernel multiplies in this process; empty while it is not loaded."""
    return _limits


def set_limits(wanted: Mapping[torch.dtype, int]) -> Mapping[torch.dtype, int]:
    """Let the kernel multiply so many rows of each dtype, none where it is not named; return what it was before."""
    global _limits
    before, _limits = _limits, MappingProxyType(dict(wanted))
    torch.ops.core_cpu.limit_rows([wanted.get(dtype, 0) for dtype in DTYPES])
    return before


def use_measured(library: Path) -> None:
    """Set the limits that a file beside a build has, measured and written there first where it has none.

    Its name tells how they were measured: with other code they are measured anew.
    """
    way = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    path = library.with_name(f"{library.stem}-{way}.json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {dtype: int(found[str(dtype)]) for dtype in DTYPES}
    except (OSError, ValueError, KeyError, TypeError):
        known = measure()
        with suppress(OSError):  # where nothing can be written, each process measures anew
            made = path.with_suffix(f".{os.getpid()}")
            made.write_text(json.dumps({str(dtype): limit for dtype, limit in known.items()}), encoding="utf-8")
            os.replace(made, path)
    set_limits(known)


def measure() -> dict[torch.dtype, int]:
    """Return for each dtype the most rows of which the kernel is the faster, as it is of all fewer; on one thread."""
    threads, before = torch.get_num_threads(), set_limits(dict.fromkeys(DTYPES, NO_LIMIT))
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return {dtype: _measure(dtype) for dtype in DTYPES}
    finally:
        torch.set_num_threads(threads)
        set_limits(before)


def _measure(dtype: torch.dtype) -> int:
    weights = [torch.full(_WEIGHT, 0.5, dtype=dtype) for _ in range(_NUM_WEIGHTS)]
    limit = 0
    for rows in _ROWS:
        x = torch.full((rows, _WEIGHT[1]), 0.5, dtype=dtype)
        own, other = _fastest(x, weights, torch.ops.core_cpu.linear), _fastest(x, weights, functional.linear)
        if own * _GAIN > other:
            break
        limit = rows
    return limit


def _fastest(x: Tensor, weights: list[Tensor], product: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the seconds of the fastest round: what else the machine does only adds to it."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for weight in weights:
            product(x, weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
