"""`core::sample` in three launches, of which the first two share a row out over several programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from core.common.ops.sampling import SAMPLE
from core_cuda.ops import launching
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.sampling.kernel import bounds_kernel, choose_kernel, histogram_kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """How rows are shared out among programs; all sizes are powers of two."""

    #: tokens of a row that a program of the first two kernels takes
    part: int
    #: warps of such a program
    part_warps: int
    #: of a row's histogram
    bins: int = 2048
    #: tokens that are sorted at a time
    listed: int = 1024
    #: tokens of its row that a program of the last kernel reads at a time
    chunk: int = 4096
    #: warps of a program of the last kernel
    warps: int = 16


def default_config(num_rows: int, vocabulary: int) -> SampleConfig:
    """Return how rows of this length are shared out: few rows over as many programs as there are multiprocessors."""
    wanted = triton.cdiv(num_rows * vocabulary, 2 * launching.num_multiprocessors())
    part = min(max(triton.next_power_of_2(wanted), 1024), 4096)
    return SampleConfig(part=part, part_warps=part // 256)


def candidates(num_rows: int, vocabulary: int) -> Iterator[SampleConfig]:
    """Yield the configurations worth measuring for rows of this length."""
    for part in (1024, 2048, 4096, 8192):
        for bins, listed in ((1024, 1024), (2048, 512), (2048, 1024), (4096, 1024)):
            for chunk, warps in ((4096, 8), (4096, 16), (8192, 16), (8192, 32)):
                sizes = {"bins": bins, "listed": listed, "chunk": chunk}
                yield SampleConfig(part=part, part_warps=part // 256, warps=warps, **sizes)


def run_sample(logits: Tensor, sampling_params: Tensor, config: SampleConfig | None = None) -> Tensor:
    """Return the next tokens (R,), int64, of logits (R, V) and parameters (R, 4), by any configuration the same."""
    num_rows, vocabulary = logits.shape
    config = config or default_config(num_rows, vocabulary)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    params = sampling_params.float().contiguous()
    num_parts = triton.cdiv(vocabulary, config.part)

    def scratch(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, size), dtype=dtype, device=logits.device)

    bounds = (scratch(num_parts, torch.int64), scratch(num_parts, torch.float32))
    histogram = (scratch(config.bins, torch.int32), scratch(config.bins, torch.int64))
    shared = (logits, params, *bounds, *histogram)
    sizes = (vocabulary, logits.stride(0), num_parts)
    cleared = triton.next_power_of_2(triton.cdiv(config.bins, num_parts))
    parts, parts_padded = (num_rows * num_parts,), triton.next_power_of_2(num_parts)
    of_part = {"PART": config.part, "BINS": config.bins, "num_warps": config.part_warps}
    launching.launch(bounds_kernel, parts, *shared, *sizes, **of_part, CLEARED=cleared)
    launching.launch(histogram_kernel, parts, *shared, *sizes, **of_part, PARTS=parts_padded)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    listings = scratch(config.listed, torch.int64)
    of_row = {"PARTS": parts_padded, "CHUNK": config.chunk, "BINS": config.bins, "LISTED": config.listed}
    launching.launch(choose_kernel, (num_rows,), *shared, listings, tokens, *sizes, **of_row, num_warps=config.warps)
    return tokens


sample = kernel_of(SAMPLE)(run_sample)
