"""`core::gated_delta_rule`: linear attention by the gated delta rule, for one token of each sequence or several.

Shapes: T rows, one token each, S sequences, G heads of queries and keys, H of values, a multiple of G, D features of a
key, V of a value, N states; which state and which rows belong to which sequence is told in slots.py.

A state M (D, V) of a head maps keys to values. It decays, and is then corrected by the part beta of what it gets wrong
of this token: M = exp(decay) * M; M += key outer (beta * (value - key @ M)); the result is query @ M. Sources: Yang,
Kautz, Hatamizadeh, arXiv 2412.06464 (Qwen3-Next, Qwen3.5, OLMo hybrid); with a decay of each feature of the key, Kimi
delta attention, arXiv 2510.26692.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_ranks, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.recurrent.sequences import decays, scan
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

NAME = "gated_delta_rule"
CHUNK, CHUNK_BY_FEATURE = 64, 16
"""Rows that the reference computes at once; fewer where decays differ by feature, since each pair of rows has D."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    *,
    scale: float,
    norm_eps: float = 0.0,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
) -> Tensor:
    """Move the states on token by token, and return what they hold for the queries: (T, H, V) in the dtype of value.

    query and key (T, G, D), value (T, H, V); the heads of H // G values in a row share a key. decay, in logarithms,
    (T, H), or (T, H, D) with one for each feature of the key; beta (T, H); states (N, H, D, V). scale multiplies the
    query. norm_eps, unless 0: query and key are first divided by `sqrt(sum of squares + norm_eps)`. slots and kept (S,)
    int64, query_starts (S + 1,) int32. Computed in at least fp32; only the result, and the states kept, are rounded.
    """
    acc = torch.promote_types(at_least_fp32(value.dtype), states.dtype)
    query, key = (_of_values(_normed(each.to(acc), norm_eps), value.shape[1]) for each in (query, key))
    if query_starts is not None:
        inputs = (query * scale, key, value.to(acc), decay.to(acc), beta.to(acc))
        size = CHUNK if decay.dim() == 2 else CHUNK_BY_FEATURE
        out, state = scan(inputs, read(states, slots).to(acc), query_starts, _scan_chunk, size=size)
        write(states, state, slots, kept)
        return out.view(value.shape).to(value.dtype)
    fading = decay.to(acc).exp()
    state = read(states, slots).to(acc) * (fading if decay.dim() == 3 else fading[..., None])[..., None]
    missing = (value.to(acc) - (state * key[..., None]).sum(-2)) * beta.to(acc)[..., None]
    state = state + key[..., None] * missing[..., None, :]
    write(states, state, slots, kept)
    return (state * (query * scale)[..., None]).sum(-2).to(value.dtype)


def _scan_chunk(state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the state after a chunk, and the chunk's results; shapes as of `ScanChunk`.

    What each row corrects depends on what the rows before it corrected: a triangular system of equations, the UT
    transform of Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484, section 3.2.
    """
    query, key, value, decay, beta = inputs
    by_feature = decay.dim() == 3
    faded, between = decays(decay)
    left = between[:, -1]  # of each row, up to the last
    if not by_feature:
        faded, left = faded[..., None], left[..., None]
    own = torch.einsum("hid,hjd,hijd->hij", key, key, between) if by_feature else key @ key.mT * between
    read_by = torch.einsum("hid,hjd,hijd->hij", query, key, between) if by_feature else query @ key.mT * between
    known = (value - (key * faded) @ state) * beta[..., None]
    missing = torch.linalg.solve_triangular(own * beta[..., None], known, upper=False, unitriangular=True)
    result = (query * faded) @ state + read_by @ missing
    return state * faded[:, -1].unsqueeze(-1) + (key * left).mT @ missing, result


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) if eps else x


def _of_values(x: Tensor, num_heads: int) -> Tensor:
    """Return the query or key of each head of values, (T, H, D)."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1) if num_heads != x.shape[1] else x


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return value.new_empty(value.shape)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    *,
    norm_eps: float = 0.0,
    slots: Tensor | None = None,
    kept: Tensor | None = None,
    query_starts: Tensor | None = None,
    **_: Any,
) -> None:
    check_floating(NAME, query=query, key=key, value=value, decay=decay, beta=beta, states=states)
    check_ranks(NAME, 3, query=query, key=key, value=value)
    check_ranks(NAME, 4, states=states)
    rows, heads, values = value.shape
    shape = (rows, key.shape[1], key.shape[2])
    check_shape(NAME, shape, query=query, key=key)
    check(heads % max(shape[1], 1) == 0, NAME, f"{heads} heads of values are no multiple of {shape[1]} heads of keys")
    check_shape(NAME, (rows, heads), beta=beta)
    check_shape(NAME, (rows, heads) if decay.dim() == 2 else (rows, heads, shape[2]), decay=decay)
    fits = tuple(states.shape[1:]) == (heads, shape[2], values)
    check(fits, NAME, f"states must be (N, {heads}, {shape[2]}, {values}), not {tuple(states.shape)}")
    check(norm_eps >= 0, NAME, f"norm_eps must be positive, or 0 for no norm, not {norm_eps}")
    check_slots(NAME, rows, states, slots, kept, query_starts)


def _call(
    draw: Draw, rows: int, form: str, *, heads: tuple[int, int] = (2, 4), sizes: tuple[int, int] = (16, 8), by: int = 2
) -> dict[str, Any]:
    """Return a call. heads: of keys and values. sizes: of keys and values. by: the rank of decay."""
    given = _arguments(draw, rows, rows, form, heads=heads, sizes=sizes, by=by)
    return {**given, **with_slots(draw, rows, form)}


def _arguments(
    draw: Draw,
    rows: int,
    num_seqs: int,
    form: str,
    *,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (16, 8),
    by: int = 2,
) -> dict[str, Any]:
    fading = (rows, heads[1], sizes[0])[:by]
    return {
        "query": draw(rows, heads[0], sizes[0]),
        "key": draw(rows, heads[0], sizes[0]),
        "value": draw(rows, heads[1], sizes[1]),
        "decay": -draw.magnitudes(*fading, dtype=draw.wide),
        "beta": draw(rows, heads[1]).sigmoid(),
        "states": draw(num_states(num_seqs, form), heads[1], *sizes, dtype=draw.wide),
        "scale": sizes[0] ** -0.5,
        "norm_eps": 1e-6,
    }


def _packed_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return sequences of all kinds of lengths, with padding, decay by feature, slow and strong decay, states that are
    not named."""
    call = partial(_arguments, draw)
    slow = packed(draw, call, (70, 3))
    slow["decay"] = slow["decay"] * 1e-3
    strong = packed(draw, call, (70, 20))
    strong["decay"] = torch.where(strong["decay"] < -1.0, -20.0, strong["decay"] * 0.05)
    strong["beta"] = torch.where(strong["beta"] < 0.5, strong["beta"] * 1e-3, 1.0)
    by_feature = packed(draw, partial(call, heads=(4, 4), by=3), (17, 1, 40))
    plain = packed(draw, partial(call, heads=(1, 3), sizes=(5, 7)), (4, 2), form="no slots")
    return {name: packed(draw, call, lengths) for name, lengths in LENGTHS.items()} | {
        "sequences, padding": packed(draw, call, (2, 5), padding=3),
        "sequences, slow decay": slow,
        "sequences, strong decay, all of a correction or hardly any": strong,
        "sequences, decay by feature": {**by_feature, "decay": by_feature["decay"] * 0.3},
        "sequences, no norm, no slots": {**plain, "norm_eps": 0.0, "key": draw(6, 1, 5, scale=0.3)},
    }


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return states in every form, decay by head and by feature, shared keys or not, without norm, of one dtype."""
    cut = _call(draw, 4, "slots")
    cut["query"], cut["key"], value = draw(4, 2, 64)[..., :16], draw(4, 2, 64)[..., 16:32], draw(4, 4, 20)
    slow = {"decay": draw.magnitudes(3, 4, dtype=draw.wide) * -1e-3}
    return {form: _call(draw, 5, form) for form in FORMS} | {
        "decay by feature": _call(draw, 5, "slots", heads=(4, 4), by=3),
        "a key for each value": _call(draw, 3, "slots", heads=(4, 4), sizes=(8, 24)),
        "one key for all values": _call(draw, 3, "slots", heads=(1, 6)),
        "no norm": {**_call(draw, 3, "slots"), "norm_eps": 0.0, "scale": 0.31, "key": draw(3, 2, 16, scale=0.25)},
        "slow decay": {**_call(draw, 3, "slots"), **slow},
        "slices of wider rows": {**cut, "value": value[..., 4:12]},
        "states of the dtype of values": {**_call(draw, 3, "slots"), "states": draw(8, 4, 16, 8)},
        "one row": _call(draw, 1, "no slots", sizes=(5, 7)),
        "no rows": _call(draw, 0, "no slots"),
        **_packed_calls(draw),
    }


GATED_DELTA_RULE = declare(
    CanonicalOp(
        schema=f"{NAME}(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor(a!) states, *, "
        "float scale, float norm_eps=0.0, Tensor? slots=None, Tensor? kept=None, Tensor? query_starts=None) -> Tensor",
        reference=gated_delta_rule,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=42,
        indices=step_slots,
    )
)
