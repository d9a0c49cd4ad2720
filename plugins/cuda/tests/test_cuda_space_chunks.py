"""core_cuda/ops/recurrent/space_chunks.py: packed prompts of a state space, in parallel over chunks."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch

from core.common.ops.arguments import Draw
from core.common.ops.recurrent import SELECTIVE_STATE_UPDATE
from core_conformance.inputs.large_recurrent import bounded, prompts, space_call
from tests.kernel_cases import CPU, moved
from tests.recurrent_cases import judged

pytest.importorskip("triton", reason="needs triton")
from cuda_planted_chunks import chunk_short, nothing_cleared, rows_short, slot_before

from core_cuda.ops import launching
from core_cuda.ops.recurrent import space_chunks, space_kernels, space_outputs
from core_cuda.ops.recurrent.state_space import selective_state_update

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200)
"""Tokens of packed sequences: around tiles of 16 and 64 rows, and past a chunk."""
PADDING = 3


def call_of(
    dtype: torch.dtype, lengths: tuple[int, ...], heads: tuple[int, int] = (4, 2), sizes: tuple[int, int] = (16, 24)
) -> dict[str, Any]:
    call = space_call(Draw(dtype, CPU, seed=9), sum(lengths) + PADDING, heads, sizes)
    return prompts(call, (0, *accumulate(lengths)))


@contextmanager
def holding_nan() -> Iterator[None]:
    """Have memory that nothing was written to hold NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", [LENGTHS[:6], LENGTHS[6:], (0, 129, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_agree_with_the_reference(
    dtype: torch.dtype, lengths: tuple[int, ...], kernel_device: torch.device
) -> None:
    call = call_of(dtype, lengths)
    assert space_chunks.takes(len(call["x"]), len(lengths), call["B"].shape[2])
    judged(SELECTIVE_STATE_UPDATE, selective_state_update, call, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_that_begin_have_no_state_before(dtype: torch.dtype, kernel_device: torch.device) -> None:
    call = bounded(call_of(dtype, (65, 17, 64)))
    call["states"].zero_()
    judged(SELECTIVE_STATE_UPDATE, selective_state_update, call, kernel_device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(33, 65), (72, 130), (16, 24)], ids=str)
def test_sizes_off_blocks(sizes: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    call = call_of(dtype, (1, 70), (2, 1), sizes)
    judged(SELECTIVE_STATE_UPDATE, selective_state_update, call, kernel_device)


def test_inputs_of_several_dtypes_are_computed_in_fp32(kernel_device: torch.device) -> None:
    call = call_of(torch.bfloat16, (1, 70), (2, 1))
    call["B"], call["C"] = call["B"].float(), call["C"].float()
    judged(SELECTIVE_STATE_UPDATE, selective_state_update, call, kernel_device)


def test_few_rows_and_wide_states_go_row_by_row() -> None:
    assert not space_chunks.takes(15, 1, 16)
    assert not space_chunks.takes(71, 9, 16)
    assert not space_chunks.takes(64, 0, 16)
    assert not space_chunks.takes(64, 1, 257)
    assert space_chunks.takes(72, 9, 256)


@pytest.mark.parametrize("heads", [(5, 1), (34, 2)], ids=str)
def test_heads_of_a_group_are_shared_among_programs(heads: tuple[int, int], kernel_device: torch.device) -> None:
    """Five do not part evenly, and 17 of a group are more than a program takes."""
    call = call_of(torch.bfloat16, (66,), heads, (8, 16))
    judged(SELECTIVE_STATE_UPDATE, selective_state_update, call, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_of_padding_are_zeros(dtype: torch.dtype, kernel_device: torch.device) -> None:
    call = moved(call_of(dtype, (70,), (2, 1)), kernel_device)
    call["query_starts"].clamp_(max=20)  # rows of padding in chunks of their own too
    with holding_nan():
        out = selective_state_update(**call)
    assert out[:20].isfinite().all() and not out[20:].any()


@pytest.mark.parametrize("bias", [-5.0, 3.0], ids=["slow", "fast"])
def test_decays_of_long_sequences(bias: float, kernel_device: torch.device) -> None:
    call = call_of(torch.bfloat16, (300,), (2, 1))
    call["dt_bias"] += bias
    judged(SELECTIVE_STATE_UPDATE, selective_state_update, call, kernel_device)


FAULTS = {
    "state of another sequence at the begin": (space_kernels, "slot_of", slot_before),
    "first row left out": (space_kernels, "rows_of", rows_short),
    "last row of a chunk left out": (space_outputs, "chunk_at", chunk_short),
    "last step of a chunk left out": (space_kernels, "chunk_at", chunk_short),
    "padding not cleared": (space_outputs, "_clear", nothing_cleared),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not launching.INTERPRETED:
        pytest.skip("a compiled kernel keeps the functions that it was compiled with")
    monkeypatch.setattr(*FAULTS[fault])
    with holding_nan(), pytest.raises(AssertionError, match="passed=False"):
        judged(SELECTIVE_STATE_UPDATE, selective_state_update, call_of(torch.bfloat16, (17, 129)), kernel_device)
