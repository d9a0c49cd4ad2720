"""Recurrent layers in which the plugin's passes must match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

_HEADS, _KEYS, _VALUES = 4, 8, 6


class _DeltaGates(nn.Module):
    """A gated delta rule of one token of each sequence, with the gates as models write them out.

    by_head: the projection lies head by head, decay and learning rate of a group side by side. by_feature: a decay for
    each feature of the keys, and the softplus written out.
    """

    def __init__(self, *, by_head: bool, by_feature: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(91)
        self.by_head, self.features = by_head, _KEYS if by_feature else 1

        def numbers(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.gates = numbers(_HEADS * (1 + self.features), 40)
        self.heads = numbers(_HEADS * (2 * _KEYS + _VALUES), 40)
        self.log_rate, self.bias = numbers(_HEADS), numbers(_HEADS * self.features)

    def forward(self, x: Tensor) -> Tensor:
        gates = x @ self.gates.t()
        if self.by_head:
            pairs = gates.view(*x.shape[:-1], 2, _HEADS)
            b, a = (each.reshape(*x.shape[:-1], _HEADS) for each in pairs.split(2, -1))
        else:
            b, a = gates.split((_HEADS, _HEADS * self.features), -1)
        heads = (x @ self.heads.t()).view(-1, _HEADS, 2 * _KEYS + _VALUES)
        query, key, value = heads.split((_KEYS, _KEYS, _VALUES), -1)
        states = torch.ones(x.shape[0], _HEADS, _KEYS, _VALUES, device=x.device)
        decay, beta = self.decay(a), b.sigmoid()
        out: Tensor = torch.ops.core.gated_delta_rule(query, key, value, decay, beta, states, scale=0.5, norm_eps=1e-6)
        return out

    def decay(self, a: Tensor) -> Tensor:
        if self.features == 1:
            return -self.log_rate.float().exp() * functional.softplus(a.float() + self.bias)
        step = (a.float() + self.bias.float()).view(-1, _HEADS, self.features)
        large = torch.where(step > 20.0, step, torch.log(1.0 + torch.exp(step)))
        return -torch.exp(self.log_rate.float().view(1, -1, 1)) * large


def delta_gate_layers() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield a layer of each form."""
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(92))
    for by_head, by_feature in ((False, False), (True, False), (False, True)):
        yield _DeltaGates(by_head=by_head, by_feature=by_feature), (x,)


class _Rated(nn.Module):
    """Layers that scale by the negative exponential of a weight of their own."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(93)
        self.log_rates = nn.ParameterList(nn.Parameter(torch.randn(40, generator=generator)) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for log_rate in self.log_rates:
            x = torch.sin(x.float() * -torch.exp(log_rate.float())).to(x.dtype)
        return x


def rated_layers() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield a model of three such layers."""
    yield _Rated(3), (torch.randn(5, 40, generator=torch.Generator().manual_seed(94)),)
