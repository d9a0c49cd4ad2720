"""core/common/ops/sampling.py: what its ops refuse, and their choices in other words (more in tests/engine)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.common.ops.sampling import ARGMAX, SAMPLE
from tests.common.ops.canonical_oracle import assert_raises, run

ROWS = [(0.0, 0.0, 1.0, 0.0), (0.7, 0.0, 1.0, 0.35), (1.0, 4.0, 1.0, 0.9), (1.3, 0.0, 0.6, 0.7), (0.9, 7.0, 0.8, 0.99)]


def in_words(logits: list[float], temperature: float, top_k: float, top_p: float, uniform: float) -> int:
    """Choose one token as a person would: sort, cut, walk until the draw is passed."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return order[0]
    order = order[: int(top_k) or len(order)]
    weights = (torch.tensor([logits[t] for t in order], dtype=torch.float64) / temperature).softmax(0).tolist()
    kept = [sum(weights[:place]) < top_p for place in range(len(weights))]
    weights = [weight for weight, stays in zip(weights, kept, strict=True) if stays]
    left = uniform * sum(weights)
    for token, weight in zip(order, weights, strict=False):
        left -= weight
        if left < 0:
            return token
    return order[len(weights) - 1]


@pytest.mark.parametrize("seed", range(5))
def test_choices_are_those_of_the_definition(seed: int) -> None:
    logits = torch.randn(len(ROWS), 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    logits[:, ::5] = logits[:, 1::5]  # equal ones
    (tokens,) = run(SAMPLE, {"logits": logits, "sampling_params": torch.tensor(ROWS)})
    assert tokens.tolist() == [in_words(row, *params) for row, params in zip(logits.tolist(), ROWS, strict=True)]


def test_the_most_likely_token_is_the_first_of_equal_ones_and_nan_the_most_likely() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -1.0, 0.0], [-inf] * 4, [inf, nan, 1.0, nan], [-inf, -inf, -5.0, -inf]]
    (tokens,) = run(ARGMAX, {"logits": torch.tensor(rows)})
    assert tokens.tolist() == [1, 0, 0, 1, 2]
    # Compared in their own dtype: in fp32 the two would be equal.
    (tokens,) = run(ARGMAX, {"logits": torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)})
    assert tokens.tolist() == [1]


def params(num_rows: int, columns: int = 4) -> Tensor:
    return torch.zeros(num_rows, columns)


@pytest.mark.parametrize(
    ("logits", "given", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), params(2), "logits must be floating-point"),
        (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64), "sampling_params must be floating-point"),
        (torch.zeros(3), params(3), r"logits must be \(R, V\), not \(3,\)"),
        (torch.zeros(2, 0), params(2), r"logits must be \(R, V\), not \(2, 0\)"),
        (torch.zeros(2, 3), params(3), r"sampling_params must have shape \(2, 4\), not \(3, 4\)"),
        (torch.zeros(2, 3), params(2, 3), r"sampling_params must have shape \(2, 4\), not \(2, 3\)"),
    ],
)
def test_wrong_arguments(logits: Tensor, given: Tensor, message: str) -> None:
    assert_raises(SAMPLE, {"logits": logits, "sampling_params": given}, message)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), "logits must be floating-point"),
        (torch.zeros(3), r"logits must be \(R, V\), not \(3,\)"),
        (torch.zeros(2, 0), r"logits must be \(R, V\), not \(2, 0\)"),
    ],
)
def test_wrong_arguments_of_argmax(logits: Tensor, message: str) -> None:
    assert_raises(ARGMAX, {"logits": logits}, message)
