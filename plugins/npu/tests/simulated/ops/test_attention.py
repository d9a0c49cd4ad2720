"""Rotations and attention on an NPU against the references of the canonical ops, cache writes included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu_calls import LENGTHS, Call, attention_call, rotary_attention_calls
from npu_kernel_cases import (
    BY_NAME,
    copied,
    implementation,
    moved,
    npu,
    on_device,
    own_calls,
    reason,
    taken,
    widened,
)

from core.common.numerics import Fp64Mode, judge
from core.common.ops.declaration import CanonicalOp
from core.errors import UsageError
from core_npu.ops.attention_lengths import decode_keys
from tests.kernel_cases import CPU, DTYPES, check, faked, laid_out
from tests.support import refused

pytestmark = pytest.mark.npu_sim
HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rotary", "rotary_single", "qk_norm_rotary"])
def test_rotations_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME[name]
    check(op, on_device(op, device), taken(op, own_calls(op, dtype)), CPU)


def check_attention(op: CanonicalOp, call: Call) -> None:
    """Expect numbers, layout, zeros for padding and the written caches, but for the null block's."""
    device = npu()
    assert reason(op, call) is None
    on_the_device = moved(call, device)
    result = implementation(op).fn(**on_the_device)
    assert laid_out([result]) == laid_out(faked(op, call))
    on_the_host, wide = copied(call), widened(call)
    wanted = op.reference(**on_the_host)
    with Fp64Mode():
        exact = op.reference(**wide)
    verdict = judge(result.cpu(), wanted, exact)
    assert verdict.passed, verdict
    real = int(call["query_starts"][-1])
    assert not result[real:].cpu().any()
    slots = call["slot_mapping"][:real]
    for name in ("key_cache", "value_cache"):
        rows = [each[name].cpu().flatten(0, 1) for each in (on_the_device, on_the_host, wide)]
        verdict = judge(*(each[slots] for each in rows))
        assert verdict.passed, (name, verdict)
        elsewhere = torch.ones(len(rows[0]), dtype=torch.bool).index_fill(0, call["slot_mapping"], False)
        assert torch.equal(*(each[elsewhere].view(torch.int16) for each in rows[:2]))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_of_any_number_attend_as_the_reference_does(name: str, size: int, dtype: torch.dtype) -> None:
    check_attention(BY_NAME["attention"], attention_call(dtype, **LENGTHS[name], size=size))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", [16, 80, 96, 256, 512])
@pytest.mark.parametrize("name", ["decode", "decode padded"])
def test_decode_takes_heads_of_other_sizes(name: str, size: int, dtype: torch.dtype) -> None:
    check_attention(BY_NAME["attention"], attention_call(dtype, **LENGTHS[name], size=size))


@pytest.mark.parametrize("page", [16, 48, 128, 1024])
def test_blocks_of_any_size_the_kernel_takes(page: int) -> None:
    lens = ((3, 1100), (1, 40))
    check_attention(BY_NAME["attention"], attention_call(torch.bfloat16, lens, page=page, heads=(6, 1)))


def test_what_is_in_unwritten_places_is_not_seen() -> None:
    """NaN in places of the cache that nobody wrote, and in the null block, which the rows of padding look at."""
    for size in (64, 80):
        call = attention_call(torch.bfloat16, **LENGTHS["decode padded"], size=size)
        written = torch.zeros(call["key_cache"].shape[:2], dtype=torch.bool)
        for row, length in zip(call["block_table"], call["seq_lens"].tolist(), strict=True):
            for position in range(length):
                written[row[position // 16], position % 16] = True
        for name in ("key_cache", "value_cache"):
            call[name].masked_fill_(~written[..., None, None], torch.nan)
        check_attention(BY_NAME["attention"], call)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", [name for name, _ in rotary_attention_calls(torch.bfloat16)])
def test_attention_behind_a_rotation_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    check_attention(BY_NAME["rotary_attention"], dict(rotary_attention_calls(dtype))[name])


def test_a_query_that_is_a_view_is_read_as_one() -> None:
    call = attention_call(torch.bfloat16, **LENGTHS["chunk and mixed"])
    call["query"] = call["query"].transpose(0, 1).contiguous().transpose(0, 1)
    merged = torch.cat((call["query"], call["key"], call["value"]), dim=1)
    parts: dict[str, Any] = dict(zip(("query", "key", "value"), merged.split((4, 2, 2), dim=1), strict=True))
    check_attention(BY_NAME["attention"], {**call, **parts})


def test_no_tokens_launch_nothing() -> None:
    device, op = npu(), BY_NAME["attention"]
    call = attention_call(torch.bfloat16, (), padding=(0, 1))
    assert on_device(op, device)(**{**call, "block_table": torch.zeros(1, 1, dtype=torch.int32)}).shape == (0, 4, 64)


def test_a_decode_step_out_of_order_is_refused_where_its_rows_could_not_be_told() -> None:
    device, op = npu(), BY_NAME["attention"]
    call = attention_call(torch.bfloat16, **LENGTHS["decode"], size=80)
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    with refused(UsageError, "sequences of padding come last"):
        on_device(op, device)(**{**call, "query_starts": starts})
    assert decode_keys(4, [7, 5, 0], [0, 1, 2, 2]) == [7, 5, 1, 1]
