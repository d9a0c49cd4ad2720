"""core_conformance/inputs/large_wide.py: what is wrong on wide rows or large tensors alone is rejected."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from core.common.conformance import ConformanceProfile
from core.common.ops.arguments import Draw
from core.common.ops.canonical import OPS
from core.common.ops.implementation import OpImplementation
from core_conformance.cases.ops import collect as ops
from core_conformance.inputs.large_wide import WIDE
from core_conformance.trial import Trial, tensors
from tests.conformance.inputs.wide_faults import COLUMNS, ELEMENTS, wrong_past_2_to_20, wrong_past_8192_columns
from tests.support import cpu

CPU = torch.device("cpu")
DECLARED = {op.name: op for op in OPS}
NOT_LONG = {"attention", "rotary_attention", "attention_quantize", "rotary_attention_quantize", "dense_attention"} | {
    "gated_linear",
    "quantize_fp4",
    "quantized_linear",
    "weight_only_linear",
    "quantized_grouped_linear",
    "moe_route",
    "sample",
    "argmax",
    "rotary_single",
}
"""Ops whose results have no 2**20 elements in these calls; of most, their weights, caches or logits have."""
CUT = ("rms_norm", "layer_norm", "linear", "gated_linear", "quantize", "argmax", "quantized_linear")


def wide_calls(name: str) -> set[str]:
    return {sample.name for sample in WIDE[name](Draw(torch.float32, CPU))}


def test_every_op_but_collectives_is_there() -> None:
    assert set(WIDE) == {op.name for op in OPS if not op.is_collective}


@pytest.mark.slow
def test_calls_are_as_wide_and_as_large_as_they_say() -> None:
    for name, calls in WIDE.items():
        given = [leaf for sample in calls(Draw(torch.bfloat16, CPU)) for leaf in tensors(dict(sample.kwargs))]
        wide = any(COLUMNS in range(size) for leaf in given for size in leaf.shape)
        assert wide or max(leaf.numel() for leaf in given) > ELEMENTS, name


def failures(name: str, planted: OpImplementation) -> list[str]:
    opened = (cpu(ops=(planted,)), ConformanceProfile())
    trial = Trial("cpu", lambda: opened)
    (case,) = (each for each in ops.collect(*opened) if each.id == f"ops/{name}/planted/float32")
    case.run(trial)
    return trial.failures


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(WIDE) - NOT_LONG))
def test_what_is_wrong_beyond_2_to_20_elements_is_rejected(name: str) -> None:
    fn = partial(wrong_past_2_to_20, DECLARED[name])
    found = failures(name, OpImplementation(op=f"core::{name}", name="planted", fn=fn))
    assert any(failure.startswith(each) for failure in found for each in wide_calls(name)), found


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_what_is_wrong_past_8192_columns_is_rejected(name: str) -> None:
    fn = partial(wrong_past_8192_columns, DECLARED[name])
    found = failures(name, OpImplementation(op=f"core::{name}", name="planted", fn=fn))
    assert any(failure.startswith(each) for failure in found for each in wide_calls(name)), found
