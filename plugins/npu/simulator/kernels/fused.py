"""Kernels that models and passes for the device use besides those of the canonical ops, written out in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import CODE_MAX, HALF, INT8, demand
from simulator.marshal import kernel

HEAD = 128


def _normed(rows: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    values = rows.to(torch.float32)
    reciprocal = (values.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return values * reciprocal * gamma.to(torch.float32), reciprocal


def _codes(values: Tensor, out: Tensor) -> None:
    out.copy_(values.round().clamp(-CODE_MAX - 1, CODE_MAX))


@kernel("aclnnAddRmsNormCast", "TTTDTTTT")
def add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, wide: Tensor, y: Tensor, rstd: Tensor, total: Tensor
) -> None:
    """The norm of a sum as it is written, and the same in fp32."""
    demand(x1.dtype in HALF and x1.dtype == x2.dtype == gamma.dtype and x1.shape == x2.shape, f"x1 {x1.dtype}")
    total.copy_(x1.to(torch.float32) + x2.to(torch.float32))
    values, reciprocal = _normed(total, gamma, epsilon)
    y.copy_(values)
    wide.copy_(y)
    rstd.copy_(reciprocal)


@kernel("aclnnRmsNormQuant", "TTTTTDT")
def rms_norm_quant(
    x: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, epsilon: float, out: Tensor
) -> None:
    """Multiply by one scale and add one zero point."""
    demand(x.dtype in HALF and x.dtype == gamma.dtype == beta.dtype == scale.dtype, f"x {x.dtype}")
    demand(scale.numel() == 1 and offset.numel() == 1 and offset.dtype == torch.int8, "one scale, one int8 offset")
    values = _normed(x, gamma, epsilon)[0] + beta.to(torch.float32)
    _codes(values * scale.to(torch.float32) + offset.to(torch.float32), out)


@kernel("aclnnAscendQuantV3", "TTTbCiiT")
def ascend_quant(
    x: Tensor, scale: Tensor, offset: Tensor | None, root: bool, mode: str, dtype: int, axis: int, out: Tensor
) -> None:
    """Multiply by scales along the last axis."""
    demand(x.dtype == torch.float32 or scale.dtype == x.dtype, f"x {x.dtype} with scales {scale.dtype}")
    demand(offset is None or offset.dtype == scale.dtype, "zero points are of the scales' dtype")
    demand(not root and mode == "round" and dtype == INT8 and axis % x.dim() == x.dim() - 1, "not simulated")
    demand(scale.dim() == 1 and scale.shape[0] in (1, x.shape[-1]), f"scales {tuple(scale.shape)}")
    values = x.to(torch.float32) * scale.to(torch.float32)
    _codes(values if offset is None else values + offset.to(torch.float32), out)


@kernel("aclnnTransposeBatchMatMul", "TTTTAAAhiT")
def transpose_batch_matmul(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    perm1: list[int],
    perm2: list[int],
    perm_out: list[int],
    math_type: int,
    split: int,
    out: Tensor,
) -> None:
    """Permute, multiply batch by batch in fp32, and put rows before batches."""
    demand(bias is None and scale is None and split == 1, "not simulated")
    demand(perm1 in ([0, 1, 2], [1, 0, 2]) and perm2 in ([0, 1, 2], [0, 2, 1]) and perm_out == [1, 0, 2], f"{perm1}")
    demand(x1.shape[0] * x1.shape[2] < 65536 if perm1 == [1, 0, 2] else x1.shape[2] < 65536, f"x1 {tuple(x1.shape)}")
    left, right = x1.permute(perm1).to(torch.float32), x2.permute(perm2).to(torch.float32)
    out.copy_((left @ right).permute(perm_out))


def _write(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows (T, N, D) into a cache (blocks, N D / 16, block, 16) or (blocks, block, N, D); -1 is no slot."""
    kept = slots >= 0
    rows, slots = rows[kept], slots[kept].long()
    block = cache.shape[2] if cache.shape[3] == 16 else cache.shape[1]
    # Slots that are given twice have no documented value, and are no error: a capture runs on zeros.
    demand(bool((slots < cache.shape[0] * block).all()), "slots beyond the cache")
    if cache.shape[3] == 16:
        cache[slots // block, :, slots % block] = rows.reshape(rows.shape[0], -1, 16)
    else:
        cache[slots // block, slots % block] = rows


@kernel("aclnnScatterPaKvCache", "TTTTTTTTCCAA")
def scatter_pa_kv_cache(
    key: Tensor,
    key_cache: Tensor,
    slots: Tensor,
    value: Tensor,
    value_cache: Tensor,
    compress_lens: Tensor | None,
    compress_offsets: Tensor | None,
    seq_lens: Tensor | None,
    mode: str | None,
    scatter_mode: str | None,
    strides: list[int] | None,
    offsets: list[int] | None,
) -> None:
    """Write keys and values (T, N, D) at their slots."""
    demand(compress_lens is None and compress_offsets is None and seq_lens is None, "not simulated")
    for cache, rows in ((key_cache, key), (value_cache, value)):
        demand(cache.dtype == rows.dtype and rows.dim() == 3 and rows.is_contiguous(), f"rows {tuple(rows.shape)}")
        demand((mode == "PA_NZ") is (cache.shape[3] == 16), f"mode {mode} with a cache {tuple(cache.shape)}")
        _write(cache, rows, slots)


@kernel("aclnnQkvRmsNormRopeCache", "TTTTTTTTTTTTTAADCTTT")
def qkv_rms_norm_rope_cache(
    qkv: Tensor,
    query_gamma: Tensor,
    key_gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    query_out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key_offset: Tensor | None,
    value_offset: Tensor | None,
    sizes: list[int],
    heads: list[int],
    epsilon: float,
    mode: str,
    query_before: Tensor | None,
    key_before: Tensor | None,
    value_before: Tensor | None,
) -> None:
    """Split, norm and rotate by halves, and write keys and values into a cache of 16 columns."""
    demand(mode == "PA_NZ" and key_scale is None and value_scale is None, "not simulated")
    demand(sizes[3] == HEAD and sum(heads) == sizes[2] and heads[1] == heads[2], f"sizes {sizes} of heads {heads}")
    demand(qkv.dtype in HALF and qkv.shape == (sizes[0] * sizes[1], sizes[2] * sizes[3]), f"qkv {tuple(qkv.shape)}")
    demand(cos.dtype == qkv.dtype and tuple(cos.shape) == (qkv.shape[0], HEAD) == tuple(sin.shape), "tables")
    demand(slots.dtype == torch.int64 and key_cache.shape[2] % 16 == 0, f"slots {slots.dtype}")
    parts = qkv.view(qkv.shape[0], sizes[2], HEAD).split(heads, dim=1)
    for part, gamma, is_query in ((parts[0], query_gamma, True), (parts[1], key_gamma, False)):
        first, second = (values := _normed(part, gamma, epsilon)[0]).chunk(2, dim=-1)
        tables = (table.to(torch.float32)[:, None] for table in (cos, sin))
        turned = sum(a * b for a, b in zip((values, torch.cat((-second, first), dim=-1)), tables, strict=True))
        assert isinstance(turned, Tensor)
        if is_query:
            query_out.copy_(turned.reshape(query_out.shape))
        else:
            _write(key_cache, turned.to(qkv.dtype), slots)
    _write(value_cache, parts[2], slots)
