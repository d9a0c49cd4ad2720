"""Random calls of norms, gates and rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32
from core.common.ops.mlp.activation import ACTIVATIONS
from core.common.ops.rotary.rotation import STYLES
from core.common.ops.rotary.table import LAYOUTS
from core_conformance.fuzzing.source import WIDTHS, Source

_EPS = (1e-5, 1e-6, 3e-4, 1.5625e-7)


def rms_norm(source: Source) -> dict[str, Any]:
    """Draw a call of core::rms_norm."""
    leading, width = source.sized()
    x = source.tensor(*leading, width, scale=source.one_of(1.0, 1e3, 1e-3))
    return {"x": x, **_rms_options(source, width)}


def add_rms_norm(source: Source) -> dict[str, Any]:
    """Draw a call of core::add_rms_norm, the residual in a dtype of its own too."""
    leading, width = source.sized()
    residual = source.tensor(*leading, width, dtype=source.one_of(source.dtype, at_least_fp32(source.dtype)))
    return {"x": source.tensor(*leading, width), "residual": residual, **_rms_options(source, width)}


def _rms_options(source: Source, width: int) -> dict[str, Any]:
    """Draw weight, eps and the roundings of an RMSNorm."""
    wide = at_least_fp32(source.dtype)
    return {
        "weight": source.maybe(width, dtype=source.one_of(source.dtype, wide), scale=0.4, shift=1.0),
        "eps": source.one_of(*_EPS),
        "offset": source.one_of(0.0, 1.0),
        "compute_dtype": source.one_of(None, wide),
        "normed_dtype": source.one_of(None, source.dtype),
        "weight_dtype": source.one_of(None, wide),
        "out_dtype": source.one_of(None, source.dtype, wide),
    }


def layer_norm(source: Source) -> dict[str, Any]:
    """Draw a call of core::layer_norm; rows of a few elements have no variance that rounding would not decide."""
    (leading, width), wide = source.sized(WIDTHS[3:]), at_least_fp32(source.dtype)
    return {
        "x": source.tensor(*leading, width, shift=source.one_of(0.0, 3.0)),
        "weight": source.maybe(width, scale=0.4, shift=1.0),
        "bias": source.maybe(width),
        "eps": source.one_of(*_EPS),
        "compute_dtype": source.one_of(None, wide),
        "out_dtype": source.one_of(None, source.dtype, wide),
    }


def gated_activation(source: Source) -> dict[str, Any]:
    """Draw a call of core::gated_activation."""
    leading, width = source.sized()
    shape = (*leading, width)
    return {"gate": source.tensor(*shape, scale=2.0), "up": source.tensor(*shape), **_gate_options(source)}


def gated_activation_fused(source: Source) -> dict[str, Any]:
    """Draw a call of core::gated_activation_fused."""
    leading, width = source.sized()
    return {
        "gate_up": source.tensor(*leading, 2 * width, scale=2.0),
        "gate_first": source.one_of(True, False),
        "interleaved": source.one_of(False, True),
        **_gate_options(source),
    }


def _gate_options(source: Source) -> dict[str, Any]:
    return {
        "kind": source.one_of(*ACTIVATIONS),
        "limit": source.one_of(0.0, 7.0, 0.5),
        "up_offset": source.one_of(0.0, 1.0),
    }


def rotary(source: Source) -> dict[str, Any]:
    """Draw a call of core::rotary: any style, whole heads or their first features, tables of both widths."""
    size = 2 * source.one_of(4, 8, 32, 64)
    rotated = source.one_of(size, size // 2)
    tokens, batch, wide = source.integer(0, 9), source.integer(1, 3), at_least_fp32(source.dtype)
    cos, sin = _tables(source, (source.one_of(1, batch), 1, tokens, source.one_of(rotated, rotated // 2)))
    return {
        "query": source.tensor(batch, source.integer(1, 6), tokens, size),
        "key": source.tensor(batch, source.integer(1, 3), tokens, size),
        "cos": cos,
        "sin": sin,
        "style": source.one_of(*STYLES),
        "rotary_dim": 0 if rotated == size else rotated,
        "compute_dtype": source.one_of(None, wide),
        "out_dtype": source.one_of(None, source.dtype, wide),
    }


def _tables(source: Source, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return cos and sin of random angles, in the dtype of the op or a wider one."""
    dtype = source.one_of(source.dtype, at_least_fp32(source.dtype))
    angles = source.dense(*shape, dtype=torch.float64, scale=3.0)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary_single(source: Source) -> dict[str, Any]:
    """Draw a call of core::rotary_single."""
    call = rotary(source)
    del call["key"]
    return {"x": call.pop("query"), **call}


def qk_norm_rotary(source: Source) -> dict[str, Any]:
    """Draw a call of core::qk_norm_rotary."""
    call = rotary(source)
    return call | head_norms(source, call["query"].shape[-1])


def head_norms(source: Source, size: int) -> dict[str, Any]:
    """Draw the norm arguments of queries and keys, for heads of this size."""
    wide = at_least_fp32(source.dtype)
    return {
        "query_weight": source.maybe(size, scale=0.4, shift=1.0),
        "key_weight": source.maybe(size, scale=0.4, shift=1.0),
        "eps": source.one_of(*_EPS),
        "offset": source.one_of(0.0, 1.0),
        "norm_compute_dtype": source.one_of(None, wide),
        "normed_dtype": source.one_of(None, source.dtype),
        "weight_dtype": source.one_of(None, wide),
    }


def rotary_table(source: Source) -> dict[str, Any]:
    """Draw a call of core::rotary_table, of positions in any order up to those of a long context."""
    shape, count, wide = source.shape(), source.integer(1, 70), at_least_fp32(source.dtype)
    most = source.one_of(10, 4096, 131_072)
    positions = source.tensor(*shape, dtype=torch.float64, scale=most / 4).abs().clamp(max=most)
    return {
        "positions": positions.to(source.one_of(torch.int64, torch.int32)),
        "inv_freq": source.tensor(count, scale=0.3, shift=0.4, dtype=source.one_of(wide, source.dtype)).abs(),
        "layout": source.one_of(*LAYOUTS),
        "scaling": source.one_of(1.0, 1.2, 0.0625),
        "out_dtype": source.one_of(None, source.dtype),
    }
