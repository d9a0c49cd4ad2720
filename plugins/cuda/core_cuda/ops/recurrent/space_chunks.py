"""`core::selective_state_update` on prompts, in parallel over chunks of rows (Dao, Gu, arXiv 2405.21060, section 6).

Three launches: steps and decays; the state before each chunk, along the chunks of a sequence; the results of each
chunk, all chunks at once. Chunks begin anew with each sequence; a single token beside prompts is a chunk.

What they do for T rows, H heads of P features with N numbers of state, in bf16: the second launch multiplies 6 T H P N
times, for states of three parts, and keeps them in registers. So of states only those before chunks of Q rows are
written, and read once, 4 T H P N / Q bytes in bf16, beside 4 T H P of x and as many of x and results in the third,
which multiplies 2 T H (P N + 3 Q P / 4) times. Of Nemotron-H 8B (128, 64, 128) 8,192 rows are 0.7 GB and 85 GFLOP.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.recurrent import chunks
from core_cuda.ops.recurrent.space_call import SpaceCall, strides_of
from core_cuda.ops.recurrent.space_kernels import passing_kernel, steps_kernel
from core_cuda.ops.recurrent.space_outputs import outputs_kernel

FEWEST_ROWS = 16
"""Of a call: fewer are moved on row by row sooner than by three launches."""
ROWS_OF_EACH = 8
"""Of a sequence, on average: shorter ones are moved on row by row, where all of them run at once."""
MAX_STATE = 256
"""Numbers of state of a feature at most."""
_HEADS = 16
"""Heads whose steps a program computes, and whose results at most."""
_HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_CHUNK = 128
"""Rows of a chunk of half precision, two tiles."""
_WIDTH = 64
"""Numbers of state of each feature that a program moves on along a sequence."""
_PASSING: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
_RESULTS: dict[str, Any] = {"num_warps": 4, "num_stages": 2}


def takes(rows: int, count: int, size: int) -> bool:
    """Return whether so many rows of so many sequences are computed in chunks, with states of this size."""
    return count > 0 and rows >= max(FEWEST_ROWS, ROWS_OF_EACH * count) and size <= MAX_STATE


def _tiles(*inputs: Tensor) -> dict[str, Any]:
    """Return rows of a tile and a chunk, features of a block, and the dtype of operands.

    Tiles of half precision have 64 rows and columns at least, whatever is padding: compiled, those of 16 features were
    wrong on an H200, though right in the interpreter. fp32 is exact: on an H100 states came to 1.3 times the numeric
    criterion's bound by products of three parts.
    """
    halves = _HALVES.get(inputs[0].dtype)
    if halves is None or any(each.dtype != inputs[0].dtype for each in inputs):
        return {"TILE": 32, "CHUNK": 64, "BLOCK": 32, "OPERAND": tl.float32}
    return {"TILE": 64, "CHUNK": _CHUNK, "BLOCK": 64, "OPERAND": halves}


def _block_state(size: int, operand: tl.dtype) -> dict[str, int]:
    """Return of how many parts results are, and of how many numbers their products.

    In bf16 one part of each factor errs as little as the result is rounded by, and the criterion allows twice that.
    """
    if operand == tl.bfloat16:
        return {"PARTS": 1, "BLOCK_STATE": max(chunks.block_of(size), 64)}
    return {"PARTS": 2, "BLOCK_STATE": 128 if operand == tl.float16 else 32}


def in_chunks(call: SpaceCall) -> Tensor:
    """Do what the canonical op does."""
    x, heads, how = call.x, call.x.shape[1], _tiles(call.x, call.B, call.C)
    num_chunks = x.shape[0] // how["CHUNK"] + call.num_sequences
    fading = torch.empty((num_chunks, heads, 3, how["CHUNK"]), dtype=torch.float32, device=x.device)
    dtype = torch.bfloat16 if how["OPERAND"] == tl.bfloat16 else torch.float32
    before = torch.empty((num_chunks, heads, x.shape[2], call.B.shape[2]), dtype=dtype, device=x.device)
    _fade(call, fading, how)
    _pass(call, fading, before, how)
    return _results(call, fading, before, how)


def _fade(call: SpaceCall, fading: Tensor, how: dict[str, Any]) -> None:
    num_chunks, heads = fading.shape[:2]
    strides = *call.dt.stride(), call.A.stride(0), *strides_of(call.dt_bias, 1)
    launching.launch(
        steps_kernel,
        (num_chunks * triton.cdiv(heads, _HEADS),),
        *(call.dt, call.A, call.dt_bias, call.bounded, call.query_starts, fading, *strides, call.num_sequences),
        **call.of_steps,
        HEADS=heads,
        BLOCK=_HEADS,
        TILE=how["TILE"],
        CHUNK=how["CHUNK"],
        num_warps=4,
    )


def _pass(call: SpaceCall, fading: Tensor, before: Tensor, how: dict[str, Any]) -> None:
    _, heads, features, size = before.shape
    *_, read, written, starts = call.tensors
    parts = triton.cdiv(features, how["BLOCK"]) * triton.cdiv(size, _WIDTH)
    strides = *call.x.stride()[:2], *call.B.stride()[:2], call.states.stride(0)
    launching.launch(
        passing_kernel,
        (call.num_sequences * heads * parts,),
        *(call.x, call.B, call.states, read, written, starts, fading, before, *strides),
        **call.sizes,
        **how,
        BLOCK_STATE=_WIDTH,
        **_PASSING,
    )


def _results(call: SpaceCall, fading: Tensor, before: Tensor, how: dict[str, Any]) -> Tensor:
    x, A, B, C, D = call.x, call.A, call.B, call.C, call.D
    out, group = torch.empty(x.shape, dtype=x.dtype, device=x.device), call.sizes["GROUP"]
    blocks = triton.cdiv(x.shape[2], how["BLOCK"])
    tiles = before.shape[0] * (how["CHUNK"] // how["TILE"]) * blocks * B.shape[1]
    share = min(_HEADS, int(triton.next_power_of_2(group)))
    while share > 1 and tiles * triton.cdiv(group, share) < 4 * launching.num_multiprocessors():
        share //= 2
    strides = *x.stride()[:2], A.stride(0), *B.stride()[:2], *C.stride()[:2], *strides_of(D, 1)
    parts = _block_state(before.shape[3], how["OPERAND"])
    options = _RESULTS if parts["PARTS"] == 1 else {**_RESULTS, "num_stages": 1}  # what is wider has no room for two
    launching.launch(
        outputs_kernel,
        (tiles * triton.cdiv(group, share),),
        *(x, A, B, C, D, call.query_starts, fading, before, out, *strides, x.shape[0], call.num_sequences),
        **call.sizes,
        **how,
        **parts,
        SHARE=share,
        **options,
    )
    return out
