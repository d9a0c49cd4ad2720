"""core/common/passes/quantize/results.py: norms and gates end in codes, and only where nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.numerics import judge
from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.mlp.quantized import GATED_ACTIVATION_QUANTIZE
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import ORIGINAL_NODES
from tests.common.passes.lifting import BF16, DTYPES, F32, draw
from tests.common.passes.quantize.quantized import (
    BEFORE,
    FUSIONS,
    NAMES,
    NUM_LAYERS,
    Quantized,
    quantized,
    quantized_model,
)
from tests.marks import slow_except

# transformers' own, where it chooses how experts are computed
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
OPS = (RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE, GATED_ACTIVATION_QUANTIZE)
D = 48
FP8, INT8 = torch.float8_e4m3fn, torch.int8
ops: Any = torch.ops.core

# Norms without a sum before them, norms of sums, gates; the last norm feeds the head, which is not quantised.
DENSE = (1, 2 * NUM_LAYERS - 1, NUM_LAYERS)
# The second norm of a layer feeds the router too, and experts whose weights are left alone.
MIXTURE = (1, NUM_LAYERS - 1, 0)
TRAINED = (1, 2 * 4 - 1, 4)
CASES = {
    ("llama", "fp8", F32): DENSE,
    ("llama", "int8-static", BF16): DENSE,
    ("qwen3", "int8", F32): DENSE,
    ("qwen3", "fp8-static", BF16): DENSE,
    ("gemma3_text", "fp8-static", F32): DENSE,
    ("gemma3_text", "int8", BF16): DENSE,
    ("qwen3_moe", "int8-static", F32): MIXTURE,
    ("qwen3_moe", "fp8", BF16): MIXTURE,
    ("trained", "fp8", F32): TRAINED,
    ("trained", "int8-static", BF16): TRAINED,
}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "scheme", "dtype"), slow_except(CASES, ("llama", "fp8", F32)), ids=str)
def test_a_quantised_model_is_fused_whole_and_keeps_its_numbers(
    model_type: str, scheme: str, dtype: torch.dtype
) -> None:
    case = (model_type, scheme, dtype)
    model, owed = quantized_model(*case), CASES[case]
    other = model.twin()
    before, exact = model.run(), model.run(fp64=True)
    other.apply(BEFORE)
    unfused, (plain, _) = other.run(), other.lowered()
    reports = model.apply(COMMON_PASSES)
    assert tuple(reports[name].matched for name in NAMES) == owed
    assert tuple(model.count(op.overload) for op in OPS) == owed
    after = model.run()
    assert all(map(torch.equal, after, unfused))  # the other passes merge layers, which may round otherwise
    for result, old, truth in zip(after, before, exact, strict=True):
        verdict = judge(result, old, truth)
        assert verdict.passed, verdict.reason
    text, choices = model.lowered()
    assert text == plain  # a device without these ops runs what it would have run
    made = [choice.implementation for choice in choices if choice.op in {op.qualified_name for op in OPS}]
    assert made == [ORIGINAL_NODES] * sum(owed)
    columns, rows = table()
    assert rows[case[:2]] == [str(reports[name].matched) for name in columns]


PAGE = Path(__file__).parents[4] / "docs" / "fusions.md"


def table() -> tuple[list[str], dict[tuple[str, str], list[str]]]:
    """Return the passes of the page's table, and its rows by model and scheme: how often each of them matches."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    header = next(cells for cells in lines if cells[:2] == ["model", "scheme"])
    rows = lines[lines.index(header) + 2 :][: len(CASES)]
    return [cell.strip("`") for cell in header[3:]], {(cells[0], cells[1]): cells[3:] for cells in rows}


def test_the_page_has_a_row_for_each_model() -> None:
    columns, rows = table()
    assert rows.keys() == {case[:2] for case in CASES}
    assert set(NAMES) <= set(columns)


WEIGHT = torch.linspace(0.4, 1.7, D)


def norm(x: Tensor, eps: float = 3e-4) -> Tensor:
    return torch.nn.functional.rms_norm(x, (D,), WEIGHT.to(x.dtype), eps)


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Return what codes stand for, with one scale for each row or for all."""
    return codes.to(scale.dtype) * scale


def fused(function: Callable[..., Any], dtype: torch.dtype = F32, **inputs: Tensor) -> tuple[Quantized, Any]:
    """Apply all passes; return the graph and the reports, having compared every bit."""
    given = inputs or {"x": draw(2, 5, D, dtype=dtype), "y": draw(2, 5, D, dtype=dtype, seed=9)}
    graph = quantized(function, **given)
    before = graph.run()
    reports = graph.apply(COMMON_PASSES)
    assert all(map(torch.equal, graph.run(), before))
    return graph, reports


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 17])
@pytest.mark.parametrize(
    "form",
    [{}, {"granularity": "tensor"}, {"granularity": "group", "group_size": 12}],
    ids=["token", "tensor", "group"],
)
def test_norms_and_gates_end_in_codes_of_every_form(form: dict[str, Any], num_tokens: int, dtype: torch.dtype) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        gate = torch.nn.functional.silu(x.sin()) * y.cos()
        first, second = (
            ops.quantize(norm(x), None, dtype=FP8, **form),
            ops.quantize(norm(total), None, dtype=INT8, **form),
        )
        return *first, *second, *ops.quantize(gate, None, dtype=FP8, **form), total * 2

    x, y = draw(2, num_tokens, D, dtype=dtype), draw(2, num_tokens, D, dtype=dtype, seed=9)
    graph, _ = fused(model, x=x, y=y)
    assert [graph.count(op.overload) for op in OPS] == [1, 1, 1]
    calls = [node for node in graph.graph.module.graph.nodes if node.target in [op.overload for op in OPS]]
    for call in calls:
        assert {name: call.kwargs[name] for name in form} == form


def test_results_that_nothing_reads_are_no_hindrance() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = ops.quantize(norm(x + y), None, dtype=INT8)[0].float() * 2
        return out

    graph, reports = fused(model)
    assert graph.count(ADD_RMS_NORM_QUANTIZE.overload) == 1
    assert not any(reports[name].near_misses for name in NAMES)


def test_equal_quantisations_of_one_norm_are_one_reader() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        normed = norm(x)
        left, right = ops.quantize(normed, None, dtype=FP8), ops.quantize(normed, None, dtype=FP8)
        return values(*left) * values(*right).sin()

    graph, _ = fused(model)
    assert graph.count(RMS_NORM_QUANTIZE.overload) == 1


def second_user(x: Tensor, y: Tensor) -> Tensor:
    normed = norm(x)
    return values(*ops.quantize(normed, None, dtype=FP8)) + normed.cos()


def two_formats(x: Tensor, y: Tensor) -> Tensor:
    normed = norm(x)
    return values(*ops.quantize(normed, None, dtype=FP8)) + values(*ops.quantize(normed, None, dtype=INT8))


def a_cast_between(x: Tensor, y: Tensor) -> Tensor:
    return values(*ops.quantize(norm(x).to(BF16), None, dtype=FP8))


def a_view_between(x: Tensor, y: Tensor) -> Tensor:
    return values(*ops.quantize(norm(x).view(-1, D), None, dtype=FP8))


def zero_points(x: Tensor, y: Tensor) -> Tensor:
    codes, scale, zero = ops.quantize_asymmetric(norm(x), None, None, dtype=INT8)
    out: Tensor = (codes.to(scale.dtype) - zero) * scale
    return out


def a_second_user_of_a_sum(x: Tensor, y: Tensor) -> Tensor:
    normed = norm(x + y)
    return values(*ops.quantize(normed, None, dtype=FP8)) + normed.cos()


def a_second_user_of_a_gate(x: Tensor, y: Tensor) -> Tensor:
    gate = torch.nn.functional.silu(x) * y
    return values(*ops.quantize(gate, None, dtype=FP8)) + gate.cos()


NEAR_MISSES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a second user": (second_user, NAMES[0], "cos reads rms_norm_default too"),
    "another dtype of codes": (two_formats, NAMES[0], "quantize_1 reads rms_norm_default too"),
    "another dtype before the codes": (a_cast_between, NAMES[0], "stands between rms_norm_default and its codes"),
    "a view": (a_view_between, NAMES[0], "view stands between rms_norm_default and its codes"),
    "zero points": (zero_points, NAMES[0], "core::quantize_asymmetric gives other codes than core::rms_norm_quantize"),
    "a second user, of a sum": (a_second_user_of_a_sum, NAMES[1], "reads"),
    "a second user, of a gate": (a_second_user_of_a_gate, NAMES[2], "reads"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    function, name, reason = NEAR_MISSES[case]
    graph, reports = fused(function)
    assert sum(graph.count(op.overload) for op in OPS) == 0
    assert reports[name].matched == 0
    assert reason in reports[name].near_misses[0].reason


@pytest.mark.parametrize("name", NAMES)
def test_a_write_in_between_is_a_near_miss(name: str) -> None:
    buffer = draw(2, 5, D)

    def model(x: Tensor, y: Tensor) -> Tensor:
        made = {
            NAMES[0]: lambda: norm(buffer),
            NAMES[1]: lambda: norm(buffer + y),
            NAMES[2]: lambda: torch.nn.functional.silu(buffer) * y,
        }[name]()
        buffer.add_(x)
        return values(*ops.quantize(made, None, dtype=FP8))

    graph, reports = fused(model)
    assert sum(graph.count(op.overload) for op in OPS) == 0
    assert "written in between by" in reports[name].near_misses[0].reason


def test_codes_of_what_is_no_norm_make_no_noise() -> None:
    _, reports = fused(lambda x, y: values(*ops.quantize(x.sin(), None, dtype=FP8)))
    assert all((reports[name].matched, reports[name].near_misses) == (0, ()) for name in NAMES)


def test_groups_that_a_kernel_does_not_take_are_put_back() -> None:
    def condition(call: OpCall) -> str | None:
        size = call.args["group_size"]
        return f"group_size is {size}, and the kernel takes powers of two" if size & (size - 1) else None

    kernel = OpImplementation(
        op=RMS_NORM_QUANTIZE.qualified_name, name="kernel", fn=RMS_NORM_QUANTIZE.reference, condition=condition
    )
    for size, implementation in ((16, "kernel"), (12, ORIGINAL_NODES)):

        def model(x: Tensor, y: Tensor, size: int = size) -> Tensor:
            out: Tensor = ops.quantize(norm(x), None, dtype=FP8, granularity="group", group_size=size)[0].float() * 2
            return out

        graph, _ = fused(model)
        _, choices = graph.lowered(kernel)
        (choice,) = (each for each in choices if each.op == RMS_NORM_QUANTIZE.qualified_name)
        assert choice.implementation == implementation
        assert [reason for _, reason in choice.refused] == [condition(OpCall(op="", args={"group_size": size}))] * (
            size == 12
        )


def test_the_passes_have_identities_of_their_own() -> None:
    assert len({declared.uuid() for declared in FUSIONS}) == len(FUSIONS)
