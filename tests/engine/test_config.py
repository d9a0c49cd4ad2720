"""SamplingParams: defaults, and one UsageError for each value out of range."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from core.engine.config import SamplingParams
from core.errors import UsageError


def test_the_default_is_greedy() -> None:
    params = SamplingParams()
    assert params.greedy
    assert (params.max_new_tokens, params.top_k, params.top_p, params.seed, params.stop) == (64, 0, 1.0, None, ())


def test_a_temperature_samples() -> None:
    assert not SamplingParams(temperature=0.7).greedy


def test_it_is_frozen_hashable_and_keyword_only() -> None:
    assert SamplingParams(stop="word").stop == SamplingParams(stop=["word"]).stop == ("word",)
    biased = SamplingParams(logit_bias=((1, 2.0),))
    for written in ([[1, 2.0]], [(1, 2.0)], ([1, 2.0],), {1: 2.0}):
        assert hash(SamplingParams(logit_bias=written)) == hash(biased)  # type: ignore[arg-type]
        assert SamplingParams(logit_bias=written) == biased  # type: ignore[arg-type]
    params = SamplingParams(stop=("a",), stop_token_ids=(1,))
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", 1e-6),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", 2**63),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", 1.0),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", 3),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("2",)),
        ("stop_token_ids", (10**400,)),
        ("ignore_eos", 1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", "1"),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 1e38),
        ("logit_bias", ((-1, 2.0),)),
        ("logit_bias", ((1, 200.0),)),
        ("logit_bias", ((1, 2.0, 3.0),)),
        ("min_tokens", -1),
        ("min_tokens", 10**400),
        ("priority", 0.5),
        ("priority", 2**31),
        ("logprobs", 21),
        ("logprobs", True),
        ("regex", 5),
        ("json_schema", {"type": "object"}),
    ],
)
def test_a_value_out_of_range_is_a_usage_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    assert f"{name}={value!r}" in caught.value.asked
    assert name in caught.value.found
    assert caught.value.remedy.startswith("pass ")


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_every_64_bit_seed_is_taken(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed
