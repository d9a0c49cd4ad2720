"""Steps of recurrent layers as models write them, for one token of each of several sequences, on states in slots.

Shapes: S sequences, H heads. Many heads: what a head's numbers share decides their error, and few would be noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_conformance.cases.passes.models import Built, Parts

_ROWS, _HEADS, _KEYS, _VALUES, _GROUP = 5, 16, 12, 24, 2
_CHANNELS, _TAPS = 96, 4
_SLOTS = torch.tensor([6, 2, 4, 3, 0])
"""The last sequence begins: it reads slot 0, where zeros are, and writes slot 1."""


def _random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _states(*shape: int) -> Tensor:
    states = _random(_ROWS + 3, *shape, seed=1, scale=0.5)
    states[0] = 0
    return states


def _convolution(model: Any, x: Tensor, slots: Tensor) -> Tensor:
    """A short causal convolution with SiLU; x (S, 1, C)."""
    state, kept = model.states.index_select(0, slots), slots.clamp(min=1)
    row = torch.cat([state, x.transpose(1, 2)], dim=-1).to(model.weight.dtype)
    state.copy_(row[:, :, -_TAPS:])
    out = F.conv1d(row, model.weight.squeeze(1).unsqueeze(1), model.bias, padding=0, groups=_CHANNELS)[:, :, -1:]
    out = F.silu(out).to(x.dtype).transpose(1, 2)
    model.states.index_copy_(0, kept, state.to(model.states.dtype))
    return out * 2


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _delta_rule(model: Any, query: Tensor, key: Tensor, value: Tensor, a: Tensor, slots: Tensor) -> Tensor:
    """The gated delta rule; query and key (S, 1, H / 2, D), value (S, 1, H, V), a (S, 1, H)."""
    state, kept, dtype = model.states.index_select(0, slots), slots.clamp(min=1), query.dtype
    decay, beta = -model.rate.float().exp() * F.softplus(a.float() + model.bias), a.sigmoid()
    query, key = (x.repeat_interleave(_GROUP, dim=2) for x in (query, key))
    query, key, value, beta, decay = (x.transpose(1, 2).to(torch.float32) for x in (query, key, value, beta, decay))
    query, key = _normed(query) / _KEYS**0.5, _normed(key)
    out, state = torch.zeros_like(value), state.to(value)
    q, k, v = query[:, :, 0], key[:, :, 0], value[:, :, 0]
    state = state * decay[:, :, 0].exp()[..., None, None]
    missing = (v - (state * k.unsqueeze(-1)).sum(dim=-2)) * beta[:, :, 0].unsqueeze(-1)
    state = state + k.unsqueeze(-1) * missing.unsqueeze(-2)
    out[:, :, 0] = (state * q.unsqueeze(-1)).sum(dim=-2)
    result = out.transpose(1, 2).contiguous().to(dtype)
    model.states.index_copy_(0, kept, state.to(model.states.dtype))
    return result * 2


def _state_space(model: Any, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, slots: Tensor) -> Tensor:
    """A selective state space; x (S, H, P), dt (S, 1, H), b and c (S, G, N)."""
    state, kept = model.states.index_select(0, slots), slots.clamp(min=1)
    dt = dt.transpose(1, 2).expand(-1, -1, _VALUES) + model.bias[:, None].expand(-1, _VALUES).to(dt.dtype)
    step = F.softplus(dt)[..., None]
    rates = (-torch.exp(model.rate.float()))[:, None, None].expand(-1, _VALUES, _KEYS)
    decay = torch.exp(step.float() * rates.float())
    wide, groups = (_ROWS, _HEADS // _GROUP, _GROUP, _KEYS), (_ROWS, _HEADS // _GROUP, 1, _KEYS)
    b = b.reshape(groups).expand(wide).contiguous().reshape(_ROWS, _HEADS, 1, _KEYS)
    new = state * decay + step * b * x[..., None]
    state.copy_(new.to(state.dtype))
    c = c.reshape(groups).expand(wide).contiguous().reshape(_ROWS, _HEADS, _KEYS)
    flat = new.to(c.dtype).view(_ROWS * _HEADS, _VALUES, _KEYS)
    out = torch.bmm(flat, c.view(_ROWS * _HEADS, _KEYS, 1)).view(_ROWS, _HEADS, _VALUES)
    out = (out + x * model.skip[:, None].expand(-1, _VALUES)).to(x.dtype)
    model.states.index_copy_(0, kept, state.to(model.states.dtype))
    doubled: Tensor = out * 2
    return doubled


def _inputs(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    drawn = {name: _random(*shape, seed=7 + index) for index, (name, shape) in enumerate(shapes.items())}
    return {**drawn, "slots": _SLOTS.clone()}


def _per_head(seed: int) -> nn.Parameter:
    return nn.Parameter(_random(_HEADS, seed=seed))


RECURRENT_MODELS: Mapping[str, Callable[[], Built]] = MappingProxyType(
    {
        "convolution-step": lambda: (
            Parts(
                _convolution,
                states=_states(_CHANNELS, _TAPS),
                weight=nn.Parameter(_random(_CHANNELS, 1, _TAPS, seed=2, scale=0.5)),
                bias=nn.Parameter(_random(_CHANNELS, seed=3)),
            ),
            _inputs(x=(_ROWS, 1, _CHANNELS)),
        ),
        "delta-rule-step": lambda: (
            Parts(_delta_rule, states=_states(_HEADS, _KEYS, _VALUES), rate=_per_head(2), bias=_per_head(3)),
            _inputs(
                query=(_ROWS, 1, _HEADS // _GROUP, _KEYS),
                key=(_ROWS, 1, _HEADS // _GROUP, _KEYS),
                value=(_ROWS, 1, _HEADS, _VALUES),
                a=(_ROWS, 1, _HEADS),
            ),
        ),
        "state-space-step": lambda: (
            Parts(
                _state_space,
                states=_states(_HEADS, _VALUES, _KEYS),
                rate=_per_head(2),
                bias=_per_head(3),
                skip=_per_head(4),
            ),
            _inputs(
                x=(_ROWS, _HEADS, _VALUES),
                dt=(_ROWS, 1, _HEADS),
                b=(_ROWS, _HEADS // _GROUP, _KEYS),
                c=(_ROWS, _HEADS // _GROUP, _KEYS),
            ),
        ),
    }
)
"""Name -> what builds the model and its inputs by name, in fp32 on the host."""
