"""The Acme graph pass: the soft cap of logits, `cap * tanh(x / cap)`, becomes one Acme kernel.

It is ordered nowhere, and so runs after core's own passes: a soft cap inside attention belongs to `lift_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from core.common.passes import view
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.rewrite import Site, fuse, near_miss

if TYPE_CHECKING:
    from core.common.passes.context import PassContext
    from torch import fx

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
    if view.kind(scaled) != "div" or not view.is_number(scaled.args[1]):
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


def fuse_softcap(context: PassContext) -> PassResult:
    """Fuse every soft cap to Acme's kernel; no bit changes."""
    return fuse(context, find)


def declarations() -> tuple[Pass, ...]:
    """Return the passes of this plugin."""
    return (Pass(name=NAME, run=fuse_softcap, owner="acme"),)
