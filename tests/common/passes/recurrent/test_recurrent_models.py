"""Every layer that keeps a state is lifted in the graphs that the engine traces, and the numbers stay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.numerics import MIN_ELEMENTS, judge
from core.common.ops.declaration import find_op
from core.common.ops.recurrent.tokens import first_stated
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.manager import PassManager
from core.engine.check.graphs import engine_graphs
from core.engine.inspect.recurrent import inspect_recurrence
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.verify.execution import run_graph
from tests.installed import needs_type
from tests.marks import slow_except
from tests.support import cpu

CONVOLUTION, DELTA, SPACE = "causal_conv1d_update", "gated_delta_rule", "selective_state_update"
TYPES = {
    "bailing_hybrid": DELTA,
    "bamba": SPACE,
    "falcon_h1": SPACE,
    "falcon_mamba": SPACE,
    "granitemoehybrid": SPACE,
    "jamba": SPACE,
    "kimi_linear": DELTA,
    "lfm2": "",
    "lfm2_moe": "",
    "mamba": SPACE,
    "mamba2": SPACE,
    "nemotron_h": SPACE,
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "zamba2": SPACE,
}
"""By type the op of its recurrent states; all have convolutions besides."""
IN_FP32 = ("bailing_hybrid",)
"""Types in fp32, where what follows their delta rule reads the memory that it fills."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("model_type", slow_except(TYPES, "lfm2"))
def test_each_state_of_a_model_has_its_op(model_type: str, phase: str) -> None:
    needs_type(model_type)
    torch.manual_seed(0)
    dtype = torch.float32 if model_type in IN_FP32 else torch.bfloat16
    loaded = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=dtype)
    layers = inspect_recurrence(loaded.model).layers.values()
    states = Counter(state.key[0] for layer in layers for state in layer.states)
    wanted = {CONVOLUTION: states["conv"], TYPES[model_type]: states["recurrent"] if TYPES[model_type] else 0}
    with engine_graphs(loaded, cpu(), cache="paged", phases=(phase,)) as (graph,):
        module, (values, *_) = graph.traced.module, graph.values()
        before, exact = run_graph(module, values), run_graph(module, values, fp64=True)
        PassManager([each for each in COMMON_PASSES if each.name.startswith(("remove_no", "lift_"))], strict=True).run(
            module
        )
        after = run_graph(module, values)
    ops = (find_op(node.target) for node in module.graph.nodes if node.op == "call_function")
    found = Counter(op.name for op in ops if op is not None)
    assert first_stated(module.graph) is None
    assert {name: found[name] for name in wanted if name} == {name: n for name, n in wanted.items() if name}
    for one, other, true in zip(after.results, before.results, exact.results, strict=True):
        if one.is_floating_point() and one.numel() >= MIN_ELEMENTS:
            verdict = judge(one, other, true)
            assert verdict.passed, verdict
