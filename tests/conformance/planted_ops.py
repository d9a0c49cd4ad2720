"""Implementations of canonical ops for tests of the suite: legitimate ones, and ones with a mistake each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.attention.dense import DENSE_ATTENTION
from core.common.ops.attention.paged import ATTENTION, reference
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.mlp.activation import GATED_ACTIVATION
from core.common.ops.moe.experts import GROUPED_MLP
from core.common.ops.moe.route import MOE_ROUTE, moe_route
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM, add_rms_norm, rms_norm
from core.common.ops.quantize.symmetric import QUANTIZE, quantize
from core.common.ops.rotary.rotation import ROTARY, rotary

Function = Callable[..., Any]


def norm_by_division(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Divide by the root of the mean of squares, summed in blocks: another order, another rounding."""
    wide = x.to(options.get("compute_dtype") or torch.promote_types(x.dtype, torch.float32))
    blocks = functional.pad(wide.square(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    squares = blocks.sum(-1).sum(-1, keepdim=True)
    normed = wide / torch.sqrt(squares / x.shape[-1] + eps)
    return _weighted(x, normed, weight, **options)


def _weighted(
    x: Tensor,
    normed: Tensor,
    weight: Tensor | None,
    *,
    offset: float = 0.0,
    compute_dtype: torch.dtype | None = None,
    normed_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    normed = normed if normed_dtype is None else normed.to(normed_dtype)
    if weight is not None:
        factor = weight if weight_dtype is None else weight.to(weight_dtype)
        normed = normed * (factor + offset)
    return normed.to(out_dtype or x.dtype)


def norm_unrounded(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Leave the rounding before the weight out: one rounding less."""
    out = options.get("out_dtype") or x.dtype
    return rms_norm(x, weight, eps, **{**options, "normed_dtype": None, "out_dtype": out})


def norm_eps(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    return rms_norm(x, weight, 10 * eps, **options)


def norm_rounding(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    normed = rms_norm(x, None, eps, compute_dtype=options.get("compute_dtype"), out_dtype=torch.bfloat16)
    return _weighted(x, normed.float(), weight, **options)


def norm_in_place(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    result = rms_norm(x, weight, eps, **options)
    x.add_(1)
    return result


def norm_strides_ignored(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    fits = x.storage_offset() + x.numel() <= x.untyped_storage().nbytes() // x.element_size()
    dense = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) if fits else x
    result = rms_norm(x, weight, eps, **options)
    return result.copy_(rms_norm(dense, weight, eps, **options))


def norm_contiguous(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    return rms_norm(x.contiguous(), weight, eps, **options)


def norm_noisy(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    result = rms_norm(x, weight, eps, **options)
    return result * (1 + torch.finfo(result.dtype).eps * torch.randint_like(result, 2))


def norm_last_column(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    result = rms_norm(x, weight, eps, **options)
    result[..., -1:] *= 1.25
    return result


def norm_nan_flushed(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    return rms_norm(x.nan_to_num(), weight, eps, **options)


def add_norm_residual(x: Tensor, residual: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    normed, total = add_rms_norm(x, residual, *args, **options)
    return normed, x.to(total.dtype, copy=True)


def add_norm_alias(x: Tensor, residual: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    normed, total = add_rms_norm(x, residual, *args, **options)
    return normed, residual.copy_(total) if residual.dtype == total.dtype else total


def add_norm_shared(x: Tensor, residual: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    normed, total = add_rms_norm(x, residual, *args, **options)
    return normed, normed if normed.dtype == total.dtype else total


def gelu_tanh(gate: Tensor, up: Tensor, *, kind: str, **options: Any) -> Tensor:
    return GATED_ACTIVATION.reference(gate, up, kind="gelu_tanh" if kind == "gelu" else kind, **options)


def gate_in_fp32(gate: Tensor, up: Tensor, *, kind: str, **options: Any) -> Tensor:
    """Round once, at the end."""
    return GATED_ACTIVATION.reference(gate.float(), up.float(), kind=kind, **options).to(gate.dtype)


def rotary_swapped(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return rotary(query, key, cos, -sin, **options)


def rotary_wide(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute in fp32 what eager rounds at each step."""
    options["out_dtype"] = options.get("out_dtype") or query.dtype
    options["compute_dtype"] = torch.float32
    return rotary(query, key, cos, sin, **options)


def attention_scale(*args: Any, scale: float, **options: Any) -> Tensor:
    return reference(*args, scale=1.02 * scale, **options)


def rotary_attention_wide(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
    """Rotate in fp32 at least, and round what is written and what comes back once."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out = options.get("out_dtype") or query.dtype
    options["compute_dtype"] = options["out_dtype"] = None
    result: Tensor = ROTARY_ATTENTION.reference(query.to(wide), key.to(wide), *args, **options)
    return result.to(out)


def rotary_attention_key(*args: Any, **options: Any) -> Tensor:
    """Leave keys in the cache that are 2 % off, for steps to come."""
    result: Tensor = ROTARY_ATTENTION.reference(*args, **options)
    cache, slots = args[5], args[8]
    cache.view(-1, *cache.shape[2:])[slots.unique()] *= 1.02
    return result


def rotary_attention_neighbour(*args: Any, **options: Any) -> Tensor:
    """Touch keys of the cache that are not of this step."""
    result: Tensor = ROTARY_ATTENTION.reference(*args, **options)
    cache, slots = args[5], args[8]
    rows = cache.view(-1, *cache.shape[2:])
    others = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    others[slots] = False
    rows[others] *= 1.001
    return result


def attention_length(*args: Any, **options: Any) -> Tensor:
    args = (*args[:7], (args[7] - 1).clamp(min=0), args[8])
    return reference(*args, **options)


def attention_stale_row(*args: Any, **options: Any) -> Tensor:
    caches = [cache.clone() for cache in args[3:5]]
    reference(*args, **options)
    key, value, slots = torch.zeros_like(args[1]), torch.zeros_like(args[2]), torch.zeros_like(args[6])
    key[:], value[:] = caches[0][0, 0], caches[1][0, 0]
    return reference(args[0], key, value, *caches, args[5], slots, *args[7:], **options)


def attention_padding_rows(*args: Any, **options: Any) -> Tensor:
    out = reference(*args, **options)
    out[int(args[8][-1]) :] = 1.0
    return out


def attention_padding_writes(*args: Any, **options: Any) -> Tensor:
    slots = args[6].clone()
    slots[int(args[8][-1]) :] = args[3].shape[1] + 1
    return reference(*args[:6], slots, *args[7:], **options)


def attention_dropped_write(*args: Any, **options: Any) -> Tensor:
    return reference(*args[:3], args[3].clone(), args[4], *args[5:], **options)


def attention_heads_repeated(*args: Any, **options: Any) -> Tensor:
    """Attend sequence by sequence: another order of sums."""
    assert ATTENTION.eager is not None
    out: Tensor = ATTENTION.eager(*args, **options)
    return out


def dense_scale(*args: Any, scale: float, **options: Any) -> Tensor:
    return DENSE_ATTENTION.reference(*args, scale=1.02 * scale, **options)


def quantize_by_reciprocal(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Multiply by the reciprocal of the scale, as kernels do."""
    _, used = quantize(x, scale, **options)
    return _codes(x.float(), used, lambda values, by: values * (1.0 / by), **options), used


def quantize_by_largest(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Multiply by the largest code over the largest value, where no scale is given."""
    codes, used = quantize(x, scale, **options)
    if scale is not None:
        return codes, used
    high = 127.0 if options["dtype"] == torch.int8 else 448.0
    return _codes(x.float(), used, lambda values, by: values * (high / (by * high)), **options), used


def quantize_truncates(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    codes, used = quantize(x, scale, **options)
    if options["dtype"] != torch.int8:
        return codes, used
    return _codes(x.float(), used, lambda values, by: torch.trunc(values / by), **options), used


def quantize_in_half(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    _, used = quantize(x, scale, **options)
    return _codes(x.float(), used, lambda values, by: (values / by).to(torch.bfloat16).float(), **options), used


def quantize_scale(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    _, used = quantize(x, scale, **options)
    wrong = used * 1.02
    return quantize(x, wrong, **options)


def _codes(x: Tensor, scale: Tensor, divide: Function, **options: Any) -> Tensor:
    low, high = (-128.0, 127.0) if options["dtype"] == torch.int8 else (-448.0, 448.0)
    size = options.get("group_size", 0)
    regions = x.unflatten(-1, (-1, size)) if size else x
    values = divide(regions, scale[..., None] if size else scale).clamp(low, high).view(x.shape)
    values = values.round() if options["dtype"] == torch.int8 else values
    return values.to(options["dtype"]).contiguous()


def route_in_half(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    return moe_route(logits, top_k, **{**options, "compute_dtype": torch.bfloat16, "out_dtype": _out(logits, options)})


def _out(logits: Tensor, options: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = options.get("out_dtype") or logits.dtype
    return found


def route_by_sort(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Break ties the other way round: which of equal scores is chosen is not promised."""
    bias = options.pop("bias", None)
    flipped = None if bias is None else bias.flip(0)
    weights, indices = moe_route(logits.flip(-1), top_k, **options, bias=flipped)
    return weights, logits.shape[1] - 1 - indices


def route_unnormalized(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    return moe_route(logits, top_k, **{**options, "renormalize": False})


def route_next_best(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    weights, indices = moe_route(logits, top_k, **options)
    if len(indices):
        indices[0, -1] = (
            next(e for e in range(logits.shape[1]) if e not in indices[0]) if top_k < logits.shape[1] else 0
        )
    return weights, indices


def mlp_in_fp32(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Round once, at the end."""
    wide = [each.float() if each.is_floating_point() else each for each in args]
    biases = {k: v.float() if isinstance(v, Tensor) else v for k, v in options.items()}
    out: Tensor = GROUPED_MLP.reference(x.float(), *wide, **biases).to(x.dtype)
    return out


def mlp_wrong_expert(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, *args: Any, **options: Any
) -> Tensor:
    out: Tensor = GROUPED_MLP.reference(x, weights, (indices + 1) % gate_up.shape[0], gate_up, *args, **options)
    return out


LEGITIMATE: dict[str, tuple[str, Function]] = {
    "norm_by_division": (RMS_NORM.name, norm_by_division),
    "norm_unrounded": (RMS_NORM.name, norm_unrounded),
    "gate_in_fp32": (GATED_ACTIVATION.name, gate_in_fp32),
    "rotary_wide": (ROTARY.name, rotary_wide),
    "rotary_attention_wide": (ROTARY_ATTENTION.name, rotary_attention_wide),
    "attention_heads_repeated": (ATTENTION.name, attention_heads_repeated),
    "quantize_by_reciprocal": (QUANTIZE.name, quantize_by_reciprocal),
    "quantize_by_largest": (QUANTIZE.name, quantize_by_largest),
    "route_by_sort": (MOE_ROUTE.name, route_by_sort),
    "mlp_in_fp32": (GROUPED_MLP.name, mlp_in_fp32),
}
WRONG: dict[str, tuple[str, Function]] = {
    "rotary_attention_key": (ROTARY_ATTENTION.name, rotary_attention_key),
    "rotary_attention_neighbour": (ROTARY_ATTENTION.name, rotary_attention_neighbour),
    "norm_eps": (RMS_NORM.name, norm_eps),
    "norm_rounding": (RMS_NORM.name, norm_rounding),
    "norm_in_place": (RMS_NORM.name, norm_in_place),
    "norm_strides_ignored": (RMS_NORM.name, norm_strides_ignored),
    "norm_contiguous": (RMS_NORM.name, norm_contiguous),
    "norm_noisy": (RMS_NORM.name, norm_noisy),
    "norm_last_column": (RMS_NORM.name, norm_last_column),
    "norm_nan_flushed": (RMS_NORM.name, norm_nan_flushed),
    "add_norm_residual": (ADD_RMS_NORM.name, add_norm_residual),
    "add_norm_alias": (ADD_RMS_NORM.name, add_norm_alias),
    "add_norm_shared": (ADD_RMS_NORM.name, add_norm_shared),
    "gelu_tanh": (GATED_ACTIVATION.name, gelu_tanh),
    "rotary_swapped": (ROTARY.name, rotary_swapped),
    "attention_scale": (ATTENTION.name, attention_scale),
    "attention_length": (ATTENTION.name, attention_length),
    "attention_stale_row": (ATTENTION.name, attention_stale_row),
    "attention_padding_rows": (ATTENTION.name, attention_padding_rows),
    "attention_padding_writes": (ATTENTION.name, attention_padding_writes),
    "attention_dropped_write": (ATTENTION.name, attention_dropped_write),
    "dense_scale": (DENSE_ATTENTION.name, dense_scale),
    "quantize_truncates": (QUANTIZE.name, quantize_truncates),
    "quantize_in_half": (QUANTIZE.name, quantize_in_half),
    "quantize_scale": (QUANTIZE.name, quantize_scale),
    "route_in_half": (MOE_ROUTE.name, route_in_half),
    "route_unnormalized": (MOE_ROUTE.name, route_unnormalized),
    "route_next_best": (MOE_ROUTE.name, route_next_best),
    "mlp_wrong_expert": (GROUPED_MLP.name, mlp_wrong_expert),
}
