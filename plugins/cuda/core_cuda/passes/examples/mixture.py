"""Mixtures in which the plugin's passes must match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Tensor, ...]]


class _Mixture(nn.Module):
    """A mixture of four experts with a shared one, as ops: what the passes before leave of a model's."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(74)

        def numbers(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.router, self.gate_up, self.down = numbers(4, 32), numbers(4, 96, 32), numbers(4, 32, 48)
        self.shared_gate_up, self.shared_down = numbers(80, 32), numbers(32, 40)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        chosen = torch.ops.core.moe_route(torch.ops.core.linear(rows, self.router), 2)
        routed = torch.ops.core.grouped_mlp(rows, chosen[0], chosen[1], self.gate_up, self.down, kind="silu")
        inner = torch.ops.core.gated_linear(rows if self.flat else x, self.shared_gate_up, None, kind="silu")
        shared = torch.ops.core.linear(inner, self.shared_down)
        out: Tensor = routed.view_as(x) + shared.view_as(x)
        return out


def shared_experts() -> Iterator[Example]:
    """Yield mixtures whose shared expert reads the routed experts' rows, and what these are a view of."""
    for flat in (True, False):
        yield _Mixture(flat=flat), (torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(75)),)


class _Experts(nn.Module):
    """The ops around the grouped products of `core.quantization`'s experts, with scaled rows in place of products."""

    def __init__(self, num_experts: int, *, wide: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(76)
        self.router = nn.Parameter(torch.randn(num_experts, 40, generator=generator))
        self.num_experts, self.wide = num_experts, wide

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = torch.topk((x @ self.router.t()).sigmoid(), 2)
        weights = weights.float() if self.wide else weights
        elsewhere = (indices < 0) | (indices >= self.num_experts)
        experts, order = torch.sort(torch.where(elsewhere, self.num_experts, indices).flatten(), stable=True)
        each = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(experts, each, right=True, out_int32=True)
        rows = x[order // 2] * (1 + ends.sum() / 64).to(x.dtype)
        places = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
        slots = rows[places].view(-1, 2, 40) * weights[..., None]
        return slots.sum(1).to(x.dtype)


def quantised_experts() -> Iterator[Example]:
    """Yield experts with weights of x's dtype and wider ones, whose sum is cast."""
    for wide in (True, False):
        yield _Experts(6, wide=wide), (torch.randn(7, 40, generator=torch.Generator().manual_seed(77)),)


class _QuantisedTwice(nn.Module):
    """Rows and what they are a view of, quantised for a layer each."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        codes, scale = torch.ops.core.quantize(x.view(-1, x.shape[-1]), None, dtype=torch.int8)
        first = (codes.float() * scale.float()).sin()
        codes, scale = torch.ops.core.quantize(x, None, dtype=torch.int8)
        return first, codes.float() * scale.float().cos()


def quantised_twice() -> Iterator[Example]:
    """Yield them."""
    yield _QuantisedTwice(), (torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(78)),)


class _Router(nn.Module):
    """A linear layer of rows and a weight that are cast to fp32, as DeepSeek-V3 writes its router; in bf16 always."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(79)) / 6
        self.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move it, and keep its dtype: in fp32 there is nothing to cast."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        self.weight.data = self.weight.data.bfloat16()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        logits = nn.functional.linear(x.type(torch.float32), self.weight.type(torch.float32))
        return logits.sigmoid()


def routers() -> Iterator[Example]:
    """Yield one."""
    yield _Router(), (torch.randn(5, 40, generator=torch.Generator().manual_seed(80)),)


class _GatedExpert(nn.Module):
    """A shared expert behind its gate and the sum with the routed ones, in place of which there are sines."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(1, 40, generator=torch.Generator().manual_seed(81)) / 6)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.ops.core.linear(x, self.gate).sigmoid()
        out: Tensor = x.cos() * gate + x.sin() if self.turned else x.sin() + gate * x.cos()
        return out


def gated_experts() -> Iterator[Example]:
    """Yield sums in both orders of their operands."""
    for turned in (False, True):
        yield _GatedExpert(turned=turned), (torch.randn(5, 40, generator=torch.Generator().manual_seed(82)),)
