"""Calls of `core::selective_state_update` that are worth testing; shapes as in state_space.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from core.common.ops.arguments import Draw
from core.common.ops.recurrent.slots import FORMS, LENGTHS, num_states, packed, with_slots


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


def _by_feature(
    draw: Draw,
    rows: int,
    num_seqs: int,
    form: str,
    *,
    heads: tuple[int, int] = (1, 1),
    sizes: tuple[int, int] = (12, 16),
) -> dict[str, Any]:
    """Return a call of Mamba's form, a state (H * P, N) for each sequence."""
    features = heads[0], sizes[0]
    return {
        **_arguments(draw, rows, num_seqs, form, heads=heads, sizes=sizes),
        "dt": draw(rows, *features),
        "A": -draw(*features, sizes[1], dtype=draw.wide).exp(),
        "states": draw(num_states(num_seqs, form), heads[0] * sizes[0], sizes[1], dtype=draw.wide),
        "D": draw(*features, scale=0.3, shift=1.0),
        "dt_bias": draw(*features),
    }


def _bounded(draw: Draw, call: dict[str, Any], *, every: int = 1, **bounds: float) -> dict[str, Any]:
    """Return a call whose steps are bounded in every so many-th row, in all for 1; half of the steps are out of
    bounds."""
    rows = torch.arange(len(call["x"]), device=draw.device) % every == 0
    return {**call, **(bounds or {"dt_min": 0.3, "dt_max": 1.0}), "bounded": None if every == 1 else rows}


def _bounded_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return bounds of all steps and of those of some rows, of single tokens and of sequences longer than a chunk."""
    call = partial(_arguments, draw)
    return {
        "bounded steps": _bounded(draw, _call(draw, 5, "slots")),
        "steps bounded above in some rows": _bounded(draw, _call(draw, 5, "slots"), every=2, dt_max=0.5),
        "sequences, bounded steps": _bounded(draw, packed(draw, call, (3, 70), padding=2)),
        "sequences, steps of some rows bounded": _bounded(draw, packed(draw, call, (66, 1, 40), padding=1), every=3),
        "sequences, steps bounded below": _bounded(draw, packed(draw, call, (17,)), dt_min=0.5),
    }


def _feature_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return steps of each feature: for single tokens, heads with groups, sequences of all kinds of lengths."""
    call = partial(_by_feature, draw)
    wide = partial(_by_feature, draw, heads=(3, 3), sizes=(5, 7))
    split = {**wide(4, 4, "slots"), "states": draw(num_states(4, "slots"), 3, 5, 7, dtype=draw.wide)}
    bare = {**call(3, 3, "no slots"), "D": None, "dt_bias": None, "dt_softplus": False}
    return {f"by feature, {name}": packed(draw, call, lengths) for name, lengths in LENGTHS.items()} | {
        "by feature": {**call(5, 5, "slots"), **with_slots(draw, 5, "slots")},
        "by feature, states of heads": {**split, **with_slots(draw, 4, "slots")},
        "by feature, bare steps": {**bare, "dt": draw.magnitudes(3, 1, 12)},
        "by feature, heads": packed(draw, wide, (4, 18), form="no slots", padding=2),
        "by feature, bounded": _bounded(draw, packed(draw, call, (5, 0, 17), padding=1), every=2),
    }


def _packed_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return sequences of all kinds of lengths, with padding, bare steps, one group, states that are not named."""
    call = partial(_arguments, draw)
    bare = {**packed(draw, call, (9, 20), padding=2), "D": None, "dt_bias": None, "dt_softplus": False}
    return {name: packed(draw, call, lengths) for name, lengths in LENGTHS.items()} | {
        "sequences, padding": packed(draw, call, (2, 5), padding=3),
        "sequences, bare steps": {**bare, "dt": draw.magnitudes(31, 4, scale=0.3)},
        "sequences, one group, no slots": packed(
            draw, partial(call, heads=(3, 1), sizes=(5, 7)), (4, 2), form="no slots"
        ),
    }


def calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return states in every form, groups of one head and of all, bare steps, large ones, views, states of x's
    dtype; bounds, and steps of each feature."""
    bare = {"D": None, "dt_bias": None, "dt_softplus": False}
    cut = _call(draw, 4, "slots")
    cut["B"], cut["C"] = draw(4, 2, 48).split((16, 32), dim=-1)[0], draw(4, 2, 48)[..., 20:36]
    return {form: _call(draw, 5, form) for form in FORMS} | {
        "a group for each head": _call(draw, 3, "slots", heads=(4, 4)),
        "one group": _call(draw, 3, "slots", heads=(6, 1), sizes=(5, 12)),
        "bare steps": {**_call(draw, 3, "slots"), **bare, "dt": draw.magnitudes(3, 4)},
        "large steps": {**_call(draw, 3, "slots"), "dt": draw(3, 4, scale=30.0)},
        "slices of wider rows": {**cut, "x": draw(4, 4, 24)[..., 8:16]},
        "states of the dtype of x": {**_call(draw, 3, "slots"), "states": draw(8, 4, 8, 16)},
        "one row": _call(draw, 1, "no slots", sizes=(3, 7)),
        "no rows": _call(draw, 0, "no slots"),
        **_packed_calls(draw),
        **_bounded_calls(draw),
        **_feature_calls(draw),
    }
