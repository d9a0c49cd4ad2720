"""core/common/ops/linear/lora.py: each row gets what its own adapter gives, as if each were computed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.linear.lora import ADD_LORA, taken_slots
from tests.common.ops.canonical_oracle import assert_raises, every_sample, in_fp64, run, sample


def row_by_row(call: dict[str, Any]) -> Tensor:
    """Add x A^T B^T of each row and layer in fp64."""
    width, rank, sizes = call["b"].shape[1], call["rank"], call["sizes"]
    base, x, a, b = (call[name].double() for name in ("base", "x", "a", "b"))
    out = base.reshape(-1, base.shape[-1]).clone()
    for row, slot in enumerate(call["slots"].tolist()):
        if not 1 <= slot <= width // rank:
            continue
        places, first = slice((slot - 1) * rank, slot * rank), 0
        for layer, size in enumerate(sizes):
            columns = slice(first, first + size)
            down = a[layer * width : (layer + 1) * width][places]
            out[row, columns] += x.reshape(-1, x.shape[-1])[row] @ down.T @ b[columns, places].T
            first += size
    return out.view(base.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_has_its_own_adapter(dtype: torch.dtype) -> None:
    for one in every_sample(ADD_LORA, dtype):
        call = dict(one.kwargs)
        exact = row_by_row(call)
        torch.testing.assert_close(in_fp64(ADD_LORA, call)[0], exact)
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(run(ADD_LORA, call)[0].double(), exact, rtol=bound, atol=bound, msg=one.name)


def test_what_one_adapter_makes_infinite_stays_with_its_rows() -> None:
    call = sample(ADD_LORA, "query, key, value")
    call["slots"] = torch.arange(9) % 4
    before = run(ADD_LORA, call)[0]
    call["a"][8:16] = torch.finfo(torch.float32).max  # slot 2 of the first layer
    found = run(ADD_LORA, call)[0]
    others = call["slots"] != 2
    assert torch.equal(found[others], before[others]) and not found[~others].isfinite().all()


def test_rows_without_an_adapter_stay_as_they_are() -> None:
    call = sample(ADD_LORA, "no row has an adapter", torch.bfloat16)
    assert torch.equal(run(ADD_LORA, call)[0], call["base"])


def test_a_call_is_timed_with_rows_of_every_slot_and_of_none() -> None:
    assert taken_slots(sample(ADD_LORA, "query, key, value"))["slots"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "rows of another number": ({"x": torch.ones(6, 48)}, "do not go together"),
    "too few slots": ({"slots": torch.ones(6, dtype=torch.int64)}, "one number for each of 7 rows, not 6"),
    "slots of int32": ({"slots": torch.ones(7, dtype=torch.int32)}, "slots must be torch.int64, not torch.int32"),
    "a rank that does not divide": ({"rank": 5}, "b has 12 columns, which are no slots of rank 5"),
    "columns of no layer": ({"sizes": [20, 10]}, r"sizes \[20, 10\] do not make up 40 columns"),
    "an A of another layer": ({"sizes": [20, 20]}, r"a must have shape \(24, 48\), not \(12, 48\)"),
    "another dtype": ({"a": torch.ones(12, 48).double()}, "must have one dtype, not torch.float32, torch.float64"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_other_arguments_are_refused_by_kernel_and_fake(case: str) -> None:
    change, message = NEAR_MISSES[case]
    assert_raises(ADD_LORA, sample(ADD_LORA, "one layer") | change, message)
