"""core_conformance/rules/codes.py: for packed codes of 4 bits it takes other roundings and rejects wrong codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.implementation import OpImplementation
from core.common.ops.quantize.fp4 import quantize_fp4
from core_conformance.cases.ops import collect as ops
from core_conformance.trial import Trial
from tests.support import cpu

Result = tuple[Tensor, Tensor, Tensor]


def in_fp64(x: Tensor, scale: Tensor | None) -> Result:
    codes, group_scales, used = quantize_fp4(x.double(), None if scale is None else scale.double())
    return codes, group_scales, used if x.dtype == used.dtype else used.float()


def other_half_first(x: Tensor, scale: Tensor | None) -> Result:
    codes, *scales = quantize_fp4(x, scale)
    return codes >> 4 | (codes & 15) << 4, *scales


def wider_groups(x: Tensor, scale: Tensor | None) -> Result:
    codes, group_scales, used = quantize_fp4(x, scale)
    return codes, (group_scales.float() * 1.3).to(group_scales.dtype), used


def without_signs(x: Tensor, scale: Tensor | None) -> Result:
    codes, *scales = quantize_fp4(x, scale)
    return codes & 0x77, *scales


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (in_fp64, ""),
        (other_half_first, "dequantised: error over bound"),
        (wider_groups, "scales of groups"),
        (without_signs, "dequantised: error over bound"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_codes_are_rejected_and_other_roundings_taken(fn: Callable[..., Any], reason: str, dtype: str) -> None:
    opened = (cpu(ops=(OpImplementation(op="core::quantize_fp4", name="own", fn=fn),)), ConformanceProfile())
    trial = Trial("cpu", lambda: opened)
    (case,) = (each for each in ops.collect(*opened) if each.id == f"ops/quantize_fp4/own/{dtype}")
    case.run(trial)
    assert any(reason in failure for failure in trial.failures) if reason else trial.failures == []
