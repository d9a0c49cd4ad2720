"""`core::selective_state_update`: a selective state space of Mamba 2, for one token of each sequence.

Shapes: S rows, one token of a sequence each, H heads of P features, G groups of heads, N numbers of state for each
feature, M states; which state belongs to which row is told in slots.py.

Each feature of a head has N numbers of state. They decay by exp(step * A), A the head's own; step * x * B is added, and
the result is their product with C. Heads of a group share B and C. Source: Dao, Gu, arXiv 2405.21060, section 7; also
in Nemotron-H, Granite 4, Bamba, Falcon-H1 and Zamba 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_ranks, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.recurrent.slots import FORMS, check_slots, num_states, read, step_slots, with_slots, write

NAME = "selective_state_update"


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
) -> Tensor:
    """Move the states on by one token, and return their products with C: (S, H, P) in the dtype of x.

    x (S, H, P); dt (S, H), to which dt_bias (H,) is added, and whose softplus is the step if dt_softplus, else dt
    itself; A (H,), negative; B and C (S, G, N), H a multiple of G; states (M, H, P, N); D (H,): D * x is added to the
    result. slots and kept (S,) int64. Computed in at least fp32; only the result, and the states kept, are rounded.
    """
    acc = torch.promote_types(at_least_fp32(x.dtype), states.dtype)
    step = dt.to(acc)
    if dt_bias is not None:
        step = step + dt_bias.to(acc)
    if dt_softplus:
        step = functional.softplus(step)
    wide, group = x.to(acc), x.shape[1] // B.shape[1]
    B, C = (each.to(acc).repeat_interleave(group, dim=1)[:, :, None] for each in (B, C))  # (S, H, 1, N)
    fading = (step * A.to(acc)).exp()
    state = read(states, slots).to(acc) * fading[..., None, None] + (step[..., None] * wide)[..., None] * B
    write(states, state, slots, kept)
    out = (state * C).sum(-1)
    return (out if D is None else out + wide * D.to(acc)[:, None]).to(x.dtype)


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
    check_slots(NAME, rows, states, slots, kept)


def _call(
    draw: Draw, rows: int, form: str, *, heads: tuple[int, int] = (4, 2), sizes: tuple[int, int] = (8, 16)
) -> dict[str, Any]:
    """Return a call. heads: and groups of them. sizes: features of a head, and numbers of state for each."""
    num_heads, groups = heads
    return {
        "x": draw(rows, num_heads, sizes[0]),
        "dt": draw(rows, num_heads),
        "A": -draw(num_heads, dtype=draw.wide).exp(),
        "B": draw(rows, groups, sizes[1]),
        "C": draw(rows, groups, sizes[1]),
        "states": draw(num_states(rows, form), num_heads, *sizes, dtype=draw.wide),
        "D": draw(num_heads, scale=0.3, shift=1.0),
        "dt_bias": draw(num_heads),
        "dt_softplus": True,
        **with_slots(draw, rows, form),
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
    }


SELECTIVE_STATE_UPDATE = declare(
    CanonicalOp(
        schema=f"{NAME}(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) states, Tensor? D=None, "
        "Tensor? dt_bias=None, *, bool dt_softplus=False, Tensor? slots=None, Tensor? kept=None) -> Tensor",
        reference=selective_state_update,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=43,
        indices=step_slots,
    )
)
