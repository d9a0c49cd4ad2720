"""Rows of strided tensors as kernels walk them, and the tensors that results go to."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.layout import layouts_of

TYPES: Mapping[torch.dtype, Any] = MappingProxyType(
    {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.int8: tl.int8,
    }
)
"""torch dtype -> Triton dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Tensors of one shape (..., D), of which D may differ, as outer * inner rows that a kernel walks together."""

    #: outer * inner
    count: int
    #: of a kernel, by name: num_rows, inner, FLAT (the inner stride alone leads to every row), and for each tensor the
    #: tensor itself and its strides in elements, `name_outer` and `name_inner`
    arguments: Mapping[str, Any]
    #: results and the copies that the kernel writes in their place; see `flush`
    unwritten: Sequence[tuple[Tensor, Tensor]] = ()

    def flush(self) -> None:
        """Copy what the kernel wrote elsewhere to where it belongs; to be called after the launch."""
        for belongs, written in self.unwritten:
            belongs.copy_(written)


def as_rows(reads: Mapping[str, Tensor | None], writes: Mapping[str, Tensor | None]) -> Rows:
    """Return the rows that a kernel reads and writes; tensors that it can't walk are copied.

    reads: the first is not None. Rows are in the order of the first tensor's memory, which need not be that of the
    shape. Two strides for each tensor lead to the rows of whatever models slice, split and transpose.
    """
    tensors = {name: t for name, t in {**reads, **writes}.items() if t is not None}
    unwritten: list[tuple[Tensor, Tensor]] = []
    levels = _levels(list(tensors.values()))
    if levels is None:
        walked = {n: t.contiguous() if n in reads else t.new_empty(t.shape) for n, t in tensors.items()}
        unwritten = [(tensors[name], walked[name]) for name in tensors if name in writes]
        tensors = walked
        levels = _levels(list(tensors.values()))
        assert levels is not None  # contiguous tensors of one shape are one run of rows
    (outer, wide), (inner, narrow) = levels
    arguments: dict[str, Any] = {"num_rows": outer * inner, "inner": inner, "FLAT": outer <= 1}
    for name in (*reads, *writes):
        arguments |= {name: None, f"{name}_outer": 0, f"{name}_inner": 0}
    for name, own_outer, own_inner in zip(tensors, wide, narrow, strict=True):
        arguments |= {name: tensors[name], f"{name}_outer": own_outer, f"{name}_inner": own_inner}
    return Rows(count=outer * inner, arguments=arguments, unwritten=unwritten)


_Level = tuple[int, tuple[int, ...]]  # a size, and the stride of each tensor


def _levels(tensors: Sequence[Tensor]) -> tuple[_Level, _Level] | None:
    """Return the outer and the inner level of all rows, or None where two are not enough or elements lie apart."""
    nothing = (0,) * len(tensors)
    sizes = tensors[0].shape[:-1]
    if 0 in sizes:
        return (0, nothing), (1, nothing)
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in tensors):
        return None
    first = tensors[0].stride()
    dims = sorted((d for d, size in enumerate(sizes) if size > 1), key=lambda d: -first[d])
    merged: list[_Level] = []
    for size, strides in ((sizes[d], tuple(t.stride(d) for t in tensors)) for d in dims):
        if merged and all(w == s * size for w, s in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if len(merged) > 2:
        return None
    outer, inner = [(1, nothing), (1, nothing), *merged][-2:]
    return outer, inner


def outputs(op: CanonicalOp, arguments: Mapping[str, Any], device: torch.device) -> list[Tensor]:
    """Return new tensors for the results of a call of a canonical op, of exactly the strides that its fake tells."""
    made = layouts_of(op.fake, (), arguments)
    return [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in made]


@triton.jit
def row_starts(row, inner, outer_stride, inner_stride, FLAT: tl.constexpr):
    """Return the offset of each row, in elements, int64."""
    if FLAT:
        starts = row.to(tl.int64) * inner_stride
    else:
        starts = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return starts
