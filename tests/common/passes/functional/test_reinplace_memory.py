"""core/common/passes/functional/memory.py: which bytes strided values cover, and which of them meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from core.common.passes.functional.memory import Area


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ((0, (3, 4), (12, 1)), (4, (3, 4), (12, 1)), True),  # columns of one matrix
        ((0, (3, 5), (12, 1)), (4, (3, 4), (12, 1)), False),
        ((0, (3, 4), (4, 1)), (12, (3, 4), (4, 1)), True),  # rows
        ((0, (3, 4), (4, 1)), (8, (3, 4), (4, 1)), False),
        ((0, (2, 3, 4), (24, 4, 1)), (12, (2, 3, 4), (24, 4, 1)), True),  # keys and values of a paged cache
        ((0, (6,), (2,)), (1, (6,), (2,)), True),  # even and odd
        ((0, (6,), (2,)), (3, (6,), (3,)), False),
        ((10, (2, 4), (12, 1)), (0, (2, 2), (12, 1)), False),  # around the end of a row
        ((0, (0, 4), (4, 1)), (0, (3, 4), (4, 1)), True),
    ],
)
def test_areas_that_do_not_meet(first: Any, second: Any, apart: bool) -> None:
    base = torch.empty(64)
    areas = [Area.of(base.as_strided(size, stride, offset)) for offset, size, stride in (first, second)]
    assert areas[0] is not None and areas[1] is not None
    assert areas[0].is_apart(areas[1]) is areas[1].is_apart(areas[0]) is apart
    touched = [torch.zeros(64), torch.zeros(64)]
    for marks, (offset, size, stride) in zip(touched, (first, second), strict=True):
        marks.as_strided(size, stride, offset).fill_(1)
    assert not (apart and bool((touched[0] * touched[1]).any()))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.lists(st.tuples(st.integers(1, 4), st.sampled_from((1, 2, 3, 4, 6, 12))), max_size=3)
        ),
        min_size=2,
        max_size=2,
    )
)
def test_what_is_said_of_areas_holds(given_areas: Any) -> None:
    base, areas, touched = torch.empty(160), [], []
    for offset, dims in given_areas:
        size, stride = [n for n, _ in dims], [s for _, s in dims]
        areas.append(Area.of(base.as_strided(size, stride, offset)))
        marks = torch.zeros(160, dtype=torch.bool)
        marks.as_strided(size, stride, offset).fill_(True)
        touched.append(marks)
    assert areas[0] is not None and areas[1] is not None
    if areas[0].is_apart(areas[1]):
        assert not (touched[0] & touched[1]).any()
    if areas[0].covers(areas[1]):
        assert not (touched[1] & ~touched[0]).any()
    if areas[0].is_same(areas[1]):
        assert torch.equal(touched[0], touched[1])


def test_symbolic_strides_are_neither_hashed_nor_guessed() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
    value = mode.from_tensor(torch.empty(3, 5, 7), symbolic_context=dynamic)
    whole, first = Area.of(value), Area.of(value[:, :1])
    assert whole is not None and first is not None
    assert whole.covers(whole) and not whole.covers(first)
