"""The plugin's passes that end in codes: norms and gates, quantised by token or by given scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_library
import pytest
import torch
from npu_rewriting import HALVES, cast, draw, rewritten
from torch import Tensor

from core.common.numerics import judge
from core_npu.passes.mlp.swiglu_quantize import FUSE_SWIGLU_DYNAMIC_QUANT as GATE
from core_npu.passes.norm.dynamic_quantize import FUSE_ADD_RMS_NORM_DYNAMIC_QUANT as DYNAMIC
from core_npu.passes.norm.quantize import FUSE_ADD_RMS_NORM_QUANT as STATIC
from core_npu.passes.norm.quantize import FUSE_RMS_NORM_QUANT as STATIC_ALONE
from core_npu.passes.reference import normed

npu_library.install()
ops: Any = torch.ops.npu
D, EPS = 64, 3e-4
F16, BF16 = HALVES


def inputs(dtype: torch.dtype, size: int = D, **more: Tensor) -> dict[str, Tensor]:
    rows = {"x": draw(14, 5, size), "residual": draw(14, 5, size, seed=2), "gamma": draw(size, seed=3).abs() + 0.4}
    return cast(rows | more, dtype)


def norm(given: dict[str, Tensor], eps: float = EPS) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, total = ops.npu_add_rms_norm(given["x"], given["residual"], given["gamma"], eps)
    return y, rstd, total


def values(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(scale.dtype) * scale


def by_token(**given: Tensor) -> tuple[Tensor, ...]:
    y, _, total = norm(given)
    codes, scale = ops.npu_dynamic_quant(y)
    return values(codes, scale[..., None]), total, codes, scale


def smoothed(**given: Tensor) -> tuple[Tensor, ...]:
    y, _, total = norm(given, 1e-6)
    codes, scale = ops.npu_dynamic_quant(y, smooth_scales=given["smooth"])
    return values(codes, scale[..., None]), codes, total


def biased(**given: Tensor) -> tuple[Tensor, ...]:
    y, _, total = norm(given)
    codes, scale = ops.npu_dynamic_quant(given["beta"] + y)
    return values(codes, scale[..., None]), total


def flattened(**given: Tensor) -> tuple[Tensor, ...]:
    y, _, total = norm(given)
    codes, scale = ops.npu_dynamic_quant(y.reshape(-1, D))
    return values(codes, scale[..., None]), total


def without_sum(**given: Tensor) -> Tensor:
    codes, scale = ops.npu_dynamic_quant(norm(given)[0])
    return values(codes, scale[..., None])


MORE = {"smooth": draw(D, seed=5).abs() + 0.2, "beta": draw(D, seed=6)}


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", [by_token, smoothed, biased, flattened, without_sum], ids=lambda f: f.__name__)
def test_a_norm_and_its_codes_by_token_are_fused(function: Callable[..., Any], dtype: torch.dtype) -> None:
    found = rewritten(function, DYNAMIC, dynamic={"x": (0,), "residual": (0,)}, **inputs(dtype, **MORE))
    assert (found.matched, found.calls) == (1, ["npu_add_rms_norm_dynamic_quant"])
    call = found.node("npu_add_rms_norm_dynamic_quant")
    assert call.kwargs["epsilon"] == (1e-6 if function is smoothed else EPS)
    # What is masked is never read.
    assert call.kwargs["output_mask"] == [True, False]
    assert {user.args[1] for user in call.users} <= {0, 2, 3}
    found.check()


def other_reader(**given: Tensor) -> tuple[Tensor, ...]:
    y, _, _ = norm(given)
    return *ops.npu_dynamic_quant(y), y.sin()


def twice(**given: Tensor) -> tuple[Tensor, ...]:
    y, _, _ = norm(given)
    return *ops.npu_dynamic_quant(y), *ops.npu_dynamic_quant(y, smooth_scales=given["smooth"])


def factor(**given: Tensor) -> tuple[Tensor, ...]:
    y, rstd, _ = norm(given)
    return *ops.npu_dynamic_quant(y), rstd


def narrowed(**given: Tensor) -> tuple[Tensor, ...]:
    return ops.npu_dynamic_quant(norm(given)[0].to(torch.bfloat16))


def column_bias(**given: Tensor) -> tuple[Tensor, ...]:
    return ops.npu_dynamic_quant(norm(given)[0] + given["x"])


def halved(**given: Tensor) -> tuple[Tensor, ...]:
    return ops.npu_dynamic_quant(norm(given)[0].view(-1, D // 2))


def wide_smooth(**given: Tensor) -> tuple[Tensor, ...]:
    return ops.npu_dynamic_quant(norm(given)[0], smooth_scales=given["smooth"].float())


def written(**given: Tensor) -> tuple[Tensor, ...]:
    x = given["x"].sin()
    y, _, total = ops.npu_add_rms_norm(x, given["residual"], given["gamma"])
    x.mul_(2)
    return *ops.npu_dynamic_quant(y), total, x


def one_row(**given: Tensor) -> tuple[Tensor, ...]:
    y = ops.npu_add_rms_norm(given["x"][0, 0], given["residual"][0, 0], given["gamma"])[0]
    codes, scale = ops.npu_dynamic_quant(y[None])
    return codes, scale


DYNAMIC_MISSES = {
    other_reader: "sin reads y too",
    twice: "npu_dynamic_quant_1 reads y too",
    factor: "reads the norm's factor",
    narrowed: "to stands between",
    column_bias: "adds no bias of one value per channel",
    halved: "does more than join the leading dimensions",
    wide_smooth: "the smooth scale",
    written: "written in between by mul_",
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("function", DYNAMIC_MISSES, ids=lambda function: function.__name__)
def test_what_the_kernel_by_token_does_not_do_stays(function: Callable[..., Any]) -> None:
    found = rewritten(function, DYNAMIC, **inputs(F16, **MORE))
    assert found.matched == 0 and DYNAMIC_MISSES[function] in found.reasons
    assert tuple(found.calls) == found.was
    assert all(torch.equal(old, new) for old, new in zip(found.before.outputs, found.after.outputs, strict=True))


def test_dtypes_and_sizes_of_rows_decide() -> None:
    plain = rewritten(without_sum, DYNAMIC, **inputs(torch.float32))
    assert plain.matched == 0 and "is torch.float32, the kernel takes torch.bfloat16 and torch.float16" in plain.reasons
    odd = rewritten(without_sum, DYNAMIC, **inputs(F16, 72))
    assert odd.matched == 0 and "have 144 bytes, no multiple of 32" in odd.reasons
    assert rewritten(one_row, DYNAMIC, **inputs(F16)).matched == 0


def test_a_mistake_in_eps_is_told_apart() -> None:
    given = inputs(BF16)
    wrong = ops.npu_add_rms_norm_dynamic_quant(
        given["x"] * 1e-3, given["residual"] * 1e-3, given["gamma"], epsilon=1e-6, output_mask=[True, False]
    )
    y = ops.npu_add_rms_norm(given["x"] * 1e-3, given["residual"] * 1e-3, given["gamma"], EPS)[0]
    codes, scale = ops.npu_dynamic_quant(y)
    exact = normed((given["x"] * 1e-3 + given["residual"] * 1e-3).double(), given["gamma"].double(), EPS)[0]
    assert not judge(values(wrong[0], wrong[3][..., None]), values(codes, scale[..., None]), exact).passed


def static(divides: bool, bias: bool = False) -> Callable[..., Any]:
    def function(**given: Tensor) -> tuple[Tensor, ...]:
        y, _, total = norm(given)
        y = y + given["beta"] if bias else y
        codes = ops.npu_quantize(y, given["scales"], given.get("zero_points"), torch.qint8, -1, divides)
        return codes, total

    return function


def given_scales(dtype: torch.dtype, *, divides: bool, zero_points: bool = False) -> dict[str, Tensor]:
    scales = torch.linspace(0.02, 0.06, D)
    found = {"scales": scales if divides else 1 / scales}
    if zero_points:
        found["zero_points"] = torch.arange(D) % 7 - 3.0
    kinds = (torch.float32 if divides else F16, torch.int32) if dtype == F16 else (BF16, BF16)
    return {name: value.to(kind) for (name, value), kind in zip(found.items(), kinds, strict=False)}


# `npu_quantize` takes zero points of fp16 with scales of fp16 that multiply, the fused kernel of int32.
STATIC_FORMS = [
    (dtype, zero_points, divides, bias)
    for dtype in HALVES
    for zero_points in (False, True)
    for divides, bias in ((True, False), (False, False), (True, True))
    if dtype == BF16 or divides or not zero_points
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("dtype", "zero_points", "divides", "bias"), STATIC_FORMS, ids=str)
def test_a_norm_and_its_codes_by_given_scales_are_fused(
    dtype: torch.dtype, zero_points: bool, divides: bool, bias: bool
) -> None:
    scales = given_scales(dtype, divides=divides, zero_points=zero_points)
    found = rewritten(static(divides, bias), STATIC, **(inputs(dtype, **MORE) | scales))
    assert (found.matched, found.calls) == (1, ["npu_add_rms_norm_quant"])
    call = found.node("npu_add_rms_norm_quant")
    assert (call.kwargs["epsilon"], call.kwargs["div_mode"], call.kwargs["axis"]) == (EPS, divides, -1)
    # Scales are given on as they are: no reciprocal is taken.
    assert not any("reciprocal" in str(node.target) for node in found.module.graph.nodes)
    found.check()


@pytest.mark.parametrize("zero_points", [False, True], ids=["", "zero points"])
def test_half_scales_are_widened(zero_points: bool) -> None:
    more = {"scales": torch.linspace(0.02, 0.06, D).half()}
    more |= {"zero_points": (torch.arange(D) % 7 - 3).to(torch.int8)} if zero_points else {}
    found = rewritten(static(True), STATIC, **(inputs(F16) | more))
    assert found.matched == 1
    call = found.node("npu_add_rms_norm_quant")
    kinds = [node.meta["example_value"].dtype for node in call.args[3:5] if isinstance(node, torch.fx.Node)]
    assert kinds == [torch.float32, torch.int32][: len(kinds)] and len(kinds) == len(more)
    found.check()


def along(axis: int) -> Callable[..., Any]:
    def function(**given: Tensor) -> Tensor:
        return ops.npu_quantize(norm(given)[0], given["scales"], None, torch.qint8, axis, True)

    return function


STATIC_MISSES: dict[str, tuple[Callable[..., Any], dict[str, Tensor], str]] = {
    "multiplied with a bias": (static(False, bias=True), given_scales(F16, divides=False), "divides by its scales"),
    "narrow scales": (static(True), {"scales": torch.ones(D, dtype=BF16)}, "scales l_"),
    "one scale": (static(True), {"scales": torch.ones(1)}, "one of each channel"),
    "wide scales that multiply": (static(False), {"scales": torch.ones(D)}, "takes torch.float16"),
    "zero points with scales that multiply": (
        static(False),
        {"scales": torch.ones(D, dtype=F16), "zero_points": torch.ones(D, dtype=F16)},
        "no zero points",
    ),
    "float zero points": (
        static(True),
        {"scales": torch.ones(D), "zero_points": torch.ones(D)},
        "zero points",
    ),
    "another axis": (along(1), {"scales": torch.ones(5)}, "along axis 1 of 3"),
}


@pytest.mark.parametrize("name", STATIC_MISSES)
def test_what_the_kernel_by_given_scales_does_not_do_stays(name: str) -> None:
    function, scales, reason = STATIC_MISSES[name]
    found = rewritten(function, STATIC, **(inputs(F16, **MORE) | scales))
    assert found.matched == 0 and reason in found.reasons
    assert tuple(found.calls) == found.was


def alone(bias: bool) -> Callable[..., Any]:
    def function(**given: Tensor) -> Tensor:
        y = ops.npu_rms_norm(given["x"], given["gamma"], EPS)[0]
        y = y + given["beta"] if bias else y
        return ops.npu_quantize(y, given["scale"], None, torch.qint8, -1, False)

    return function


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_norm_without_a_sum_takes_one_scale_and_bound_zeros(dtype: torch.dtype, bias: bool) -> None:
    given = inputs(dtype, **MORE, scale=torch.tensor([40.0]))
    found = rewritten(alone(bias), STATIC_ALONE, **given)
    assert (found.matched, found.calls) == (1, ["npu_rms_norm_quant"])
    bound = [node.name for node in found.module.graph.nodes if node.name.startswith("npu_zeros")]
    kind = str(dtype).removeprefix("torch.")
    assert bound == ["npu_zeros_1_int8"] if bias else [f"npu_zeros_64_{kind}", "npu_zeros_1_int8"]
    found.check()


def test_two_norms_share_their_zeros() -> None:
    def function(**given: Tensor) -> tuple[Tensor, ...]:
        return alone(False)(**given), alone(False)(**(given | {"x": given["residual"]}))

    found = rewritten(function, STATIC_ALONE, **inputs(F16, scale=torch.tensor([40.0])))
    zeros = [node.name for node in found.module.graph.nodes if node.name.startswith("npu_zeros")]
    assert found.matched == 2 and len(zeros) == 2
    found.check()


def divided(**given: Tensor) -> Tensor:
    return ops.npu_quantize(
        ops.npu_rms_norm(given["x"], given["gamma"])[0], given["scale"], None, torch.qint8, -1, True
    )


def with_zero_point(**given: Tensor) -> Tensor:
    y = ops.npu_rms_norm(given["x"], given["gamma"])[0]
    return ops.npu_quantize(y, given["scale"], given["scale"].round(), torch.qint8, -1, False)


def by_channel(**given: Tensor) -> Tensor:
    return ops.npu_quantize(ops.npu_rms_norm(given["x"], given["gamma"])[0], given["gamma"], None, 1, -1, False)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (divided, "multiplies by its scale"),
        (with_zero_point, "the kernel's zero point is int8"),
        (by_channel, "takes one of"),
    ],
)
def test_a_norm_without_a_sum_refuses_other_scales(function: Callable[..., Any], reason: str) -> None:
    found = rewritten(function, STATIC_ALONE, **inputs(F16, scale=torch.tensor([40.0])))
    assert found.matched == 0 and reason in found.reasons
    assert tuple(found.calls) == found.was


def gate(**given: Tensor) -> tuple[Tensor, ...]:
    codes, scale = ops.npu_dynamic_quant(ops.npu_swiglu(given["x"]), smooth_scales=given.get("smooth"))
    return values(codes, scale[..., None]), codes, scale


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("smooth", [False, True], ids=["", "smooth"])
def test_a_gate_and_its_codes_are_fused(dtype: torch.dtype, smooth: bool) -> None:
    given = {"x": draw(70, 2 * D)} | ({"smooth": MORE["smooth"]} if smooth else {})
    found = rewritten(gate, GATE, dynamic={"x": (0,)}, **cast(given, dtype))
    assert (found.matched, found.calls) == (1, ["npu_dequant_swiglu_quant"])
    call = found.node("npu_dequant_swiglu_quant")
    # `npu_swiglu` has its gate first; the fused op has it last unless told so.
    assert (call.kwargs["activate_left"], call.kwargs["quant_mode"]) == (True, 1)
    found.check()


def along_rows(**given: Tensor) -> tuple[Tensor, ...]:
    return ops.npu_dynamic_quant(ops.npu_swiglu(given["x"], 0))


def read_too(**given: Tensor) -> tuple[Tensor, ...]:
    product = ops.npu_swiglu(given["x"])
    return *ops.npu_dynamic_quant(product), product.sin()


def test_rows_of_a_gate_come_in_blocks() -> None:
    found = rewritten(gate, GATE, **cast({"x": draw(70, 96)}, F16))
    assert found.matched == 0 and "rows of l_inputs_x_ have 96 elements, no multiple of 64" in found.reasons


def of_rank_three(**given: Tensor) -> tuple[Tensor, ...]:
    return ops.npu_dynamic_quant(ops.npu_swiglu(given["x"][None]))


@pytest.mark.parametrize(
    ("function", "reason"),
    [(along_rows, "halves dimension 0"), (read_too, "sin reads"), (of_rank_three, "has rank 3, the kernel takes 2")],
)
def test_other_gates_stay(function: Callable[..., Any], reason: str) -> None:
    found = rewritten(function, GATE, **cast({"x": draw(70, 2 * D)}, F16))
    assert found.matched == 0 and reason in found.reasons
    assert tuple(found.calls) == found.was
