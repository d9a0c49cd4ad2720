"""The Acme graph pass: drop casts to the dtype a tensor already has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from core.common.passes.declaration import NearMiss, Pass, PassResult

if TYPE_CHECKING:
    from torch import fx

NAME = "acme_drop_same_dtype_cast"
_CAST_METHODS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


def drop_same_dtype_cast(module: fx.GraphModule) -> PassResult:
    """Replace each `x.to(dtype)` (or `x.float()` …) whose `x` already has that dtype by `x`.

    Right for every dtype and for aliasing too: such a cast returns `x` itself, not a copy. Casts that change the dtype
    are left alone without comment; they are not near-misses, they are needed.
    """
    sites: list[str] = []
    near_misses: list[NearMiss] = []
    for node in list(module.graph.nodes):
        wanted = _cast_target(node)
        if wanted is None:
            continue
        source = node.args[0]
        actual = _dtype(source)
        if actual is None:
            near_misses.append(NearMiss(site=_site(node), reason=f"the dtype of {source} is not recorded in the graph"))
        elif actual == wanted and node.kwargs.get("copy", False):
            near_misses.append(NearMiss(site=_site(node), reason="copy=True asks for a tensor of its own"))
        elif actual == wanted:
            sites.append(_site(node))
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
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
    """Return the dtype that tracing recorded for a node: `example_value` from Dynamo, `val` after AOTAutograd."""
    meta = getattr(source, "meta", {})
    value = meta.get("example_value", meta.get("val"))
    return value.dtype if isinstance(value, torch.Tensor) else None


def _site(node: fx.Node) -> str:
    """Return the path of the module that the node came from, else the node's name."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path: str = list(stack.values())[-1][0]
    # Dynamo writes L['model'].layers.0: the local variable it came from says nothing to a reader.
    return f"{path.partition('].')[2] or path}:{node.name}"


def declarations() -> tuple[Pass, ...]:
    """Return the passes of this plugin."""
    return (Pass(name=NAME, run=drop_same_dtype_cast, owner="acme"),)
