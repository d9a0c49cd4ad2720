"""The rules for a language model's logits: what T3 and the divergence accept, and what they reject."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from core_conformance.rules.divergence import divergences, judge_divergence, rounding_bound, token_slip

VOCAB, ROWS, SIZE = 160, 48, 64


def head(x: Tensor, weight: Tensor, *, approximate: str = "none", eps: float = 1e-6) -> Tensor:
    """Norm, GELU and a projection to logits: a last layer in small."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return nn.functional.gelu(normed, approximate=approximate) @ weight.T


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def sides(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, eager's logits and the fp64 ones, in one dtype."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, SIZE, generator=generator).to(request.param)
    weight = torch.randn(VOCAB, SIZE, generator=generator).mul(0.3).to(request.param)
    return x, weight, head(x, weight), head(x.double(), weight.double())


def test_legitimate_variants_are_accepted(sides: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight, eager, exact = sides
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(4))
    variants = {
        "itself": eager,
        "another order of sums": head(x[:, order], weight[:, order]),
        "fp32 inside, rounded once": head(x.float(), weight.float()).to(x.dtype),
        "the reference, rounded": exact.to(x.dtype),
    }
    rounding = rounding_bound(eager, exact)
    for name, logits in variants.items():
        assert judge_divergence(logits, eager, exact) == (pytest.approx(0, abs=1), ""), name
        slips = [token_slip(int(row.argmax()), row, r, rounding) for row, r in zip(logits, exact, strict=True)]
        assert all(ratio <= 1 and not reason for ratio, reason in slips), name


@pytest.mark.parametrize("options", [{"approximate": "tanh"}, {"eps": 1e-3}])
def test_in_fp32_the_divergence_rejects_what_is_small(options: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(ROWS, SIZE, generator=generator), torch.randn(VOCAB, SIZE, generator=generator) * 0.3
    exact = head(x.double(), weight.double())
    ratio, reason = judge_divergence(head(x, weight, **options), head(x, weight), exact)  # type: ignore[arg-type]
    assert ratio > 1000
    assert "divergence over bound" in reason and "KL(R||G)" in reason


def test_one_row_that_is_wrong_is_not_lost_among_the_others(sides: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, _, eager, exact = sides
    wrong = eager.clone()
    wrong[17] = eager[18]
    ratio, reason = judge_divergence(wrong, eager, exact)
    assert ratio > 10 and reason
    one = eager.clone()
    one[17, 5] += 4 * float(exact.std())
    assert judge_divergence(one, eager, exact)[0] > 1


def test_the_divergence_is_that_of_the_definition_and_blind_to_a_shift() -> None:
    wanted, other = torch.randn(2, 4, 9, dtype=torch.float64)
    p, q = wanted.softmax(-1), other.softmax(-1)
    assert torch.allclose(divergences(wanted, other), (p * (p / q).log()).sum(-1))
    # In fp64, far below the resolution of the plain sum.
    tiny = wanted + 1e-9 * other
    expected = 0.5e-18 * ((p * other.pow(2)).sum(-1) - (p * other).sum(-1).pow(2))
    assert torch.allclose(divergences(wanted, tiny), expected, rtol=1e-4, atol=0)
    assert float(divergences(wanted, wanted + 5).abs().max()) < 1e-25


def test_logits_that_are_not_finite_are_wrong() -> None:
    exact = torch.randn(4, 9, dtype=torch.float64)
    eager = exact.float()
    broken = eager.clone()
    broken[2, 3] = math.nan
    assert judge_divergence(broken, eager, exact) == (math.inf, "its logits are not finite")
    assert token_slip(3, broken[2], exact[2], 1.0) == (math.inf, "its logits are not finite")


def test_a_token_may_differ_where_fp64_sees_a_tie() -> None:
    exact = torch.tensor([0.0, 1.0 + 1e-6, 1.0], dtype=torch.float64)
    logits = torch.tensor([0.0, 1.0, 1.0 + 1e-6])
    ratio, reason = token_slip(2, logits, exact, rounding=1e-5)
    assert 0 < ratio <= 1 and not reason
    assert token_slip(1, exact.float(), exact, rounding=0.0) == (0.0, "")


def test_a_large_error_excuses_no_token() -> None:
    exact = torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64)
    logits = torch.tensor([0.0, 1.0, 2.0])  # the margin is below twice the error, and the error is no rounding
    ratio, reason = token_slip(2, logits, exact, rounding=1e-5)
    assert ratio > 1000
    assert "took 2 where fp64 prefers 1 by 1" in reason and "its largest error there is 1" in reason


def test_a_token_that_its_own_logits_do_not_prefer_is_wrong() -> None:
    exact = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    ratio, reason = token_slip(1, exact.float(), exact, rounding=1e-5)
    assert ratio == math.inf and "took 1 where its own logits prefer 2" in reason
