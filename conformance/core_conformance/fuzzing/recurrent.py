"""Random calls of recurrent layers: any slots, sequences, sizes, layouts and options."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from core.common.ops.arguments import at_least_fp32
from core_conformance.fuzzing.source import WIDTHS, Source

_SIZES = (1, 2, 8, 16, 31, 64)


def _sequences(source: Source, most: int) -> tuple[int, int, dict[str, Any]]:
    """Draw how many rows and states a call has, and the sequences: of one row each, of at most `most`, or several."""
    count = source.integer(0, most)
    if source.one_of(True, False):
        return count, *_slots(source, count)
    lengths = [source.one_of(0, 1, 2, 5, 17) for _ in range(max(count, 1))]
    states, slots = _slots(source, len(lengths))
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=source.device)
    return sum(lengths) + source.one_of(0, 1, 3), states, {**slots, "query_starts": starts}


def _slots(source: Source, count: int) -> tuple[int, dict[str, Any]]:
    """Draw how many states there are, and which of them sequences read and write: their own, or one that nobody
    writes."""
    form, none = source.one_of("none", "own", "others"), {"query_starts": None}
    if form == "none":
        return count, {"slots": None, "kept": None, **none}
    states = count + source.integer(1, 5)
    order = source.order(states - 1)[:count] + 1
    slots = torch.where(source.booleans(count, share=0.3), 0, order) if form == "others" else order
    kept = None if form == "own" else order.to(source.device)
    return states, {"slots": slots.to(source.device), "kept": kept, **none}


def convolution(source: Source) -> dict[str, Any]:
    """Draw a call of core::causal_conv1d_update."""
    channels = source.one_of(*WIDTHS)
    taps = source.integer(1, 6)
    length = max(taps - 1, 1) + source.integer(0, 2)
    rows, count, slots = _sequences(source, 6)
    dtype = source.one_of(source.dtype, at_least_fp32(source.dtype))
    return {
        "x": source.tensor(rows, channels),
        "states": source.dense(count, channels, length),
        "weight": source.tensor(channels, taps, dtype=dtype, scale=0.5),
        "bias": source.maybe(channels, dtype=dtype),
        "silu": source.one_of(False, True),
        **slots,
    }


def delta_rule(source: Source) -> dict[str, Any]:
    """Draw a call of core::gated_delta_rule."""
    heads, group = source.integer(1, 3), source.integer(1, 3)
    key, value = source.one_of(*_SIZES), source.one_of(*_SIZES)
    rows, count, slots = _sequences(source, 4)
    wide = at_least_fp32(source.dtype)
    fading = source.one_of((rows, heads * group), (rows, heads * group, key))
    return {
        "query": source.tensor(rows, heads, key),
        "key": source.tensor(rows, heads, key),
        "value": source.tensor(rows, heads * group, value),
        "decay": -source.dense(*fading, dtype=wide).abs(),
        "beta": source.dense(rows, heads * group).sigmoid(),
        "states": source.dense(count, heads * group, key, value, dtype=source.one_of(wide, source.dtype)),
        "scale": key**-0.5,
        "norm_eps": source.one_of(1e-6, 0.0),
        **slots,
    }


def state_space(source: Source) -> dict[str, Any]:
    """Draw a call of core::selective_state_update."""
    groups, group = source.integer(1, 3), source.integer(1, 3)
    features, size = source.one_of(*_SIZES), source.one_of(*_SIZES)
    rows, count, slots = _sequences(source, 4)
    heads, wide = groups * group, at_least_fp32(source.dtype)
    softplus = source.one_of(True, False)
    by_feature = source.one_of(False, True)
    each = (heads, features) if by_feature else (heads,)
    dt = source.tensor(rows, *each)
    merged = by_feature and source.one_of(True, False)
    shape = (heads * features, size) if merged else (heads, features, size)
    least, most = source.one_of((0.0, 0.0), (0.1, 0.0), (0.1, 1.5))
    return {
        "x": source.tensor(rows, heads, features),
        "dt": dt if softplus else dt.abs(),  # states that grow by steps below zero would leave the range
        "A": -source.dense(*each, *([size] if by_feature else []), dtype=wide).exp(),
        "B": source.tensor(rows, groups, size),
        "C": source.tensor(rows, groups, size),
        "states": source.dense(count, *shape, dtype=source.one_of(wide, source.dtype)),
        "D": source.maybe(*each),
        "dt_bias": source.maybe(*each) if softplus else None,
        "dt_softplus": softplus,
        "dt_min": least,
        "dt_max": most,
        "bounded": source.one_of(None, source.booleans(rows, share=0.5).to(source.device)),
        **slots,
    }
