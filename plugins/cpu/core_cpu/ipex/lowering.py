"""The lowering `ipex`: Inductor with the fusions and the code generator of intel-extension-for-pytorch."""

from __future__ import annotations

import importlib
from typing import Any

from core.common.inductor import compile_fixed, specialize
from core.common.lowering import FlatCallable, LoweringRequest
from core_cpu.ipex import presence


def ipex(request: LoweringRequest) -> FlatCallable:
    """Compile the graph for the sizes of the example inputs; call it only where `presence.why_not` returns ""."""
    presence.load()
    compiler: Any = importlib.import_module("intel_extension_for_pytorch._inductor.compiler")
    graph, kept = specialize(request.graph, request.example_inputs)
    compiled = compile_fixed(graph, [request.example_inputs[i] for i in kept], compiler=compiler.compile)
    return lambda *args: compiled(*[args[i] for i in kept])
