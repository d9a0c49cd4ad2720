"""Calls of recurrent layers at shapes of Qwen3-Next, Nemotron-H, Mamba and LFM2, for compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core_cuda.ops.recurrent.convolution import causal_conv1d_update
from core_cuda.ops.recurrent.delta_gates import delta_gates
from core_cuda.ops.recurrent.delta_rule import gated_delta_rule
from core_cuda.ops.recurrent.state_space import selective_state_update

BF16 = torch.bfloat16


def slots(rows: int) -> dict[str, Tensor]:
    return {name: torch.empty(rows, dtype=torch.int64) for name in ("slots", "kept")}


def convolution(rows: int, channels: int, taps: int, *, silu: bool) -> dict[str, Any]:
    return {
        "x": torch.empty(rows, channels, dtype=BF16),
        "states": torch.empty(rows + 2, channels, taps, dtype=BF16),
        "weight": torch.empty(channels, taps, dtype=BF16),
        "bias": None,
        "silu": silu,
        **slots(rows),
    }


def delta_rule(rows: int, *, by_feature: bool) -> dict[str, Any]:
    keys, values, size = (32, 32, 128) if by_feature else (16, 32, 128)
    return {
        "query": torch.empty(rows, keys, size, dtype=BF16),
        "key": torch.empty(rows, keys, size, dtype=BF16),
        "value": torch.empty(rows, values, size, dtype=BF16),
        "decay": torch.empty((rows, values, size) if by_feature else (rows, values)),
        "beta": torch.empty(rows, values, dtype=BF16),
        "states": torch.empty(rows + 2, values, size, size),
        "scale": size**-0.5,
        "norm_eps": 1e-6,
        **slots(rows),
    }


def state_space(rows: int) -> dict[str, Any]:
    heads, groups, size, state = 128, 8, 64, 128
    return {
        "x": torch.empty(rows, heads, size, dtype=BF16),
        "dt": torch.empty(rows, heads, dtype=BF16),
        "A": torch.empty(heads),
        "B": torch.empty(rows, groups, state, dtype=BF16),
        "C": torch.empty(rows, groups, state, dtype=BF16),
        "states": torch.empty(rows + 2, heads, size, state),
        "D": torch.empty(heads, dtype=BF16),
        "dt_bias": torch.empty(heads, dtype=BF16),
        "dt_softplus": True,
        **slots(rows),
    }


def features(rows: int) -> dict[str, Any]:
    size, state = 5120, 16
    return {
        **state_space(rows),
        "x": torch.empty(rows, 1, size, dtype=BF16),
        "dt": torch.empty(rows, 1, size, dtype=BF16),
        "A": torch.empty(1, size, state),
        "B": torch.empty(rows, 1, state, dtype=BF16),
        "C": torch.empty(rows, 1, state, dtype=BF16),
        "states": torch.empty(rows + 2, size, state),
        "D": torch.empty(1, size, dtype=BF16),
        "dt_bias": torch.empty(1, size, dtype=BF16),
    }


def packed(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its rows as prompts of four sequences."""
    return {**call, **slots(4), "query_starts": torch.empty(5, dtype=torch.int32)}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield steps of one and 64 sequences, and prompts of 256 tokens, a convolution's of 1,024 as well."""
    for tokens in (256, 1024):
        call = packed(convolution(tokens, 8192, 4, silu=True))
        yield f"convolution of prompts {tokens}", lambda call=call: causal_conv1d_update(**call)  # type: ignore[misc]
    for name, by_feature in (("delta", False), ("kimi", True)):
        call = packed(delta_rule(256, by_feature=by_feature))
        yield f"{name} of prompts", lambda call=call: gated_delta_rule(**call)  # type: ignore[misc]
    call = packed(state_space(256))
    yield "state space of prompts", lambda call=call: selective_state_update(**call)  # type: ignore[misc]
    bounded: dict[str, Any] = {"dt_min": 0.001, "bounded": torch.empty(256, dtype=torch.bool)}
    yield "bounded steps of prompts", lambda call=call: selective_state_update(**call, **bounded)  # type: ignore[misc]
    call = packed(features(256))
    yield "features of prompts", lambda call=call: selective_state_update(**call)  # type: ignore[misc]
    for rows in (1, 64):
        call = features(rows)
        yield f"features {rows}", lambda call=call: selective_state_update(**call)  # type: ignore[misc]
        call = convolution(rows, 8192, 4, silu=True)
        yield f"convolution {rows}", lambda call=call: causal_conv1d_update(**call)  # type: ignore[misc]
        call = convolution(rows, 2048, 3, silu=False)
        yield f"short convolution {rows}", lambda call=call: causal_conv1d_update(**call)  # type: ignore[misc]
        for name, by_feature in (("delta", False), ("kimi", True)):
            call = delta_rule(rows, by_feature=by_feature)
            yield f"{name} {rows}", lambda call=call: gated_delta_rule(**call)  # type: ignore[misc]
        call = state_space(rows)
        yield f"state space {rows}", lambda call=call: selective_state_update(**call)  # type: ignore[misc]
        pairs, rates = torch.empty(rows, 1, 16, 4, dtype=BF16), torch.empty(32, dtype=BF16)
        gates: dict[str, Any] = {"sizes": [32], "a_dims": 2, "b_dims": 2, "rounded": BF16}
        yield f"gates {rows}", partial(delta_gates, pairs[..., 2:], rates, rates, pairs[..., :2], **gates)
        wide = torch.empty(rows, 32 * 128, dtype=BF16)
        by_feature = partial(delta_gates, wide, rates, wide[0], None, sizes=[32, 128], a_dims=1)
        yield f"gates by feature {rows}", by_feature
