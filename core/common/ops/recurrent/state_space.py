"""`core::selective_state_update`: a selective state space of Mamba 2, for one token of each sequence or several.

Shapes: T rows, one token each, S sequences, H heads of P features, G groups of heads, N numbers of state for each
feature, M states; which state and which rows belong to which sequence is told in slots.py.

Each feature of a head has N numbers of state. They decay by exp(step * A), A the head's own; step * x * B is added, and
the result is their product with C. Heads of a group share B and C. Source: Dao, Gu, arXiv 2405.21060, section 7; also
in Nemotron-H, Granite 4, Bamba, Falcon-H1 and Zamba 2.
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
from core.common.ops.recurrent.sequences import Places, decays, scan
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

NAME = "selective_state_update"
CHUNK = 64
"""Rows that the reference computes at once."""


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
) -> Tensor:
    """Move the states on token by token, and return their products with C: (T, H, P) in the dtype of x.

    x (T, H, P); dt (T, H), to which dt_bias (H,) is added, and whose softplus is the step if dt_softplus, else dt
    itself; A (H,), negative; B and C (T, G, N), H a multiple of G; states (M, H, P, N); D (H,): D * x is added to the
    result. slots and kept (S,) int64, query_starts (S + 1,) int32. Computed in at least fp32; only the result, and the
    states kept, are rounded.
    """
    acc = torch.promote_types(at_least_fp32(x.dtype), states.dtype)
    step = dt.to(acc)
    if dt_bias is not None:
        step = step + dt_bias.to(acc)
    if dt_softplus:
        step = functional.softplus(step)
    wide, group = x.to(acc), x.shape[1] // B.shape[1]
    B, C = (each.to(acc).repeat_interleave(group, dim=1) for each in (B, C))  # (T, H, N)
    fading, added = step * A.to(acc), step[..., None] * wide
    if query_starts is None:
        state = read(states, slots).to(acc) * fading.exp()[..., None, None] + added[..., None] * B[:, :, None]
        out = (state * C[:, :, None]).sum(-1)
    else:
        inputs, before = (added, fading, B, C), read(states, slots).to(acc)
        out, state = scan(inputs, before, query_starts, _scan_chunk, size=CHUNK)
        out = out.view(x.shape)
    write(states, state, slots, kept)
    if D is not None:
        out = out + wide * D.to(acc)[:, None]
    if query_starts is not None:
        out = Places.of(query_starts, x.shape[0]).without_padding(out)
    return out.to(x.dtype)


def _scan_chunk(state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the state after a chunk, and the chunk's results; shapes as of `ScanChunk`."""
    added, fading, B, C = inputs
    faded, between = decays(fading)
    out = C @ B.mT * between @ added + (C * faded[..., None]) @ state.mT
    return state * faded[:, -1, None, None] + (added * between[:, -1, :, None]).mT @ B, out


def _fake(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
    **_: Any,
) -> None:
    check_floating(NAME, x=x, dt=dt, A=A, B=B, C=C, states=states, D=D, dt_bias=dt_bias)
    check_ranks(NAME, 3, x=x, B=B)
    check_ranks(NAME, 4, states=states)
    rows, heads, features = x.shape
    check_shape(NAME, (rows, heads), dt=dt)
    check_shape(NAME, (heads,), A=A, D=D, dt_bias=dt_bias)
    groups, size = B.shape[1:]
    check_shape(NAME, (rows, groups, size), B=B, C=C)
    check(heads % max(groups, 1) == 0, NAME, f"{heads} heads are no multiple of {groups} groups")
    fits = tuple(states.shape[1:]) == (heads, features, size)
    check(fits, NAME, f"states must be (M, {heads}, {features}, {size}), not {tuple(states.shape)}")
    check_slots(NAME, rows, states, slots, kept, query_starts)


def _call(
    draw: Draw, rows: int, form: str, *, heads: tuple[int, int] = (4, 2), sizes: tuple[int, int] = (8, 16)
) -> dict[str, Any]:
    """Return a call. heads: and groups of them. sizes: features of a head, and numbers of state for each."""
    return {**_arguments(draw, rows, rows, form, heads=heads, sizes=sizes), **with_slots(draw, rows, form)}


def _arguments(
    draw: Draw,
    rows: int,
    num_seqs: int,
    form: str,
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (8, 16),
) -> dict[str, Any]:
    num_heads, groups = heads
    return {
        "x": draw(rows, num_heads, sizes[0]),
        "dt": draw(rows, num_heads),
        "A": -draw(num_heads, dtype=draw.wide).exp(),
        "B": draw(rows, groups, sizes[1]),
        "C": draw(rows, groups, sizes[1]),
        "states": draw(num_states(num_seqs, form), num_heads, *sizes, dtype=draw.wide),
        "D": draw(num_heads, scale=0.3, shift=1.0),
        "dt_bias": draw(num_heads),
        "dt_softplus": True,
    }


def _packed_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return sequences of all kinds of lengths, with padding, bare steps, one group, states that are not named."""
    call = partial(_arguments, draw)
    bare = {**packed(draw, call, (9, 20), padding=2), "D": None, "dt_bias": None, "dt_softplus": False}
    return {name: packed(draw, call, lengths) for name, lengths in LENGTHS.items()} | {
        "sequences, padding": packed(draw, call, (2, 5), padding=3),
        "sequences, bare steps": {**bare, "dt": draw(31, 4, scale=0.3).abs()},
        "sequences, one group, no slots": packed(
            draw, partial(call, heads=(3, 1), sizes=(5, 7)), (4, 2), form="no slots"
        ),
    }


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return states in every form, groups of one head and of all, bare steps, large ones, views, states of x's
    dtype."""
    bare = {"D": None, "dt_bias": None, "dt_softplus": False}
    cut = _call(draw, 4, "slots")
    cut["B"], cut["C"] = draw(4, 2, 48).split((16, 32), dim=-1)[0], draw(4, 2, 48)[..., 20:36]
    return {form: _call(draw, 5, form) for form in FORMS} | {
        "a group for each head": _call(draw, 3, "slots", heads=(4, 4)),
        "one group": _call(draw, 3, "slots", heads=(6, 1), sizes=(5, 12)),
        "bare steps": {**_call(draw, 3, "slots"), **bare, "dt": draw(3, 4).abs()},
        "large steps": {**_call(draw, 3, "slots"), "dt": draw(3, 4, scale=30.0)},
        "slices of wider rows": {**cut, "x": draw(4, 4, 24)[..., 8:16]},
        "states of the dtype of x": {**_call(draw, 3, "slots"), "states": draw(8, 4, 8, 16)},
        "one row": _call(draw, 1, "no slots", sizes=(3, 7)),
        "no rows": _call(draw, 0, "no slots"),
        **_packed_calls(draw),
    }


SELECTIVE_STATE_UPDATE = declare(
    CanonicalOp(
        schema=f"{NAME}(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) states, Tensor? D=None, "
        "Tensor? dt_bias=None, *, bool dt_softplus=False, Tensor? slots=None, Tensor? kept=None, "
        "Tensor? query_starts=None) -> Tensor",
        reference=selective_state_update,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=43,
        indices=step_slots,
    )
)
