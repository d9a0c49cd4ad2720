"""core_conformance/rules/codes.py on ops that end in codes: honest variants pass, each planted mistake fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.numerics import Fp64Mode, t1_bounds
from core.common.ops.implementation import OpImplementation
from core.common.ops.norm import RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from core.common.ops.quantize.symmetric import quantize
from core_conformance.cases.ops import collect as ops
from core_conformance.rules.codes import judge_coded
from core_conformance.rules.judging import Judged, by_t1
from core_conformance.trial import Trial
from tests.conformance.planted_ops import norm_by_division, quantize_by_reciprocal, quantize_truncates
from tests.support import cpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
Codes = tuple[Tensor, ...]
_NAMES = ("dtype", "granularity", "group_size")


def judged(op: str, fn: Callable[..., Any], dtype: torch.dtype) -> Trial:
    device = cpu(ops=(OpImplementation(op=f"core::{op}", name="planted", fn=fn),))
    trial = Trial(device.name, lambda: (device, ConformanceProfile()))
    wanted = f"ops/{op}/planted/{str(dtype).removeprefix('torch.')}"
    (case,) = (each for each in ops.collect(device, ConformanceProfile()) if each.id == wanted)
    case.run(trial)
    return trial


def in_two(norm: Callable[..., Tensor], codes: Callable[..., Codes]) -> Callable[..., Codes]:
    """Return the op made of a norm and a quantisation."""

    def op(x: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, **options: Any) -> Codes:
        told = {name: options.pop(name) for name in _NAMES if name in options}
        return codes(norm(x, weight, eps, **options), scale, **told)

    return op


def norm(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    out: Tensor = torch.ops.core.rms_norm(x, weight, eps, **options)
    return out


@pytest.mark.cases(1)
@DTYPES
@pytest.mark.parametrize("codes", [quantize, quantize_by_reciprocal])
def test_other_orders_of_rounding_pass(codes: Callable[..., Codes], dtype: torch.dtype) -> None:
    trial = judged("rms_norm_quantize", in_two(norm_by_division, codes), dtype)
    assert not trial.failures, trial.failures
    assert {each.criterion for each in trial.measurements} >= {"T0", "T1"}


def eps_left_out(x: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, **options: Any) -> Codes:
    return RMS_NORM_QUANTIZE.reference(x, weight, eps * 3, scale, **options)


def scale_too_large(x: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, **options: Any) -> Codes:
    codes, used = RMS_NORM_QUANTIZE.reference(x, weight, eps, scale, **options)
    return codes, used * 1.02


def codes_two_off(x: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, **options: Any) -> Codes:
    codes, used = RMS_NORM_QUANTIZE.reference(x, weight, eps, scale, **options)
    if codes.dtype == torch.int8 and codes.numel():
        codes = codes.clone()
        codes[..., -1] = torch.where(codes[..., -1] > 100, codes[..., -1] - 3, codes[..., -1] + 3)
    return codes, used


WRONG: dict[str, tuple[Callable[..., Codes], str]] = {
    "eps": (eps_left_out, "error over bound"),
    "truncation": (in_two(norm, quantize_truncates), "codes are"),
    "scale": (scale_too_large, "scale: error over bound"),
    "last code of each row": (codes_two_off, "off, by up to 3"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    # A mistake is told by one dtype; the slow ones tell that the other hides none.
    "dtype",
    [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_planted_mistake_fails_for_its_own_reason(mistake: str, dtype: torch.dtype) -> None:
    fn, reason = WRONG[mistake]
    assert any(reason in failure for failure in judged("rms_norm_quantize", fn, dtype).failures)


@pytest.mark.slow
def test_further_results_are_judged_too() -> None:
    def sum_of_another(x: Tensor, residual: Tensor, *args: Any, **options: Any) -> Codes:
        codes, scale, total = ADD_RMS_NORM_QUANTIZE.reference(x, residual, *args, **options)
        return codes, scale, total * 1.001

    failures = judged("add_rms_norm_quantize", sum_of_another, torch.float32).failures
    assert any("further result: error over bound" in failure for failure in failures)
    assert not judged("add_rms_norm_quantize", ADD_RMS_NORM_QUANTIZE.reference, torch.float32).failures


@pytest.mark.parametrize(("by", "passes"), [(0.25, True), (0.5, True), (20.0, False)])
def test_next_to_zero_codes_may_be_as_far_off_as_values(by: float, passes: bool) -> None:
    """There the codes of a float lie so close that an error which T1 passes is many of them."""
    exact = torch.randn(64, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact[:, ::16] *= 1e-4
    floor = torch.finfo(torch.bfloat16).eps / 4 * exact.pow(2).mean().sqrt()
    off = exact.clone()
    off[:, ::16] += by * floor  # next to zero alone, where rounding to half precision moves eager's codes hardly
    scale = torch.tensor(0.0093)
    sides = [
        quantize(x, scale, dtype=torch.float8_e4m3fn, granularity="tensor") for x in (off, exact.bfloat16(), exact)
    ]
    apart = (sides[0][0].view(torch.uint8).int() - sides[2][0].view(torch.uint8).int()).abs()
    assert apart[:, ::16][sides[2][0][:, ::16].float() >= 0].max() > 4
    trial = Trial("cpu", lambda: (cpu(), ConformanceProfile()))
    call = {"x": exact.bfloat16(), "granularity": "tensor"}
    judge_coded(trial, Judged("call", call, sides[0], sides[1], lambda: sides[2], by_t1))
    far = [failure for failure in trial.failures if "steps off" in failure or "step off" in failure]
    assert bool(far) is not passes, trial.failures


@pytest.mark.cases(1)
@pytest.mark.parametrize(("by", "passes"), [(0.5, True), (0.9, True), (4.0, False)])
def test_codes_may_move_as_far_and_as_often_as_errors_that_t1_passes_move_them(by: float, passes: bool) -> None:
    """Errors of one size at all values, as of a sum of rounded products, move codes of small values most often."""

    def off(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
        eager = norm(x, weight, eps, **options)
        with Fp64Mode():
            exact = RMS_NORM.reference(x.double(), None if weight is None else weight.double(), eps, **options)
        if not exact.numel():
            return eager
        most_rms, _ = t1_bounds(eager.double(), exact, torch.finfo(x.dtype))
        noise = torch.rand(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
        made: Tensor = (exact + by * most_rms * 3**0.5 * noise).float()
        return made

    found = [
        each for each in judged("rms_norm_quantize", in_two(off, quantize), torch.float16).failures if "codes" in each
    ]
    assert bool(found) is not passes, found


def test_the_op_is_judged_by_this_rule() -> None:
    assert ops.RULES[RMS_NORM_QUANTIZE.name] is ops.RULES["gated_activation_quantize"] is judge_coded
