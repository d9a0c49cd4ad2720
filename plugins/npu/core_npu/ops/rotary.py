"""Rotary position embedding of query and key, alone and behind their norms, by `npu_rotary_mul`.

Shapes: x (..., D), cos and sin as in core/common/ops/rotary/rotation.py; R rotated features. The kernel sees rows and
heads with the tables of the rows: (T, N, R) and (T, 1, R), or (B, S, N, R) and (1, S, 1, R) where sequences share a
table. Its other forms, with the heads before the tokens, have bounds that decode does not meet. It distinguishes the
forms only by sizes, so only these two are used.

`npu_apply_rotary_pos_emb`, which turns query and key at once, is not: it writes into both, which its schema denies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.layout import layouts_of, moved
from core.common.ops.rotary import rotation as canonical
from core_npu.ops.conditions import DTYPES, dtypes, listed
from core_npu.ops.layout import rows_of
from core_npu.ops.norm import rms_norm, rms_norm_condition

__all__ = [
    "qk_norm_rotary",
    "qk_norm_rotary_condition",
    "rotary",
    "rotary_condition",
    "rotary_single",
    "rotary_single_condition",
]

MAX_FEATURES = 896
"""Exclusive upper limit of the number of rotated features."""

MAX_HEADS = 1000
"""Exclusive upper limit of the number of heads, and of sequences times heads if sequences share a table."""

_MODES = {"half": "half", "interleaved": "interleave", "deinterleave": "half"}
"""Style -> mode of the kernel. Deinterleaved pairs are first put half by half."""


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Do what `core::rotary` does, for calls that `rotary_condition` lets pass."""
    options = {name: options[name] for name in _OPTIONS if name in options}
    return _turned(query, cos, sin, **options), _turned(key, cos, sin, **options)


def rotary_single(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """Do what `core::rotary_single` does, for calls that `rotary_single_condition` lets pass."""
    return _turned(x, cos, sin, **options)


def qk_norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Do what `core::qk_norm_rotary` does, for calls that `qk_norm_rotary_condition` lets pass."""
    normed = (rms_norm(query, query_weight, eps, offset=offset), rms_norm(key, key_weight, eps, offset=offset))
    return rotary(*normed, cos, sin, **options)


_OPTIONS = ("style", "rotary_dim", "compute_dtype", "out_dtype")


def _turned(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    rotary_dim: int = 0,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x with its first R features rotated, laid out as `core::rotary` has it."""
    size, out = x.shape[-1], out_dtype or x.dtype
    width = rotary_dim or size
    tables, options = (cos, sin), {"style": style, "rotary_dim": rotary_dim}
    if not x.numel():
        return _laid_out(x.new_empty(x.shape, dtype=out), x, tables, options)
    # The kernel rounds wide tables to x's dtype; the op promotes x to theirs.
    wide = compute_dtype or torch.promote_types(x.dtype, cos.dtype)
    part = (x if width == size else x[..., :width]).to(wide)
    if style == "deinterleave":
        part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    cos, sin = (_widened(table, width, style).to(wide) for table in (cos, sin))
    turned = _rotate(part, cos, sin, _MODES[style]).to(out)
    if width < size:
        turned = torch.cat((turned, x[..., width:].to(out)), dim=-1)
    return _laid_out(turned, x, tables, options)


def _laid_out(turned: Tensor, x: Tensor, tables: tuple[Tensor, Tensor], options: dict[str, Any]) -> Tensor:
    """Return the result laid out as x where all of it is rotated in place of itself, else as torch.cat leaves it."""
    if options["rotary_dim"] in (0, x.shape[-1]) and options["style"] != "deinterleave":
        rows = rows_of(x)
        return rows.give(rows.take(turned).contiguous())
    if all(each.is_contiguous() for each in (x, *tables)):
        return turned.contiguous()
    return moved(turned, layouts_of(canonical.rotary_single, (x, *tables), options)[0])


def _widened(table: Tensor, width: int, style: str) -> Tensor:
    """Repeat one value per pair to one per feature of the result."""
    if table.shape[-1] == width:
        return table
    return table.repeat_interleave(2, dim=-1) if style == "interleaved" else torch.cat((table, table), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Return x (..., R) turned by tables (..., R), which one dimension of x, of heads, shares."""
    cos, sin = (table.view((1,) * (x.dim() - table.dim()) + tuple(table.shape)) for table in (cos, sin))
    heads_first = _heads_dim(x.shape, cos.shape) == x.dim() - 3
    if heads_first:
        x, cos, sin = (each.transpose(-3, -2) for each in (x, cos, sin))
    turned = _in_form(x, cos, sin, mode)
    if not heads_first:
        return turned
    # Where one of the two has size one, the order is the same: as contiguous as it is said to be.
    one = 1 in turned.shape[-3:-1]
    return turned.view(turned.transpose(-3, -2).shape) if one else turned.transpose(-3, -2)


def _in_form(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Return x (B, S, N, R) or (T, N, R) turned by tables with one head."""
    kernel = torch.ops.npu.npu_rotary_mul
    if x.dim() == 3:
        turned: Tensor = kernel(x, cos.contiguous(), sin.contiguous(), mode)
        return turned
    batch, _, heads, width = x.shape
    if cos.shape[0] != batch and batch * heads < MAX_HEADS:
        return kernel(x, cos.contiguous(), sin.contiguous(), mode)  # type: ignore[no-any-return]  # torch.ops
    own = (*x.shape[:2], 1, width)
    cos, sin = (table.expand(own).reshape(-1, 1, width) for table in (cos, sin))
    return kernel(x.reshape(-1, heads, width), cos, sin, mode).view(x.shape)  # type: ignore[no-any-return]


def _heads_dim(shape: torch.Size, table: torch.Size) -> int:
    """Return which dimension of x holds heads that share a row of the tables: -3 or -2 from the end, counted from 0."""
    before, behind = len(shape) - 3, len(shape) - 2
    # If both dimensions fit, there is one token or one head, and either reading gives the same rows.
    return before if table[before] == 1 and not (table[behind] == 1 and shape[behind] > 1) else behind


def rotary_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::rotary`, or None."""
    return _refusal(call, "query") or _refusal(call, "key")


def rotary_single_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::rotary_single`, or None."""
    return _refusal(call, "x")


def qk_norm_rotary_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::qk_norm_rotary`, or None."""
    for name in ("query", "key"):
        norm = {"x": call.args[name], "weight": call.args[f"{name}_weight"], "offset": call.args["offset"]}
        norm |= {"compute_dtype": call.args["norm_compute_dtype"], "out_dtype": None}
        reason = rms_norm_condition(OpCall(op="core::rms_norm", args=norm))
        if reason is not None:
            return f"{name}: {reason}"
    return rotary_condition(call)


def _refusal(call: OpCall, name: str) -> str | None:
    x, cos, compute = call.args[name], call.args["cos"], call.args["compute_dtype"]
    if compute not in (None, *DTYPES):
        return f"compute_dtype is {compute}, and the kernel takes {listed(DTYPES)}"
    if x.dim() not in (3, 4):
        return f"{name} has rank {x.dim()}, and the kernel takes 3 or 4"
    width = call.args["rotary_dim"] or x.shape[-1]
    if width >= MAX_FEATURES:
        return f"{width} features are rotated, and the kernel takes fewer than {MAX_FEATURES}"
    table = torch.Size((1,) * (x.dim() - cos.dim()) + tuple(cos.shape))
    heads = _heads_dim(x.shape, table)
    rows = 2 * x.dim() - 5 - heads  # the other one of the two dimensions before the last
    if table[heads] != 1:
        return f"each head of {name} has a row of the tables, and the kernel takes one for all heads"
    if table[rows] != x.shape[rows]:
        return f"tokens of {name} share a row of the tables, and the kernel takes one for each"
    if x.shape[heads] >= MAX_HEADS:
        return f"{name} has {x.shape[heads]} heads, and the kernel takes fewer than {MAX_HEADS}"
    return dtypes((name, "cos", "sin"))(call)
