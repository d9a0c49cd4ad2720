"""The sampler: exact support sets, frequencies, seeds, and independence of the rest of the batch.

A frequency of n draws has the standard deviation sqrt(p (1 - p) / n); the bounds are five of them, so that a right
sampler fails once in a million comparisons and a wrong one (another temperature, a token too many) at once.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from core.engine.config import SamplingParams
from core.engine.sampling import Sampler, make_generator
from core.errors import UsageError

N = 20_000
PROBABILITIES = torch.tensor([0.05, 0.40, 0.02, 0.25, 0.03, 0.15, 0.10])


def draw(logits: torch.Tensor, n: int = N, **options: Any) -> torch.Tensor:
    """Return the frequency of each token over n independent sequences with these options."""
    params = SamplingParams(temperature=options.pop("temperature", 1.0), **options)
    generator = torch.Generator().manual_seed(7)
    tokens = Sampler().sample(logits.expand(n, -1), [params] * n, [generator] * n)
    assert tokens.shape == (n,)
    assert tokens.dtype == torch.int64
    return torch.bincount(tokens, minlength=logits.numel()) / n


def assert_frequencies(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found > 0, expected > 0), "another set of tokens is possible"
    for f, p in zip(found.tolist(), expected.tolist(), strict=True):
        assert abs(f - p) <= 5 * math.sqrt(p * (1 - p) / N)


def truncated(keep: list[int], probabilities: torch.Tensor = PROBABILITIES) -> torch.Tensor:
    kept = torch.zeros_like(probabilities)
    kept[keep] = probabilities[keep]
    return kept / kept.sum()


def test_plain_sampling_follows_the_probabilities() -> None:
    assert_frequencies(draw(PROBABILITIES.log()), PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    expected = (PROBABILITIES.log() / temperature).softmax(-1)
    assert_frequencies(draw(PROBABILITIES.log(), temperature=temperature), expected)


@pytest.mark.parametrize(
    ("top_k", "keep"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 5]), (7, list(range(7))), (99, list(range(7)))]
)
def test_top_k_keeps_exactly_the_k_most_likely(top_k: int, keep: list[int]) -> None:
    assert_frequencies(draw(PROBABILITIES.log(), top_k=top_k), truncated(keep))


@pytest.mark.parametrize(
    ("top_p", "keep"),
    [
        (1e-6, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.64, [1, 3]),
        (0.66, [1, 3, 5]),
        (0.96, [0, 1, 3, 5, 6, 4]),
        (1.0, list(range(7))),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, keep: list[int]) -> None:
    assert_frequencies(draw(PROBABILITIES.log(), top_p=top_p), truncated(keep))


def test_top_p_counts_what_top_k_and_temperature_left() -> None:
    # After top_k=3 the probabilities are 0.5, 0.3125, 0.1875: p=0.8 takes two of them; of all tokens it takes three.
    assert_frequencies(draw(PROBABILITIES.log(), top_k=3, top_p=0.8), truncated([1, 3]))
    # At temperature 0.5 they are 0.615, 0.240, 0.086, ...: p=0.6 is reached by the first alone.
    assert_frequencies(draw(PROBABILITIES.log(), temperature=0.5, top_p=0.6), truncated([1]))


def test_equal_logits_are_cut_at_the_lower_id() -> None:
    expected = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    assert_frequencies(draw(torch.zeros(5), top_k=2), expected)
    assert_frequencies(draw(torch.zeros(5), top_p=0.3), expected)


def test_masked_tokens_are_never_drawn() -> None:
    logits = PROBABILITIES.log().index_fill(0, torch.tensor([1, 3]), float("-inf"))
    assert_frequencies(draw(logits), truncated([0, 2, 4, 5, 6]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tiny_temperature_is_the_argmax_in_every_dtype(dtype: torch.dtype) -> None:
    logits = torch.tensor([3.0, 60_000.0, -60_000.0, 59_000.0], dtype=dtype)
    assert draw(logits, n=50, temperature=1e-5)[1] == 1.0


def test_greedy_is_the_argmax_in_the_dtype_of_the_logits() -> None:
    # In fp32 the two would be equal.
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 0.5]], dtype=torch.float64)
    assert Sampler().sample(logits, [SamplingParams()], [None]).tolist() == [1]


def test_logits_that_overflow_when_divided_are_sampled() -> None:
    logits = torch.tensor([-3e38, 3e38, 2e38, 3e38])
    assert_frequencies(draw(logits, temperature=1e-5), torch.tensor([0.0, 0.5, 0.0, 0.5]))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (0.49, 2), (0.5, 0), (0.74, 0), (0.75, 1), (1.0, 3)])
def test_a_draw_selects_by_cumulative_probability(uniform: float, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_a, **_k: torch.tensor([uniform]))
    params = SamplingParams(temperature=1.0)
    logits = torch.tensor([[0.25, 0.125, 0.5, 0.125, 0.0]]).log()
    assert Sampler().sample(logits, [params], [make_generator(params)]).tolist() == [token]


def test_a_draw_that_rounds_up_stays_inside_the_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_a, **_k: torch.tensor([1.0]))
    params = [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0)]
    generators = [make_generator(p) for p in params]
    # In the second row the probabilities of the rest are lost in the sum, but top_p=1 takes none of them away.
    logits = torch.stack([PROBABILITIES.log(), torch.tensor([0.0, -20.0, -20.0] + [float("-inf")] * 4)])
    assert Sampler().sample(logits, params, generators).tolist() == [5, 2]


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    def run(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        generator, sampler = make_generator(params), Sampler()
        return [int(sampler.sample(torch.zeros(1, 1000), [params], [generator])) for _ in range(20)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) != run(None)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    mine = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
    others = [
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=5, seed=1),
        SamplingParams(temperature=1.0, seed=2),
    ]
    steps = torch.randn(12, 4, 64, generator=torch.Generator().manual_seed(0))

    alone, generator = [], make_generator(mine)
    for step in steps:
        alone.append(int(Sampler().sample(step[2:3], [mine], [generator])))

    params = [others[0], others[1], mine, others[2]]
    generators = [None, *map(make_generator, params[1:])]
    sampler, together = Sampler(), []
    for step in steps:
        tokens = sampler.sample(step, params, generators)
        together.append(int(tokens[2]))
        assert tokens[0] == step[0].argmax()
    assert together == alone


def test_a_new_mix_of_sequences_is_noticed() -> None:
    sampler, logits = Sampler(), torch.tensor([[0.0, 9.0], [0.0, 9.0]])
    cold, hot = SamplingParams(), SamplingParams(temperature=1e6, seed=0)
    generator = make_generator(hot)
    for _ in range(20):
        assert sampler.sample(logits, [cold, hot], [None, generator])[0] == 1
        assert sampler.sample(logits, [hot, cold], [generator, None])[1] == 1
    tokens = [int(sampler.sample(logits[:1], [hot], [generator])) for _ in range(40)]
    assert set(tokens) == {0, 1}


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.5, seed=0)
    Sampler().sample(logits, [params, params], [make_generator(params)] * 2)
    assert torch.equal(logits, before)


def test_wrong_counts_and_a_missing_generator_are_usage_errors() -> None:
    hot = SamplingParams(temperature=1.0)
    with pytest.raises(UsageError, match=r"logits of shape \(2, 3\), 1 parameters"):
        Sampler().sample(torch.zeros(2, 3), [SamplingParams()], [None, None])
    with pytest.raises(UsageError, match=r"logits of shape \(3,\)"):
        Sampler().sample(torch.zeros(3), [SamplingParams()], [None])
    with pytest.raises(UsageError, match=r"sequence 1 with temperature=1\.0"):
        Sampler().sample(torch.zeros(2, 3), [SamplingParams(), hot], [None, None])


def test_a_row_of_nan_gives_some_token_and_spares_the_others() -> None:
    hot = SamplingParams(temperature=1.0, seed=0)
    logits = torch.stack([torch.full((7,), float("nan")), torch.tensor([0.0] * 6 + [1e4])])
    tokens = Sampler().sample(logits, [hot, hot], [make_generator(hot), make_generator(hot)])
    assert 0 <= int(tokens[0]) < 7
    assert int(tokens[1]) == 6
