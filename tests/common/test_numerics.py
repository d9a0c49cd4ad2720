"""core/common/numerics.py: bugs are rejected and legitimate reorderings accepted, whatever a few elements hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import Verdict, judge, judge_pooled
from core.errors import UsageError
from tests.support import refused

EPS = 1e-5


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def reordered(x: Tensor, weight: Tensor) -> Tensor:
    """The same norm with its operations in another order, as a fused kernel has them."""
    total = sum((part * part).sum(-1, keepdim=True) for part in x.split(7, dim=-1))
    return (x * weight) / torch.sqrt(total / x.shape[-1] + EPS)


def changed(place: tuple[int, int], value: float) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        out = norm(x, weight)
        out[place] = value
        return out

    return compute


def stale(x: Tensor, weight: Tensor) -> Tensor:
    out = norm(x, weight)
    out[5] = out[4]
    return out


BUGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale 2 % off": lambda x, w: norm(x, w) * 1.02,
    "eps 1e-6": lambda x, w: norm(x, w, 1e-6),
    "sum for mean": lambda x, w: norm(x, w) / 8,
    "weight left out": lambda x, w: norm(x, torch.ones_like(w)),
    "weight plus one": lambda x, w: norm(x, w + 1),
    "rounded to bf16 on the way": lambda x, w: norm(x.bfloat16().float(), w),
    "one wrong element": changed((3, 2), 1.0),
    "one NaN": changed((3, 2), torch.nan),
    "one infinity": changed((3, 2), torch.inf),
    "stale row": stale,
}


@pytest.fixture
def arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    # Small rows, so that eps counts, and weights far from 1.
    return torch.randn(32, 64, generator=generator) * 0.02, torch.linspace(0.2, 2.0, 64)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_rejected_in_fp32(bug: str, arguments: tuple[Tensor, Tensor]) -> None:
    verdict = judge(BUGS[bug](*arguments), norm(*arguments), norm(*(t.double() for t in arguments)))
    assert not verdict.passed
    assert verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_reordering_is_accepted(dtype: torch.dtype, arguments: tuple[Tensor, Tensor]) -> None:
    x, weight = (t.to(dtype) for t in arguments)
    result, eager = reordered(x, weight), norm(x, weight)
    assert not torch.equal(result, eager)
    verdict = judge(result, eager, norm(x.double(), weight.double()))
    assert verdict.passed, verdict
    assert verdict.num_elements == 32 * 64
    json.dumps(verdict.to_json())


def test_equal_results_have_equal_errors(arguments: tuple[Tensor, Tensor]) -> None:
    verdict = judge(norm(*arguments), norm(*arguments), norm(*(t.double() for t in arguments)))
    assert verdict.passed
    assert verdict.rms_error == verdict.eager_rms_error > 0
    assert verdict.max_error == verdict.eager_max_error > 0


def test_small_outputs_are_looser_judged_than_large_ones() -> None:
    reference = torch.linspace(1, 2, 512, dtype=torch.float64)
    eager, result = (reference + sign * 2e-6 * factor for sign, factor in ((1, 1), (-1, 2.5)))
    assert judge(*(t[:511].float() for t in (result, eager)), reference[:511]).passed
    assert not judge(result.float(), eager.float(), reference).passed


def test_fewer_than_64_elements_are_refused() -> None:
    x = torch.linspace(1, 2, 63)
    with refused(UsageError, "63 elements", "noise", "judge_pooled"):
        judge(x, x, x.double())
    more = torch.linspace(1, 2, 64)
    assert judge(more, more, more.double()).passed


def test_pooling_reaches_the_count_and_still_sees_a_bug() -> None:
    parts = list(torch.linspace(1, 2, 66).split(22))
    doubles = [t.double() for t in parts]
    assert judge_pooled(parts, parts, doubles).passed
    assert not judge_pooled([parts[0], parts[1] * 1.02, parts[2]], parts, doubles).passed


@pytest.mark.parametrize(
    "result", [torch.ones(8, 16), torch.ones(128, dtype=torch.bfloat16)], ids=["another shape", "another dtype"]
)
def test_other_metadata_fails(result: Tensor) -> None:
    eager = torch.ones(128)
    for verdict in (judge(result, eager, eager.double()), judge_pooled([result], [eager], [eager.double()])):
        assert not verdict.passed
        assert "metadata differs" in verdict.reason


@pytest.mark.parametrize(("found", "wanted"), [(-torch.inf, torch.inf), (torch.nan, torch.inf), (1.0, torch.nan)])
def test_infinity_and_nan_are_told_apart(found: float, wanted: float) -> None:
    reference = torch.linspace(1, 2, 128, dtype=torch.float64)
    reference[7] = wanted
    eager = reference.float()
    assert judge(eager, eager, reference).passed
    result = eager.clone()
    result[7] = found
    verdict = judge(result, eager, reference)
    assert not verdict.passed
    assert "NaN or infinity" in verdict.reason


def test_a_reference_without_finite_elements_fails() -> None:
    nothing = torch.full((64,), torch.nan)
    verdict = judge(nothing, nothing, nothing.double())
    assert not verdict.passed
    assert "no finite element" in verdict.reason


def test_a_zero_reference_admits_zero_only() -> None:
    zero = torch.zeros(64)
    assert judge(zero, zero, zero.double()).passed
    assert not judge(zero + 1e-30, zero, zero.double()).passed


def test_integers_have_no_rounding_to_judge() -> None:
    codes = torch.arange(64)
    with refused(UsageError, "torch.int64", "rounding", "torch.equal"):
        judge(codes, codes, codes.double())


def test_nothing_to_pool_is_refused() -> None:
    with refused(UsageError, "no outputs", "empty", "pool"):
        judge_pooled([], [], [])


LEAST = torch.finfo(torch.float32).min


def values(count: int = 1024, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nearby(reference: Tensor) -> Tensor:
    """Round like eager, after another error of a quarter of a rounding."""
    return (reference * (1 + 3e-8)).float()


def with_one(value: float, result: Callable[[Tensor], Tensor]) -> Verdict:
    """Judge ordinary values of which one is replaced, alike in eager and result, the others changed by `result`."""
    reference = values()
    reference[7] = value
    eager = reference.float()
    changed = result(reference).float()
    changed[7] = eager[7]
    return judge(changed, eager, reference)


@pytest.mark.parametrize("value", [LEAST, -3e38, -1e9, 1e5, torch.inf, torch.nan])
def test_one_large_element_hides_nothing(value: float) -> None:
    for wrong in (lambda r: values(seed=1), lambda r: r * 1.5, lambda r: r * (1 + 1e-5)):
        verdict = with_one(value, wrong)
        assert not verdict.passed
        assert "error over bound" in verdict.reason
    verdict = with_one(value, lambda r: r)
    assert verdict.passed
    assert verdict.num_elements == 1024 and verdict.max_error < 1e-6


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_mask_may_cover_any_share_and_differ_from_the_reference(share: float) -> None:
    # Code that asks for the least number of its tensor's dtype gets another one in fp64.
    count = int(1024 * share)
    reference = values()
    eager = reference.float()
    reference[:count], eager[:count] = torch.finfo(torch.float64).min, LEAST
    result = eager.clone()
    result[count:] = nearby(reference[count:])
    assert judge(result, eager, reference).passed
    for place, value in ((0, 0.0), (0, -torch.inf), (0, -LEAST), (-1, LEAST)):
        wrong = result.clone()
        wrong[place] = value
        verdict = judge(wrong, eager, reference)
        assert not verdict.passed
        assert ("NaN or infinity, or a value next to it" in verdict.reason) == (place == 0)
    assert not judge(result * 1.001, eager, reference).passed


def test_half_precision_may_overflow_where_eager_does() -> None:
    reference = values()
    reference[0], reference[1] = 70_000.0, -70_000.0
    eager = reference.half()
    assert eager[0].isinf() and judge(eager, eager, reference).passed
    for place, value in ((0, -torch.inf), (0, 65504.0), (0, torch.nan), (2, torch.inf)):
        wrong = eager.clone()
        wrong[place] = value
        assert "NaN or infinity" in judge(wrong, eager, reference).reason


def test_an_outlier_is_judged_by_its_own_size() -> None:
    reference = values()
    reference[7], reference[9] = 1e5, -3e7
    eager = reference.float()
    assert judge(nearby(reference), eager, reference).passed
    for place in (7, 9):
        wrong = eager.clone()
        wrong[place] *= 1 + 1e-6
        assert not judge(wrong, eager, reference).passed


def test_each_magnitude_has_a_floor_of_its_own() -> None:
    reference = values(64_000).reshape(64, 1000)
    reference[0] *= 1e4
    eager = reference.float()
    assert judge(nearby(reference), eager, reference).passed
    for row in (0, 5):
        wrong = eager.clone()
        wrong[row] *= 1 + 1e-4
        assert not judge(wrong, eager, reference).passed


def test_zeros_and_subnormals_are_no_scale() -> None:
    sparse = values(2048)
    sparse[:1800] = 0
    assert judge(nearby(sparse), sparse.float(), sparse).passed
    # Most of these lie below what fp16 holds to full precision: eager has lost them, as a softmax does.
    peaked = (values(4096) * 6).softmax(-1)
    assert judge(peaked.float().half(), peaked.half(), peaked).passed
    assert not judge((peaked * 1.01).half(), peaked.half(), peaked).passed


@pytest.mark.parametrize("place", [0, slice(None, None, 2)])
def test_an_eager_of_nan_is_no_yardstick(place: Any) -> None:
    reference = values()
    eager = reference.float()
    eager[place] = torch.nan
    for result in (reference.float(), eager):
        verdict = judge(result, eager, reference)
        assert not verdict.passed and verdict.reason == "the yardstick itself is NaN"


@pytest.mark.parametrize("count", [128, 1024])
def test_an_eager_far_off_is_no_yardstick(count: int) -> None:
    reference = values(count)
    outlier = reference.float()
    outlier[0] = 100.0
    for eager in (torch.zeros(count), reference.float() * 1.3, outlier):
        verdict = judge(reference.float() * 1.2, eager, reference)
        assert not verdict.passed and verdict.reason.startswith("the yardstick itself is off")
        assert verdict.rms_ratio == verdict.max_ratio == torch.inf
    reference[3] = 1e6
    eager = reference.float()
    eager[3] = 0.0
    assert "yardstick itself is off" in judge(eager, eager, reference).reason


@pytest.mark.parametrize(("count", "slips"), [(512, 1), (1024, 3), (8192, 60)])
def test_a_slip_of_eager_is_no_licence_for_all(count: int, slips: int) -> None:
    reference = values(count)
    eager = reference.float()
    eager[:slips] += 0.5
    for scale in (1.03, 1 + 1e-5):
        verdict = judge((reference * scale).float(), eager, reference)
        assert not verdict.passed and "error over bound: rms" in verdict.reason
    assert judge(nearby(reference), eager, reference).passed
    assert judge(eager, eager, reference).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_reordered_sums_with_massive_activations_are_accepted(dtype: torch.dtype, seed: int) -> None:
    x, weight = values(64 * 256, seed).reshape(64, 256), values(256 * 96, seed + 9).reshape(256, 96) / 16
    for columns, factor in ((3, 300.0), (1, 3000.0), (20, 3000.0)):
        scaled = weight.clone()
        scaled[:, :columns] *= factor
        a, b = x.to(dtype), scaled.to(dtype)
        eager = a @ b
        result = sum((a[:, i : i + 32].float() @ b[i : i + 32].float() for i in range(0, 256, 32)), torch.zeros(()))
        verdict = judge(result.to(dtype), eager, a.double() @ b.double())
        assert verdict.passed, verdict


def test_numbers_near_the_end_of_fp64_do_not_overflow() -> None:
    reference = values() * 1e200
    assert judge(reference, reference, reference).passed
    verdict = judge(torch.zeros_like(reference), reference, reference)
    assert not verdict.passed and "nan" not in verdict.reason
