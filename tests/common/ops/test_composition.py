"""core/common/ops/composition.py: an op made of two has their arguments, results, fakes and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.composition import Signature, followed
from core.common.ops.declaration import CanonicalOp


def split(x: Tensor, at: int, *, twice: bool = False) -> tuple[Tensor, Tensor]:
    return x[:at] * (2 if twice else 1), x[at:]


def shifted(x: Tensor, offset: Tensor | None, *, by: float = 1.0) -> Tensor:
    return x + by if offset is None else x + offset * by


def no_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    return {}


SPLIT = CanonicalOp(
    schema="split(Tensor x, int at, *, bool twice=False) -> (Tensor head, Tensor tail)",
    reference=split,
    fake=split,
    calls=no_calls,
)
SHIFT = CanonicalOp(
    schema="shift(Tensor x, Tensor? offset, *, float by=1.0) -> Tensor", reference=shifted, fake=shifted, calls=no_calls
)


def test_the_schema_is_made_of_both() -> None:
    made = followed(SPLIT, SHIFT, no_calls)
    assert made.schema == (
        "split_shift(Tensor x, int at, Tensor? offset, *, float by=1.0, bool twice=False) -> (Tensor, Tensor tail)"
    )
    assert followed(SHIFT, SHIFT, no_calls).schema.startswith("shift_shift(Tensor x, Tensor? offset, Tensor? offset, *")


@pytest.mark.parametrize("op", [SPLIT, SHIFT], ids=lambda op: op.name)
def test_a_schema_taken_apart_is_put_together_again(op: CanonicalOp) -> None:
    assert Signature.of(op).schema(op.name) == op.schema


def test_each_part_gets_its_own_arguments() -> None:
    made, x = followed(SPLIT, SHIFT, no_calls), torch.arange(5.0)
    for function in (made.reference, made.fake):
        head, tail = function(x, 2, torch.ones(2), by=10.0, twice=True)
        assert head.tolist() == [10.0, 12.0] and tail.tolist() == [2.0, 3.0, 4.0]
    head, tail = made.reference(x, 2, None)
    assert head.tolist() == [1.0, 2.0] and tail.tolist() == [2.0, 3.0, 4.0]


def test_it_is_cut_and_runs_between_graphs_as_the_first() -> None:
    assert not followed(SPLIT, SHIFT, no_calls).break_point and followed(SPLIT, SHIFT, no_calls).eager is None
    cut = replace(SPLIT, break_point=True, eager=lambda x, at: (x[:at] - 7, x[at:]))
    made = followed(cut, SHIFT, no_calls)
    assert made.break_point and made.eager is not None
    assert made.eager(torch.zeros(3), 1, None)[0].tolist() == [-6.0]
