"""The plugin's passes on the real torch_npu: graphs of its own device, and what is launched before and after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import npu_decoder
import npu_library
import pytest
import torch
from npu_rewriting import HALVES, check_codes, kernels
from torch import Tensor, nn

import core
from core.common.numerics import judge
from core.common.passes.declaration import Pass
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.aten import to_aten
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewriting import Rewriter
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph
from core_npu.passes.linear.transpose_matmul import FUSE_TRANSPOSE_BATCHMATMUL
from core_npu.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core_npu.passes.norm.dynamic_quantize import FUSE_ADD_RMS_NORM_DYNAMIC_QUANT
from core_npu.passes.norm.quantize import FUSE_ADD_RMS_NORM_QUANT
from core_npu.passes.registry import PASSES, available
from core_npu.passes.rotary.qk_norm import LIFT_QK_NORM_ROTARY
from simulator import runtime
from tests.support import cpu

pytestmark = pytest.mark.npu_sim
npu_library.install()
ops: Any = torch.ops.npu

CAST = "InplaceCopy"  # casts and `contiguous` are copies
QKV = {"RmsNorm": -2, CAST: -1, "ScatterPaKvCache": -1, "QkvRmsNormRopeCache": 1}
# Per pass, what its example launches less and more, of kernels that compute.
LAUNCHES: Mapping[str, tuple[dict[str, int], ...]] = {
    "erase_npu_copies": ({"InplaceCopy": -1},),
    "fold_npu_double_reciprocal": ({"Reciprocal": -4, "Muls": -2},),
    "fuse_npu_qkv_rms_norm_rope_cache": (
        QKV | {"RotaryPositionEmbeddingV2": -2},
        QKV | {"ApplyRotaryPosEmbV2": -1},
    ),
    "fuse_npu_add_rms_norm": ({"Add": -2, "RmsNorm": -2, "AddRmsNorm": 2},),
    "fuse_npu_add_rms_norm_quant": (
        {"AddRmsNorm": -1, "Quantize": -1, "AddRmsNormQuantV2": 1},
        {"AddRmsNorm": -1, "AscendQuantV3": -1, "AddRmsNormQuantV2": 1},
        {"AddRmsNorm": -1, "Add": -1, "Quantize": -1, "AddRmsNormQuantV2": 1},
    ),
    "fuse_npu_add_rms_norm_dynamic_quant": (
        {"AddRmsNorm": -3, "DynamicQuantV2": -3, "Add": -1, "AddRmsNormDynamicQuantV2": 3},
    ),
    "fuse_npu_add_rms_norm_cast": ({"AddRmsNorm": -2, CAST: -2, "AddRmsNormCast": 2},),
    "fuse_npu_rms_norm_quant": (
        {"RmsNorm": -1, "AscendQuantV3": -1, "RmsNormQuant": 1},
        {"RmsNorm": -1, "Add": -1, "AscendQuantV3": -1, "RmsNormQuant": 1},
    ),
    "fuse_npu_swiglu_dynamic_quant": ({"SwiGlu": -2, "DynamicQuantV2": -2, "DequantSwigluQuantV2": 2},),
    "fuse_npu_multiply_add": ({"Muls": -3},),
    # One of its products has rows that were copied in their other order, which now nothing needs.
    "fuse_npu_transpose_batchmatmul": ({"BatchMatMul": -2, "TransposeBatchMatMul": 2, CAST: -1},),
}


def launched(graph: TracedGraph, inputs: Mapping[str, Tensor]) -> tuple[list[Any], Counter[str]]:
    """Run a graph and return what it gave and the kernels that it launched, copies of buffers left out."""
    values = graph.values(inputs)
    graph.module.recompile()
    torch.npu.synchronize()
    run_graph(graph.module, values)
    runtime.clear()
    with torch.no_grad():
        found = graph.module(*values)
    names = Counter(name.removeprefix("aclnn") for name in runtime.kernels())
    return list(found), names


def rewritten(graph: TracedGraph, *passes: Pass) -> tuple[TracedGraph, dict[str, Any]]:
    names = tuple(declared.name for declared in passes)
    made = Rewriter(cpu(passes=passes, ops=()), PassSwitches(only=names), strict=True).rewrite(graph)
    return made.traced, {report.name: report for report in made.passes if report.name in names}


def on_npu(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.npu() for name, value in inputs.items()}


def test_stand_ins_have_the_schemas_of_torch_npu() -> None:
    for text in (*npu_library.SCHEMAS, *npu_library.UNCOMPUTED):
        name = text.partition("(")[0]
        assert torch._C.parse_schema(f"npu::{text}") == getattr(ops, name).default._schema


def test_the_plugin_registers_every_pass() -> None:
    assert available() == PASSES
    assert {declared.name for declared in core.select_device("npu").passes} == {declared.name for declared in PASSES}


CASES = [(declared.name, index) for declared in PASSES for index in range(len(LAUNCHES.get(declared.name, ())))]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_pass_changes_what_is_launched(name: str, index: int, dtype: torch.dtype) -> None:
    (declared,) = (each for each in PASSES if each.name == name)
    assert declared.examples is not None
    module, args = list(declared.examples())[index]
    module = module.eval().to(dtype).npu()
    args = tuple(value.to(dtype) if value.is_floating_point() else value for value in args)
    names = module.forward.__code__.co_varnames[1:]
    inputs = on_npu(dict(zip(names, args, strict=False)))
    graph = trace(module, inputs)
    before, old = launched(graph, inputs)
    twin = trace(module, inputs)
    made, reports = rewritten(twin, declared)
    assert reports[name].matched > 0
    after, new = launched(made, inputs)
    changes = {kernel: new[kernel] - old[kernel] for kernel in new | old if new[kernel] != old[kernel]}
    owed = dict(LAUNCHES[name][index])
    if name == "fuse_npu_add_rms_norm_quant" and dtype == torch.float16:
        owed[CAST] = 1  # scales of fp16 are widened
    assert changes == owed
    exact = run_graph(graph.module, graph.values(inputs), fp64=True).outputs
    for result, was, reference in zip(after, before, exact, strict=True):
        if result.dtype == torch.int8:
            check_codes(result.cpu(), was.cpu(), reference)
        elif not torch.equal(result.cpu(), was.cpu()):
            verdict = judge(result.cpu(), was.cpu(), reference)
            assert verdict.passed, verdict.reason


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_decoder_is_fused_whole_on_its_own_device(dtype: torch.dtype) -> None:
    inputs = npu_decoder.inputs(dtype)
    model = npu_decoder.Decoder(dtype).eval().npu()
    graph = trace(model, on_npu(inputs))
    before, old = launched(graph, on_npu(inputs))
    made, reports = rewritten(trace(model, on_npu(inputs)), *PASSES)
    assert {name: report.matched for name, report in reports.items()} == npu_decoder.OWED
    after, new = launched(made, on_npu(inputs))
    layers = npu_decoder.LAYERS
    assert {name: (old[name], new[name]) for name in FUSED} == FUSED
    assert sum(new.values()) <= sum(old.values()) - 12 * layers
    exact = run_graph(graph.module, graph.values(on_npu(inputs)), fp64=True).outputs
    for result, was, reference in zip(after, before, exact, strict=True):
        verdict = judge(result.cpu(), was.cpu(), reference)
        assert verdict.passed, verdict.reason


FUSED = {
    "RmsNorm": (3 * npu_decoder.LAYERS + 1, 0),
    "AddRmsNorm": (npu_decoder.LAYERS, 0),
    "Quantize": (npu_decoder.LAYERS, 0),
    "AscendQuantV3": (1, 0),
    "DynamicQuantV2": (2 * npu_decoder.LAYERS - 1, 0),
    "SwiGlu": (npu_decoder.LAYERS, 0),
    "RotaryPositionEmbeddingV2": (2 * npu_decoder.LAYERS, 0),
    "ScatterPaKvCache": (npu_decoder.LAYERS, 0),
    "BatchMatMul": (npu_decoder.LAYERS, 0),
    "QkvRmsNormRopeCache": (0, npu_decoder.LAYERS),
    "RmsNormQuant": (0, 1),
    "AddRmsNormQuantV2": (0, npu_decoder.LAYERS),
    "AddRmsNormDynamicQuantV2": (0, npu_decoder.LAYERS - 1),
    "AddRmsNormCast": (0, 1),
    "DequantSwigluQuantV2": (0, npu_decoder.LAYERS),
    "TransposeBatchMatMul": (0, npu_decoder.LAYERS),
}
"""Launches of each kernel before and after."""


class Composite(nn.Module):
    """What torch_npu keeps whole: a linear layer of rank 3, attention, a batched matmul; and a norm of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.gamma = nn.Parameter(torch.linspace(0.4, 1.7, 128))
        self.heads = nn.Parameter(_rows(4, 128, 128) / 11)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        heads = y.unflatten(-1, (2, 64)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        y = ops.npu_rms_norm(x + y, self.gamma, 1e-4)[0]
        rows = y.reshape(-1, 4, 128)
        return torch.matmul(rows.transpose(0, 1), self.heads).transpose(0, 1)


def test_composite_ops_stay_whole_in_aten_graphs_and_are_fused() -> None:
    module, inputs = Composite().half().eval().npu(), {"x": _rows(2, 6, 128).half().npu()}
    graph = trace(module, inputs)
    names = [str(node.target) for node in to_aten(graph.module).graph.nodes if node.op == "call_function"]
    assert "aten.matmul.default" in names and "aten.bmm.default" not in names
    assert any("npu_fusion_attention" in name for name in names)
    before, old = launched(graph, inputs)
    made, reports = rewritten(trace(module, inputs), FUSE_ADD_RMS_NORM, FUSE_TRANSPOSE_BATCHMATMUL)
    assert [report.matched for report in reports.values()] == [1, 1]
    assert {"npu_add_rms_norm", "npu_transpose_batchmatmul"} <= set(kernels(made.module))
    after, new = launched(made, inputs)
    assert (old["TransposeBatchMatMul"], new["TransposeBatchMatMul"]) == (0, 1)
    exact = run_graph(graph.module, graph.values(inputs), fp64=True).outputs
    verdict = judge(after[0].cpu(), before[0].cpu(), exact[0])
    assert verdict.passed, verdict.reason


def test_what_torch_npu_s_stream_block_divides_stays_apart() -> None:
    side = torch.npu.Stream()

    def divided(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
        total = x + y
        with torch.npu.stream(side):
            normed, _, _ = ops.npu_add_rms_norm(total, y, gamma, 1e-5)
        return ops.npu_dynamic_quant(normed)[0]

    rows = on_npu({"x": _rows(9, 64).half(), "y": _rows(9, 64).half(), "gamma": _rows(64).half()})
    _, reports = rewritten(trace(divided, rows), FUSE_ADD_RMS_NORM_DYNAMIC_QUANT)
    (report,) = reports.values()
    assert report.matched == 0
    assert "in another stream or scope than" in report.near_misses[0].reason


def test_masked_results_are_what_nobody_reads() -> None:
    rows = on_npu({"x": _rows(9, 64).half(), "y": _rows(9, 64).half(), "gamma": _rows(64).half()})
    results = ops.npu_add_rms_norm_dynamic_quant(*rows.values(), output_mask=[True, False])
    assert [tuple(result.shape) for result in results] == [(9, 64), (), (9, 64), (9,), ()]

    def coded(x: Tensor, y: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        normed, _, total = ops.npu_add_rms_norm(x, y, gamma, 1e-5)
        return *ops.npu_dynamic_quant(normed), total

    made, _ = rewritten(trace(coded, rows), FUSE_ADD_RMS_NORM_DYNAMIC_QUANT)
    (call,) = (node for node in made.module.graph.nodes if "dynamic_quant" in str(node.target))
    assert sorted(user.args[1] for user in call.users) == [0, 2, 3]


def test_a_program_of_the_device_is_fused_captured_and_right() -> None:
    inputs = npu_decoder.inputs(torch.float16)
    specs = {
        "x": core.InputSpec((8, npu_decoder.HIDDEN), torch.float16),
        **{name: core.InputSpec((8, 1, npu_decoder.SIZE), torch.float16) for name in ("cos", "sin")},
        "slots": core.InputSpec((8,), torch.int64),
    }
    model = npu_decoder.Decoder(torch.float16).eval().npu()
    own = tuple(declared.name for declared in PASSES)
    with core.compile(model, core.select_device("npu"), inputs=specs, passes=own, strict=True) as program:
        matched = {report.name: report.matched for report in program.report().traces[0].passes}
        assert {name: matched[name] for name in own} == npu_decoder.OWED
        first = [result.clone() for result in program(**on_npu(inputs))]
        again = program(**on_npu(inputs))
        for result, repeated in zip(first, again, strict=True):
            assert torch.equal(result.cpu(), repeated.cpu())
    twin = npu_decoder.Decoder(torch.float16).eval().npu()
    with torch.no_grad():
        eager = twin(**on_npu(inputs))
        wide = npu_decoder.Decoder(torch.float32).double().eval()
        exact = wide(**{name: v.double() if v.is_floating_point() else v for name, v in inputs.items()})
    for result, was, reference in zip(first, eager, exact, strict=True):
        verdict = judge(result.cpu(), was.cpu(), reference)
        assert verdict.passed, verdict.reason


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_lifted_norms_and_rotation_launch_the_plugins_kernels(dtype: torch.dtype) -> None:
    assert LIFT_QK_NORM_ROTARY.examples is not None
    ((module, args),) = LIFT_QK_NORM_ROTARY.examples()
    model = module.eval().to(dtype).npu()
    names = ("query", "key", "cos", "sin")
    inputs = on_npu({name: value.to(dtype) for name, value in zip(names, args, strict=True)})
    before, old = launched(trace(model, inputs), inputs)
    device = core.select_device("npu")
    switches = PassSwitches(only=(LIFT_QK_NORM_ROTARY.name,))
    made = Rewriter(device, switches, strict=True).rewrite(trace(model, inputs))
    assert [report.matched for report in made.passes if report.name == LIFT_QK_NORM_ROTARY.name] == [1]
    (choice,) = choose_implementations(made.traced.module, device.ops)
    assert choice.implementation not in ("original", "reference")
    after, new = launched(made.traced, inputs)
    assert old == new == {"RmsNorm": 2, "RotaryPositionEmbeddingV2": 2, "Sin": 1, "Cos": 1}
    assert all(torch.equal(result.cpu(), was.cpu()) for result, was in zip(after, before, strict=True))


def test_multiplied_scales_and_given_eps_reach_the_kernel() -> None:
    def coded(x: Tensor, y: Tensor, gamma: Tensor, scales: Tensor) -> Tensor:
        normed, _, _ = ops.npu_add_rms_norm(x, y, gamma, 0.25)
        return ops.npu_quantize(normed, scales, None, torch.qint8, -1, False)

    rows = {"x": _rows(9, 64), "y": _rows(9, 64) * 2, "gamma": _rows(64), "scales": torch.linspace(20, 40, 64)}
    given = on_npu({name: value.bfloat16() for name, value in rows.items()})
    graph = trace(coded, given)
    before, _ = launched(graph, given)
    made, reports = rewritten(trace(coded, given), FUSE_ADD_RMS_NORM_QUANT)
    (report,) = reports.values()
    assert report.matched == 1
    after, new = launched(made, given)
    assert new["AddRmsNormQuantV2"] == 1
    check_codes(after[0].cpu(), before[0].cpu(), run_graph(graph.module, graph.values(given), fp64=True).outputs[0])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_references_agree_with_the_kernels(dtype: torch.dtype) -> None:
    for declared in PASSES:
        if declared.guards.world_size[0] > 1:
            continue  # test_ranks.py
        assert declared.examples is not None
        for module, args in declared.examples():
            inputs = [value.to(dtype) if value.is_floating_point() else value for value in args]
            model = module.eval().to(dtype)
            with torch.no_grad():
                here = model(*inputs)
                there = model.npu()(*(value.npu() for value in inputs))
                wide = model.cpu().double()
                exact = wide(*(value.double() if value.is_floating_point() else value for value in inputs))
            for result, was, reference in zip(*(_leaves(each) for each in (there, here, exact)), strict=True):
                if not torch.equal(result.cpu(), was):
                    verdict = judge(result.cpu(), was, reference.double())
                    assert verdict.passed, f"{declared.name}: {verdict.reason}"


def _leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)
