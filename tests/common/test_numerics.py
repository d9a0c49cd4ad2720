"""core/common/numerics.py: planted bugs are rejected, legitimate reorderings accepted, and fp64 stays fp64."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core.common.numerics import Fp64Mode, judge, judge_pooled
from core.errors import UsageError
from tests.support import Norm, refused

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


def test_fp64_mode_keeps_a_norm_in_fp64() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = Norm().double()
    exact = norm(x, module.weight.detach(), module.eps)
    with torch.no_grad():
        plain = module(x)
        with Fp64Mode():
            kept = module(x)
    assert kept.dtype == torch.float64
    torch.testing.assert_close(kept, exact, rtol=1e-14, atol=0)
    assert (plain - exact).abs().max() > 1e-9


@pytest.mark.parametrize(
    "narrow",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.bfloat16),
        lambda x: x.to(dtype=torch.float16),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: x + torch.zeros(4, dtype=torch.float32),
    ],
)
def test_fp64_mode_undoes_each_spelling_of_a_cast(narrow: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(0.1, 0.7, 4, dtype=torch.float64)
    with Fp64Mode():
        result = narrow(x)
        assert result.dtype == torch.float64
        # Rounding on the way would leave a value that survives a round trip through fp32.
        assert not torch.equal(result, torch.as_tensor(result.numpy().astype("float32").astype("float64")))


def test_fp64_mode_leaves_integers_and_fp64_alone() -> None:
    with Fp64Mode():
        assert torch.ones(3).to(torch.int32).dtype == torch.int32
        assert torch.zeros(3, dtype=torch.float64).dtype == torch.float64
