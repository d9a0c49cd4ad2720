"""What the tests of fusions that end in codes share: quantised models, traced, and runs before and after passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core.common.passes.constants import Constants
from core.common.passes.declaration import Pass
from core.common.passes.quantize.results import (
    FUSE_ADD_RMS_NORM_QUANTIZE,
    FUSE_GATED_ACTIVATION_QUANTIZE,
    FUSE_RMS_NORM_QUANTIZE,
)
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import OpChoice, choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.quantization.quantize import quantize
from core.quantization.targets import is_experts
from core.verify.execution import run_graph
from tests.common.passes.linear.merging import constants_of

FUSIONS = (FUSE_RMS_NORM_QUANTIZE, FUSE_ADD_RMS_NORM_QUANTIZE, FUSE_GATED_ACTIVATION_QUANTIZE)
NAMES = tuple(declared.name for declared in FUSIONS)
BEFORE = tuple(declared for declared in COMMON_PASSES if declared.name not in NAMES)
"""All passes but these fusions."""
NUM_LAYERS = 2


@dataclass
class Quantized:
    """A traced graph with the constants bound to it, and what each pass that ran has reported."""

    graph: TracedGraph
    inputs: Mapping[str, Tensor]
    constants: Constants

    def twin(self) -> Quantized:
        """Return a copy of the graph with the same constants."""
        graph = replace(self.graph, module=deepcopy(self.graph.module))
        return Quantized(graph, self.inputs, constants_of(graph))

    def apply(self, passes: Iterable[Pass]) -> dict[str, PassReport]:
        manager = PassManager(list(passes), strict=True, implemented=frozenset())
        return {report.name: report for report in manager.run(self.graph.module, constants=self.constants)}

    def run(self, *, fp64: bool = False) -> list[Tensor]:
        values = (*self.graph.values(self.inputs), *(tensor for _, tensor in self.constants.added))
        return list(run_graph(self.graph.module, values, fp64=fp64).outputs)

    def count(self, target: object) -> int:
        return sum(node.target is target for node in self.graph.module.graph.nodes)

    def lowered(self, *implementations: Any) -> tuple[str, tuple[OpChoice, ...]]:
        """Return the text of the finished graph, names of nodes left out, and what each op became."""
        module = deepcopy(self.graph.module)
        choices = choose_implementations(module, implementations)
        module.graph.eliminate_dead_code()
        names: dict[Any, int] = {node: index for index, node in enumerate(module.graph.nodes)}
        lines = [
            f"{node.op} {node.target} {torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: names[n])}"
            for node in module.graph.nodes
        ]
        return "\n".join(lines), choices


def quantized_model(name: str, scheme: str, dtype: torch.dtype = torch.float32, num_tokens: int = 9) -> Quantized:
    """Trace a tiny model of transformers, or the trained one, quantised by a scheme; stacked experts are left alone."""
    from core.engine.models.assets import embedded_model
    from core.engine.models.loading import build_model, load_model
    from core.engine.models.tiny import tiny_config

    device = torch.device("cpu")
    source: Any = load_model(embedded_model(), torch_device=device, dtype=dtype) if name == "trained" else None
    model: Any = (source or build_model(tiny_config(name), torch_device=device, dtype=dtype)).model
    ids = torch.arange(3, 3 + num_tokens)[None]
    experts = [path for path, module in model.named_modules() if is_experts(module)]
    quantize(model, scheme, calibration=[ids], ignore=experts)
    inputs = {"input_ids": ids, "position_ids": torch.arange(num_tokens)[None]}
    graph = trace(lambda input_ids, position_ids: model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False
    ).logits, inputs)  # fmt: skip
    return Quantized(graph, inputs, constants_of(graph))


def quantized(function: Any, **inputs: Tensor) -> Quantized:
    """Trace a function of named tensors that calls `core.quantize` itself."""
    graph = trace(lambda **named: function(**named), inputs)
    return Quantized(graph, inputs, constants_of(graph))
