"""`core::argmax` in one launch: several programs share a row, and the last one to arrive joins their finds.

Legend: R rows, V vocabulary, P parts into which a row is divided.
"""
# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.sampling import ARGMAX
from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.sampling.ranks import id_in, packed, rank_of
from core_cuda.ops.workspace import counters

_LANES = 8  # logits of a thread at a time: 16 bytes in half precision


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgmaxConfig:
    """How rows are shared out among programs."""

    #: warps of a program, whose threads take 8 logits each at a time
    num_warps: int
    #: iterations of that
    steps: int

    @property
    def block(self) -> int:
        """Logits that a program reads at a time."""
        return 32 * self.num_warps * _LANES

    @property
    def part(self) -> int:
        """Logits that a program reads in all."""
        return self.steps * self.block


def default_config(num_rows: int, vocabulary: int) -> ArgmaxConfig:
    """Return how rows of this length are shared out.

    Few rows go over as many programs as there are multiprocessors, since one is done with a kilobyte as soon as with
    ten. With many of them a program reads as much as keeps the memory busy, and joining the parts becomes rare.
    """
    wanted = triton.cdiv(num_rows * vocabulary, 2 * launching.num_multiprocessors())
    if wanted <= 2048:
        return ArgmaxConfig(num_warps=4, steps=1)
    steps = min(triton.next_power_of_2(triton.cdiv(wanted, 2048)), 8)
    return ArgmaxConfig(num_warps=8, steps=steps)


def candidates(num_rows: int, vocabulary: int) -> Iterator[ArgmaxConfig]:
    """Yield the configurations worth measuring for rows of this length."""
    for num_warps in (4, 8, 16):
        for steps in (1, 2, 4, 8, 16):
            config = ArgmaxConfig(num_warps=num_warps, steps=steps)
            if num_rows * triton.cdiv(vocabulary, config.part) >= min(num_rows, 64):
                yield config


@triton.jit
def _argmax_kernel(
    logits, tokens, finds, arrived, V, stride, BLOCK: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of one part of a row; the last program of a row, the largest of all. tokens (R,) int64.

    finds int64 (R, P): rank and id of each part's largest, packed. arrived: a counter for each row, zero before and
    after.
    """
    row, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, BLOCK)
    row_logits = logits + row.to(tl.int64) * stride
    first = part * (STEPS * BLOCK) + lane
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    # What lies past the end is no larger than any logit and has a higher id than all of them.
    best = tl.load(row_logits + first, mask=first < V, other=float("-inf")).to(tl.float32)
    best_ids = first
    for step in tl.static_range(1, STEPS):
        ids = first + step * BLOCK
        values = tl.load(row_logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        # Larger, or NaN after what is none. Ids rise, so that of equal ones the first stays.
        better = (values > best) | ((values != values) & (best == best))
        best = tl.where(better, values, best)
        best_ids = tl.where(better, ids, best_ids)
    pair = tl.max(packed(rank_of(best), best_ids), axis=0)
    if PARTS == 1:
        tl.store(tokens + row, id_in(pair).to(tl.int64))
    else:
        tl.store(finds + row * num_parts + part, pair)
        tl.debug_barrier()  # the result must be written before the arrival is counted
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == num_parts - 1:
            tl.store(arrived + row, 0)  # reset for the next launch
            each = tl.arange(0, PARTS)
            found = tl.load(finds + row * num_parts + each, mask=each < num_parts, other=-(2**63), cache_modifier=".cg")
            tl.store(tokens + row, id_in(tl.max(found, axis=0)).to(tl.int64))


def run_argmax(logits: Tensor, config: ArgmaxConfig | None = None) -> Tensor:
    """Return the ids of the largest logits (R,), int64, of logits (R, V), by any configuration the same."""
    num_rows, vocabulary = logits.shape
    config = config or default_config(num_rows, vocabulary)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    num_parts = triton.cdiv(vocabulary, config.part)
    finds = torch.empty((num_rows, num_parts) if num_parts > 1 else 0, dtype=torch.int64, device=logits.device)
    arrived = counters(num_rows, logits.device) if num_parts > 1 else finds
    launching.launch(
        _argmax_kernel, (num_rows, num_parts), logits, tokens, finds, arrived, vocabulary, logits.stride(0),
        BLOCK=config.block, STEPS=config.steps, PARTS=triton.next_power_of_2(num_parts), num_warps=config.num_warps,
    )  # fmt: skip
    return tokens


argmax = kernel_of(ARGMAX)(run_argmax)
