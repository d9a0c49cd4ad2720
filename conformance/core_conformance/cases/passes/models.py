"""Small models of the parts of language models: norms, residuals, gates, soft caps, experts, writes, repetitions.

Passes are run over each. Sizes are odd where models allow it, the scalars differ from place to place, and each module
calls its parts by several spellings. H is the hidden size, T the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, TOKENS = 64, 5
"""H and T."""
EPSILONS = (1e-5, 1e-6, 3e-4)
Built = tuple[nn.Module, Mapping[str, Tensor]]


class RmsNorm(nn.Module):
    """RMSNorm with fp32 statistics. late: the weight, in its own dtype, after the cast back (Llama), else before it."""

    def __init__(self, size: int = SIZE, eps: float = 1e-5, *, late: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.3, 1.7, size) - offset)
        self.eps, self.late, self.offset = eps, late, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.late:
            return self.weight * wide.to(x.dtype)
        weight = self.weight.float()
        return (wide * (self.offset + weight if self.offset else weight)).type_as(x)


class Parts(nn.Module):
    """A model that is a function of its parts (submodules, parameters, buffers), which it reads as attributes."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def _norms(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Norm in every spelling and with several eps; the input is small enough for these to matter."""
    plain = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 5e-5)
    return (*(norm(x) for norm in model.llama), model.early(x), model.gemma(x), model.builtin(x), plain)


def _residual_norms(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Add residuals and norm each sum, which later layers read too."""
    total = x + y
    total = model.mix(model.first(total)) + total
    return model.second(total), total


def _layer_norms(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Norm by a module, without weights, and written out."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    written = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
    return model.norm(x), F.layer_norm(x, (SIZE,), eps=3e-4), (model.weight.float() * written).to(x.dtype)


class GatedMlp(nn.Module):
    """`act(gate) * up`, from two projections or from one."""

    def __init__(self, activation: Callable[[Tensor], Tensor], *, joined: bool = False) -> None:
        super().__init__()
        inner = 48
        self.projections = nn.ModuleList(
            [nn.Linear(SIZE, 2 * inner)] if joined else [nn.Linear(SIZE, inner, bias=False) for _ in range(2)]
        )
        self.down = nn.Linear(inner, SIZE, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        parts = [projection(x) for projection in self.projections]
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)  # type: ignore[no-any-return]  # torch's


def _gates() -> nn.Module:
    """Return gated MLPs with each activation that models use."""
    gelu = {form: (lambda x, form=form: F.gelu(x, approximate=form)) for form in ("none", "tanh")}
    mlps = [GatedMlp(activation) for activation in (F.silu, gelu["none"], gelu["tanh"], F.relu)]
    joined = [GatedMlp(activation, joined=True) for activation in (F.silu, gelu["tanh"])]
    return Parts(lambda model, x: tuple(mlp(x) for mlp in model.mlps), mlps=nn.ModuleList([*mlps, *joined]))


def _soft_caps(model: Any, x: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """Cap logits in several spellings, in a step that also counts and stores what it saw."""
    model.counts.add_(1)
    model.seen.index_copy_(0, slots, x)
    first = 30.0 * torch.tanh(model.norm(x) * 20 / 30.0)
    logits = x * 40
    logits = logits / 50.0
    logits = torch.tanh(logits)
    second = logits * 50.0
    model.seen.mul_(0.5)
    return first, second, torch.tanh(x / 2) * 2 + torch.tanh(x)


class Router(nn.Module):
    """The choice of two experts by softmax, renormalised (Mixtral) or not (OLMoE), and by sigmoid with a bias."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.project = nn.Linear(SIZE, num_experts, bias=False)
        # A permutation of steps: a bias that ties no two experts.
        self.bias = nn.Parameter(torch.linspace(-0.4, 0.5, num_experts).roll(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, indices = torch.topk(F.softmax(self.project(x), dim=-1, dtype=torch.float), 2, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), indices


def _routers(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Choose experts in each way."""
    logits = model.router.project(x)
    plain, chosen = torch.topk(F.softmax(logits.float(), dim=-1), 3, dim=-1)
    scores = logits.sigmoid()
    _, indices = torch.topk(scores + model.router.bias, k=3, dim=-1)
    weights = torch.gather(scores, 1, indices)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-6) * 2.5
    return (*model.router(x), plain.to(x.dtype), chosen, weights, indices)


class Experts(nn.Module):
    """A mixture: a router, and experts over tokens sorted by expert, through two grouped products and an activation.

    gated: with a gate by SiLU (Mixtral), else with the square of ReLU (Nemotron-H).
    """

    def __init__(self, num_experts: int = 5, inner: int = 24, *, gated: bool = True) -> None:
        super().__init__()
        self.router, self.num_experts, self.gated = Router(num_experts), num_experts, gated
        self.up = nn.Parameter(torch.randn(num_experts, 2 * inner if gated else inner, SIZE) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, SIZE, inner) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x)
        experts, order = torch.sort(indices.reshape(-1))
        rows, row_weights = x[order // 2], weights.reshape(-1)[order]
        counts = torch.histc(experts.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        hidden = grouped_product(rows, self.up.transpose(-2, -1), ends)
        gate, up = hidden.chunk(2, dim=-1)
        hidden = F.silu(gate) * up if self.gated else torch.square(F.relu(hidden))
        rows = grouped_product(hidden, self.down.transpose(-2, -1), ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=rows.device)
        rows = (rows * row_weights.unsqueeze(-1))[inverse]
        return rows.view(x.size(0), 2, x.size(1)).sum(dim=1).to(x.dtype)  # type: ignore[no-any-return]  # torch's


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the rows (T, K) up to ends[e] by matrices[e] (K, N), as models call it: torch's own product in bf16."""
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, matrices, offs=ends)
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, matrices, offs=ends)
    return product


def _experts() -> Built:
    # Declares the product for other dtypes than bf16, where it is installed.
    with suppress(ImportError):
        import_module("transformers.integrations.moe")
    kinds = {"gated": Experts(), "plain": Experts(gated=False)}
    return Parts(lambda model, x: (model.gated(x), model.plain(x)), **kinds), {"x": rows(19)}


def _merged(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Apply linears of one input, of different widths and with biases, and a gated MLP."""
    return model.q(x).sin(), model.k(x).sin(), model.v(x).cos(), model.mlp(x)


def _adapted(model: Any, x: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """Apply linears of one input that have adapters, each row one of its own."""

    def apply(name: str) -> Tensor:
        y = getattr(model, name)(x)
        down, up = (getattr(model, f"{name}_{side}") for side in ("a", "b"))
        return torch.ops.core.add_lora(y, x, down, up, slots, rank=4, sizes=[y.shape[-1]])  # type: ignore[no-any-return]

    return apply("q").sin(), apply("k").sin(), apply("v").cos()


def _adapters() -> Built:
    """Return query, key and value with two adapters each."""
    linears = {name: nn.Linear(SIZE, size, bias=False) for name, size in (("q", 64), ("k", 32), ("v", 32))}
    sides = {f"{name}_a": torch.randn(8, SIZE) * SIZE**-0.5 for name in linears}
    sides |= {f"{name}_b": torch.randn(linear.out_features, 8) * 0.05 for name, linear in linears.items()}
    return Parts(_adapted, **linears, **sides), {"x": rows(), "slots": torch.tensor([1, 0, 2, 2, 1])}


def _no_ops(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mix ops that change nothing with ops that do, sums with small numbers among these."""
    y = F.dropout(x.sin().to(x.dtype) * 1, 0.1, training=False).contiguous().view(TOKENS, SIZE)
    z = (x.cos() * 1.0 + 1e-4).reshape(TOKENS, SIZE).to(x.dtype)
    return (y / 1).exp(), z.clone().tanh()


def _repeated(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Compute one value twice, take two slices that only look alike, and read before and after a write."""
    first, again = x.sin() * 0.5, x.sin() * 0.5
    head, tail = x[:, : SIZE // 2] * 3, x[:, SIZE // 2 :] * 3
    before = model.state * 2
    model.state.add_(x)
    return first + again.cos(), head - tail, before, model.state * 2


def rows(num_tokens: int = TOKENS, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return random rows (T, H) of several sizes, the smallest a hundredth of the largest."""
    generator = torch.Generator().manual_seed(11 + seed)
    sizes = torch.logspace(-2, 0, num_tokens).unsqueeze(-1)
    return torch.randn(num_tokens, SIZE, generator=generator) * sizes * scale


def perturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Perturb each constant parameter, in place: weights of exactly 1 would hide that they were left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            if constant and parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator) * 0.5 - 0.25
                parameter.copy_(parameter.float() + noise)
    return model.eval().requires_grad_(False)


def _linspace(first: float, last: float, *shape: int) -> Tensor:
    return torch.linspace(first, last, math.prod(shape)).view(shape)


MODELS: Mapping[str, Callable[[], Built]] = {
    "rms-norm": lambda: (
        Parts(
            _norms,
            llama=nn.ModuleList([RmsNorm(eps=eps) for eps in EPSILONS]),
            early=RmsNorm(eps=2e-6, late=False),
            gemma=RmsNorm(eps=1e-6, late=False, offset=1.0),
            builtin=nn.RMSNorm(SIZE, eps=4e-5),
        ),
        {"x": rows(scale=0.1)},
    ),
    "residual-norm": lambda: (
        Parts(
            _residual_norms,
            first=RmsNorm(eps=1e-5),
            second=RmsNorm(eps=3e-4, late=False, offset=1.0),
            mix=nn.Linear(SIZE, SIZE, bias=False),
        ),
        {"x": rows(), "y": rows(seed=1)},
    ),
    "layer-norm": lambda: (
        Parts(_layer_norms, norm=nn.LayerNorm(SIZE, eps=2e-5), weight=nn.Parameter(_linspace(0.4, 1.9, SIZE))),
        {"x": rows(scale=0.3)},
    ),
    "gated-mlp": lambda: (_gates(), {"x": rows(scale=2.0)}),
    "soft-cap": lambda: (
        Parts(
            _soft_caps,
            counts=torch.zeros(1, dtype=torch.int64),
            seen=_linspace(-1, 1, 3 * TOKENS, SIZE),
            norm=RmsNorm(),
        ),
        {"x": rows(), "slots": torch.tensor([3, 14, 7, 0, 5])},
    ),
    "router": lambda: (Parts(_routers, router=Router(8)), {"x": rows(37, scale=2.0)}),
    "experts": _experts,
    "linears": lambda: (
        Parts(
            _merged,
            q=nn.Linear(SIZE, 64),
            k=nn.Linear(SIZE, 32),
            v=nn.Linear(SIZE, 32),
            mlp=GatedMlp(F.silu),
        ),
        {"x": rows()},
    ),
    "adapters": _adapters,
    "no-ops": lambda: (Parts(_no_ops), {"x": rows()}),
    "repeats": lambda: (Parts(_repeated, state=_linspace(-2, 3, TOKENS, SIZE)), {"x": rows()}),
}
"""Name -> what builds the model and its inputs by name, in fp32 on the host."""
