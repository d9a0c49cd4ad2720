"""`core::selective_state_update` on prompts, in parallel over chunks of rows (Dao, Gu, arXiv 2405.21060, section 6).

Three launches: what each chunk adds to the state, all chunks at once; the state before each chunk, along the chunks of
a sequence, by a product and a sum each; the results of each chunk, all chunks at once. Chunks begin anew with each
sequence; a single token beside prompts is a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.recurrent import chunks
from core_cuda.ops.recurrent.space_kernels import contributions_kernel, outputs_kernel, passing_kernel
from core_cuda.ops.recurrent.states import num_sequences, places, results

CHUNK = 128
"""Rows of a chunk. Each has a state in memory, which is written twice and read twice."""
FEWEST_ROWS = 64
"""Of a call: fewer are moved on row by row sooner than by three launches."""
MAX_STATE = 256
"""Numbers of state of a feature at most."""
_BLOCK_STATE = 128
"""Of these, in a product."""
_HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PASSED = 1024
"""Numbers of a state that a program passes along a sequence."""


def takes(B: Tensor) -> bool:
    """Return whether prompts are computed in chunks: rows enough for products of matrices, and no wider states."""
    return B.shape[0] >= FEWEST_ROWS and B.shape[2] <= MAX_STATE


def _tiles(features: int, size: int, *inputs: Tensor) -> dict[str, Any]:
    """Return rows of a tile, features and numbers of state of a block, and the dtype of operands.

    Tiles of half precision have 64 rows and columns at least, whatever is padding: compiled, those of 16 features were
    wrong on an H200, though right in the interpreter. fp32 is exact: on an H100 states came to 1.3 times the numeric
    criterion's bound by products of three parts.
    """
    numbers = min(_BLOCK_STATE, chunks.block_of(size))
    halves = _HALVES.get(inputs[0].dtype)
    if halves is None or any(each.dtype != inputs[0].dtype for each in inputs):
        block = min(32, chunks.block_of(features))
        return {"TILE": 16, "BLOCK": block, "BLOCK_STATE": numbers, "OPERAND": tl.float32}
    return {"TILE": 64, "BLOCK": 64, "BLOCK_STATE": max(numbers, 64), "OPERAND": halves}


def in_chunks(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    bounded: Tensor | None,
    slots: Tensor | None,
    kept: Tensor | None,
    query_starts: Tensor,
) -> Tensor:
    """Do what the canonical op does; x, B and C each with rows of one run."""
    (rows, heads, features), size = x.shape, B.shape[2]
    count, starts, out = num_sequences(rows, query_starts), query_starts.contiguous(), results(x, query_starts)
    num_chunks = rows // CHUNK + count
    found = torch.empty((num_chunks, heads, features, size), dtype=torch.float32, device=x.device)
    decays = torch.empty((num_chunks, heads), dtype=torch.float32, device=x.device)
    how: dict[str, Any] = {
        "HEADS": heads,
        "GROUP": max(heads // max(B.shape[1], 1), 1),
        "FEATURES": features,
        "STATE": size,
        "CHUNK": CHUNK,
        "SOFTPLUS": dt_softplus,
        "LEAST": dt_min,
        "MOST": dt_max,
        **_tiles(features, size, x, B, C),
    }
    programs = num_chunks * heads * triton.cdiv(features, how["BLOCK"])
    bias_head = 0 if dt_bias is None else dt_bias.stride(0)
    strides = *x.stride()[:2], *dt.stride(), *B.stride()[:2]
    given = x, dt, A, B, dt_bias, bounded, starts, found, decays, *strides, A.stride(0), bias_head, count
    grid = (programs * triton.cdiv(size, how["BLOCK_STATE"]),)
    # With one stage it takes 128 registers, so that two programs share a multiprocessor.
    launching.launch(contributions_kernel, grid, *given, num_warps=8, num_stages=1, **how)
    numbers = features * size
    launching.launch(
        passing_kernel,
        (count * heads * triton.cdiv(numbers, _PASSED),),
        *(states, *places(slots, kept), starts, found, decays, states.stride(0)),
        HEADS=heads,
        NUMBERS=numbers,
        BLOCK=_PASSED,
        CHUNK=CHUNK,
        num_warps=4,
    )
    strides = *strides, *C.stride()[:2], A.stride(0), 0 if D is None else D.stride(0)
    given = x, dt, A, B, C, D, dt_bias, bounded, starts, found, out, *strides, bias_head, count
    launching.launch(outputs_kernel, (programs * (CHUNK // how["TILE"]),), *given, num_warps=4, num_stages=2, **how)
    return out
