"""Random calls of the ops that stand for parts of a layer: rotation with attention, linears with a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32
from core.common.ops.mlp.activation import ACTIVATIONS
from core.common.ops.rotary.rotation import STYLES
from core_conformance.fuzzing.attention import attention
from core_conformance.fuzzing.source import WIDTHS, Source


def rotary_attention(source: Source) -> dict[str, Any]:
    """Draw a call of core::rotary_attention: one of core::attention, causal, without a mask, with or without norms."""
    call, wide = attention(source), at_least_fp32(source.dtype)
    del call["mask"], call["causal"]
    num_tokens, _, size = call["query"].shape
    rotated = source.one_of(size, size // 2)
    width, dtype = source.one_of(rotated, rotated // 2), source.one_of(source.dtype, wide)
    angles = source.dense(num_tokens, width, dtype=torch.float64, scale=3.0)
    options: dict[str, Any] = {
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "style": source.one_of(*STYLES),
        "rotary_dim": 0 if rotated == size else rotated,
        "compute_dtype": source.one_of(None, wide),
        "out_dtype": source.one_of(None, source.dtype),
    }
    norms = _norms(source, size) if source.one_of(False, True) else {"normalize": False}
    return {**call, **options, **norms}


def _norms(source: Source, size: int) -> dict[str, Any]:
    wide = at_least_fp32(source.dtype)
    return {
        "normalize": True,
        "query_weight": source.maybe(size, scale=0.4, shift=1.0),
        "key_weight": source.maybe(size, scale=0.4, shift=1.0),
        "eps": source.one_of(1e-5, 1e-6, 3e-4),
        "offset": source.one_of(0.0, 1.0),
        "norm_compute_dtype": source.one_of(None, wide),
        "normed_dtype": source.one_of(None, source.dtype),
        "weight_dtype": source.one_of(None, wide),
    }


def linear(source: Source) -> dict[str, Any]:
    """Draw a call of core::linear."""
    return _linear(source, source.one_of(*WIDTHS))


def gated_linear(source: Source) -> dict[str, Any]:
    """Draw a call of core::gated_linear, gate and up in every order."""
    return {
        **_linear(source, 2 * source.one_of(*WIDTHS[:-2])),
        "kind": source.one_of(*ACTIVATIONS),
        "gate_first": source.one_of(True, False),
        "interleaved": source.one_of(False, True),
        "limit": source.one_of(0.0, 7.0, 0.5),
        "up_offset": source.one_of(0.0, 1.0),
    }


def _linear(source: Source, outputs: int) -> dict[str, Any]:
    width = source.one_of(*WIDTHS)
    weight: Tensor = source.tensor(outputs, width, scale=width**-0.5)
    return {"x": source.tensor(*source.shape(), width), "weight": weight, "bias": source.maybe(outputs)}
