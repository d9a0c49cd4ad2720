"""tools/lift_coverage/oracle.py: what counts as a site, on modules small enough to count by hand, and what does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lift_coverage.oracle import Site, find_sites

H = 8


class ToyRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class PowerRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5


class CentredNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class ScaleNorm(nn.Module):
    """Normalises nothing: it scales another tensor than the one it measures."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 3 + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Plain(nn.Module):
    """A norm by its numbers, and not by its name."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def sites(forward: Callable[..., Tensor], x: Tensor | None = None, **modules: nn.Module) -> tuple[Site, ...]:
    """Return the sites of `forward(model, x)` for a model with these submodules."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    model = Model()
    for name, module in modules.items():
        setattr(model, name, module)
    return find_sites(model, lambda x: model(x), {"x": torch.randn(2, 3, H) if x is None else x})


def kinds(found: tuple[Site, ...]) -> dict[str, int]:
    return dict(Counter(site.kind for site in found))


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (ToyRMSNorm(), "rms_norm"),
        (PowerRMSNorm(), "rms_norm"),
        (nn.RMSNorm(H), "rms_norm"),
        (CentredNorm(), "layer_norm"),
        (nn.LayerNorm(H), "layer_norm"),
        (ScaleNorm(), None),
        (Plain(), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(norm: nn.Module, kind: str | None, dtype: torch.dtype) -> None:
    found = sites(lambda m, x: m.norm(x), torch.randn(2, 3, H, dtype=dtype), norm=norm.to(dtype))
    assert [(site.kind, site.path) for site in found] == ([(kind, "norm")] if kind else [])


def test_a_module_called_twice_is_two_sites() -> None:
    assert kinds(sites(lambda m, x: m.norm(m.norm(x)), norm=ToyRMSNorm())) == {"rms_norm": 2}


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (lambda m, x: m.norm(x + x.exp()), 1),
        (lambda m, x: m.norm((x + x.exp()) * 2), 0),
        (lambda m, x: m.norm(x + 1), 0),
        (lambda m, x: m.norm(x + x[:1]), 0),
        (lambda m, x: m.norm(x.exp().add_(x)), 1),
        (lambda m, x: m.norm(apply_rotary_emb(x, x.cos(), x.sin())), 0),
    ],
    ids=["sum", "scaled sum", "a number added", "broadcast", "in place", "rotation"],
)
def test_sums_that_feed_a_norm(forward: Callable[..., Tensor], count: int) -> None:
    assert kinds(sites(forward, norm=ToyRMSNorm())).get("add_rms_norm", 0) == count


def test_a_sum_read_by_two_norms_is_one_site() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        total = x + x.exp()
        return torch.mul(m.first(total), m.second(total))

    found = sites(forward, first=ToyRMSNorm(), second=ToyRMSNorm())
    assert kinds(found) == {"rms_norm": 2, "add_rms_norm": 1}


class ToyMLP(nn.Module):
    def __init__(self, combine: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.small = nn.Linear(H, 16), nn.Linear(H, 16), nn.Linear(H, 1)
        self.act = nn.SiLU()
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x)


class ToyRouter(ToyMLP):
    """What chooses experts is none."""


@pytest.mark.parametrize(
    ("combine", "count"),
    [
        (lambda m, x: F.silu(m.gate(x)) * m.up(x), 1),
        (lambda m, x: m.up(x) * m.act(m.gate(x)), 1),
        (lambda m, x: (m.up(x).clamp(-1, 1) + 1) * (m.gate(x) * torch.sigmoid(m.gate(x) * 1.7)), 1),
        (lambda m, x: (lambda gate, up: F.gelu(gate) * up)(*m.gate(x).chunk(2, -1)), 1),
        (lambda m, x: F.silu(m.small(x)) * m.up(x), 0),
        (lambda m, x: torch.sigmoid(m.gate(x)) * m.up(x), 0),
        (lambda m, x: F.silu(m.gate(x)) * m.up(x).exp(), 0),
        (lambda m, x: F.silu(m.gate(x)), 0),
    ],
    ids=["silu", "a module", "gpt-oss", "chunks", "a shared expert's gate", "sigmoid", "not linear", "no product"],
)
def test_gates(combine: Callable[..., Tensor], count: int) -> None:
    assert kinds(sites(lambda m, x: m.mlp(x), mlp=ToyMLP(combine))).get("gated_activation", 0) == count
    outer = ToyMLP(lambda m, x: m.router(x))
    outer.router = ToyRouter(combine)
    assert "gated_activation" not in kinds(sites(lambda m, x: m.mlp(x), mlp=outer))


def test_the_products_inside_an_activation_are_no_gates() -> None:
    activations = pytest.importorskip("transformers.activations", reason="needs the extra 'hf'")
    mlp = ToyMLP(lambda m, x: m.act(m.gate(x)))
    mlp.act = activations.NewGELUActivation()
    assert kinds(sites(lambda m, x: m.mlp(x), mlp=mlp)) == {}
    mlp.combine = lambda m, x: m.act(m.gate(x)) * m.up(x)
    assert kinds(sites(lambda m, x: m.mlp(x), mlp=mlp)) == {"gated_activation": 1}


class ToyAttention(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x)


class ToySelfAttention(ToyAttention):
    """Stands inside another attention module, as in BERT."""


class ToyAttentionDecoderLayer(ToyAttention):
    """Named after what is in it."""


def attend(x: Tensor) -> Tensor:
    weights = F.softmax(x @ x.mT, -1, dtype=torch.float32).to(x.dtype)
    return F.dropout(weights, 0.0, training=False) @ x


def sdpa(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def unequal(x: Tensor) -> Tensor:
    """Attend with values narrower than the keys, which has no fused kernel."""
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None, :, :4])


@pytest.mark.parametrize(
    ("forward", "parts"),
    [
        (attend, 1),
        (sdpa, 1),
        (unequal, 1),
        (lambda x: attend(x) - sdpa(x), 2),
        (lambda x: F.softmax(x, -1) * 2, 0),
    ],
    ids=["softmax", "sdpa", "sdpa in parts", "two", "no product of matrices"],
)
def test_attention(forward: Callable[..., Tensor], parts: int) -> None:
    found = sites(lambda m, x: m.attn(x), attn=ToyAttention(forward))
    assert [(site.kind, site.parts) for site in found] == ([("attention", parts)] if parts else [])


def test_attention_counts_once_in_the_innermost_module_named_like_it() -> None:
    outer = ToyAttentionDecoderLayer(lambda x: outer.middle(x))
    outer.middle = ToyAttention(lambda x: outer.middle.inner(x))
    outer.middle.inner = ToySelfAttention(attend)
    found = sites(lambda m, x: m.layer(x), layer=outer)
    assert [(site.kind, site.path) for site in found] == [("attention", "layer.middle.inner")]
    assert kinds(sites(lambda m, x: m.layer(x), layer=ToyAttentionDecoderLayer(attend))) == {}


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def pair(x: Tensor) -> Tensor:
    return sum(apply_rotary_pos_emb(x, x + 1, x.cos(), x.sin()))  # type: ignore[return-value]


def two_singles(x: Tensor) -> Tensor:
    cos, sin = x.cos(), x.sin()
    return apply_rotary_emb(x, cos, sin) + apply_rotary_emb(x + 1, cos, sin)


def two_tables(x: Tensor) -> Tensor:
    y = x + 1
    return apply_rotary_emb(x, x.cos(), x.sin()) + apply_rotary_emb(y, y.cos(), y.sin())


def inline(x: Tensor) -> Tensor:
    table = torch.polar(torch.ones(H // 2), torch.arange(H // 2.0))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table
    return torch.view_as_real(turned).flatten(-2)


def positions(x: Tensor) -> Tensor:
    """Add sines, as absolute positions do."""
    return x + torch.arange(H).cos()


@pytest.mark.parametrize(
    ("forward", "parts"),
    [(pair, [2]), (two_singles, [2]), (two_tables, [1, 1]), (inline, [1]), (positions, [])],
    ids=["pair", "two singles", "two tables", "inline", "none"],
)
def test_rotations(forward: Callable[[Tensor], Tensor], parts: list[int]) -> None:
    found = sites(lambda m, x: m.attn(x), attn=ToyAttention(forward))
    assert [(site.kind, site.parts) for site in found] == [("rotary", count) for count in parts]


def test_routing_and_experts() -> None:
    class ToyRouter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(x, -1).topk(2).values

    class ToyMoeIndexer(ToyRouter):
        """Chooses tokens, not experts."""

    class ToyExperts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT

    assert kinds(sites(lambda m, x: m.router(x), router=ToyRouter())) == {"moe_route": 1}
    assert kinds(sites(lambda m, x: m.indexer(x), indexer=ToyMoeIndexer())) == {}
    assert kinds(sites(lambda m, x: m.experts(x), experts=ToyExperts())) == {"experts": 1}


@pytest.mark.parametrize(("phase", "dtype"), [(0, torch.float32), (1, torch.bfloat16)], ids=["prefill", "decode"])
def test_a_whole_model_has_the_sites_that_its_configuration_says(phase: int, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.engine.static.cache import static_phases

    model: Any = build_model(tiny_config("qwen3"), torch_device=torch.device("cpu"), dtype=dtype).model
    run = static_phases(model)[phase]
    layers = model.config.num_hidden_layers
    assert kinds(find_sites(model, run.function, run.inputs)) == {
        "rms_norm": 4 * layers + 1,  # two per layer, one each for query and key, one at the end
        "add_rms_norm": 2 * layers,
        "gated_activation": layers,
        "attention": layers,
        "rotary": layers,
    }
