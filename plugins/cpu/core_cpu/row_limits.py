"""Up to how many rows a kernel multiplies on this machine: measured once for each build of it.

Where another product overtakes a kernel depends on the processor's instructions for each kind of call, so it is
measured and not written down. All processes of a machine find the same limits, beside the build.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of x that the kernels take, in the order in which the extension has their limits."""
NO_LIMIT = 1 << 31
ROWS = (1, 4, 8, 16, 32, 64)
_WEIGHT = (1024, 1024)
_NUM_WEIGHTS = 8
"""Together larger than the second cache, as a model's are."""
_ROUNDS = 3
_TRIES = 3
"""So often has the kernel to lose."""
_GAIN = 1.05
"""How many times as fast as the other product the kernel has to be."""

Kind = tuple[torch.dtype, int]
"""The dtype of x, and the bits of a code."""
Calls = Callable[[Kind, int], Callable[[], object]]
"""Takes a kind of call and a number of rows, and returns what makes such calls once."""


class RowLimits:
    """The most rows of each kind of call that an op's kernel multiplies itself, in this process."""

    def __init__(self, source: str, kinds: Sequence[Kind], calls: Calls) -> None:
        """Name the op's file in csrc/, its kinds of calls in the extension's order, and how calls to time are made."""
        self.kinds: tuple[Kind, ...] = tuple(kinds)
        self._source = source
        self._calls = calls
        self._limits: Mapping[Kind, int] = MappingProxyType({})

    def limits(self) -> Mapping[Kind, int]:
        """Return the most rows of each kind; empty while the kernel is not loaded."""
        return self._limits

    def set(self, wanted: Mapping[Kind, int]) -> Mapping[Kind, int]:
        """Let the kernel multiply so many rows of each kind, none where it is not named; return what it was before."""
        before, self._limits = self._limits, MappingProxyType(dict(wanted))
        limit = getattr(torch.ops.core_cpu, f"limit_rows_{self._source}")
        for index, kind in enumerate(self.kinds):
            limit(index, wanted.get(kind, 0))
        return before

    def use_measured(self, library: Path) -> None:
        """Set the limits that a file beside a build has, measured and written there first where it has none.

        Its name tells how they were measured: with other code they are measured anew.
        """
        way = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
        path = library.with_name(f"{library.stem}-{way}.json")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known = {kind: int(found[str(kind)]) for kind in self.kinds}
        except (OSError, ValueError, KeyError, TypeError):
            known = self.measure()
            with suppress(OSError):  # where nothing can be written, each process measures anew
                made = path.with_suffix(f".{os.getpid()}")
                made.write_text(json.dumps({str(kind): limit for kind, limit in known.items()}), encoding="utf-8")
                os.replace(made, path)
        self.set(known)

    def measure(self) -> dict[Kind, int]:
        """Return for each kind the most rows of which the kernel is faster, as it is of all fewer; on one thread."""
        threads, before = torch.get_num_threads(), self._limits
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                return {kind: self._measure(kind) for kind in self.kinds}
        finally:
            torch.set_num_threads(threads)
            self.set(before)

    def _measure(self, kind: Kind) -> int:
        limit = 0
        for rows in ROWS:
            calls = self._calls(kind, rows)
            # What is found is kept for good, so one round beside a busy neighbour must not decide it.
            if not any(self._is_faster(calls) for _ in range(_TRIES)):
                break
            limit = rows
        return limit

    def _is_faster(self, calls: Callable[[], object]) -> bool:
        self.set(dict.fromkeys(self.kinds, NO_LIMIT))
        own = _fastest(calls)
        self.set({})
        return own * _GAIN <= _fastest(calls)


def _fastest(calls: Callable[[], object]) -> float:
    """Return the seconds of the fastest round: what else the machine does only adds to it."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        calls()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _weight_only_linears(kind: tuple[torch.dtype, int], rows: int) -> Callable[[], object]:
    (dtype, num_bits), (columns, depth) = kind, _WEIGHT
    x, scale = torch.full((rows, depth), 0.5, dtype=dtype), torch.full((columns, depth // 128), 0.5)
    shape, code = ((columns, depth), torch.int8) if num_bits == 8 else ((columns, depth // 8), torch.int32)
    weights = [torch.full(shape, 3, dtype=code) for _ in range(_NUM_WEIGHTS)]
    product = partial(torch.ops.core_cpu.weight_only_linear, x, num_bits=num_bits)
    return lambda: [product(weight, scale, None, None) for weight in weights]


WEIGHT_ONLY_LINEAR = RowLimits(
    "weight_only_linear", [(dtype, num_bits) for num_bits in (8, 4) for dtype in DTYPES], _weight_only_linears
)
