"""core/verify/fakes/parity.py: what differs between a kernel, its fake and its schema on one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.fakes.schema import find_overload
from core.verify.fakes.parity import CallRefused, compare, described

ROWS = torch.arange(12.0).view(3, 4)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("parity_test", "DEF")
    yield made
    made._destroy()


def differences(library: torch.library.Library, schema: str, kernel: Any, fake: Any, **kwargs: Any) -> list[str]:
    library.define(f"op{schema}")
    library.impl("op", kernel, "CPU")
    torch.library.register_fake("parity_test::op", fake, lib=library)
    op = find_overload("parity_test::op")
    assert op is not None
    before = {name: value.clone() for name, value in kwargs.items() if isinstance(value, Tensor)}
    found = compare(op, kwargs)
    assert all(torch.equal(value, before[name]) for name, value in kwargs.items() if name in before)
    return found


def one(x: Tensor) -> Tensor:
    return x.clone()


def written(x: Tensor) -> Tensor:
    return x.add_(1).clone()


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.clone()
    return whole, whole[:, :2]


CASES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], list[str]]] = {
    "right": ("(Tensor x) -> Tensor", one, torch.empty_like, []),
    "shape": (
        "(Tensor x) -> Tensor", one, lambda x: x.new_empty(3), ["result 0 has shape (3, 4), and the fake says (3)"],
    ),
    "dtype": ("(Tensor x) -> Tensor", one, lambda x: x.int(), ["result 0 has dtype float32, and the fake says int32"]),
    "strides": (
        "(Tensor x) -> Tensor", one, lambda x: x.new_empty(4, 3).t(),
        ["result 0 has strides (4, 1), and the fake says (1, 3)"],
    ),
    "device": (
        "(Tensor x) -> Tensor", one, lambda x: torch.empty(3, 4, device="meta"),
        ["result 0 has device cpu, and the fake says meta"],
    ),
    "count": ("(Tensor x) -> Tensor[]", lambda x: [one(x)] * 1, lambda x: [one(x), one(x)],
              ["the kernel gives 1 results, the fake 2"]),
    "undeclared write": (
        "(Tensor x) -> Tensor", written, torch.empty_like,
        ["writes its argument 'x', which the schema does not declare"],
    ),
    "declared write": ("(Tensor(a!) x) -> Tensor", written, torch.empty_like, []),
    "undeclared alias": (
        "(Tensor x) -> Tensor", lambda x: x, torch.empty_like, ["result 0 shares memory with argument 'x'"],
    ),
    "declared alias": ("(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), lambda x: x, []),
    "alias that the fake forgets": (
        "(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), torch.empty_like,
        ["result 0 shares memory with argument 'x', and the fake's does not"],
    ),
    "alias of the fake alone": (
        "(Tensor x) -> Tensor", one, lambda x: x,
        ["the fake's result 0 shares memory with argument 'x', and the kernel's does not"],
    ),
    "results that share, as the fake says": ("(Tensor x) -> (Tensor, Tensor)", parts, parts, []),
    "results that share": (
        "(Tensor x) -> (Tensor, Tensor)", parts, lambda x: (torch.empty_like(x), x.new_empty(3, 4)[:, :2]),
        ["results 0 and 1 share memory"],
    ),
    "results that the fake alone shares": (
        "(Tensor x) -> (Tensor, Tensor)", lambda x: (x.clone(), x.clone()[:, :2]), parts,
        ["the fake's results 0 and 1 share memory, and the kernel's do not"],
    ),
    "a number": ("(Tensor x) -> int", lambda x: 3, lambda x: 4, ["result 0 is 3, and the fake says 4"]),
    "a size that values decide": ("(Tensor x) -> Tensor", torch.nonzero, torch.nonzero, []),
    "nothing": ("(Tensor(a!) x) -> ()", lambda x: _adds(x), lambda x: None, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_said(library: torch.library.Library, name: str) -> None:
    schema, kernel, fake, expected = CASES[name]
    assert differences(library, schema, kernel, fake, x=ROWS) == expected


def _adds(x: Tensor) -> None:
    x.add_(1)


def test_a_fake_that_raises_is_a_difference(library: torch.library.Library) -> None:
    def fake(x: Tensor) -> Tensor:
        raise ValueError("not on\nfakes")

    (line,) = differences(library, "(Tensor x) -> Tensor", one, fake, x=ROWS)
    assert line == "runs on real tensors and raises on fake ones: ValueError: not on fakes"


def test_a_kernel_that_raises_judges_nothing(library: torch.library.Library) -> None:
    def kernel(x: Tensor) -> Tensor:
        raise ValueError("rank 7 only")

    with pytest.raises(CallRefused, match="ValueError: rank 7 only"):
        differences(library, "(Tensor x) -> Tensor", kernel, torch.empty_like, x=ROWS)


def test_writes_between_the_rows_of_a_view_and_lists_of_tensors_are_seen(library: torch.library.Library) -> None:
    def kernel(xs: list[Tensor], *, by: float) -> Tensor:
        xs[1].as_strided((1,), (1,), 3).add_(by)
        return xs[0].clone()

    def fake(xs: list[Tensor], *, by: float) -> Tensor:
        return torch.empty_like(xs[0])

    wide = torch.zeros(2, 6)
    found = differences(library, "(Tensor[] xs, *, float by) -> Tensor", kernel, fake, xs=[ROWS, wide[:, :2]], by=2.0)
    assert found == ["writes its argument 'xs', which the schema does not declare"]
    assert not wide.any()


def test_views_that_torch_declares_are_no_lie() -> None:
    assert compare(torch.ops.aten.t.default, {"self": ROWS}) == []
    assert compare(torch.ops.aten.split.Tensor, {"self": ROWS, "split_size": 2, "dim": 1}) == []


def test_values_are_described_in_short() -> None:
    values = [ROWS, ROWS.t(), None, 2, torch.int8, [ROWS]]
    assert [described(each) for each in values] == [
        "float32 (3, 4)",
        "float32 (4, 3) strides (1, 4)",
        "None",
        "2",
        "int8",
        "[float32 (3, 4)]",
    ]
