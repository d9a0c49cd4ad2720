"""Rotations turned the other way, on a device without the op: nothing of the model changes, not even a layout."""

from __future__ import annotations

import torch
from torch import Tensor

import core
from core import InputSpec
from tests.support import cpu

SHAPE = (2, 7, 4, 8)
ANGLES = torch.arange(7.0)[:, None] * torch.tensor([1.0, 0.4, 0.1, 0.03]).repeat(2)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def backward(x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return x * COS + torch.cat((x[..., 4:], -x[..., :4]), -1) * SIN


def test_a_backward_rotation_keeps_bits_and_layout_where_it_is_not_implemented() -> None:
    inputs, x = {"x": InputSpec(SHAPE, torch.float32)}, torch.linspace(-2, 3, 448).view(SHAPE)
    fused = core.compile(backward, cpu(), inputs=inputs, lowering="inline", strict=True)
    result, expected = fused(x=x), core.compile(backward, cpu(), inputs=inputs, lowering="inline", passes=())(x=x)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
    (report,) = [r for r in fused.report().traces[0].passes if r.name == "lift_rotary"]
    assert report.matched == 0
    assert "does not implement core::rotary_single" in report.near_misses[0].reason
