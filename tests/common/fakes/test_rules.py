"""core/common/fakes/rules.py and sizes.py: what rules made of data give, and how they read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.common.fakes import (
    Rule,
    arg,
    argument,
    computed,
    half_last,
    like,
    new,
    nothing,
    part,
    results,
    size,
    with_last,
)
from core.common.fakes.sizes import Size

X = torch.empty(3, 4, 8, dtype=torch.bfloat16)
W = torch.empty(6, 8, dtype=torch.float16)


def given(rule: Rule) -> Tensor:
    out = rule.on({"x": X, "w": W, "n": 5, "to": torch.int8, 0: X, 1: W})
    assert isinstance(out, Tensor)
    return out


def test_rules_choose_their_argument() -> None:
    first, second = torch.empty(2, 4), torch.empty(3, 6, dtype=torch.float16)
    assert like(1)(first, second, extra=1).shape == second.shape
    assert half_last(1)(first, second).shape == (3, 3)
    assert half_last(1)(first, second).dtype == torch.float16
    assert like()(first.t(), second).stride() == (1, 4)
    assert like("y")(first, y=second).shape == second.shape
    assert nothing(first, key=second) is None


@pytest.mark.parametrize(
    ("rule", "shape", "dtype", "text"),
    [
        (like("x"), (3, 4, 8), torch.bfloat16, "like x"),
        (like("x", dtype=torch.int8), (3, 4, 8), torch.int8, "like x of dtype int8"),
        (like("x", dtype="w"), (3, 4, 8), torch.float16, "like x of dtype w"),
        (half_last("x"), (3, 4, 4), torch.bfloat16, "new (*x.shape[:-1], x.shape[-1] // 2) of x's dtype"),
        (with_last("x", size("w", 0)), (3, 4, 6), torch.bfloat16, "new (*x.shape[:-1], w.shape[0]) of x's dtype"),
        (with_last("x", 2, dtype="to"), (3, 4, 2), torch.int8, "new (*x.shape[:-1], 2) of dtype to"),
        (new(size("x", 0), arg("n"), like="w"), (3, 5), torch.float16, "new (x.shape[0], n) of w's dtype"),
        (new(1, like="w", dtype=torch.float32), (1,), torch.float32, "new (1) of dtype float32"),
        (argument("w"), (6, 8), torch.float16, "w itself"),
    ],
)
def test_one_result(rule: Rule, shape: tuple[int, ...], dtype: torch.dtype, text: str) -> None:
    out = given(rule)
    assert (tuple(out.shape), out.dtype, str(rule)) == (shape, dtype, text)


def test_new_results_are_contiguous_and_arguments_are_themselves() -> None:
    turned = X.mT
    assert half_last("x").on({"x": turned}).is_contiguous()
    assert argument("x").on({"x": turned}) is turned
    assert like("x").on({"x": turned}).stride() == turned.stride()


def test_a_part_of_an_earlier_result_shares_its_memory() -> None:
    rule = results(like("x"), part(0, size("x", -1) - 2), argument("w"))
    whole, leading, last = rule.on({"x": X, "w": W})
    assert leading.shape == (3, 4, 6) and leading.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert last is W
    assert str(rule) == "like x; the first x.shape[-1] - 2 columns of result 0; w itself"


def rounded(n: int, x: Tensor) -> int:
    return n + x.dim()


@pytest.mark.parametrize(
    ("expression", "value", "text"),
    [
        (arg("n") + 1, 6, "n + 1"),
        (1 + arg("n"), 6, "1 + n"),
        (arg("n") - 1 - arg("n"), -1, "n - 1 - n"),
        (9 - (arg("n") - 1), 5, "9 - (n - 1)"),
        (arg("n") * 2 * size("x", 1), 40, "n * 2 * x.shape[1]"),
        (2 * (arg("n") + 1) // 5, 2, "2 * (n + 1) // 5"),
        (arg("n") // (size("x", 0) - 1), 2, "n // (x.shape[0] - 1)"),
        (computed(rounded, ("n", "int"), ("x", "tensor")), 8, "rounded(n, x)"),
        (arg(0), 5, "argument 0"),
    ],
)
def test_sizes(expression: Size, value: int, text: str) -> None:
    assert (expression.of({"n": 5, "x": X, 0: 5}), str(expression)) == (value, text)


def test_a_rule_names_the_arguments_that_it_needs() -> None:
    rule = results(
        new(size("x", 0), arg("n"), computed(rounded, ("m", "int")), like="w", dtype="to"), with_last("y", 3)
    )
    assert set(rule.needs()) == {
        ("x", "tensor"),
        ("n", "int"),
        ("m", "int"),
        ("w", "tensor"),
        ("to", "dtype"),
        ("y", "tensor"),
    }
