"""`core::causal_conv1d_update`: a short causal convolution of each channel, for one token of each sequence or several.

Shapes: T rows, one token each, S sequences, C channels, K taps, N states of L inputs each, L at least K - 1; which
state and which rows belong to which sequence is told in slots.py.

A state holds the last L inputs of a sequence, the newest last. Where transformers' caches keep K of them, the oldest
takes no part. Source: the decode step of `causal_conv1d` (Dao), which Mamba (Gu, Dao, arXiv 2312.00752), gated delta
nets and LFM2 have before their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_ranks, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.recurrent.sequences import Places
from core.common.ops.recurrent.slots import (
    FORMS,
    LENGTHS,
    check_slots,
    num_states,
    packed,
    read,
    step_slots,
    with_slots,
    write,
)

NAME = "causal_conv1d_update"


def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Shift x into the states, and return the convolution of what they hold after each token, (T, C) in the dtype of x.

    x (T, C); states (N, C, L) of its dtype; weight (C, K), the newest input's tap last, and bias (C,), both in a dtype
    that holds x exactly. slots and kept (S,) int64, query_starts (S + 1,) int32. silu: SiLU follows. The sum is rounded
    to the dtype of weight, and so is what SiLU gives, and the result to that of x.
    """
    before, taps, length = read(states, slots), weight.shape[1], states.shape[2]
    if query_starts is None:
        inputs = torch.cat((before, x[..., None]), dim=-1)  # (S, C, L + 1)
        write(states, inputs[..., 1:], slots, kept)
        return _convolved(inputs[..., -taps:].unbind(-1), weight, bias, silu).to(x.dtype)
    places = Places.of(query_starts, x.shape[0])
    windows = [_inputs(x, before, places, places.sequence, places.offset + i) for i in range(1 - taps, 1)]
    out = places.without_padding(_convolved(windows, weight, bias, silu).to(x.dtype))
    every = torch.arange(before.shape[0], device=x.device)
    last = [_inputs(x, before, places, every, places.lengths + i) for i in range(-length, 0)]
    write(states, torch.stack(last, dim=-1), slots, kept)
    return out


def _inputs(x: Tensor, before: Tensor, places: Places, sequence: Tensor, offset: Tensor) -> Tensor:
    """Return the inputs of sequences (R,) at offsets (R,) from their first rows, (R, C); before these rows lie the
    states, before (S, C, L)."""
    length = before.shape[2]
    known = before[sequence.clamp(max=before.shape[0] - 1), :, (offset + length).clamp(0, length - 1)]
    if not x.shape[0]:
        return known
    rows = (places.starts[sequence] + offset).clamp(0, x.shape[0] - 1)
    return torch.where(offset[:, None] < 0, known, x[rows])


def _convolved(windows: Sequence[Tensor], weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Return the sums of K inputs (T, C) each, in the dtype of weight."""
    acc = at_least_fp32(weight.dtype)
    out = windows[0].to(acc) * weight[:, 0].to(acc)
    for i, window in enumerate(windows[1:], start=1):
        out = out + window.to(acc) * weight[:, i].to(acc)
    if bias is not None:
        out = out + bias.to(acc)
    out = out.to(weight.dtype)
    return functional.silu(out) if silu else out


def _fake(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _check(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
    **_: Any,
) -> None:
    check_floating(NAME, x=x, states=states, weight=weight, bias=bias)
    check_ranks(NAME, 2, x=x, weight=weight)
    check_ranks(NAME, 3, states=states)
    channels = x.shape[1]
    fits = states.shape[1] == channels and weight.shape[0] == channels
    check(fits, NAME, f"x has {channels} channels, states {states.shape[1]}, weight {weight.shape[0]}")
    check_shape(NAME, (channels,), bias=bias)
    fits = weight.shape[1] <= states.shape[2] + 1
    check(fits, NAME, f"states of {states.shape[2]} inputs are too short for {weight.shape[1]} taps")
    check(states.dtype == x.dtype, NAME, f"states are {states.dtype}, x is {x.dtype}")
    exact = torch.promote_types(x.dtype, weight.dtype) == weight.dtype
    alike = bias is None or bias.dtype == weight.dtype
    check(exact and alike, NAME, f"weight and bias must be of one dtype that holds {x.dtype} exactly")
    check_slots(NAME, x.shape[0], states, slots, kept, query_starts)


def _call(draw: Draw, num_rows: int, form: str, *, taps: int = 4, length: int = 4, **options: Any) -> dict[str, Any]:
    return {
        **_arguments(draw, num_rows, num_rows, form, taps=taps, length=length),
        **with_slots(draw, num_rows, form),
        **options,
    }


def _arguments(
    draw: Draw, num_rows: int, num_seqs: int, form: str, *, taps: int = 4, length: int = 4
) -> dict[str, Any]:
    channels = 24
    return {
        "x": draw(num_rows, channels),
        "states": draw(num_states(num_seqs, form), channels, length),
        "weight": draw(channels, taps, scale=0.5),
        "bias": draw(channels, scale=0.3),
    }


def _packed_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return sequences of all kinds of lengths, with padding, short states, states that are not named."""
    call = partial(_arguments, draw)
    short, long = partial(call, length=3), partial(call, taps=2, length=6)
    bare = {"bias": None, "silu": False}
    return {name: {**packed(draw, call, lengths), "silu": True} for name, lengths in LENGTHS.items()} | {
        "sequences, padding": {**packed(draw, call, (2, 5), padding=3), "silu": True},
        "sequences, no slots": packed(draw, call, (4, 2), form="no slots"),
        "sequences, states without the oldest input": {**packed(draw, short, (1, 2, 9), form="slots"), **bare},
        "sequences, long states": packed(draw, long, (1, 3, 8), form="slots"),
    }


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return states in every form, as long as the taps and one shorter, with and without bias, activation, fp32."""
    calls = {form: _call(draw, 5, form, silu=True) for form in FORMS}
    x = draw(5, 72)[:, 24:48]
    wide = {name: draw(*shape, dtype=draw.wide) for name, shape in {"weight": (24, 4), "bias": (24,)}.items()}
    return calls | {
        "no bias, no activation": {**_call(draw, 3, "slots", taps=3, length=3), "bias": None},
        "states without the oldest input": _call(draw, 3, "slots", length=3, silu=True),
        "long states": _call(draw, 2, "slots", taps=2, length=5),
        "wide weights": {**_call(draw, 3, "slots", silu=True), **wide},
        "slice of wider rows": {**_call(draw, 5, "slots", silu=True), "x": x},
        "one row": _call(draw, 1, "no slots", silu=True),
        "no rows": _call(draw, 0, "no slots", silu=True),
        **_packed_calls(draw),
    }


CAUSAL_CONV1D_UPDATE = declare(
    CanonicalOp(
        schema=f"{NAME}(Tensor x, Tensor(a!) states, Tensor weight, Tensor? bias=None, *, Tensor? slots=None, "
        "Tensor? kept=None, Tensor? query_starts=None, bool silu=False) -> Tensor",
        reference=causal_conv1d_update,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=41,
        indices=step_slots,
    )
)
