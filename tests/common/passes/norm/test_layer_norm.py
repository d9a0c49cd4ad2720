"""core/common/passes/norm/layer_norm.py: one call keeps every bit in fp32; else layer norm keeps criterion T1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.common.numerics import judge
from core.common.ops.norm.norms import LAYER_NORM
from core.common.passes.norm.layer_norm import LIFT_LAYER_NORM
from tests.common.passes.lifting import BF16, DTYPES, F32, Lifted, draw, lifted

D = 48


def lift(function: Callable[..., Any], **inputs: Tensor) -> Lifted:
    return lifted(function, LIFT_LAYER_NORM, **inputs)


def inputs(dtype: torch.dtype = F32) -> dict[str, Tensor]:
    return {
        "x": draw(3, 7, D, dtype=dtype, shift=2.0),
        "w": draw(D, dtype=dtype, scale=0.4, shift=1.0),
        "b": draw(D, dtype=dtype, seed=9),
    }


ONE_CALL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weight and bias": lambda x, w, b: functional.layer_norm(x, (D,), w, b, 1e-5),
    "no bias": lambda x, w, b: torch.layer_norm(x, (D,), w, None, 1e-6),
    "neither": lambda x, w, b: functional.layer_norm(x, (D,)),
    "by name": lambda x, w, b: functional.layer_norm(x, bias=b, weight=w, normalized_shape=(D,), eps=3e-4),
    "one plus weight": lambda x, w, b: functional.layer_norm(x, (D,), w + 1, b, 1e-5),
    "wide, then back": lambda x, w, b: functional.layer_norm(x.float(), (D,), None, None, 1e-5).to(x.dtype),
    "twice": lambda x, w, b: functional.layer_norm(functional.layer_norm(x, (D,)).float(), (D,)).to(x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", ONE_CALL)
def test_one_call_is_lifted_and_keeps_every_bit_of_fp32(spelling: str, dtype: torch.dtype) -> None:
    result = lift(ONE_CALL[spelling], **inputs(dtype))
    wanted = 2 if spelling == "twice" else 1
    assert result.reports["lift_layer_norm"].matched == result.count(LAYER_NORM.overload) == wanted
    assert result.is_equal or dtype == BF16
    assert not judge(result.after[0], result.before[0], result.exact[0]).reason


def written(x: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    return (wide - mean) * torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + eps)


WRITTEN_OUT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cohere": lambda x, w, b: (w.float() * written(x)).to(x.dtype),
    "with a bias": lambda x, w, b: (written(x, 1e-3) * w.float() + b.float()).to(x.dtype),
    "without weight": lambda x, w, b: written(x).to(x.dtype),
    "wide result": lambda x, w, b: written(x),
    "weight after the cast": lambda x, w, b: written(x).to(x.dtype) * w,
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", WRITTEN_OUT)
def test_written_out_it_is_lifted_and_as_exact_as_before(spelling: str, dtype: torch.dtype) -> None:
    result = lift(WRITTEN_OUT[spelling], **inputs(dtype))
    assert result.reports["lift_layer_norm"].matched == result.count(LAYER_NORM.overload) == 1
    assert not judge(result.after[0], result.before[0], result.exact[0]).reason


def test_eps_and_dtypes_are_read_as_values() -> None:
    result = lift(lambda x, w, b: (written(x, 3e-4) * w.float()).to(x.dtype), **inputs(BF16))
    (node,) = result.calls(LAYER_NORM.overload)
    assert node.args[3] == 3e-4
    assert (node.kwargs["compute_dtype"], node.kwargs["out_dtype"]) == (F32, BF16)


NEAR_MISSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "over two dimensions": (lambda x: functional.layer_norm(x, x.shape[1:]), "over 2 dimensions"),
    "another mean": (
        lambda x: x * torch.rsqrt((x - x.mean()).pow(2).mean(-1, True) + 1e-5),
        "something else than its own mean",
    ),
    "the root scales something else": (
        lambda x: x * torch.rsqrt((x - x.mean(-1, True)).pow(2).mean(-1, True) + 1e-5),
        "less its mean",
    ),
    "half precision": (
        lambda x: (
            (x.bfloat16() - x.bfloat16().mean(-1, True))
            * torch.rsqrt((x.bfloat16() - x.bfloat16().mean(-1, True)).pow(2).mean(-1, True) + 1e-5)
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    function, reason = NEAR_MISSES[case]
    result = lift(function, x=draw(3, 7, D))
    assert result.reports["lift_layer_norm"].matched == result.count(LAYER_NORM.overload) == 0
    assert reason in result.reasons("lift_layer_norm")
    assert result.reasons("lift_layer_norm")


def test_an_rms_norm_is_no_layer_norm() -> None:
    report = lift(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5), x=draw(5, D)).reports["lift_layer_norm"]
    assert (report.matched, report.near_misses) == (0, ())
