"""core_cuda/ops/recurrent: the steps of recurrent layers against their references, states included."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from core.common.ops.declaration import CanonicalOp
from tests.kernel_cases import DTYPES, randn
from tests.recurrent_cases import OPS, calls, judged

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops.recurrent import convolution
from core_cuda.ops.recurrent.convolution_tiles import Tiles, tiles_of
from core_cuda.ops.recurrent.states import block_of

BY_OP = {each.op: each for each in IMPLEMENTATIONS}
EACH = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EACH
def test_calls_agree_with_the_reference(op: CanonicalOp, dtype: torch.dtype, kernel_device: torch.device) -> None:
    own = BY_OP[op.qualified_name]
    for name, call in calls(op, dtype):
        assert own.condition(op.bind((), call)) is None, name
        judged(op, own.fn, call, kernel_device)


@EACH
def test_states_that_are_no_run_are_refused(op: CanonicalOp) -> None:
    call = next(dict(each.kwargs) for each in op.samples(torch.float32, torch.device("cpu")) if each.name == "slots")
    call["states"] = call["states"].mT.contiguous().mT
    reason = BY_OP[op.qualified_name].condition(op.bind((), call))
    assert reason is not None and "one run of memory" in reason


def test_wide_keys_and_states_are_refused() -> None:
    for op, name, size in ((OPS[1], "key", 513), (OPS[2], "B", 513)):
        call = {name: torch.empty(1, 1, size)}
        reason = BY_OP[op.qualified_name].condition(op.bind((), call))
        assert reason is not None and "takes up to 512" in reason


def test_few_states_are_shared_out_among_more_programs(kernel_device: torch.device) -> None:
    assert block_of(1, 128, most=64, least=8) == 8
    assert block_of(10_000, 128, most=64, least=8) == 64
    assert block_of(10_000, 5, most=64, least=8) == 8


def packed_convolution(
    lengths: tuple[int, ...], padding: int, dtype: torch.dtype, *, taps: int = 4, length: int = 4
) -> dict[str, Any]:
    """Return a call of sequences of these lengths, of a slice of wider rows; what lies in padding is not a number."""
    channels, tokens = 24, sum(lengths)
    x = randn(tokens + padding, 3 * channels, dtype=dtype)[:, channels : 2 * channels]
    x[tokens:] = torch.nan
    return {
        "x": x,
        "states": randn(len(lengths) + 2, channels, length, dtype=dtype, seed=1),
        "weight": randn(channels, taps, dtype=dtype, seed=2),
        "bias": randn(channels, dtype=dtype, seed=3),
        "slots": torch.arange(len(lengths)).flip(0) + 1,
        "query_starts": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "silu": True,
    }


AROUND = (2, 6, 1, 6, 0, 0, 2, 3, 11)
"""Sequences that begin and end within tiles of 4 rows and at their ends, several in one, empty, shorter than taps."""


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(
    ("lengths", "padding", "sizes"),
    [
        pytest.param((21,), 0, {}, id="one"),
        pytest.param(AROUND, 7, {}, id="around"),
        pytest.param(AROUND, 0, {"length": 3}, id="around, states without the oldest input"),
        pytest.param(AROUND, 1, {"taps": 3, "length": 6}, id="around, long states"),
        pytest.param((9,), 0, {"taps": 1, "length": 1}, id="one tap"),
        pytest.param((0, 2, 0), 9, {}, id="mostly padding"),
    ],
)
def test_packed_rows_in_tiles_agree_with_the_reference(
    lengths: tuple[int, ...],
    padding: int,
    sizes: dict[str, int],
    rows: int,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forced = Tiles(rows=rows, block=16)  # channels do not fill blocks
    monkeypatch.setattr(convolution, "tiles_of", lambda *_: forced)
    kernel = convolution.causal_conv1d_update
    for dtype in (torch.float32, torch.bfloat16):
        judged(OPS[0], kernel, packed_convolution(lengths, padding, dtype, **sizes), kernel_device)


def test_tiles_are_low_and_narrow_where_programs_are_few(kernel_device: torch.device) -> None:
    many, few, one = tiles_of(100_000, 10_000), tiles_of(3, 1_000), tiles_of(1, 24)
    assert (many.rows, many.block, many.num_warps) == (4, 256, 1)
    assert few.rows == 1
    assert (one.rows, one.block, one.num_warps) == (1, 32, 1)
