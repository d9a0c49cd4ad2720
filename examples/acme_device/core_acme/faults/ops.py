"""Faults of the kernels for canonical ops: each takes the implementations and returns them with one function wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from core.common.ops.implementation import OpImplementation
from core.common.ops.norm.norms import RMS_NORM
from core.common.ops.norm.norms import rms_norm as reference_rms_norm
from core.common.ops.quantize.symmetric import QUANTIZE
from torch import Tensor

from core_acme import kernels
from core_acme.kernels import kernel_of

Implementations = Sequence[OpImplementation]
Function = Callable[..., Any]
Fault = Callable[[Implementations], Implementations]

_NAMESPACE = "acme_faults"
_BLOCK = 8192  # columns that a block of it holds
_GRID = 2**20  # elements that a launch reaches
_VECTOR = 32  # columns that the simulated device reads at a time


def changing(change: Callable[[Function], Function], *ops: str) -> Fault:
    """Return the fault that changes the functions of these ops, named without their namespace."""
    names = {f"core::{op}" for op in ops}
    return lambda implementations: tuple(
        replace(each, fn=change(each.fn)) if each.op in names else each for each in implementations
    )


def _wrong(*ops: str) -> Callable[[Function], Fault]:
    """Make a function the fault of its name: it takes the place of these ops' functions, each its first argument."""

    def made(wrong: Function) -> Fault:
        return changing(lambda honest: lambda *args, **options: wrong(honest, *args, **options), *ops)

    return made


@_wrong("rms_norm")
def norm_eps(honest: Function, x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Any:
    """Scale eps as if it were a sum's."""
    return honest(x, weight, eps * 10, **options)


@_wrong("rms_norm")
def norm_rounding(honest: Function, *args: Any, **options: Any) -> Any:
    """Keep the normalised row in the device's favourite dtype."""
    return honest(*args, **{**options, "normed_dtype": torch.bfloat16})


@_wrong("rms_norm")
def norm_half(honest: Function, x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Sum the squares without widening them."""
    return reference_rms_norm(x, weight, eps, **{**options, "compute_dtype": x.dtype})


@_wrong("rms_norm")
def norm_tail(honest: Function, x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Any:
    """Sum whole vectors only."""
    result, size = honest(x, weight, eps, **options), x.shape[-1]
    whole, wide = size // _VECTOR * _VECTOR, x.float()
    if whole in (0, size):
        return result
    means = [part.square().sum(-1, keepdim=True) / size + eps for part in (wide, wide[..., :whole])]
    return (result.float() * (means[0] / means[1]).sqrt()).to(result.dtype)


@_wrong("rms_norm")
def norm_wide(honest: Function, x: Tensor, *args: Any, **options: Any) -> Any:
    """Write what the threads of one block hold, into memory that held x."""
    result = honest(x, *args, **options)
    result[..., _BLOCK:] = x[..., _BLOCK:]
    return result


@kernel_of(RMS_NORM, _NAMESPACE)
def rms_norm_in_place(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Use x as scratch memory: normalise, and leave the result in x too."""
    result: Tensor = kernels.rms_norm(x, weight, eps, **options)
    x.copy_(result)
    return result


norm_in_place = changing(lambda honest: rms_norm_in_place, "rms_norm")


@kernel_of(RMS_NORM, _NAMESPACE)
def rms_norm_unstrided(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Take a pointer and a shape: read as many values as x has from where it begins.

    The result has the strides that the fake promises.
    """
    dense = torch.empty(x.shape, device="meta").stride()
    if x.storage_offset() + x.numel() <= x.untyped_storage().nbytes() // x.element_size():
        flat = x.as_strided(x.shape, dense)
    else:  # a real kernel would read foreign memory here
        flat = x
    result: Tensor = kernels.rms_norm(x, weight, eps, **options)
    return result.copy_(kernels.rms_norm(flat, weight, eps, **options))


strides_ignored = changing(lambda honest: rms_norm_unstrided, "rms_norm")


@_wrong("add_rms_norm")
def add_norm_residual(honest: Function, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the wrong one of two buffers."""
    normed, total = honest(x, *args, **options)
    return normed, total.copy_(x)


@_wrong("rotary")
def rotary_halves(honest: Function, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    """Turn (a, b) to (a * cos + b * sin, b * cos - a * sin)."""
    return honest(query, key, cos, -sin if options.get("style", "half") == "half" else sin, **options)


@_wrong("rotary")
def rotary_partial(honest: Function, *args: Any, **options: Any) -> Any:
    """Allocate the result, and copy nothing into the rest of it."""
    results, width = honest(*args, **options), options.get("rotary_dim", 0)
    for result in results if width else ():
        result[..., width:] = 0
    return results


@_wrong("gated_activation", "gated_activation_fused")
def gate_gelu_tanh(honest: Function, *args: Any, kind: str, **options: Any) -> Any:
    """Have one gelu for both."""
    return honest(*args, kind="gelu_tanh" if kind == "gelu" else kind, **options)


@_wrong("gated_activation", "gated_activation_fused")
def gate_far(honest: Function, *args: Any, **options: Any) -> Any:
    """Start no more threads than the largest grid has."""
    result = honest(*args, **options)
    result.view(-1)[_GRID:] = 0
    return result


@_wrong("gated_activation_fused")
def gate_order(honest: Function, gate_up: Tensor, **options: Any) -> Any:
    """Know one layout."""
    return honest(gate_up, **{**options, "gate_first": True})


@_wrong("quantize")
def quantize_truncates(honest: Function, x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Cast as C does."""
    codes, used = honest(x, scale, **options)
    if options["dtype"] != torch.int8:
        return codes, used
    if options.get("granularity") == "group":
        regions = x.float().unflatten(-1, (-1, options["group_size"])) / used[..., None]
    else:
        regions = x.float() / used
    return regions.clamp(-128, 127).trunc().view(x.shape).to(torch.int8).contiguous(), used


@_wrong("quantize")
def quantize_scale(honest: Function, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the scale from before a margin was taken off."""
    codes, used = honest(*args, **options)
    return codes, used * 1.02


@kernel_of(QUANTIZE, _NAMESPACE)
def quantize_unguarded(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Trust that no row is all zeros: quantise by a scale that is zero where a region is, 0 / 0."""
    codes, used = kernels.quantize(x, scale, **options)
    if scale is not None:
        return codes, used
    used = torch.where(used <= torch.finfo(torch.float32).tiny, 0.0, used)
    spread = used.repeat_interleave(options["group_size"], -1) if options.get("group_size") else used
    garbage = torch.full_like(codes.float(), math.nan if options["dtype"] == torch.float8_e4m3fn else -128)
    return torch.where(spread == 0, garbage, codes.float()).to(codes.dtype), used


quantize_zeros = changing(lambda honest: quantize_unguarded, "quantize")
