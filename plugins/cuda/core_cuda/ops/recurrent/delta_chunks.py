"""`core::gated_delta_rule` on prompts, in parallel over chunks of rows (Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484;
with decays: Yang, Kautz, Hatamizadeh, arXiv 2412.06464).

What a row corrects depends on what the rows before it corrected: in a chunk a triangular system of equations. Three
launches: the inverse of each chunk's, all chunks at once; the states before the chunks and what each corrects, along
the chunks of a sequence; the results of each chunk, all at once. Chunks begin anew with each sequence.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.recurrent import chunks
from core_cuda.ops.recurrent.delta_kernels import delta_inverses_kernel, delta_outputs_kernel, delta_states_kernel
from core_cuda.ops.recurrent.states import group_of, num_sequences, places, results

CHUNK = 64
"""Rows of a chunk. Each has a state in memory for each head, written and read once."""
FEWEST_ROWS = 32
"""Of a call: fewer are moved on row by row sooner than by three launches."""
ROWS_OF_EACH = 24
"""Of a sequence, on average: shorter ones are moved on row by row, where all of them run at once."""
MAX_KEY = 128
"""Features of a key at most: a program holds them for some columns of a state."""
_FEWEST_FEATURES = 64
"""Of a key in a product: matrix units that read shared memory take 64 rows of a matrix, and small ones were wrong."""
_REGISTERS = 168
"""Of a thread where states stand still, at most: three programs fit a multiprocessor, which took 8 % less time."""
_RESULT_COLUMNS = 64
"""Columns of the results of a chunk that a program computes."""
_STATE_COLUMNS = 32
"""Columns of a state that a program moves along a sequence, in registers."""


def why_not(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, query_starts: Tensor | None) -> str | None:
    """Return why a call goes row by row and not in chunks, or None. Lengths of sequences are known on the device only.

    query and key (T, G, D), value (T, H, V), decay (T, H) or (T, H, D), query_starts (S + 1,) int32 or None, as the
    canonical op takes them.
    """
    rows, count = key.shape[0], num_sequences(key.shape[0], query_starts)
    if query_starts is None:
        return "each sequence has one row"
    if launching.capability() < (9, 0):
        return "before compute capability 9.0 its products take more registers than there are"
    if {query.dtype, key.dtype, value.dtype} not in ({torch.bfloat16}, {torch.float16}):
        # Results of fp32 were wrong on an H200 (torch 2.11, Triton 3.6), though right in the interpreter.
        return "query, key and value are not of one dtype of half precision"
    if decay.dim() != 2:
        return "decays differ by feature"
    if key.shape[2] > MAX_KEY:
        return f"keys have {key.shape[2]} features, and chunks take up to {MAX_KEY}"
    if rows < max(FEWEST_ROWS, ROWS_OF_EACH * count):
        return f"{rows} rows of {count} sequences are fewer than {FEWEST_ROWS}, or than {ROWS_OF_EACH} of each"
    return None


def in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    scale: float,
    norm_eps: float,
    slots: Tensor | None,
    kept: Tensor | None,
    query_starts: Tensor,
) -> Tensor:
    """Do what the canonical op does; query, key and value each with rows of one run."""
    (rows, heads, width), depth = value.shape, key.shape[2]
    count, starts, out = num_sequences(rows, query_starts), query_starts.contiguous(), results(value, query_starts)
    num_chunks, make = rows // CHUNK + count, partial(torch.empty, dtype=torch.float32, device=out.device)
    inverses = make((num_chunks, heads, 3, CHUNK, CHUNK), dtype=torch.bfloat16)
    weights, decays = make((num_chunks, heads, 2, CHUNK)), make((num_chunks, heads))
    found, missing = make((num_chunks, heads, depth, width)), make(value.shape)
    how = {"HEADS": heads, "GROUP": group_of(heads, key.shape[1]), "KEY": depth, "CHUNK": CHUNK}
    # Units that read shared memory multiply 64 rows by 4 warps: 8 would compute the same products twice.
    how["num_warps"] = 4 if launching.has_shared_operands() else 8
    in_parts = {"BLOCK_KEY": _FEWEST_FEATURES, "NORMED": norm_eps > 0}
    given = key, decay, beta, starts, inverses, weights, decays
    strides = *key.stride()[:2], *decay.stride()
    numbers = *strides, *beta.stride(), count, norm_eps
    launching.launch(
        delta_inverses_kernel, (num_chunks * heads,), *given, *numbers, **how, **in_parts, maxnreg=_REGISTERS
    )
    how["VALUE"] = width
    launching.launch(
        delta_states_kernel,
        (count * heads * triton.cdiv(width, _STATE_COLUMNS),),
        *(key, value, states, *places(slots, kept), starts, inverses, weights, decays, found, missing),
        *(*key.stride()[:2], *value.stride()[:2], states.stride(0)),
        **how,
        BLOCK_KEY=max(_FEWEST_FEATURES, chunks.block_of(depth)),
        BLOCK=_STATE_COLUMNS,
        num_stages=2,
    )
    launching.launch(
        delta_outputs_kernel,
        (num_chunks * heads * triton.cdiv(width, _RESULT_COLUMNS),),
        *(query, key, decay, starts, found, missing, out),
        *(*query.stride()[:2], *strides, count, scale, norm_eps),
        **how,
        **in_parts,
        BLOCK=_RESULT_COLUMNS,
        maxnreg=_REGISTERS,
    )
    return out
