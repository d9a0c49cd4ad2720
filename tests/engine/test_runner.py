"""Engine configurations that can't work are refused when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from core.engine.runner import EngineConfig, powers
from core.errors import UsageError


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"block_size": 0},
        {"block_size": 2.5},
        {"max_model_len": 0},
        {"max_model_len": 1},
        {"max_model_len": -5},
        {"decode_buckets": ()},
        {"decode_buckets": (0, 8)},
        {"decode_buckets": [8]},
        {"decode_buckets": (4,), "max_num_seqs": 5},
        {"prefill_buckets": ()},
        {"prefill_buckets": ("32",)},
        {"mode": {"decode": "off", "encode": "off"}},
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**fields)
    name = next(iter(fields))
    assert caught.value.asked.startswith(f"{name}=")
    assert name in caught.value.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_seqs": 1, "block_size": 1, "max_model_len": 2},
        {"max_num_seqs": 3, "decode_buckets": (1, 4), "prefill_buckets": (1,)},
        {"mode": "off"},
        {"mode": {"prefill": "off"}},
        {"mode": {}},
    ],
)
def test_a_right_one_is_taken(fields: dict[str, Any]) -> None:
    assert EngineConfig(**fields) == EngineConfig(**fields)


def test_powers_end_with_the_last() -> None:
    assert powers(1, 6, 2) == (1, 2, 4, 6)
    assert powers(32, 2, 4) == (2,)
