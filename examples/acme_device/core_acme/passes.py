"""The Acme graph pass: drop casts to the dtype a tensor already has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.effects import value_of
from core.common.passes.rewrite import near_miss, site_name

if TYPE_CHECKING:
    from core.common.passes.context import PassContext
    from torch import fx

NAME = "acme_drop_same_dtype_cast"
_CAST_METHODS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


def drop_same_dtype_cast(context: PassContext) -> PassResult:
    """Replace each `x.to(dtype)` (or `x.float()` …) whose `x` already has that dtype by `x`.

    Right for every dtype and for aliasing too: such a cast returns `x` itself, not a copy. Casts that change the dtype
    are left alone without comment; they are not near-misses, they are needed.
    """
    sites: list[str] = []
    near_misses: list[NearMiss] = []
    for node in list(context.graph.nodes):
        wanted = _cast_target(node)
        if wanted is None:
            continue
        source = node.args[0]
        actual = _dtype(source)
        if actual is None:
            near_misses.append(near_miss(node, f"the dtype of {source} is not recorded in the graph"))
        elif actual == wanted and node.kwargs.get("copy", False):
            near_misses.append(near_miss(node, "copy=True asks for a tensor of its own"))
        elif actual == wanted:
            sites.append(site_name(node))
            node.replace_all_uses_with(source)
            context.graph.erase_node(node)
    return PassResult(matched=len(sites), sites=tuple(sites), near_misses=tuple(near_misses))


def _cast_target(node: fx.Node) -> torch.dtype | None:
    """Return the dtype that `node` casts to, or None where it is no cast or also moves or re-lays out its tensor."""
    if node.op != "call_method":
        return None
    if node.target in _CAST_METHODS and len(node.args) == 1 and not node.kwargs:
        return _CAST_METHODS[str(node.target)]
    if node.target != "to" or not set(node.kwargs) <= {"dtype", "copy", "non_blocking"}:
        return None
    wanted: Any = node.args[1] if len(node.args) == 2 else node.kwargs.get("dtype") if len(node.args) == 1 else None
    return wanted if isinstance(wanted, torch.dtype) else None


def _dtype(source: Any) -> torch.dtype | None:
    """Return the dtype that tracing recorded for a node."""
    value = value_of(source)
    return value.dtype if isinstance(value, torch.Tensor) else None


def declarations() -> tuple[Pass, ...]:
    """Return the passes of this plugin."""
    return (Pass(name=NAME, run=drop_same_dtype_cast, owner="acme"),)
