"""Larger calls of recurrent layers: heads as models have them, sizes off tiles, many rows and channels, prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample
from core_conformance.inputs.large_derived import Calls


def _slots(draw: Draw, rows: int, num_states: int) -> dict[str, Tensor]:
    """Return slots in no order, the first row read from where nothing was written, as one that begins."""
    order = torch.randperm(num_states - 1, generator=torch.Generator().manual_seed(rows))[:rows] + 1
    read = order.clone()
    read[:1] = 0
    return {"slots": read.to(draw.device), "kept": order.to(draw.device)}


def prompts(call: dict[str, Any], starts: tuple[int, ...]) -> dict[str, Any]:
    """Return a call with its rows as the tokens of sequences that begin at these rows; the last one is the end."""
    found, count = torch.tensor(starts, dtype=torch.int32, device=call["slots"].device), len(starts) - 1
    return {**call, "slots": call["slots"][:count], "kept": call["kept"][:count], "query_starts": found}


def conv_call(draw: Draw, rows: int, channels: int, taps: int = 4, length: int = 4) -> dict[str, Any]:
    """Return a call of `core::causal_conv1d_update` with SiLU."""
    return {
        "x": draw(rows, channels),
        "states": draw(rows + 3, channels, length),
        "weight": draw(channels, taps, scale=0.5),
        "bias": draw(channels, scale=0.3),
        **_slots(draw, rows, rows + 3),
        "silu": True,
    }


def delta_call(
    draw: Draw, rows: int, heads: tuple[int, int], sizes: tuple[int, int], *, by_feature: bool = False
) -> dict[str, Any]:
    """Return a call of `core::gated_delta_rule`. heads: of keys and values; sizes: features of each."""
    wide, fading = at_least_fp32(draw.dtype), (rows, heads[1], sizes[0]) if by_feature else (rows, heads[1])
    return {
        "query": draw(rows, heads[0], sizes[0]),
        "key": draw(rows, heads[0], sizes[0]),
        "value": draw(rows, heads[1], sizes[1]),
        "decay": -draw.magnitudes(*fading, dtype=wide),
        "beta": draw(rows, heads[1]).sigmoid(),
        "states": draw(rows + 3, heads[1], *sizes, dtype=wide),
        "scale": sizes[0] ** -0.5,
        "norm_eps": 1e-6,
        **_slots(draw, rows, rows + 3),
    }


def space_call(draw: Draw, rows: int, heads: tuple[int, int], sizes: tuple[int, int]) -> dict[str, Any]:
    """Return a call of `core::selective_state_update`. heads: and groups of them; sizes: features, and numbers of
    state."""
    wide = at_least_fp32(draw.dtype)
    return {
        "x": draw(rows, heads[0], sizes[0]),
        "dt": draw(rows, heads[0]),
        "A": -draw(heads[0], dtype=wide).exp(),
        "B": draw(rows, heads[1], sizes[1]),
        "C": draw(rows, heads[1], sizes[1]),
        "states": draw(rows + 3, heads[0], *sizes, dtype=wide),
        "D": draw(heads[0], scale=0.3, shift=1.0),
        "dt_bias": draw(heads[0]),
        "dt_softplus": True,
        **_slots(draw, rows, rows + 3),
    }


def scan_call(draw: Draw, rows: int, features: int, size: int) -> dict[str, Any]:
    """Return a call of `core::selective_state_update` whose features have a step each, as Mamba's one head has."""
    call, wide = space_call(draw, rows, (1, 1), (features, size)), at_least_fp32(draw.dtype)
    call |= {"dt": draw(rows, 1, features), "dt_bias": draw(1, features), "D": draw(1, features, scale=0.3, shift=1.0)}
    return {**call, "A": -draw(1, features, size, dtype=wide).exp(), "states": call["states"][:, 0]}


def bounded(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call that bounds the steps of every other row, a fifth of which are out of bounds."""
    rows = torch.arange(len(call["x"]), device=call["x"].device) % 2 == 0
    return {**call, "dt_min": 0.15, "dt_max": 2.0, "bounded": rows}


def convolution(draw: Draw) -> Iterator[Sample]:
    """Yield 1,024 channels."""
    yield Sample(name="1024 channels", kwargs=conv_call(draw, 4, 1024))
    yield Sample(name="prompts, 1024 channels", kwargs=prompts(conv_call(draw, 40, 1024), (0, 3, 3, 38)))


def delta_rule(draw: Draw) -> Iterator[Sample]:
    """Yield heads of 128 features, two of values to a key, and decay by feature."""
    yield Sample(name="heads of 128", kwargs=delta_call(draw, 4, (2, 4), (128, 128)))
    yield Sample(name="heads of 64, decay by feature", kwargs=delta_call(draw, 4, (4, 4), (64, 64), by_feature=True))
    yield Sample(name="prompts, heads of 128", kwargs=prompts(delta_call(draw, 150, (1, 2), (128, 128)), (0, 129, 147)))


def state_space(draw: Draw) -> Iterator[Sample]:
    """Yield heads of 64 features with 128 numbers of state, four to a group, steps within bounds, and of features."""
    yield Sample(name="heads of 64 by 128", kwargs=space_call(draw, 4, (8, 2), (64, 128)))
    call = prompts(space_call(draw, 150, (2, 1), (64, 128)), (0, 129, 147))
    yield Sample(name="prompts, heads of 64 by 128", kwargs=call)
    call = bounded(prompts(space_call(draw, 150, (2, 1), (64, 128)), (0, 129, 147)))
    yield Sample(name="prompts, bounded steps of 64 by 128", kwargs=call)
    yield Sample(name="features by 16", kwargs=scan_call(draw, 4, 256, 16))
    yield Sample(name="prompts, features by 16", kwargs=prompts(scan_call(draw, 150, 128, 16), (0, 129, 147)))


def convolution_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield many rows, an odd number of channels, and more taps."""
    yield Sample(name="65 rows of 1001 channels", kwargs=conv_call(draw, 65, 1001))
    yield Sample(name="129 rows, 7 taps", kwargs=conv_call(draw, 129, 130, 7, 6))
    yield Sample(name="prompts, 7 taps", kwargs=prompts(conv_call(draw, 129, 130, 7, 6), (0, 1, 6, 129)))


def delta_rule_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield many rows, and odd features of keys and values."""
    yield Sample(name="65 rows, keys of 33, values of 65", kwargs=delta_call(draw, 65, (1, 3), (33, 65)))
    yield Sample(name="3 rows, keys of 192, values of 257", kwargs=delta_call(draw, 3, (2, 2), (192, 257)))
    odd = prompts(delta_call(draw, 97, (1, 3), (33, 65)), (0, 31, 96))
    yield Sample(name="prompts, keys of 33, values of 65", kwargs=odd)


def state_space_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield many rows, and odd features and numbers of state."""
    yield Sample(name="65 rows, 33 by 65", kwargs=space_call(draw, 65, (3, 1), (33, 65)))
    yield Sample(name="3 rows, 130 by 257", kwargs=space_call(draw, 3, (4, 4), (130, 257)))
    yield Sample(name="prompts, 33 by 65", kwargs=prompts(space_call(draw, 97, (3, 1), (33, 65)), (0, 31, 96)))
    yield Sample(name="65 rows, 33 features by 65", kwargs=scan_call(draw, 65, 33, 65))
    odd = prompts(bounded(scan_call(draw, 97, 33, 65)), (0, 31, 96))
    yield Sample(name="prompts, 33 features by 65, bounded", kwargs=odd)


def convolution_wide(draw: Draw) -> Iterator[Sample]:
    """Yield channels past 8,192, of more than 2**20 results."""
    yield Sample(name="129 rows of 8208 channels", kwargs=conv_call(draw, 129, 8208, 3, 2))


def delta_rule_wide(draw: Draw) -> Iterator[Sample]:
    """Yield rows past 8,192, of more than 2**20 results."""
    yield Sample(name="8208 rows, 8 heads of 16", kwargs=delta_call(draw, 8208, (4, 8), (4, 16)))


def state_space_wide(draw: Draw) -> Iterator[Sample]:
    """Yield rows past 8,192, of more than 2**20 results."""
    yield Sample(name="8208 rows, 8 heads of 16", kwargs=space_call(draw, 8208, (8, 2), (16, 4)))


def _by_op(*calls: Calls) -> Mapping[str, Calls]:
    names = ("causal_conv1d_update", "gated_delta_rule", "selective_state_update")
    return MappingProxyType(dict(zip(names, calls, strict=True)))


LARGE = _by_op(convolution, delta_rule, state_space)
SIZES = _by_op(convolution_sizes, delta_rule_sizes, state_space_sizes)
WIDE = _by_op(convolution_wide, delta_rule_wide, state_space_wide)
"""Name of an op -> its calls: larger ones, those past tiles, and those past 8,192 columns and 2**20 elements."""
