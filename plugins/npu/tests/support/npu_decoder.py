"""A small quantised decoder, written with torch_npu's ops as models for the device are, in which each pass has work.

T tokens, hidden size H, N query and K key heads of 128. Weights are random and no two scalars alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 256, 2, 1, 128, 128
BLOCKS, BLOCK, COLUMNS = 2, 16, 16
LAYERS = 2
OWED = {
    "erase_npu_copies": LAYERS,
    "fold_npu_double_reciprocal": LAYERS,
    "fuse_npu_qkv_rms_norm_rope_cache": LAYERS,
    "lift_npu_qk_norm_rotary": 0,  # the pass before leaves it nothing
    "fuse_npu_add_rms_norm": LAYERS,  # before every layer but the first, and behind the last
    "fuse_npu_add_rms_norm_quant": LAYERS,
    "fuse_npu_add_rms_norm_dynamic_quant": LAYERS - 1,
    "fuse_npu_add_rms_norm_cast": 1,
    "fuse_npu_rms_norm_quant": 1,
    "fuse_npu_swiglu_dynamic_quant": LAYERS,
    "fuse_npu_multiply_add": LAYERS,
    "fuse_npu_transpose_batchmatmul": LAYERS,
    "fuse_npu_linear_all_reduce": 0,  # of one process
}
"""How often each pass owes a match."""


def ops() -> Any:
    return torch.ops.npu


def _weights(*shape: int, seed: int) -> nn.Parameter:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-2] ** 0.5
    return nn.Parameter(values, requires_grad=False)


def _row(low: float, high: float, size: int = HIDDEN) -> nn.Parameter:
    return nn.Parameter(torch.linspace(low, high, size), requires_grad=False)


def _linear(codes: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Multiply codes by a weight and their scale: of each token (T,), or of each channel of the codes."""
    values = codes.to(weight.dtype)
    if scale.ndim == 1 and scale.shape[0] == codes.shape[0]:
        return (values @ weight) * scale.to(weight.dtype)[:, None]
    return (values * scale.to(weight.dtype)) @ weight


class Layer(nn.Module):
    """Attention and a gated MLP. index: its place; the first quantises its input by one scale, others by token."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index, self.eps = index, (1 + index) * 1e-5
        self.before, self.after = _row(0.4, 1.6), _row(1.7, 0.5)
        self.query, self.key = _row(0.4, 1.6, SIZE), _row(1.5, 0.7, SIZE)
        self.qkv = _weights(HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE, seed=index)
        self.absorbed = _weights(HEADS, SIZE, SIZE, seed=10 + index)
        self.out = _weights(HEADS * SIZE, HIDDEN, seed=20 + index)
        self.gate_up, self.down = _weights(HIDDEN, 2 * INNER, seed=30 + index), _weights(INNER, HIDDEN, seed=40 + index)
        self.scale = nn.Parameter(torch.tensor([30.0]), requires_grad=False)
        self.scales = _row(0.02, 0.05)
        for name in ("key_cache", "value_cache"):
            self.register_buffer(name, torch.zeros(BLOCKS, KV_HEADS * SIZE // COLUMNS, BLOCK, COLUMNS))
        self.to(dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        y = ops().npu_rms_norm(x, self.before, self.eps)[0]
        if self.index == 0:
            codes, scale = ops().npu_quantize(y, self.scale, None, torch.qint8, -1, False), 1 / self.scale
        else:
            codes, scale = ops().npu_dynamic_quant(y)
        attended = self.attend(_linear(codes, scale, self.qkv), cos, sin, slots)
        buffer = torch.empty_like(x)
        buffer.copy_(x)
        y, _, x = ops().npu_add_rms_norm(attended @ self.out, buffer, self.after, self.eps * 3)
        codes = ops().npu_quantize(y, 1.0 / (1.0 / self.scales), None, torch.qint8, -1, True)
        gate = ops().npu_swiglu(_linear(codes, self.scales, self.gate_up))
        codes, scale = ops().npu_dynamic_quant(gate)
        return x + (_linear(codes, scale, self.down) * 0.75 + x.tanh())

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        """Write key and value at their slots, and attend to them, causally."""
        query, key, value = qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
        query = ops().npu_rms_norm(query.reshape(-1, HEADS, SIZE), self.query, self.eps)[0]
        key = ops().npu_rms_norm(key.reshape(-1, KV_HEADS, SIZE), self.key, self.eps)[0]
        query, key = (ops().npu_rotary_mul(each, cos, sin) for each in (query, key))
        caches = self.key_cache, self.value_cache
        value = value.contiguous().view(-1, KV_HEADS, SIZE)
        ops().npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="PA_NZ")
        found = [cache[slots // BLOCK, :, slots % BLOCK].reshape(1, 1, -1, SIZE) for cache in caches]
        found = [each.expand(1, HEADS, -1, SIZE) for each in found]
        rows = query.transpose(0, 1)[None]
        attended = nn.functional.scaled_dot_product_attention(rows, *found, is_causal=True)[0].transpose(0, 1)
        return torch.bmm(attended.transpose(0, 1), self.absorbed).transpose(0, 1).reshape(-1, HEADS * SIZE)


class Decoder(nn.Module):
    """The layers and a norm, whose result is read as it is and in fp32, as by a router."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, dtype) for index in range(LAYERS))
        self.norm, self.head = _row(0.6, 1.4), _weights(HIDDEN, 64, seed=50)
        self.norm.data, self.head.data = self.norm.to(dtype), self.head.to(dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = layer(x, cos, sin, slots)
        y = ops().npu_rms_norm(x, self.norm, 7e-6)[0]
        return y.float().softmax(-1), y @ self.head


def inputs(dtype: torch.dtype, num_tokens: int = 8) -> dict[str, Tensor]:
    """Return rows, the tables of their positions, and a slot for each."""
    generator = torch.Generator().manual_seed(70)
    angles = torch.rand(num_tokens, 1, SIZE, generator=generator) * 6
    return {
        "x": torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "slots": torch.randperm(BLOCKS * BLOCK, generator=generator)[:num_tokens],
    }
