"""The plugin's passes on scales, sums, copies and transposed products, and what streams forbid to all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_library
import pytest
import torch
from npu_rewriting import HALVES, cast, draw, rewritten
from torch import Tensor

from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewriting import Rewriter
from core.compilation.trace.tracing import trace
from core.errors import PassError
from core_npu.passes.cleanup.copies import ERASE_COPIES
from core_npu.passes.cleanup.multiply_add import FUSE_MULTIPLY_ADD
from core_npu.passes.cleanup.scales import FOLD_DOUBLE_RECIPROCAL
from core_npu.passes.linear.transpose_matmul import FUSE_TRANSPOSE_BATCHMATMUL
from core_npu.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core_npu.passes.registry import NEEDED, PASSES, available
from core_npu.passes.streams import streams
from tests.support import cpu

npu_library.install()
ops: Any = torch.ops.npu
F16, BF16 = HALVES
D = 64


def quantized(x: Tensor, scales: Tensor) -> Tensor:
    return ops.npu_quantize(x, scales, None, torch.qint8, -1, True)


def by_division(x: Tensor, scales: Tensor) -> Tensor:
    return quantized(x, 1.0 / (1.0 / scales))


def by_method(x: Tensor, scales: Tensor) -> Tensor:
    return quantized(x, scales.reciprocal().reciprocal())


def by_both(x: Tensor, scales: Tensor) -> Tensor:
    return quantized(x, torch.reciprocal(1 / scales))


@pytest.mark.parametrize("function", [by_division, by_method, by_both], ids=lambda function: function.__name__)
def test_a_scale_inverted_twice_is_the_scale(function: Callable[..., Any]) -> None:
    scales = torch.linspace(0.01, 0.09, D)
    found = rewritten(function, FOLD_DOUBLE_RECIPROCAL, x=draw(9, D), scales=scales)
    assert found.matched == 1
    assert [node.op for node in found.module.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]
    found.check()


def test_the_scales_may_be_off_by_a_rounding() -> None:
    scales = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 0.01
    twice = 1 / (1 / scales)
    assert not torch.equal(twice, scales)
    assert ((twice - scales).abs() <= torch.finfo(torch.float32).eps * scales).all()


def as_value(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    again = 1.0 / (1.0 / scales)
    return quantized(x, again), x * again


def as_input(x: Tensor, scales: Tensor) -> Tensor:
    return quantized(1.0 / (1.0 / x), scales)


def half_way(x: Tensor, scales: Tensor) -> Tensor:
    return quantized(x, 2.0 / (1.0 / scales))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (as_value, "mul reads again otherwise than as a scale"),
        (as_input, "otherwise than as a scale"),
        (half_way, ""),
    ],
)
def test_what_is_no_scale_keeps_its_roundings(function: Callable[..., Any], reason: str) -> None:
    found = rewritten(function, FOLD_DOUBLE_RECIPROCAL, x=draw(9, D), scales=torch.linspace(0.01, 0.09, D))
    assert found.matched == 0 and reason in found.reasons
    assert all(torch.equal(old, new) for old, new in zip(found.before.outputs, found.after.outputs, strict=True))


def scaled_first(x: Tensor, y: Tensor) -> Tensor:
    return x * 2.5 + y


def scaled_last(x: Tensor, y: Tensor) -> Tensor:
    return y.add(0.22 * x)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", [scaled_first, scaled_last], ids=lambda function: function.__name__)
def test_a_scaled_sum_is_one_call(function: Callable[..., Any], dtype: torch.dtype) -> None:
    found = rewritten(function, FUSE_MULTIPLY_ADD, **cast({"x": draw(9, D), "y": draw(9, D, seed=2)}, dtype))
    assert found.matched == 1
    (call,) = (node for node in found.module.graph.nodes if node.op.startswith("call"))
    assert (call.target, dict(call.kwargs)) == (torch.add, {"alpha": 2.5 if function is scaled_first else 0.22})
    found.check()
    # It rounds once: never further from the exact sum than the two calls by more than the criterion's floor.
    errors = [(run.outputs[0].double() - found.exact.outputs[0]).pow(2).mean() for run in (found.after, found.before)]
    assert errors[0] <= errors[1]


def read_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    product = x * 2.5
    return product + y, product


def by_tensor(x: Tensor, y: Tensor) -> Tensor:
    return x * x + y


def widened(x: Tensor, y: Tensor) -> Tensor:
    return x * 2.5 + y.float()


def of_row(x: Tensor, y: Tensor) -> Tensor:
    return x * 2.5 + y[0]


def already(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x * 2.5, y, alpha=3)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (read_twice, "output reads product too"),
        (by_tensor, ""),
        (widened, "float16"),
        (of_row, "differ in shape"),
        (already, ""),
    ],
)
def test_other_sums_stay(function: Callable[..., Any], reason: str) -> None:
    found = rewritten(function, FUSE_MULTIPLY_ADD, **cast({"x": draw(9, D), "y": draw(9, D, seed=2)}, F16))
    assert found.matched == 0 and reason in found.reasons and bool(found.reasons) is bool(reason)


def test_a_scaled_sum_of_terms_laid_out_otherwise_stays() -> None:
    x, y = draw(9, D).to(F16), draw(D, 9, seed=2).to(F16).t()
    found = rewritten(scaled_first, FUSE_MULTIPLY_ADD, x=x, y=y)
    assert found.matched == 0 and "has strides (64, 1) and l_inputs_y_ (1, 9)" in found.reasons
    assert found.after.outputs[0].stride() == (D, 1)
    # Where a size is one, strides say nothing.
    one = rewritten(scaled_first, FUSE_MULTIPLY_ADD, x=x[:1], y=y[:1].contiguous().as_strided((1, D), (3, 1)))
    assert one.matched == 1


def buffered(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    buffer = torch.empty_like(y)
    buffer.copy_(y.sin())
    return ops.npu_add_rms_norm(x, buffer, x[0])[0], buffer * 2


def by_result(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return ops.npu_add_rms_norm(x, torch.zeros(9, D, dtype=x.dtype).copy_(y), x[0])[0]


@pytest.mark.parametrize("function", [buffered, by_result], ids=lambda function: function.__name__)
def test_a_copy_into_memory_of_the_graph_goes(function: Callable[..., Any]) -> None:
    found = rewritten(function, ERASE_COPIES, x=draw(9, D), y=draw(9, D, seed=2))
    assert found.matched == 1
    assert not any("copy_" in str(node.target) or "empty" in str(node.target) for node in found.module.graph.nodes)
    assert all(torch.equal(old, new) for old, new in zip(found.before.outputs, found.after.outputs, strict=True))


def to_the_caller(x: Tensor, kv_cache: Tensor) -> Tensor:
    kv_cache.copy_(x)
    return kv_cache * 2


def written_later(x: Tensor) -> tuple[Tensor, ...]:
    source = x.sin()
    buffer = torch.empty_like(x)
    buffer.copy_(source)
    source.add_(1)
    return buffer * 2, source


def written_into(x: Tensor) -> Tensor:
    buffer = torch.empty_like(x)
    buffer.copy_(x.sin())
    buffer[0].mul_(2)
    return buffer * 2


def converted(x: Tensor) -> Tensor:
    return torch.empty(9, D, dtype=torch.float64).copy_(x) * 2


def part(x: Tensor) -> Tensor:
    buffer = torch.zeros(18, D)
    buffer[:9].copy_(x)
    return buffer * 2


def returned(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def read_before(x: Tensor) -> tuple[Tensor, ...]:
    buffer = torch.zeros_like(x)
    before = buffer + 1
    buffer.copy_(x)
    return before, buffer * 2


COPIES = {
    to_the_caller: "is no memory that the graph itself has made",
    written_later: "add_ writes into source later",
    written_into: "mul_ writes into buffer too",
    converted: "float32",
    part: "is no memory that the graph itself has made whole",
    returned: "is returned",
    read_before: "reads buffer before the copy",
}


@pytest.mark.parametrize("function", COPIES, ids=lambda function: function.__name__)
def test_a_copy_that_somebody_can_tell_apart_stays(function: Callable[..., Any]) -> None:
    given = {"x": draw(9, D)} | ({"kv_cache": torch.zeros(9, D)} if function is to_the_caller else {})
    found = rewritten(function, ERASE_COPIES, **given)
    assert found.matched == 0 and COPIES[function] in found.reasons
    assert all(torch.equal(old, new) for old, new in zip(found.before.outputs, found.after.outputs, strict=True))


def absorbed(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(rows.transpose(0, 1), weights).transpose(0, 1)


def after_product(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(rows.sin().permute(1, 0, 2), weights).transpose(0, 1) * 2


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", [absorbed, after_product], ids=lambda function: function.__name__)
def test_a_product_between_transposed_batches_is_one_call(function: Callable[..., Any], dtype: torch.dtype) -> None:
    given = cast({"rows": draw(6, 3, 128), "weights": draw(3, 128, 256, scale=0.1)}, dtype)
    found = rewritten(function, FUSE_TRANSPOSE_BATCHMATMUL, **given)
    assert (found.matched, found.calls) == (1, ["npu_transpose_batchmatmul"])
    turned = [1, 0, 2] if function is absorbed else [0, 1, 2]
    assert found.node("npu_transpose_batchmatmul").kwargs["perm_x1"] == turned
    found.check()


@pytest.mark.parametrize(
    ("heads", "inner", "columns", "reason"),
    [(3, 64, 128, "have 64 elements"), (3, 128, 64, "have 64 elements"), (1, 65536, 128, "is 65536, not below 65536")],
)
def test_products_out_of_the_kernels_bounds_stay(heads: int, inner: int, columns: int, reason: str) -> None:
    given = cast({"rows": draw(2, heads, inner), "weights": draw(heads, inner, columns)}, F16)
    found = rewritten(absorbed, FUSE_TRANSPOSE_BATCHMATMUL, **given)
    assert found.matched == 0 and reason in found.reasons


@pytest.mark.slow
def test_many_heads_are_turned_before_the_kernel() -> None:
    # Turning rows itself, the kernel takes less than 65536 heads times features; turned rows it takes.
    given = cast({"rows": draw(2, 512, 128), "weights": draw(512, 128, 128, scale=0.1)}, F16)
    found = rewritten(absorbed, FUSE_TRANSPOSE_BATCHMATMUL, **given)
    assert found.matched == 1 and "batches times inner size is 65536, not below 65536" in found.reasons
    assert found.node("npu_transpose_batchmatmul").kwargs["perm_x1"] == [0, 1, 2]
    found.check()


def test_graphs_are_lowered_to_aten_for_no_pass_that_nobody_asked_for() -> None:
    graph = trace(absorbed, {"rows": draw(6, 3, 128), "weights": draw(3, 128, 128)})
    made = Rewriter(cpu(passes=PASSES), PassSwitches(), strict=True).rewrite(graph)
    assert any(node.target is torch.bmm for node in made.traced.module.graph.nodes)
    asked = PassSwitches(enable=(FUSE_TRANSPOSE_BATCHMATMUL.name,))
    graph = trace(absorbed, {"rows": draw(6, 3, 128).half(), "weights": draw(3, 128, 128).half()})
    made = Rewriter(cpu(passes=PASSES), asked, strict=True).rewrite(graph)
    assert {report.name: report.matched for report in made.passes}[FUSE_TRANSPOSE_BATCHMATMUL.name] == 1


def summed(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    return ops.npu_rms_norm(x + residual, gamma)[0]


def test_what_runs_in_two_streams_stays_apart() -> None:
    inputs = cast({"x": draw(5, D), "residual": draw(5, D), "gamma": draw(D)}, F16)
    for stream, owed in ((None, 1), (1, 0)):
        graph = trace(summed, inputs).module
        (total,) = (node for node in graph.graph.nodes if "add" in node.name)
        if stream is not None:  # as Dynamo notes `with torch.npu.stream(…)`
            total.meta["custom"] = {"stream": stream}
        (report,) = PassManager([FUSE_ADD_RMS_NORM], strict=True).run(graph)
        assert report.matched == owed
        assert bool(report.near_misses) is (owed == 0)
    assert "add runs in another stream or scope" in report.near_misses[0].reason


def test_scopes_and_events_divide_a_graph() -> None:
    library = torch.library.Library("npugraph_ex", "FRAGMENT")
    for schema in (
        "scope_enter(str[] keys, str[] values) -> ()",
        "scope_exit() -> ()",
        "tagged_event_wait(str tag) -> ()",
    ):
        if not hasattr(torch.ops.npugraph_ex, schema.partition("(")[0]):
            library.define(schema)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    marks: Any = torch.ops.npugraph_ex
    before = graph.call_function(torch.sin, (x,))
    graph.call_function(marks.scope_enter.default, (["_user_stream_label"], ["side"]))
    inside = graph.call_function(torch.sin, (before,))
    graph.call_function(marks.scope_exit.default)
    behind = graph.call_function(torch.sin, (inside,))
    graph.call_function(marks.tagged_event_wait.default, ("tag",))
    last = graph.call_function(torch.sin, (behind,))
    known = streams(graph)
    assert known[before] == known[behind] != known[inside]
    assert known[behind] != known[last]


def test_passes_are_named_once_and_need_what_they_make() -> None:
    names = [declared.name for declared in PASSES]
    assert len(set(names)) == len(names) and NEEDED.keys() <= set(names)
    assert available() == PASSES
    assert all(hasattr(torch.ops.npu, made) for made in NEEDED.values())


def test_a_pass_whose_op_is_missing_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("core_npu.passes.registry.NEEDED", {FUSE_ADD_RMS_NORM.name: "npu_no_such_op"})
    assert FUSE_ADD_RMS_NORM not in available()
    assert "fuse_npu_add_rms_norm is left out: the loaded torch_npu has no op npu_no_such_op" in caplog.text


def test_a_broken_promise_is_an_error() -> None:
    from dataclasses import replace

    with pytest.raises(PassError, match="which owes 2 matches"):
        rewritten(summed, replace(FUSE_ADD_RMS_NORM, expect=2), **cast(
            {"x": draw(5, D), "residual": draw(5, D), "gamma": draw(D)}, F16
        ))  # fmt: skip


def test_every_pass_says_what_it_does() -> None:
    assert [declared.name for declared in PASSES if not declared.does] == []
