"""What a pass owes: how often it matches, the numbers in fp32 and bf16, near-misses, and a planted mistake found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core.common.passes.declaration import Pass
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.errors import PassError
from core.verify.planted import Mistake, with_mistake
from core.verify.verify import checker
from torch import Tensor, fx, nn

from core_acme.passes import declarations

CAPPED = torch.ops.acme.softcap.default


class Head(nn.Module):
    def __init__(self, cap: float, *, product_first: bool) -> None:
        super().__init__()
        self.cap, self.product_first = cap, product_first

    def forward(self, x: Tensor) -> Tensor:
        capped = torch.tanh(x / self.cap)
        return self.cap * capped if self.product_first else capped * self.cap


class Model(nn.Module):
    """Two soft caps of different size, spelled in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.logits = Head(50.0, product_first=True), Head(30, product_first=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.scores(x) * 7)


def rows(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-90, 90, 33).view(3, 11).to(dtype)


def fused(model: Any, x: Tensor, declared: Pass | None = None, **options: Any) -> tuple[fx.GraphModule, PassReport]:
    graph = trace(model, {"x": x}).module
    (report,) = PassManager([declared or declarations()[0]], strict=True).run(graph, **options)
    return graph, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_soft_cap_is_fused_and_keeps_every_bit(dtype: torch.dtype) -> None:
    x = rows(dtype)
    expected = trace(Model(), {"x": x}).module(x)[0]
    graph, report = fused(Model(), x)
    assert (report.matched, report.sites, report.near_misses) == (2, ("scores", "logits"), ())
    assert [node.args[1] for node in graph.graph.nodes if node.target is CAPPED] == [50.0, 30.0]
    assert not any(node.target is torch.tanh for node in graph.graph.nodes)
    assert torch.equal(graph(x)[0], expected)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda x: 10.0 * torch.tanh(x / 20.0), "divided by 20.0 and multiplied by 10.0"),
        (lambda x: torch.tanh(x / 20.0) + 20.0, "used otherwise than in one product"),
    ],
)
def test_near_misses_say_why(model: Any, reason: str) -> None:
    _, report = fused(model, rows(torch.float32))
    assert report.matched == 0
    assert [reason in miss.reason for miss in report.near_misses] == [True]


@pytest.mark.parametrize(
    "model",
    [
        torch.tanh,
        lambda x: x / 20.0 * 20.0,
        lambda x: 2 * torch.tanh(x),
        lambda x: 20.0 * torch.tanh(torch.div(x, 20.0, rounding_mode="floor")),
    ],
)
def test_what_is_plainly_something_else_is_passed_over(model: Any) -> None:
    _, report = fused(lambda x: model(x), rows(torch.float32))
    assert (report.matched, report.near_misses) == (0, ())


def test_a_planted_mistake_is_found() -> None:
    def other_cap(node: fx.Node) -> bool:
        node.args = (node.args[0], node.args[1] * 1.01)  # type: ignore[operator]  # a number
        return True

    x = rows(torch.float32)
    mistake = Mistake(name="cap", of="acme_softcap", what="a cap one per cent too large", make=other_cap)
    check = checker([(x,)], "full")
    fused(Model(), x, check=check)
    with pytest.raises(PassError, match="verifying pass 'acme_softcap' of acme with planted 'cap'"):
        fused(Model(), x, with_mistake(declarations()[0], mistake), check=check)


def test_the_declaration_names_its_owner() -> None:
    (declared,) = declarations()
    assert (declared.name, declared.mechanism, declared.stage, declared.owner) == (
        "acme_softcap",
        "graph",
        "torch",
        "acme",
    )
