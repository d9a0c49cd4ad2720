"""Acme's kernels of recurrent layers: a short convolution and a selective state space, on states in slots.

As those of `kernels.py` they compute in fp32 and round once at the end. A sequence after the other: its tokens are cut
out of the step's rows, run on the state that its slot holds, and what is then left goes where the call says.

Shapes: T rows, S sequences, C channels, K taps, L inputs of a state; H heads of P features with N numbers of state.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, SELECTIVE_STATE_UPDATE
from torch import Tensor
from torch.nn import functional

from core_acme.kernels import kernel_of

Index = Tensor | None
Run = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""Takes rows and the states before them in fp32, (S, …), and returns the results of the rows and the states after."""


def _along(x: Tensor, states: Tensor, slots: Index, kept: Index, starts: Index, run: Run) -> Tensor:
    """Run a step and write its states; return the results, zero where no sequence has a row.

    Without `starts` each row is another sequence's, and all run at once.
    """
    before = (states if slots is None else states[slots]).float()
    if starts is None:
        out, after = run(slice(None), before)
    else:
        out, after = torch.zeros(x.shape, dtype=x.dtype), before.clone()
        for sequence, (first, last) in enumerate(pairwise(starts.tolist())):
            for row in range(first, last):  # one token after the other, as it will be when they are generated
                rows, own = slice(row, row + 1), slice(sequence, sequence + 1)
                out[rows], after[own] = run(rows, after[own])
    places = kept if kept is not None else slots
    states[slice(None) if places is None else places] = after.to(states.dtype)
    return out


@kernel_of(CAUSAL_CONV1D_UPDATE, keywords=False)
def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    slots: Index = None,
    kept: Index = None,
    query_starts: Index = None,
    silu: bool = False,
) -> Tensor:
    """Multiply the newest inputs by the taps, the newest first."""
    taps = weight.float()

    def run(rows: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat((before, x[rows, :, None].float()), dim=-1)
        out = (inputs[..., -taps.shape[1] :].flip(-1) * taps.flip(-1)).sum(-1)
        out = (out if bias is None else out + bias.float()).to(weight.dtype)
        return (functional.silu(out) if silu else out).to(x.dtype), inputs[..., 1:]

    return _along(x, states, slots, kept, query_starts, run)


@kernel_of(SELECTIVE_STATE_UPDATE, keywords=False)
def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = 0.0,
    bounded: Tensor | None = None,
    slots: Index = None,
    kept: Index = None,
    query_starts: Index = None,
) -> Tensor:
    """Fade the states, add what each token brings, and sum their products with C."""
    heads, features = x.shape[1:]
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = functional.softplus(step) if dt_softplus else step
    if dt_min or dt_max:
        within = step.clamp(min=dt_min or None, max=dt_max or None)
        step = within if bounded is None else torch.where(bounded.view(-1, *[1] * (dt.dim() - 1)), within, step)
    rates = A.float() if A.dim() == 3 else A.float()[:, None, None]
    step = step[..., None] if A.dim() == 3 else step[..., None, None]
    skip = 0.0 if D is None else D.float() if A.dim() == 3 else D.float()[:, None]
    B, C = (each.float().repeat_interleave(heads // each.shape[1], dim=1) for each in (B, C))

    def run(rows: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        wide, state = x[rows].float(), before.view(-1, heads, features, B.shape[2])
        state = state * (step[rows] * rates).exp() + (step[rows] * wide[..., None]) * B[rows, :, None]
        out = (state * C[rows, :, None]).sum(-1) + wide * skip
        return out.to(x.dtype), state.reshape(before.shape)

    return _along(x, states, slots, kept, query_starts, run)
