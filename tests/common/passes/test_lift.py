"""core/common/passes/*/lift.py: the lifts work together, each as often as the model owes, and change no bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.ops.mlp.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from core.common.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.norm.layer_norm import LIFT_LAYER_NORM
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.common.passes.rotary.lift import LIFT_ROTARY
from tests.common.passes.lifting import BF16, DTYPES, F32, lifted_graph, traced_model
from tests.marks import slow_except

PASSES = (LIFT_RMS_NORM, FUSE_ADD_RMS_NORM, LIFT_GATED_ACTIVATION, LIFT_LAYER_NORM, LIFT_ROTARY)
# Residual adds in front of a norm: pre-norm layers have two, less the first; OLMo 2 normalises before it adds.
MODELS = {
    "llama": {"add": 4, "gate": 2, "rotary": 2},
    "qwen3": {"add": 4, "gate": 2, "rotary": 2},
    "gemma3_text": {"add": 4, "gate": 2, "rotary": 2},
    "olmo2": {"add": 1, "gate": 2, "rotary": 2},
    "phi3": {"add": 4, "gate": 2, "rotary": 2},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "dtype"), slow_except(product(MODELS, DTYPES), ("llama", F32), ("gemma3_text", BF16)), ids=str
)
def test_a_model_is_lifted_whole_and_no_bit_changes(name: str, dtype: torch.dtype) -> None:
    graph, inputs, num_norms = traced_model(name, dtype)
    result = lifted_graph(graph, inputs, *PASSES)
    owed = MODELS[name]
    assert result.reports["lift_rms_norm"].matched == num_norms
    assert result.count(RMS_NORM.overload) == num_norms - owed["add"]
    assert result.count(ADD_RMS_NORM.overload) == result.reports["fuse_add_rms_norm"].matched == owed["add"]
    gates = result.count(GATED_ACTIVATION.overload) + result.count(GATED_ACTIVATION_FUSED.overload)
    assert gates == result.reports["lift_gated_activation"].matched == owed["gate"]
    assert result.reports["lift_rotary"].matched == owed["rotary"]
    assert result.is_equal
