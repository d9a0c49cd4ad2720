"""Sites that only partly compute under autocast: one op in their place would compute all of it under one mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core import InputSpec, Program
from tests.support import cpu

SHAPE = (2, 4, 6, 16)
INPUTS = {name: InputSpec(SHAPE, torch.float32) for name in ("q", "k", "v")}


def scores_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores.float() * 0.25, -1) @ v


def values_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return weights @ v


def scores_alone_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores * 0.25, -1) @ v.to(scores.dtype)


def compiled(model: Any, **options: Any) -> Program:
    return core.compile(model, cpu(), inputs=INPUTS, options=core.CompileOptions(lowering="inline", **options))


@pytest.mark.parametrize("model", [scores_in_half, values_in_half, scores_alone_in_half])
def test_attention_across_the_border_of_an_autocast_stays_as_it_is(model: Any) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(SHAPE) for name in INPUTS}
    program = compiled(model, strict=True)
    assert torch.equal(program(**given), compiled(model, passes=())(**given))
    (report,) = [r for r in program.report().traces[0].passes if r.name == "lift_attention"]
    assert report.matched == 0
    assert "computes under another autocast" in report.near_misses[0].reason


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = q @ k.transpose(-1, -2) * 0.25
        with torch.autocast("cpu", enabled=False):
            other = v + 1
        return torch.softmax(scores, -1).to(v.dtype) @ other.to(v.dtype)


def test_attention_within_one_autocast_is_lifted_and_keeps_every_bit() -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(SHAPE) for name in INPUTS}
    program = compiled(whole, strict=True)
    assert torch.equal(program(**given), compiled(whole, passes=())(**given))
    assert [r.matched for r in program.report().traces[0].passes if r.name == "lift_attention"] == [1]
