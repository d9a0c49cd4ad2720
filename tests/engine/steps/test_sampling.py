"""The sampler: exact support sets, frequencies, seeds, and independence of the rest of the batch.

A frequency of n draws has the standard deviation sqrt(p (1 - p) / n); the bounds are five of them, so that a right
sampler fails once in a million comparisons and a wrong one (another temperature, a token too many) at once.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from core.engine.config import Sampling, SamplingParams
from core.engine.steps.sampling import GREEDY_ROW, make_generator, next_tokens, sampling_guard, sampling_row
from core.engine.steps.sequence import Sequence

N = 20_000
PROBABILITIES = torch.tensor([0.05, 0.40, 0.02, 0.25, 0.03, 0.15, 0.10])


def rows(params: list[SamplingParams], uniforms: list[float]) -> torch.Tensor:
    """Return the packed parameters of some rows."""
    return torch.tensor([sampling_row(p, u) for p, u in zip(params, uniforms, strict=True)], dtype=torch.float32)


def draw(logits: torch.Tensor, n: int = N, **options: Any) -> torch.Tensor:
    """Return the frequency of each token over n draws with these options."""
    params = SamplingParams(temperature=options.pop("temperature", 1.0), **options)
    packed = torch.tensor([sampling_row(params, 0.0)]).repeat(n, 1)
    packed[:, 3] = torch.rand(n, generator=torch.Generator().manual_seed(7))
    tokens = next_tokens(logits.expand(n, -1), packed, "random")
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


@pytest.mark.parametrize("sampling", ["greedy", "random"])
def test_greedy_is_the_argmax_in_the_dtype_of_the_logits(sampling: Any) -> None:
    # In fp32 the two would be equal.
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 0.5]], dtype=torch.float64)
    assert next_tokens(logits, torch.tensor([GREEDY_ROW]), sampling).tolist() == [1]


def test_logits_that_overflow_when_divided_are_sampled() -> None:
    logits = torch.tensor([-3e38, 3e38, 2e38, 3e38])
    assert_frequencies(draw(logits, temperature=1e-5), torch.tensor([0.0, 0.5, 0.0, 0.5]))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (0.49, 2), (0.5, 0), (0.74, 0), (0.75, 1), (1.0, 3)])
def test_a_draw_selects_by_cumulative_probability(uniform: float, token: int) -> None:
    logits = torch.tensor([[0.25, 0.125, 0.5, 0.125, 0.0]]).log()
    assert next_tokens(logits, rows([SamplingParams(temperature=1.0)], [uniform]), "random").tolist() == [token]


def test_a_draw_that_rounds_up_stays_inside_the_support() -> None:
    params = [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0)]
    # In the second row the probabilities of the rest are lost in the sum, but top_p=1 takes none of them away.
    logits = torch.stack([PROBABILITIES.log(), torch.tensor([0.0, -20.0, -20.0] + [float("-inf")] * 4)])
    assert next_tokens(logits, rows(params, [1.0, 1.0]), "random").tolist() == [5, 2]


def numbers(seed: int | None, count: int = 20) -> list[float]:
    params = SamplingParams(temperature=1.0, seed=seed)
    sequence = Sequence(0, [1], params, make_generator(params))
    return [sequence.uniform(index) for index in range(count)]


def test_a_seed_gives_the_same_numbers_again_and_another_seed_others() -> None:
    assert numbers(3) == numbers(3)
    assert numbers(3) != numbers(4)
    assert numbers(None) != numbers(None)
    assert all(0 <= number < 1 for number in numbers(3))
    assert make_generator(SamplingParams(seed=3)) is None


def test_the_number_of_a_token_is_the_same_whenever_it_is_asked_for() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    sequence = Sequence(0, [1], params, make_generator(params))
    assert sequence.uniform(4) == numbers(3)[4]
    assert [sequence.uniform(index) for index in range(20)] == numbers(3)


# Five sequences over twelve steps; greedy the second. Logits by integer arithmetic, so that they are the same anywhere.
MIX = [
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=11),
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=12),
    SamplingParams(temperature=2.0, top_p=0.8, seed=13),
    SamplingParams(temperature=1.3, top_k=3, seed=14),
]
STEPS = [
    ((7 * torch.arange(50) ** 2 + 31 * step + 17 * torch.arange(5)[:, None] * torch.arange(50)) % 97) / 16
    for step in range(12)
]
TOKENS = [
    [30, 6, 14, 0, 8, 2, 0, 11, 12, 17, 26, 18],
    [10, 11, 26, 8, 5, 19, 8, 5, 9, 8, 22, 13],
    [47, 22, 33, 47, 41, 28, 26, 19, 33, 45, 10, 34],
    [33, 10, 43, 13, 12, 3, 49, 42, 33, 13, 17, 2],
    [4, 25, 5, 0, 45, 47, 41, 3, 24, 31, 1, 24],
]


def sampled(which: list[int]) -> list[list[int]]:
    """Return the tokens of some sequences of the mix that share their steps."""
    sequences = [Sequence(i, [1], MIX[i], make_generator(MIX[i])) for i in which]
    found = []
    for step, logits in enumerate(STEPS):
        uniforms = [0.0 if s.params.greedy else s.uniform(step) for s in sequences]
        found.append(next_tokens(logits[which], rows([s.params for s in sequences], uniforms), "random"))
    return torch.stack(found, dim=1).tolist()


def test_a_seed_gives_these_tokens_in_every_version() -> None:
    assert sampled([0, 1, 2, 3, 4]) == TOKENS


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    for alone in range(5):
        assert sampled([alone]) == [TOKENS[alone]]
    assert sampled([4, 2, 1]) == [TOKENS[4], TOKENS[2], TOKENS[1]]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.5, seed=0)
    next_tokens(logits, rows([params, params], [0.3, 0.9]), "random")
    assert torch.equal(logits, before)


def test_a_row_of_nan_gives_some_token_and_spares_the_others() -> None:
    hot = SamplingParams(temperature=1.0, seed=0)
    logits = torch.stack([torch.full((7,), float("nan")), torch.tensor([0.0] * 6 + [1e4])])
    tokens = next_tokens(logits, rows([hot, hot], [0.5, 0.5]), "random")
    assert 0 <= int(tokens[0]) < 7
    assert int(tokens[1]) == 6


def test_a_step_is_served_by_what_was_captured() -> None:
    found = {
        captured: [sampling_guard(wanted, captured) for wanted in get_args(Sampling)]
        for captured in [("greedy", "random"), ("greedy",), ("random",), ("shaped", "greedy"), ("shaped",)]
    }
    assert found == {
        ("greedy", "random"): ["greedy", "random", "greedy"],
        ("greedy",): ["greedy", "greedy", "greedy"],
        ("random",): ["random", "random", "random"],
        ("shaped", "greedy"): ["greedy", "shaped", "shaped"],
        ("shaped",): ["shaped", "shaped", "shaped"],
    }


def test_the_choice_can_be_traced_as_one_graph() -> None:
    compiled = torch.compile(next_tokens, backend="eager", fullgraph=True)
    packed = rows(MIX, [0.1, 0.0, 0.5, 0.9, 0.7])
    for sampling in ("greedy", "random"):
        assert torch.equal(compiled(STEPS[0], packed, sampling), next_tokens(STEPS[0], packed, sampling))
