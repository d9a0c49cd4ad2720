"""Tensors that a call names stand by position in a trace, so that passes see one spelling of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import core
from core.compilation.trace.tracing import trace
from tests.support import compile_with, cpu

X, W = torch.linspace(-2, 2, 32).view(4, 8), torch.linspace(-1, 1, 64).view(8, 8)

CALLS: dict[str, tuple[Callable[..., Tensor], int, set[str]]] = {
    "one tensor": (lambda x, w: torch.exp(input=x), 1, set()),
    "of two, the second": (lambda x, w: torch.matmul(x, other=w), 2, set()),
    "an option stays": (lambda x, w: torch.softmax(input=x, dim=-1), 1, {"dim"}),
    "a number stays": (lambda x, w: torch.add(input=x, other=2.0), 1, {"other"}),
    "several tensors": (lambda x, w: F.linear(weight=w, input=x), 2, set()),
    "behind what is left out": (lambda x, w: F.linear(x, w, bias=None) + F.layer_norm(x, (8,), bias=w[0]), 2, {"bias"}),
    "a list of tensors": (lambda x, w: torch.cat(tensors=[x, x], dim=-1), 1, {"dim"}),
    "a function in Python": (lambda x, w: F.silu(input=x), 1, set()),
    "a function of several forms": (lambda x, w: torch.where(condition=x > 0, input=x, other=w[:4]), 3, set()),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(query=x[None], key=w[None], value=w[None], is_causal=True),
        3,
        {"is_causal"},
    ),
    "a method": (lambda x, w: x.mul(other=w[:4]), 2, set()),
    "as NumPy names it": (lambda x, w: torch.exp(x=x), 1, set()),  # type: ignore[call-arg]
    "an option as NumPy names it": (lambda x, w: x.mean(axis=-1, keepdims=True) + x, 1, {"dim", "keepdim"}),
    "an older order": (lambda x, w: torch.addcmul(x, 0.5, tensor1=x, tensor2=w[:4]), 2, {"tensor1", "tensor2"}),
    "an op of several forms": (lambda x, w: torch.ops.positions.two(x, r=w[:4]), 1, {"r"}),
}
LIBRARY = torch.library.Library("positions", "FRAGMENT")
FORMS: dict[str, Callable[..., Tensor]] = {
    "two.A(Tensor p, Tensor q) -> Tensor": lambda p, q: p - q,
    "two.B(Tensor p, Tensor r) -> Tensor": lambda p, r: p + 10 * r,
}
for schema, form in FORMS.items():
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], form, "CompositeExplicitAutograd")
    torch.library.register_fake(f"positions::{schema.partition('(')[0]}", lambda p, _: torch.empty_like(p))


class Called(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"y": self.call(x, w)}


@pytest.mark.filterwarnings("ignore:This overload of addcmul is deprecated")
@pytest.mark.parametrize("case", CALLS)
def test_named_tensors_are_given_by_position(case: str) -> None:
    call, count, named = CALLS[case]
    graph = trace(Called(call), {"x": X, "w": W})
    calls = [node for node in graph.module.graph.nodes if node.op in ("call_function", "call_method")]
    found = [(len(node.args), set(node.kwargs)) for node in calls]
    assert (count, named) in found, calls
    y = compile_with(Called(call), cpu(), inputs=SPECS, lowering="inline")(x=X, w=W)["y"]
    assert torch.equal(y, call(X, W))


SPECS = {"x": core.InputSpec((4, 8), torch.float32), "w": core.InputSpec((8, 8), torch.float32)}


class Named(nn.Module):
    """A norm and a gated MLP, each call with names (or none)."""

    def __init__(self, names: bool) -> None:
        super().__init__()
        self.names = names
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        if self.names:
            mean = torch.mean(input=torch.square(input=x), dim=-1, keepdim=True)
            normed = torch.mul(input=torch.mul(input=x, other=torch.rsqrt(input=mean + 1e-6)), other=self.weight)
            gated = torch.mul(input=F.silu(input=F.linear(input=normed, weight=w)), other=F.linear(normed, weight=w.T))
            return {"y": gated}
        normed = x * torch.rsqrt(torch.mean(torch.square(x), -1, keepdim=True) + 1e-6) * self.weight
        return {"y": F.silu(F.linear(normed, w)) * F.linear(normed, w.T)}


@torch.no_grad()
def test_passes_match_calls_with_names_as_without() -> None:
    matched: list[Any] = []
    for names in (True, False):
        program = compile_with(Named(names).eval(), cpu(), inputs=SPECS, lowering="inline", strict=True)
        matched.append({each.name: each.matched for each in program.report().traces[0].passes if each.matched})
        assert torch.allclose(program(x=X, w=W)["y"], Named(names)(X, W)["y"])
    assert matched[0] == matched[1] and matched[0]["lift_rms_norm"] == matched[0]["lift_gated_activation"] == 1
