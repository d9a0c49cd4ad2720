"""What the tests of merged linears share: blocks with projections of one input, and constants of a traced graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.common.numerics import judge
from core.common.passes.constants import Constants
from core.common.passes.linear.merge import MERGE_LINEARS
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import ConstantSlot, TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import Run, run_graph


class Attention(nn.Module):
    """Query, key and value of one input, of two widths; `kinds` says which have a bias."""

    def __init__(self, size: int = 64, kinds: str = "---") -> None:
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=kinds[0] == "b")
        self.k_proj = nn.Linear(size, size // 2, bias=kinds[1] == "b")
        self.v_proj = nn.Linear(size, size // 2, bias=kinds[2] == "b")
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (p(x).view(batch, tokens, -1, 16).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, 2 * size, bias=False)
        self.up_proj = nn.Linear(size, 2 * size, bias=False)
        self.down_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, size: int, kinds: str) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(size, kinds), Mlp(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        out: Tensor = x + self.mlp(x)
        return out


class Decoder(nn.Module):
    """Layers as models have them; two groups to merge in each."""

    def __init__(self, num_layers: int = 2, *, kinds: str = "---", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Layer(64, kinds) for _ in range(num_layers)])
        self.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(dtype: torch.dtype = torch.float32, num: int = 5, size: int = 64) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(2, num, size).to(dtype)


def constants_of(graph: TracedGraph) -> Constants:
    nodes = graph.module.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, graph.slots, strict=True)
    return Constants({n.name: slot.value for n, slot in pairs if isinstance(slot, ConstantSlot)})


class Merged:
    """A traced function, merged: the report, and runs of the graph before and after."""

    def __init__(self, function: Callable[..., Any], x: Tensor, **options: Any) -> None:
        self.graph, self.x = trace(lambda x: function(x), {"x": x}), x
        self.constants = constants_of(self.graph)
        self.before = self.run()
        self.exact = run_graph(self.graph.module, self.values(), fp64=True)
        manager = PassManager([MERGE_LINEARS], strict=True)
        self.report: PassReport
        (self.report,) = manager.run(self.graph.module, constants=self.constants, **options)

    def values(self) -> tuple[Any, ...]:
        return (*self.graph.values({"x": self.x}), *(tensor for _, tensor in self.constants.added))

    def run(self) -> Run:
        return run_graph(self.graph.module, self.values())

    def check_numbers(self) -> None:
        """Judge outputs and written tensors by T1 against the graph before."""
        after = self.run()
        pairs = [*zip(after.outputs, self.before.outputs, self.exact.outputs, strict=True)]
        assert after.written.keys() == self.before.written.keys()
        pairs += [(after.written[k], self.before.written[k], self.exact.written[k]) for k in after.written]
        for result, old, exact in pairs:
            assert result.shape == old.shape and result.dtype == old.dtype
            verdict = judge(result, old, exact)
            assert verdict.passed, verdict.reason


class Pair(nn.Module):
    """Two projections of one input, joined by a function."""

    def __init__(self, join: Callable[..., Any], sizes: tuple[int, int] = (32, 32)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = (nn.Linear(64, size, bias=False).requires_grad_(False) for size in sizes)
        self.join = join

    def forward(self, x: Tensor) -> Any:
        return self.join(self, x)


def plain(pair: Pair, x: Tensor) -> Any:
    return pair.a(x).sin() * pair.b(x)
