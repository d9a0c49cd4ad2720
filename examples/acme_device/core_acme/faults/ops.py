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
Change = Callable[[Function], Function]

_NAMESPACE = "acme_faults"
_VECTOR = 32  # columns that the simulated device reads at a time


def _with_function(
    implementations: Implementations, op: str, change: Callable[[Function], Function]
) -> Implementations:
    """Return the implementations, the function of `core::op` changed."""
    return tuple(replace(i, fn=change(i.fn)) if i.op == f"core::{op}" else i for i in implementations)


def norm_eps(implementations: Implementations) -> Implementations:
    """Scale eps as if it were a sum's."""

    def change(honest: Function) -> Function:
        return lambda x, weight, eps, **options: honest(x, weight, eps * 10, **options)

    return _with_function(implementations, "rms_norm", change)


def norm_rounding(implementations: Implementations) -> Implementations:
    """Keep the normalised row in the device's favourite dtype."""

    def change(honest: Function) -> Function:
        return lambda *args, **options: honest(*args, **{**options, "normed_dtype": torch.bfloat16})

    return _with_function(implementations, "rms_norm", change)


def norm_half(implementations: Implementations) -> Implementations:
    """Sum the squares without widening them."""

    def narrow(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
        return reference_rms_norm(x, weight, eps, **{**options, "compute_dtype": x.dtype})

    return _with_function(implementations, "rms_norm", lambda honest: narrow)


def norm_tail(implementations: Implementations) -> Implementations:
    """Sum whole vectors only."""

    def change(honest: Function) -> Function:
        def headless(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
            result, size = honest(x, weight, eps, **options), x.shape[-1]
            whole, wide = size // _VECTOR * _VECTOR, x.float()
            if whole in (0, size):
                return result  # type: ignore[no-any-return]
            means = [part.square().sum(-1, keepdim=True) / size + eps for part in (wide, wide[..., :whole])]
            return (result.float() * (means[0] / means[1]).sqrt()).to(result.dtype)  # type: ignore[no-any-return]

        return headless

    return _with_function(implementations, "rms_norm", change)


@kernel_of(RMS_NORM, _NAMESPACE)
def rms_norm_in_place(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Normalise, and leave the result in x too."""
    result: Tensor = kernels.rms_norm(x, weight, eps, **options)
    x.copy_(result)
    return result


def norm_in_place(implementations: Implementations) -> Implementations:
    """Use x as the kernel's scratch memory."""
    return _with_function(implementations, "rms_norm", lambda honest: rms_norm_in_place)


@kernel_of(RMS_NORM, _NAMESPACE)
def rms_norm_unstrided(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Read as many values as x has from where it begins; the result has the strides that the fake promises."""
    dense = torch.empty(x.shape, device="meta").stride()
    if x.storage_offset() + x.numel() <= x.untyped_storage().nbytes() // x.element_size():
        flat = x.as_strided(x.shape, dense)
    else:  # a real kernel would read foreign memory here
        flat = x
    result: Tensor = kernels.rms_norm(x, weight, eps, **options)
    return result.copy_(kernels.rms_norm(flat, weight, eps, **options))


def strides_ignored(implementations: Implementations) -> Implementations:
    """Take a pointer and a shape."""
    return _with_function(implementations, "rms_norm", lambda honest: rms_norm_unstrided)


def add_norm_residual(implementations: Implementations) -> Implementations:
    """Return the wrong one of two buffers."""

    def change(honest: Function) -> Function:
        def swapped(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            normed, total = honest(x, *args, **options)
            return normed, total.copy_(x)

        return swapped

    return _with_function(implementations, "add_rms_norm", change)


def rotary_halves(implementations: Implementations) -> Implementations:
    """Turn (a, b) to (a * cos + b * sin, b * cos - a * sin)."""

    def change(honest: Function) -> Function:
        def backwards(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
            return honest(query, key, cos, -sin if options.get("style", "half") == "half" else sin, **options)

        return backwards

    return _with_function(implementations, "rotary", change)


def rotary_partial(implementations: Implementations) -> Implementations:
    """Allocate the result, and copy nothing into the rest of it."""

    def change(honest: Function) -> Function:
        def cut(*args: Any, **options: Any) -> Any:
            results, width = honest(*args, **options), options.get("rotary_dim", 0)
            for result in results if width else ():
                result[..., width:] = 0
            return results

        return cut

    return _with_function(implementations, "rotary", change)


def gate_gelu_tanh(implementations: Implementations) -> Implementations:
    """Have one gelu for both."""

    def change(honest: Function) -> Function:
        def one_gelu(*args: Any, kind: str, **options: Any) -> Any:
            return honest(*args, kind="gelu_tanh" if kind == "gelu" else kind, **options)

        return one_gelu

    ungated = _with_function(implementations, "gated_activation", change)
    return _with_function(ungated, "gated_activation_fused", change)


def gate_order(implementations: Implementations) -> Implementations:
    """Know one layout."""

    def change(honest: Function) -> Function:
        return lambda gate_up, **options: honest(gate_up, **{**options, "gate_first": True})

    return _with_function(implementations, "gated_activation_fused", change)


def quantize_truncates(implementations: Implementations) -> Implementations:
    """Cast as C does."""

    def change(honest: Function) -> Function:
        def truncated(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
            codes, used = honest(x, scale, **options)
            if options["dtype"] != torch.int8:
                return codes, used
            regions = x.float()
            if options.get("granularity") == "group":
                regions = regions.unflatten(-1, (-1, options["group_size"])) / used[..., None]
            else:
                regions = regions / used
            return regions.clamp(-128, 127).trunc().view(x.shape).to(torch.int8).contiguous(), used

        return truncated

    return _with_function(implementations, "quantize", change)


def quantize_scale(implementations: Implementations) -> Implementations:
    """Return the scale from before a margin was taken off."""

    def change(honest: Function) -> Function:
        def enlarged(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            codes, used = honest(*args, **options)
            return codes, used * 1.02

        return enlarged

    return _with_function(implementations, "quantize", change)


@kernel_of(QUANTIZE, _NAMESPACE)
def quantize_unguarded(x: Tensor, scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Quantise by a scale that is zero where a region is: 0 / 0."""
    codes, used = kernels.quantize(x, scale, **options)
    if scale is not None:
        return codes, used
    used = torch.where(used <= torch.finfo(torch.float32).tiny, 0.0, used)
    spread = used.repeat_interleave(options["group_size"], -1) if options.get("group_size") else used
    largest = 448.0 if options["dtype"] == torch.float8_e4m3fn else 127.0
    garbage = torch.full_like(codes.float(), math.nan if options["dtype"] == torch.float8_e4m3fn else -largest - 1)
    return torch.where(spread == 0, garbage, codes.float()).to(codes.dtype), used


def quantize_zeros(implementations: Implementations) -> Implementations:
    """Trust that no row is all zeros."""
    return _with_function(implementations, "quantize", lambda honest: quantize_unguarded)
