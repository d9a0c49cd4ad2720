"""tools/lift_coverage/states.py: short convolutions and recurrences, as they are written, and what is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lift_coverage.match import match_sites
from lift_coverage.oracle import find_sites

C, K = 6, 4


class Mixer(nn.Module):
    """A module named like a recurrence that runs what it is given."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.randn(C, 1, K)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight)


class Plain(Mixer):
    """No module named like a recurrence."""


class GatedRMSNormOfMamba(Mixer):
    """A norm beside a recurrence."""


def counted(model: nn.Module, x: Tensor | None = None) -> dict[str, int]:
    whole = nn.Sequential(model)
    found = find_sites(whole, lambda x: whole(x), {"x": torch.randn(2, C, 9) if x is None else x})
    return dict(Counter(site.kind for site in found))


def padded(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight, padding=K - 1, groups=C)[..., : x.shape[-1]]


def behind_its_past(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.conv1d(torch.cat([x.new_zeros(2, C, K - 1), x], -1), weight, groups=C))


def window(x: Tensor, weight: Tensor) -> Tensor:
    return (x[..., -K:] * weight.squeeze(1)).sum(-1)


def sees_what_comes(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (0, 1)), weight, padding=1, groups=C)


def mixes_channels(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight.expand(C, C // 2, K), groups=2)


def long(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (8, 0)), weight.repeat(1, 1, 3)[..., :9], groups=C)


def sum_of_products(x: Tensor, weight: Tensor) -> Tensor:
    return (x[..., -K:] * x[..., :K]).sum(-1)


@pytest.mark.parametrize("forward", [padded, behind_its_past, window])
def test_short_convolutions_are_found_by_what_they_compute(forward: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert counted(Plain(forward)) == {"short_convolution": 1}


@pytest.mark.parametrize("forward", [sees_what_comes, mixes_channels, long, sum_of_products])
def test_what_is_no_short_convolution(forward: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert counted(Plain(forward)) == {}


def scan(x: Tensor, _: Tensor) -> Tensor:
    state, decay, outputs = x[..., 0], (-x.abs()).exp(), []
    for step in range(x.shape[-1]):
        state = decay[..., step] * state + x[..., step]
        outputs.append(state)
    return torch.stack(outputs, -1)


def test_a_recurrence_is_a_module_named_so_whose_state_decays() -> None:
    assert counted(Mixer(scan)) == {"recurrence": 1}
    assert counted(Plain(scan)) == counted(GatedRMSNormOfMamba(scan)) == {}
    assert counted(Mixer(lambda x, _: x * 2)) == {}


class AlibiAttention(nn.Module):
    """Scores with a bias of their distance, which grows with the head."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-2])
        bias = torch.tensor([0.5, 0.25])[:, None, None] * (places - places[:, None])
        return (x @ x.mT + bias).softmax(-1) @ x


class ChunkedAttention(nn.Module):
    """Tokens see those of their own chunk."""

    def forward(self, x: Tensor) -> Tensor:
        chunk = torch.arange(x.shape[-2]) // 3
        return F.scaled_dot_product_attention(x, x, x, attn_mask=chunk == chunk[:, None])


@pytest.mark.parametrize("kind", [AlibiAttention, ChunkedAttention])
def test_attention_with_a_bias_and_in_chunks_is_attention(kind: type[nn.Module]) -> None:
    assert counted(kind(), torch.randn(3, 2, 9, 8)) == {"attention": 1}


RECURRENT = {
    "mamba": (1, 1),
    "mamba2": (1, 1),
    "qwen3_next": (1, 1),
    "kimi_linear": (1, 1),
    "lfm2": (1, 0),
    "recurrent_gemma": (1, 1),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_models_recurrent_layers_are_counted_in_both_phases(model_type: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    for found, layers in _phases(model_type):
        sites = Counter(site.kind for site in found)
        convolutions, recurrences = RECURRENT[model_type]
        expected = (convolutions * layers, recurrences * layers)
        assert layers and (sites["short_convolution"], sites["recurrence"]) == expected


def _phases(model_type: str) -> Iterator[tuple[Any, int]]:
    """Yield the sites of prefill and decode of a tiny model, and how many of its layers keep a state."""
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.engine.static.cache import static_phases

    model: Any = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=torch.float32).model
    filtering = [m for m in model.modules() if any(isinstance(child, nn.Conv1d) for child in m.children())]
    for phase in static_phases(model):
        yield find_sites(model, phase.function, phase.inputs), len(filtering)


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("causal_conv1d_update", "short_convolution"),
        ("gated_delta_rule", "recurrence"),
        ("selective_state_update", "recurrence"),
    ],
)
def test_the_ops_stand_for_what_they_are(op: str, kind: str) -> None:
    from torch import fx

    import core.common.ops.canonical  # noqa: F401  # declares the ops
    from lift_coverage.oracle import Site

    graph = fx.Graph()
    node = graph.call_function(getattr(torch.ops.core, op).default, (graph.placeholder("x"),))
    node.meta["nn_module_stack"] = {"here": ("L['self'].mixer", nn.Module)}
    graph.output(node)
    sites = [Site("short_convolution", "mixer", "Mixer"), Site("recurrence", "mixer", "Mixer")]
    missed, extra = match_sites(sites, fx.GraphModule({}, graph), ())
    assert [miss.site.kind for miss in missed] == [each.kind for each in sites if each.kind != kind] and not extra
