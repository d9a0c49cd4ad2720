"""core_cpu/lora.py and csrc/add_lora.cpp: what adapters add, judged against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.ops.arguments import Draw
from core.common.ops.implementation import OpCall
from core.common.ops.linear.lora import ADD_LORA, lora_call
from core_cpu.lora import add_lora, add_lora_alike, why_not
from tests.kernel_cases import CPU, DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels")

both = pytest.mark.parametrize("kernel", [add_lora, add_lora_alike], ids=["few", "alike"])


def call_of(rows: int, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return lora_call(Draw(dtype, CPU, 5), (rows,), 83, options.pop("sizes", (203,)), **options)


@pytest.mark.cases(3)
@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype, kernel: Any) -> None:
    check(ADD_LORA, kernel, [sample.kwargs for sample in ADD_LORA.samples(dtype, CPU)], CPU)


@pytest.mark.cases(2)
@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows_and_ranks_that_no_vector_divides(dtype: torch.dtype, kernel: Any) -> None:
    for rows in (1, 2, 3, 19, 70):
        check(ADD_LORA, kernel, [call_of(rows, dtype, rank=rank) for rank in (1, 4, 7, 16, 33)], CPU)
    check(ADD_LORA, kernel, [call_of(70, dtype, sizes=(40, 24, 19), rank=16)], CPU)


@both
def test_rows_without_an_adapter_keep_every_bit_and_infinity_its_rows(kernel: Any) -> None:
    call = call_of(40, torch.bfloat16)
    call["slots"] = torch.arange(40) % 4
    before = kernel(**call)
    assert torch.equal(before[::4], call["base"][::4])
    call["a"][4:8] = torch.finfo(torch.bfloat16).max
    found = kernel(**call)
    others = call["slots"] != 2
    assert torch.equal(found[others], before[others]) and not found[~others].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    call = call_of(70, dtype)
    whole = add_lora_alike(**call)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        some = {**call, **{name: call[name][rows] for name in ("base", "x", "slots")}}
        assert torch.equal(add_lora_alike(**some), whole[rows])


def test_other_dtypes_are_refused() -> None:
    call = call_of(3, torch.float64)
    assert "torch.float64" in str(why_not(OpCall(op=ADD_LORA.qualified_name, args=call)))
