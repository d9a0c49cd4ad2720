"""What the pass tests share: ops to fuse to, models to trace, and finders that are right."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.rewrite import fuse
from core.common.passes.sites import Finder, Site, near_miss
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace

_LIBRARY = torch.library.Library("passes_test", "DEF")


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
W = torch.linspace(0.3, 1.7, 16)


def folded(x: Tensor) -> Tensor:
    return x.clone().view(4, 4, 4)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    added = x + residual
    return rms(added, weight, eps), added


def put(cache: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    cache[index] = rows
    return cache.clone()


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"passes_test::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.passes_test, name).default  # type: ignore[no-any-return]  # torch.ops is untyped


RMS = _define("rms(Tensor x, Tensor weight, float eps) -> Tensor", rms, lambda x, weight, eps: torch.empty_like(x))
ADD_RMS = _define(
    "add_rms(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    add_rms,
    lambda x, residual, weight, eps: (torch.empty_like(x), torch.empty_like(x)),
)
PUT = _define(
    "put(Tensor(a!) cache, Tensor index, Tensor rows) -> Tensor",
    put,
    lambda cache, index, rows: torch.empty_like(cache),
)
NARROW = _define("narrow(Tensor x) -> Tensor", lambda x: x.half(), lambda x: x.half())
TALL = _define("tall(Tensor x) -> Tensor", lambda x: x.t().contiguous().t(), lambda x: x.t().contiguous().t())
STORE = _define("store(Tensor(a!) cache, Tensor rows) -> ()", lambda cache, rows: None, lambda cache, rows: None)


class RmsNorm(nn.Module):
    """RMSNorm as models write it, with weights far from 1."""

    def __init__(self, size: int = 16, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.3, 1.7, size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(size, eps)
        self.post_layernorm = RmsNorm(size, eps)
        self.up = nn.Linear(size, size, bias=False)
        self.down = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.input_layernorm(x))
        return x + nn.functional.silu(self.down(self.post_layernorm(x)))


class Stack(nn.Module):
    """Residual layers with two norms each and one at the end: 2n + 1 norms."""

    def __init__(self, num_layers: int = 2, *, size: int = 16, eps: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList([Layer(size, eps) for _ in range(num_layers)])
        self.norm = RmsNorm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed


def traced(model: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Return the Dynamo graph of a model of inputs x, y, z."""
    return traced_graph(model, *inputs).module


def traced_graph(model: Callable[..., Any], *inputs: Tensor) -> TracedGraph:
    names = ["x", "y", "z"][: len(inputs)]
    module = model.eval() if isinstance(model, nn.Module) else model
    return trace(lambda **kwargs: module(*kwargs.values()), dict(zip(names, inputs, strict=True)))


def to_aten(model: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Return the graph of a model after AOTAutograd, weights as placeholders."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=False)(*inputs)
    return graphs[0]


def find_rms(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Find weight * cast(wide * rsqrt(mean(wide ** 2) + eps)) on a Dynamo graph."""
    if node.target is not operator.mul or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    weight, cast = node.args
    if not isinstance(cast, fx.Node) or cast.target != "to" or not isinstance(cast.args[0], fx.Node):
        return None
    product = cast.args[0]
    if product.target is not operator.mul:
        return None
    wide, root = product.args
    assert isinstance(wide, fx.Node) and isinstance(root, fx.Node)
    if root.target is not torch.rsqrt:
        return near_miss(root, f"{root.name} is no rsqrt")
    added: Any = root.args[0]
    mean, eps = added.args
    square = mean.args[0]
    interior = (wide, square, mean, added, root, product, cast, node)
    return Site(anchor=node, target=RMS, args=(wide.args[0], weight, eps), interior=interior)


def find_add_rms(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Find the same after `x + residual`, whose sum is the second output."""
    site = find_rms(context, node)
    if not isinstance(site, Site):
        return site
    added, weight, eps = site.args
    if added.target is not operator.add:
        return near_miss(added, "the input is no sum")
    return Site(
        anchor=node,
        target=ADD_RMS,
        args=(*added.args, weight, eps),
        interior=(added, *site.interior),
        outputs=(node, added),
    )


def fusion(find: Finder, *, name: str = "fuse_rms", **fields: Any) -> Pass:
    """Return a pass of the finder."""

    def run(context: PassContext) -> PassResult:
        return fuse(context, find)

    return Pass(name=name, run=run, **{"owner": "acme"} | fields)


def calls(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target == target]


def fused(module: fx.GraphModule, find: Finder, **fields: Any) -> PassResult:
    result = fuse(PassContext(module=module, **fields), find)
    module.graph.lint()
    module.recompile()
    return result


def doubled(**fields: Any) -> Finder:
    """Find `(v * 2) + v` and offer to replace it, by default by one multiplication of v by 3."""

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add or not isinstance(node.args[0], fx.Node):
            return None
        product, source = node.args
        assert isinstance(product, fx.Node)
        site = Site(anchor=node, target=torch.mul, args=(source, 3), interior=(product, node))
        return replace(site, **fields) if product.target is operator.mul else None

    return find


def the_miss(result: PassResult) -> NearMiss:
    assert result.matched == 0
    (miss,) = result.near_misses
    return miss
