"""From a Dynamo graph to ATen ops: whose fake mode the trace is made in."""

from __future__ import annotations

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from core.compilation.rewrite.aten import to_aten


def test_the_fakes_of_a_graph_decide_whatever_torchs_context_holds() -> None:
    """Llama 4's text model leaves another mode there, by which no pass of the stage ran on it under torch.compile."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.sin, (x,)),))
    x.meta["example_value"] = mode.from_tensor(torch.empty(2, 3))
    with tracing(TracingContext(FakeTensorMode())):
        found = to_aten(fx.GraphModule({}, graph))
    assert [node.target for node in found.graph.nodes if node.op == "call_function"] == [torch.ops.aten.sin.default]
    assert next(iter(found.graph.nodes)).meta["val"].fake_mode is mode
