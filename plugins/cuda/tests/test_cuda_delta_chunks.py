"""core_cuda/ops/recurrent/delta_chunks.py: packed prompts of the gated delta rule, in parallel over chunks."""

# Triton reads annotations of kernels as types of its own
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.recurrent import GATED_DELTA_RULE
from core_conformance.inputs.large_recurrent import delta_call, prompts
from tests.kernel_cases import CPU
from tests.recurrent_cases import judged

pytest.importorskip("triton", reason="needs triton")
import triton
import triton.language as tl
from cuda_planted_chunks import chunk_short, rows_short, slot_before

from core_cuda.ops import launching
from core_cuda.ops.recurrent import delta_chunks, delta_kernels
from core_cuda.ops.recurrent.delta_rule import gated_delta_rule

PADDING = 3
DTYPES = (torch.bfloat16, torch.float16)


def call_of(
    dtype: torch.dtype, lengths: tuple[int, ...], heads: tuple[int, int] = (1, 2), sizes: tuple[int, int] = (16, 24)
) -> dict[str, Any]:
    call = delta_call(Draw(dtype, CPU, seed=9), sum(lengths) + PADDING, heads, sizes)
    return prompts(call, (0, *accumulate(lengths)))


def expect_agreement(call: dict[str, Any], device: torch.device) -> None:
    """Expect that a call goes in chunks, and agrees with the reference."""
    assert delta_chunks.why_not(*(call[name] for name in ("query", "key", "value", "decay", "query_starts"))) is None
    judged(GATED_DELTA_RULE, gated_delta_rule, call, device)


@pytest.mark.parametrize("lengths", [(1, 15, 17, 40, 64), (63, 64, 65), (0, 129, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_agree_with_the_reference(
    dtype: torch.dtype, lengths: tuple[int, ...], kernel_device: torch.device
) -> None:
    expect_agreement(call_of(dtype, lengths), kernel_device)


def test_sequences_that_begin_have_no_state_before(kernel_device: torch.device) -> None:
    call = call_of(torch.bfloat16, (65, 17))
    call["states"].zero_()
    expect_agreement(call, kernel_device)


def test_a_prompt_in_two_calls_is_one(kernel_device: torch.device) -> None:
    """The second call goes on in the middle of what is a chunk of the first."""

    def in_two(**given: Any) -> Tensor:
        rows, read, written = given["value"].shape[0], given["slots"], given["kept"]
        results = []
        for begin, end, slots in ((0, 100, read), (100, 170, written)):
            own = {name: given[name][begin:end] for name in ("query", "key", "value", "decay", "beta")}
            starts = torch.tensor([0, end - begin], dtype=torch.int32, device=kernel_device)
            results.append(gated_delta_rule(**{**given, **own, "slots": slots, "query_starts": starts}))
        return torch.cat((*results, results[0].new_zeros((rows - 170, *results[0].shape[1:]))))

    judged(GATED_DELTA_RULE, in_two, call_of(torch.bfloat16, (170,)), kernel_device)


HARD: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "decay to e^-20 in each row": {"decay": lambda x: x * 0.0 - 20.0},
    "decay to e^-20 in some rows": {"decay": lambda x: torch.where(x < -1.0, -20.0, x * 0.05)},
    "decay to zero": {"decay": lambda x: torch.where(x < -1.5, -torch.inf, x * 0.05)},
    "hardly any decay": {"decay": lambda x: x * 1e-4},
    "beta near 0": {"beta": lambda x: x * 1e-3},
    "beta of 1": {"beta": torch.ones_like},
    "keys alike, beta of 1": {
        "key": lambda x: x * 0.1 + x[:1],
        "beta": torch.ones_like,
        "decay": lambda x: x * 1e-2,
    },
}


@pytest.mark.parametrize("hard", HARD)
def test_hard_numbers(hard: str, kernel_device: torch.device) -> None:
    call = call_of(torch.bfloat16, (130, 20), (1, 1))
    for name, change in HARD[hard].items():
        call[name] = change(call[name])
    expect_agreement(call, kernel_device)


@pytest.mark.parametrize("sizes", [(33, 65), (72, 130)], ids=str)
def test_sizes_off_blocks(sizes: tuple[int, int], kernel_device: torch.device) -> None:
    expect_agreement(call_of(torch.bfloat16, (1, 70), (1, 1), sizes), kernel_device)


def test_keys_without_a_norm_and_rates_of_another_dtype(kernel_device: torch.device) -> None:
    call = call_of(torch.bfloat16, (1, 70))
    call |= {"norm_eps": 0.0, "key": call["key"] * 0.25, "beta": call["beta"].half()}
    expect_agreement(call, kernel_device)


def test_slices_of_wider_rows(kernel_device: torch.device) -> None:
    call = call_of(torch.bfloat16, (70,))
    rows, wide = len(call["key"]), Draw(torch.bfloat16, CPU, seed=3)
    call |= {"query": wide(rows, 1, 64)[..., :16], "key": wide(rows, 1, 64)[..., 16:32]}
    call |= {"value": wide(rows, 2, 40)[..., 5:29], "decay": call["decay"].mT.contiguous().mT}
    expect_agreement(call, kernel_device)


def test_calls_that_go_row_by_row_are_named() -> None:
    def reason(rows: int, count: int, size: int = 16, by: int = 2, dtype: torch.dtype = torch.bfloat16) -> str | None:
        starts = torch.zeros(count + 1, dtype=torch.int32) if count else None
        key, value = torch.empty(rows, 1, size, dtype=dtype), torch.empty(rows, 1, size, dtype=torch.bfloat16)
        return delta_chunks.why_not(key, key, value, torch.empty((rows, 1, size)[:by]), starts)

    assert reason(64, 2) is None and reason(32, 1) is None and reason(64, 1, 128) is None
    assert reason(64, 0) == "each sequence has one row"
    assert reason(31, 1) == "31 rows of 1 sequences are fewer than 32, or than 24 of each"
    assert reason(64, 3) == "64 rows of 3 sequences are fewer than 32, or than 24 of each"
    assert reason(64, 1, 129) == "keys have 129 features, and chunks take up to 128"
    assert reason(64, 1, by=3) == "decays differ by feature"
    for other in (torch.float16, torch.float32):
        assert reason(64, 1, dtype=other) == "query, key and value are not of one dtype of half precision"


@triton.jit
def _apart(solved, system, rows, SIZE: tl.constexpr):
    """Blocks of the inverse that are not joined: rows that correct nothing of the blocks before."""
    return solved


FAULTS = {
    "state of another sequence at the begin": ("slot_of", slot_before),
    "first row left out": ("rows_of", rows_short),
    "last row of a chunk left out": ("chunk_at", chunk_short),
    "blocks of the inverse on their own": ("_joined", _apart),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not launching.INTERPRETED:
        pytest.skip("a compiled kernel keeps the functions that it was compiled with")
    monkeypatch.setattr(delta_kernels, *FAULTS[fault])
    with pytest.raises(AssertionError, match="passed=False"):
        judged(GATED_DELTA_RULE, gated_delta_rule, call_of(torch.bfloat16, (17, 129)), kernel_device)
