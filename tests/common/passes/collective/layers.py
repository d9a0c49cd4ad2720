"""Layers of tensor parallelism written by hand, for the tests of the passes over collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from core.common.passes.declaration import Pass
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from tests.common.processes import drawn
from tests.support import Norm

SIZE, INNER = 32, 48


def in_place(x: Tensor) -> Tensor:
    distributed.all_reduce(x)
    return x


def functional(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x, "sum", distributed.group.WORLD)


def canonical(x: Tensor) -> Tensor:
    return torch.ops.core.all_reduce(x, "")


class Sharded(nn.Module):
    """Residual layers, each a norm, a column-parallel and a row-parallel product; n layers have n sums to reduce."""

    def __init__(self, num_layers: int = 2, *, reduce: Callable[[Tensor], Tensor] = in_place, seed: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(SIZE, 1e-5) for _ in range(num_layers + 1)])
        self.ups = nn.ModuleList([nn.Linear(SIZE, INNER, bias=False) for _ in range(num_layers)])
        self.downs = nn.ModuleList([nn.Linear(INNER, SIZE, bias=False) for _ in range(num_layers)])
        for index, parameter in enumerate([*self.ups.parameters(), *self.downs.parameters()]):
            parameter.data = drawn(*parameter.shape, seed=seed + index) * 0.2
        self.reduce = reduce

    def forward(self, x: Tensor) -> Any:
        for index in range(len(self.ups)):
            x = x + self.reduce(self.layer(index, self.norms[index](x)))
        return self.last(self.norms[-1](x))

    def layer(self, index: int, x: Tensor) -> Tensor:
        down: Tensor = self.downs[index](torch.nn.functional.silu(self.ups[index](x)))
        return down

    def last(self, x: Tensor) -> Any:
        return x.sin()


class Gated(Sharded):
    """The same, with a gated linear layer in place of the column-parallel product, as a device's own op."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__(num_layers)
        self.ups = nn.ModuleList([nn.Linear(SIZE, 2 * INNER) for _ in range(num_layers)])
        for index, parameter in enumerate(self.ups.parameters()):
            parameter.data = drawn(*parameter.shape, seed=40 + index) * 0.2

    def layer(self, index: int, x: Tensor) -> Tensor:
        down: Tensor = self.downs[index](self.gated(index, x))
        return down

    def gated(self, index: int, x: Tensor) -> Tensor:
        up = self.ups[index]
        gated: Tensor = torch.ops.core.gated_linear(x, up.weight, up.bias, kind="gelu", gate_first=False)
        return gated


def codes_fp8(x: Tensor) -> tuple[Tensor, ...]:
    codes, scale = torch.ops.core.quantize(x, None, dtype=torch.float8_e4m3fn)
    return codes.float() * 2, scale


def codes_fp4(x: Tensor) -> tuple[Tensor, ...]:
    codes, group_scales, scale = torch.ops.core.quantize_fp4(x, None)
    return codes + 1, group_scales.float(), scale


def traced(model: nn.Module, x: Tensor, **options: Any) -> TracedGraph:
    module = model.eval()
    # A trace marks dimensions on the tensors that it is given.
    return trace(lambda x: module(x), {"x": x.clone()}, **options)


def rewritten(
    graph: TracedGraph, passes: Sequence[Pass] = COMMON_PASSES, *, sizes: Sequence[int] = (), **options: Any
) -> dict[str, PassReport]:
    """Run passes, all of them on request; sizes: what the only open size is in each bucket."""
    served = [dict.fromkeys(graph.symbols, size) for size in sizes]
    manager = PassManager(passes, strict=True, **options)
    return {report.name: report for report in manager.run(graph.module, sizes=served)}


def reasons(report: PassReport) -> str:
    return "; ".join(miss.reason for miss in report.near_misses)


def names(graph: TracedGraph) -> list[str]:
    """Return the canonical ops of a graph, in order, without their namespace."""
    found = (str(node.target) for node in graph.module.graph.nodes if node.op == "call_function")
    return [name.split(".")[1] for name in found if name.startswith("core.")]
