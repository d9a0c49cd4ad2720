"""Small models of what language models are made of: norms, residuals, gates, soft caps, experts, writes, repetitions.

Passes are run over each. Sizes are odd where models allow it, the scalars differ from place to place, and each module
calls its parts by several spellings. H is the hidden size, T the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module

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


class Norms(nn.Module):
    """RMSNorms in every spelling and with several eps; the input is small enough for these to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = nn.ModuleList([RmsNorm(eps=eps) for eps in EPSILONS])
        self.early = RmsNorm(eps=2e-6, late=False)
        self.gemma = RmsNorm(eps=1e-6, late=False, offset=1.0)
        self.builtin = nn.RMSNorm(SIZE, eps=4e-5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        plain = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 5e-5)
        return (*(norm(x) for norm in self.llama), self.early(x), self.gemma(x), self.builtin(x), plain)


class ResidualNorms(nn.Module):
    """Residual adds and the norm of each sum, which later layers read too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RmsNorm(eps=1e-5), RmsNorm(eps=3e-4, late=False, offset=1.0)
        self.mix = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        normed = self.mix(self.first(total))
        total = normed + total
        return self.second(total), total


class LayerNorms(nn.Module):
    """Layer norms as a module, without weights, and written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE, eps=2e-5)
        self.weight = nn.Parameter(torch.linspace(0.4, 1.9, SIZE))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        written = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.norm(x), F.layer_norm(x, (SIZE,), eps=3e-4), (self.weight.float() * written).to(x.dtype)


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
        out: Tensor = self.down(self.activation(gate) * up)
        return out


class Gates(nn.Module):
    """Gated MLPs with each activation that models use."""

    def __init__(self) -> None:
        super().__init__()
        gelu = {form: (lambda x, form=form: F.gelu(x, approximate=form)) for form in ("none", "tanh")}
        mlps = [GatedMlp(activation) for activation in (F.silu, gelu["none"], gelu["tanh"], F.relu)]
        joined = [GatedMlp(activation, joined=True) for activation in (F.silu, gelu["tanh"])]
        self.mlps = nn.ModuleList([*mlps, *joined])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(mlp(x) for mlp in self.mlps)


class SoftCaps(nn.Module):
    """Soft caps of logits in several spellings, in a step that also counts and stores what it saw."""

    counts: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("seen", torch.linspace(-1, 1, 3 * TOKENS * SIZE).view(3 * TOKENS, SIZE))
        self.norm = RmsNorm()

    def forward(self, x: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        self.counts.add_(1)
        self.seen.index_copy_(0, slots, x)
        first = 30.0 * torch.tanh(self.norm(x) * 20 / 30.0)
        logits = x * 40
        logits = logits / 50.0
        logits = torch.tanh(logits)
        second = logits * 50.0
        self.seen.mul_(0.5)
        third = torch.tanh(x / 2) * 2 + torch.tanh(x)
        return first, second, third


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


class Routers(nn.Module):
    """Each way to choose experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.router.project(x)
        plain, chosen = torch.topk(F.softmax(logits.float(), dim=-1), 3, dim=-1)
        scores = logits.sigmoid()
        _, indices = torch.topk(scores + self.router.bias, k=3, dim=-1)
        weights = torch.gather(scores, 1, indices)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-6) * 2.5
        return (*self.router(x), plain.to(x.dtype), chosen, weights, indices)


class Experts(nn.Module):
    """A mixture: a router, and experts over tokens sorted by expert, through two grouped products and a gate."""

    def __init__(self, num_experts: int = 5, inner: int = 24) -> None:
        super().__init__()
        self.router, self.num_experts = Router(num_experts), num_experts
        self.up = nn.Parameter(torch.randn(num_experts, 2 * inner, SIZE) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, SIZE, inner) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x)
        experts, order = torch.sort(indices.reshape(-1))
        rows, row_weights = x[order // 2], weights.reshape(-1)[order]
        counts = torch.histc(experts.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = grouped_product(rows, self.up.transpose(-2, -1), ends).chunk(2, dim=-1)
        rows = grouped_product(F.silu(gate) * up, self.down.transpose(-2, -1), ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=rows.device)
        rows = (rows * row_weights.unsqueeze(-1))[inverse]
        out: Tensor = rows.view(x.size(0), 2, x.size(1)).sum(dim=1).to(x.dtype)
        return out


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
    return Experts(), {"x": rows(19)}


class Merged(nn.Module):
    """Linears of one input, of different widths and with biases, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, size) for size in (64, 32, 32))
        self.mlp = GatedMlp(F.silu)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x).sin(), self.k(x).sin(), self.v(x).cos(), self.mlp(x)


class NoOps(nn.Module):
    """What computes nothing, between what does; and sums with small numbers, which do not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x.sin().to(x.dtype) * 1, 0.1, training=False).contiguous().view(TOKENS, SIZE)
        z = (x.cos() * 1.0 + 1e-4).reshape(TOKENS, SIZE).to(x.dtype)
        return (y / 1).exp(), z.clone().tanh()


class Repeated(nn.Module):
    """What is computed twice, slices that only look alike, and reads before and after a write."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.linspace(-2, 3, TOKENS * SIZE).view(TOKENS, SIZE))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, again = x.sin() * 0.5, x.sin() * 0.5
        head, tail = x[:, : SIZE // 2] * 3, x[:, SIZE // 2 :] * 3
        before = self.state * 2
        self.state.add_(x)
        return first + again.cos(), head - tail, before, self.state * 2


def rows(num_tokens: int = TOKENS, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return random rows (T, H) of several sizes, the smallest a hundredth of the largest."""
    generator = torch.Generator().manual_seed(11 + seed)
    sizes = torch.logspace(-2, 0, num_tokens).unsqueeze(-1)
    return torch.randn(num_tokens, SIZE, generator=generator) * sizes * scale


def perturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Spread each parameter that is constant, in place: weights of exactly 1 hide that they were left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            if constant and parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator) * 0.5 - 0.25
                parameter.copy_(parameter.float() + noise)
    return model.eval().requires_grad_(False)


def _capped() -> Built:
    return SoftCaps(), {"x": rows(), "slots": torch.tensor([3, 14, 7, 0, 5])}


MODELS: Mapping[str, Callable[[], Built]] = {
    "rms-norm": lambda: (Norms(), {"x": rows(scale=0.1)}),
    "residual-norm": lambda: (ResidualNorms(), {"x": rows(), "y": rows(seed=1)}),
    "layer-norm": lambda: (LayerNorms(), {"x": rows(scale=0.3)}),
    "gated-mlp": lambda: (Gates(), {"x": rows(scale=2.0)}),
    "soft-cap": _capped,
    "router": lambda: (Routers(), {"x": rows(37, scale=2.0)}),
    "experts": _experts,
    "linears": lambda: (Merged(), {"x": rows()}),
    "no-ops": lambda: (NoOps(), {"x": rows()}),
    "repeats": lambda: (Repeated(), {"x": rows()}),
}
"""Name -> what builds the model and its inputs by name, in fp32 on the host."""
