"""`core::selective_state_update`: a selective state space, for one token of each sequence or several.

Shapes: T rows, one token each, S sequences, H heads of P features, G groups of heads, N numbers of state for each
feature, M states; which state and which rows belong to which sequence is told in slots.py.

Each feature of a head has N numbers of state. They decay by exp(step * A); step * x * B is added, and the result is
their product with C. Heads of a group share B and C. There are two forms:

- Of Mamba 2, a step and an A for each head. Source: Dao, Gu, arXiv 2405.21060, section 7; also in Nemotron-H, Granite
  4, Bamba, Falcon-H1 and Zamba 2.
- Of Mamba, a step for each feature and an A for each number of its state. Source: Gu, Dao, arXiv 2312.00752, section
  3; also in Falcon Mamba, Jamba and Zamba.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import at_least_fp32, check, check_floating, check_ranks, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.recurrent.sequences import Places, decays, scan
from core.common.ops.recurrent.slots import check_slots, read, step_slots, write
from core.common.ops.recurrent.state_space_calls import calls

NAME = "selective_state_update"
CHUNK = 64
"""Rows that the reference computes at once."""
FEW = 16
"""Rows of a chunk where the reference computes one after the other."""


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
    dt_min: float = 0.0,
    dt_max: float = 0.0,
    bounded: Tensor | None = None,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
) -> Tensor:
    """Move the states on token by token, and return their products with C: (T, H, P) in the dtype of x.

    x (T, H, P); dt (T, H), to which dt_bias (H,) is added, and whose softplus is the step if dt_softplus, else dt
    itself; A (H,), negative; B and C (T, G, N), H a multiple of G; states (M, H, P, N); D (H,): D * x is added to the
    result. With A (H, P, N) dt is (T, H, P), dt_bias and D are (H, P); states may then be (M, H * P, N).
    dt_min, dt_max: the least and the most that a step may be, 0 for no bound; bounded (T,) bool: for these rows alone.
    slots and kept (S,) int64, query_starts (S + 1,) int32. Computed in at least fp32; only the result, and the
    states kept, are rounded.
    """
    acc = torch.promote_types(at_least_fp32(x.dtype), states.dtype)
    step = _steps(dt.to(acc), None if dt_bias is None else dt_bias.to(acc), dt_softplus, dt_min, dt_max, bounded)
    wide, group, by_feature = x.to(acc), x.shape[1] // B.shape[1], A.dim() == 3
    B, C = (each.to(acc).repeat_interleave(group, dim=1) for each in (B, C))  # (T, H, N)
    rates, before = A.to(acc), read(states, slots).to(acc).view(-1, *x.shape[1:], B.shape[2])
    added = step * wide if by_feature else step[..., None] * wide
    if query_starts is None:
        faded = (step[..., None] * rates).exp() if by_feature else (step * rates).exp()[..., None, None]
        state = before * faded + added[..., None] * B[:, :, None]
        out = (state * C[:, :, None]).sum(-1)
    elif by_feature:
        rows = partial(_scan_rows, rates)
        out, state = scan((added, step, B, C), before, query_starts, rows, size=FEW)
    else:
        out, state = scan((added, step * rates, B, C), before, query_starts, _scan_chunk, size=CHUNK)
    write(states, state.view(-1, *states.shape[1:]), slots, kept)
    out = out.view(x.shape)
    if D is not None:
        out = out + wide * (D.to(acc) if by_feature else D.to(acc)[:, None])
    if query_starts is not None:
        out = Places.of(query_starts, x.shape[0]).without_padding(out)
    return out.to(x.dtype)


def _steps(
    dt: Tensor, bias: Tensor | None, softplus: bool, least: float, most: float, bounded: Tensor | None
) -> Tensor:
    """Return the steps, of the shape of dt."""
    step = dt if bias is None else dt + bias
    if softplus:
        step = functional.softplus(step)
    if not least and not most:
        return step
    within = step.clamp(min=least or None, max=most or None)
    return within if bounded is None else torch.where(bounded.view(-1, *[1] * (dt.dim() - 1)), within, step)


def _scan_rows(rates: Tensor, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the state after a chunk, and the chunk's results, row by row; shapes as of `ScanChunk`.

    rates (H, P, N): decays differ by number of state, so that no product of matrices is several rows.
    """
    added, steps, B, C = (each.unbind(1) for each in inputs)
    outs = []
    for new, step, keys, queries in zip(added, steps, B, C, strict=True):
        state = state * (step[..., None] * rates).exp() + new[..., None] * keys[:, None]
        outs.append((state * queries[:, None]).sum(-1))
    return state, torch.stack(outs, dim=1)


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
    dt_min: float = 0.0,
    dt_max: float = 0.0,
    bounded: Tensor | None = None,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
    **_: Any,
) -> None:
    check_floating(NAME, x=x, dt=dt, A=A, B=B, C=C, states=states, D=D, dt_bias=dt_bias)
    check_ranks(NAME, 3, x=x, B=B)
    rows, heads, features = x.shape
    groups, size = B.shape[1:]
    check(A.dim() in (1, 3), NAME, f"A must have 1 or 3 dimensions, not {A.dim()}")
    each = (heads, features) if A.dim() == 3 else (heads,)
    check_shape(NAME, (rows, *each), dt=dt)
    check_shape(NAME, each, D=D, dt_bias=dt_bias)
    check_shape(NAME, (*each, size) if A.dim() == 3 else each, A=A)
    check_shape(NAME, (rows, groups, size), B=B, C=C)
    check(heads % max(groups, 1) == 0, NAME, f"{heads} heads are no multiple of {groups} groups")
    shapes = [(heads, features, size), *([(heads * features, size)] if A.dim() == 3 else [])]
    fits = tuple(states.shape[1:]) in shapes
    check(fits, NAME, f"states must be (M, {heads}, {features}, {size}), not {tuple(states.shape)}")
    check(dt_min >= 0 and dt_max >= 0, NAME, f"dt_min {dt_min} and dt_max {dt_max} must be positive, or 0 for no bound")
    check_shape(NAME, (rows,), bounded=bounded)
    fits = bounded is None or bounded.dtype == torch.bool
    check(fits, NAME, f"bounded must be torch.bool, not {None if bounded is None else bounded.dtype}")
    check_slots(NAME, rows, states, slots, kept, query_starts)


SELECTIVE_STATE_UPDATE = declare(
    CanonicalOp(
        schema=f"{NAME}(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) states, Tensor? D=None, "
        "Tensor? dt_bias=None, *, bool dt_softplus=False, float dt_min=0.0, float dt_max=0.0, Tensor? bounded=None, "
        "Tensor? slots=None, Tensor? kept=None, Tensor? query_starts=None) -> Tensor",
        reference=selective_state_update,
        fake=_fake,
        check=_check,
        calls=calls,
        seed=43,
        indices=step_slots,
    )
)
