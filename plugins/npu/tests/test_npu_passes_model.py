"""A whole decoder written with torch_npu's ops: each pass fires as often as it owes, and the numbers stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import npu_decoder
import npu_library
import pytest
import torch
from npu_rewriting import HALVES, kernels

import core
from core.common.numerics import judge
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewriting import Rewriter
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph
from core_npu.passes.linear.transpose_matmul import FUSE_TRANSPOSE_BATCHMATMUL
from core_npu.passes.registry import PASSES
from tests.marks import slow_except
from tests.support import cpu

npu_library.install()
ON_REQUEST = FUSE_TRANSPOSE_BATCHMATMUL.name
BEFORE = {
    "npu_rms_norm": 3 * npu_decoder.LAYERS + 1,
    "npu_add_rms_norm": npu_decoder.LAYERS,
    "npu_quantize": npu_decoder.LAYERS + 1,
    "npu_dynamic_quant": 2 * npu_decoder.LAYERS - 1,
    "npu_swiglu": npu_decoder.LAYERS,
    "npu_rotary_mul": 2 * npu_decoder.LAYERS,
    "npu_scatter_pa_kv_cache": npu_decoder.LAYERS,
}
AFTER = {
    "npu_rms_norm_quant": 1,
    "core_npu::qkv_rms_norm_rotary_cache": npu_decoder.LAYERS,
    "npu_transpose_batchmatmul": npu_decoder.LAYERS,
    "npu_add_rms_norm_quant": npu_decoder.LAYERS,
    "npu_dequant_swiglu_quant": npu_decoder.LAYERS,
    "npu_add_rms_norm_dynamic_quant": npu_decoder.LAYERS - 1,
    "npu_add_rms_norm_cast": 1,
}


@pytest.mark.parametrize("dtype", slow_except(HALVES, torch.float16), ids=str)
def test_every_pass_fires_as_often_as_it_owes(dtype: torch.dtype) -> None:
    model, inputs = npu_decoder.Decoder(dtype).eval(), npu_decoder.inputs(dtype)
    graph = trace(model, inputs)
    assert Counter(kernels(graph.module)) == BEFORE
    values = graph.values(inputs)
    before, exact = run_graph(graph.module, values), run_graph(graph.module, values, fp64=True)
    made = Rewriter(cpu(passes=PASSES), PassSwitches(enable=(ON_REQUEST,)), strict=True).rewrite(graph)
    own = {report.name: report for report in made.passes if report.owner == "npu"}
    assert {name: report.matched for name, report in own.items()} == npu_decoder.OWED
    assert Counter(kernels(made.traced.module)) == AFTER
    made.traced.module.recompile()
    after = run_graph(made.traced.module, made.traced.values(inputs))
    for new, old, reference in zip(after.outputs, before.outputs, exact.outputs, strict=True):
        verdict = judge(new, old, reference)
        assert verdict.passed, verdict.reason
    for name, cache in before.written.items():
        verdict = judge(after.written[name], cache, exact.written[name])
        assert verdict.passed, f"{name}: {verdict.reason}"


def test_in_fp32_nothing_fires_but_what_keeps_every_bit() -> None:
    model, inputs = npu_decoder.Decoder(torch.float32).eval(), npu_decoder.inputs(torch.float32)
    graph = trace(model, inputs)
    values = graph.values(inputs)
    before = run_graph(graph.module, values)
    names = tuple(declared.name for declared in PASSES)
    made = Rewriter(cpu(passes=PASSES), PassSwitches(only=names), strict=True).rewrite(graph)
    fired = {report.name: report.matched for report in made.passes if report.matched}
    assert fired == dict.fromkeys(("erase_npu_copies", "fold_npu_double_reciprocal"), npu_decoder.LAYERS)
    made.traced.module.recompile()
    after = run_graph(made.traced.module, made.traced.values(inputs))
    assert all(new.shape == old.shape for new, old in zip(after.outputs, before.outputs, strict=True))


@pytest.fixture
def program() -> Iterator[core.Program]:
    model = npu_decoder.Decoder(torch.float16).eval()
    specs = {
        "x": core.InputSpec(("tokens", npu_decoder.HIDDEN), torch.float16),
        **{n: core.InputSpec(("tokens", 1, npu_decoder.SIZE), torch.float16) for n in ("cos", "sin")},
        "slots": core.InputSpec(("tokens",), torch.int64, "sentinel", npu_decoder.BLOCKS * npu_decoder.BLOCK - 1),
    }
    with core.compile(
        model, cpu(passes=PASSES), inputs=specs, buckets=[8, 12], lowering="inline", strict=True
    ) as compiled:
        yield compiled


@pytest.mark.slow
def test_a_program_of_several_sizes_runs_fused(program: core.Program) -> None:
    for found in program.report().traces:
        matched = {report.name: report.matched for report in found.passes if report.owner == "npu"}
        owed = {name: count for name, count in npu_decoder.OWED.items() if name != ON_REQUEST}
        assert {name: matched[name] for name in owed} == owed
    for num_tokens in (7, 12):
        inputs = npu_decoder.inputs(torch.float16, num_tokens)
        inputs["slots"] = torch.arange(num_tokens)
        twin = npu_decoder.Decoder(torch.float16).eval()
        wide = npu_decoder.Decoder(torch.float32).double().eval()
        with torch.no_grad():
            exact = wide(**{n: v.double() if v.is_floating_point() else v for n, v in inputs.items()})
            for got, old, reference in zip(program(**inputs), twin(**inputs), exact, strict=True):
                verdict = judge(got, old, reference)
                assert verdict.passed, verdict.reason
