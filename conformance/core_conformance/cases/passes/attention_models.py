"""Small models of attention, for passes: rotary embedding, normed queries and keys, masks, windows, caps, caches.

B batch, T tokens, N query heads, K key heads, D head size, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_conformance.cases.passes.models import SIZE, Built, GatedMlp, Parts, RmsNorm, rows

B, T, N, K, D, S = 2, 5, 4, 2, 16, 12


def rotate_halves(x: Tensor) -> Tensor:
    """Return the pairs of halves turned by a quarter (Llama)."""
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    """Return the pairs of neighbours turned by a quarter (GPT-J)."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Rotary(nn.Module):
    """Tables of cos and sin for positions (B, T), computed in the graph."""

    inverse: Tensor

    def __init__(self, *, halves: bool = True) -> None:
        super().__init__()
        self.register_buffer("inverse", 100.0 ** (-torch.arange(0, D, 2).float() / D))
        self.halves = halves

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inverse.float()
        angles = torch.cat((angles, angles), dim=-1) if self.halves else angles.repeat_interleave(2, dim=-1)
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = True) -> Tensor:
    return (x * cos) + ((rotate_halves if halves else rotate_neighbours)(x) * sin)


def _rotations(model: Any, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate a query and its key, in the style of the model's tables."""
    cos, sin = model.tables(positions, q.dtype)
    halves = model.tables.halves
    return _turned(q, cos, sin, halves=halves), _turned(k, cos, sin, halves=halves)


def _normed_rotations(model: Any, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Norm query and key per head, and then rotate them, as Qwen 3 does."""
    q, k = model.q_norm(q.transpose(1, 2)).transpose(1, 2), model.k_norm(k.transpose(1, 2)).transpose(1, 2)
    cos, sin = model.tables(positions, q.dtype)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _key_norm() -> RmsNorm:
    norm = RmsNorm(D, eps=1e-6)
    norm.weight = nn.Parameter(torch.linspace(1.4, 0.2, D))
    return norm


def repeated(x: Tensor) -> Tensor:
    """Return keys or values (B, K, S, D) repeated for the queries' heads: (B, N, S, D)."""
    batch, heads, slots, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, N // K, slots, size).reshape(batch, N, slots, size)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float = 0.0) -> Tensor:
    """Return attention as models write it eagerly, with a soft cap of the scores where asked for."""
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * D**-0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeated(v)).transpose(1, 2).contiguous()


def _attentions(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Attend in one call and written out: causal, masked, windowed, capped."""
    positions = torch.arange(T, device=q.device)
    away = positions[:, None] - positions[None, :]
    window = ((away >= 0) & (away < 3))[None, None]
    call = F.scaled_dot_product_attention
    return (
        call(q, k, v, is_causal=True, scale=0.3, enable_gqa=True),
        call(q, repeated(k), repeated(v), attn_mask=mask),
        call(q, repeated(k), repeated(v), attn_mask=window),
        written_out(q, k, v, mask),
        written_out(q, k, v, mask, cap=2.0),
    )


def _cached(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, eager: bool) -> Tensor:
    """Attend over a static cache, which it writes first; its length is counted in the graph."""
    slots = torch.arange(T, device=q.device) + model.length
    model.length.add_(T)
    model.keys.index_copy_(2, slots, k)
    model.values.index_copy_(2, slots, v)
    if eager:
        return written_out(q, model.keys, model.values, mask)
    return F.scaled_dot_product_attention(q, repeated(model.keys), repeated(model.values), attn_mask=mask)


class Layer(nn.Module):
    """A decoder layer: norm, projections, rotation, attention, residual, norm, gated MLP, residual."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RmsNorm(eps=1e-5 * (index + 1)), RmsNorm(eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(SIZE, n * D, bias=False) for n in (N, K, K))
        self.o_proj, self.mlp = nn.Linear(SIZE, SIZE, bias=False), GatedMlp(F.silu)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_norm(x)
        q, k, v = (p(normed).view(B, T, -1, D).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (_turned(y, cos, sin) for y in (q, k))
        out = F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)
        x = x + self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
        return x + self.mlp(self.post_norm(x))  # type: ignore[no-any-return]  # torch's


def _decoder(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Run two layers and a norm, and give logits with a soft cap."""
    cos, sin = model.tables(positions, x.dtype)
    for layer in model.layers:
        x = layer(x, cos, sin)
    return 1.5 * torch.tanh(model.head(model.norm(x)) / 1.5)


def heads(num_heads: int, seed: int = 0) -> Tensor:
    """Return random values (B, heads, T, D), laid out token by token as projections leave them."""
    generator = torch.Generator().manual_seed(23 + num_heads + seed)
    return torch.randn(B, T, num_heads, D, generator=generator).transpose(1, 2)


def _qkv(mask: Tensor) -> dict[str, Tensor]:
    return {"q": heads(N), "k": heads(K), "v": heads(K, seed=5), "mask": mask}


def _causal(slots: int, past: int) -> Tensor:
    """Return an additive mask (B, 1, T, slots); a large number, since the least one is another for each dtype."""
    return torch.zeros(B, 1, T, slots).masked_fill(torch.ones(T, slots).tril(past) == 0, -3e4)


def _positions() -> Tensor:
    return torch.arange(3, 3 + T).expand(B, T) + torch.tensor([[0], [4]])


def _to_rotate() -> dict[str, Tensor]:
    return {"q": heads(N), "k": heads(K), "positions": _positions()}


def _with_cache(*, eager: bool) -> Built:
    keys, values = (torch.linspace(start, 1.5, B * K * S * D).view(B, K, S, D) for start in range(2))
    model = Parts(partial(_cached, eager=eager), keys=keys, values=values, length=torch.tensor(4))
    return model, _qkv(_causal(S, 4))


ATTENTION_MODELS: Mapping[str, Callable[[], Built]] = {
    "rotary-halves": lambda: (Parts(_rotations, tables=Rotary()), _to_rotate()),
    "rotary-neighbours": lambda: (Parts(_rotations, tables=Rotary(halves=False)), _to_rotate()),
    "normed-rotary": lambda: (
        Parts(_normed_rotations, tables=Rotary(), q_norm=RmsNorm(D, eps=1e-6), k_norm=_key_norm()),
        _to_rotate(),
    ),
    "attention": lambda: (Parts(_attentions), _qkv(_causal(T, 0))),
    "cached-attention": lambda: _with_cache(eager=False),
    "cached-attention-eager": lambda: _with_cache(eager=True),
    "decoder": lambda: (
        Parts(
            _decoder,
            tables=Rotary(),
            layers=nn.ModuleList([Layer(index) for index in range(2)]),
            norm=RmsNorm(eps=3e-4),
            head=nn.Linear(SIZE, 96, bias=False),
        ),
        {"x": torch.stack([rows(T), rows(T, seed=2)]), "positions": _positions()},
    ),
}
"""As `models.MODELS`."""
