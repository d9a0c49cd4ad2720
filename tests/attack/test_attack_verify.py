"""Verification of passes that change nothing: no false alarm, whatever the values are."""

from __future__ import annotations

import torch
from torch import Tensor

import core
from core import InputSpec
from tests.support import cpu


def undefined(x: Tensor) -> Tensor:
    y = (x * 1 - torch.inf) * 0
    return y.view(y.shape) + x


def test_values_that_are_not_a_number_before_and_after_are_equal() -> None:
    inputs, x = {"x": InputSpec((8, 16), torch.float32)}, torch.randn(8, 16)
    program = core.compile(
        undefined,
        cpu(),
        inputs=inputs,
        lowering="inline",
        strict=True,
        verify="full",
        options=core.CompileOptions(examples=[{"x": x}]),
    )
    assert program(x=x).isnan().all()
    assert program.report().traces[0].passes[0].matched > 0
