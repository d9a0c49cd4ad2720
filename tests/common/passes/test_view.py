"""core/common/passes/view.py: what a node is called, in whichever way the model spells it; and sizes as known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core import InputSpec, compile
from core.common.passes import same_sizes, view
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.results import PassResult
from core.compilation.trace.tracing import trace
from tests.support import cpu


def test_bits_read_as_another_dtype_are_no_reshape() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.view(-1, 3), x.view(torch.bfloat16), torch.ops.aten.view.dtype(x, torch.int16)

    graph = trace(model, {"x": torch.ones(4, 6, dtype=torch.float16)}).module.graph
    kinds = {view.dtype(node): view.kind(node) for node in graph.nodes if "view" in str(node.target)}
    assert kinds == {torch.float16: "view", torch.bfloat16: "", torch.int16: ""}


def test_inputs_of_one_declared_dimension_have_the_same_size_wherever_the_graph_serves() -> None:
    found: list[tuple[bool, bool, bool]] = []

    def run(context: PassContext) -> PassResult:
        nodes = [node for node in context.graph.nodes if node.op == "placeholder" and view.shape(node) is not None]
        x, y, other = (tuple(view.shape(node) or ())[:1] for node in nodes)
        found.append((same_sizes(x, y), context.served_alike(x, y), context.served_alike(x, other)))
        return PassResult()

    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor, other: Tensor) -> tuple[Tensor, ...]:
            return x * 2, y * 2, other * 2

    specs = {name: InputSpec((dim, 3), torch.float32) for name, dim in (("x", "n"), ("y", "n"), ("other", "m"))}
    device = cpu(passes=(Pass(name="look", mechanism="graph", run=run),))
    buckets = [{"n": 4, "m": 4}, {"n": 8, "m": 4}]
    compile(Model(), device, inputs=specs, buckets=buckets, lowering="inline", passes=("look",))
    assert set(found) == {(False, True, False)}  # the trace alone can't tell
