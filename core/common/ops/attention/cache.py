"""How attention ops store values in the paged key/value cache and read them back: as they are, or as codes.

A cache of `float8_e4m3fn` holds codes: value = code * scale, one scale for the whole cache, () or for each key/value
head, (K,). It takes half the memory of half precision (Micikevicius et al., arXiv 2209.05433, for the format).
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32, check
from core.common.ops.quantize.symmetric import RANGES

CODES = (torch.float8_e4m3fn,)
"""Dtypes of caches that hold codes."""


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write this step's key (T, K, D) and value (T, K, V) into the paged caches at slot_mapping (T,), in place."""
    # `view`, not `flatten`: on a cache it can't view, flatten would copy and the write would be lost.
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        cache.view(-1, *cache.shape[2:]).index_put_((slot_mapping,), stored(new, cache.dtype, scale))


def stored(new: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return new (..., K, D) in the form that a cache of this dtype stores.

    Codes are new / scale, cut off at the range of their dtype and rounded to nearest even, as `core::quantize` makes
    them; scale () or (K,), None for 1. Any other cache holds new itself, in its dtype.
    """
    if dtype not in CODES:
        return new.to(dtype)
    low, high = RANGES[dtype]
    wide = new.to(at_least_fp32(new.dtype))
    return (wide if scale is None else wide / _by_head(scale, wide.dtype)).clamp(low, high).to(dtype)


def read(cached: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return the dequantised values of a part of a cache (..., K, D), in this dtype: the inverse of `stored`, up to
    rounding."""
    values = cached.to(dtype)
    return values if scale is None else values * _by_head(scale, dtype)


def _by_head(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scale () or (K,) so that it broadcasts against (..., K, D)."""
    scale = scale.to(dtype)
    return scale[:, None] if scale.dim() else scale


def check_scales(
    op: str, key_cache: Tensor, value_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Raise `RuntimeError` unless each scale goes with a cache of codes and is () or has one number per head."""
    for name, scale, kind, cache in (
        ("k_scale", k_scale, "key_cache", key_cache),
        ("v_scale", v_scale, "value_cache", value_cache),
    ):
        if scale is None:
            continue
        codes = ", ".join(map(str, CODES))
        check(cache.dtype in CODES, op, f"{name} given, and {kind} is {cache.dtype}, no cache of codes ({codes})")
        check(scale.dtype in (torch.float32, torch.float64), op, f"{name} must be torch.float32, not {scale.dtype}")
        fits = scale.dim() == 0 or (scale.dim() == 1 and scale.shape[0] == cache.shape[2])
        shape = f"{name} must have shape () or ({cache.shape[2]},), one for each head, not {tuple(scale.shape)}"
        check(fits, op, shape)
