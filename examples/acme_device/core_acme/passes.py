"""The Acme graph pass: the soft cap of logits, `cap * tanh(x / cap)`, becomes one Acme kernel.

It is ordered nowhere, and so runs after core's own passes: a soft cap inside attention belongs to `lift_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from core.common.passes import NearMiss, Pass, PassContext, Site, near_miss, view
from torch import Tensor, fx, nn

NAME = "acme_softcap"


@torch.library.custom_op("acme::softcap", mutates_args=())
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return `cap * tanh(x / cap)`, each step rounded to x's dtype; a real device launches its kernel here."""
    return cap * torch.tanh(x / cap)


@softcap.register_fake
def _softcap_fake(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.empty_like(x)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the soft cap around a tanh, a near-miss where it is none, and None for any other node."""
    if view.kind(node) != "tanh":
        return None
    scaled: Any = node.args[0]
    if view.kind(scaled) != "div" or len(scaled.args) != 2 or scaled.kwargs or not view.is_number(scaled.args[1]):
        return None  # a plain tanh
    source, cap = scaled.args
    product = view.only_user(node)
    if product is None or view.kind(product) != "mul":
        return near_miss(node, f"{node} is used otherwise than in one product")
    if view.other(product, node) != cap:
        return near_miss(node, f"divided by {cap} and multiplied by {view.other(product, node)}")
    return Site(
        anchor=product,
        target=torch.ops.acme.softcap.default,
        args=(source, float(cap)),
        interior=(scaled, node, product),
    )


class CappedHead(nn.Module):
    """A head whose logits are capped, in one of the two spellings that models use."""

    def __init__(self, cap: float, *, cap_first: bool) -> None:
        super().__init__()
        self.head, self.cap, self.cap_first = nn.Linear(16, 40), cap, cap_first

    def forward(self, x: Tensor) -> Tensor:
        """Return capped logits (T, 40) of x (T, 16)."""
        capped = torch.tanh(self.head(x) / self.cap)
        return self.cap * capped if self.cap_first else capped * self.cap


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield models in which the pass owes a match; logits reach well beyond the cap, where its size tells."""
    for cap, cap_first in ((3.0, True), (1.5, False)):
        random = torch.Generator().manual_seed(0)
        model = CappedHead(cap, cap_first=cap_first)
        for parameter in model.parameters():
            nn.init.normal_(parameter, generator=random)
        yield model, (torch.randn(24, 16, generator=random),)


def declarations() -> tuple[Pass, ...]:
    """Return the passes of this plugin."""
    does = "Fuse every soft cap to Acme's kernel; no bit changes."
    return (Pass(name=NAME, does=does, find=find, examples=examples, owner="acme"),)
