"""`core::rotary_table`: cos and sin of the angles by which rotary embedding turns, from positions and frequencies.

Shapes: positions (..., T), usually (B, T): B sequences, T tokens. inv_freq (F,): radians per position of each pair of
features, F half the number of rotated features (Su et al., arXiv 2104.09864). cos and sin (..., T, W), by layout:

    half         W = 2 F, all angles and then all once more           Llama, Qwen, Gemma
    interleaved  W = 2 F, each angle twice, side by side              Cohere
    pairs        W = F                                                gpt-oss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32, check, check_choice, check_floating, check_ranks
from core.common.ops.declaration import CanonicalOp, declare

LAYOUTS = ("half", "interleaved", "pairs")


def rotary_table(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    layout: str = "half",
    scaling: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `scaling * cos(positions * inv_freq)` and the same of sin, contiguous, for each position and frequency.

    positions: integers; inv_freq: floating. Both are cast to at least fp32, where the product, the function and the
    scaling round; the results to out_dtype, by default none. The angles of long contexts are many turns (131072 at the
    first frequency): cos and sin have to reduce them exactly.
    """
    wide = at_least_fp32(inv_freq.dtype)
    angles = positions.to(wide).unsqueeze(-1) * inv_freq.to(wide)
    if layout == "half":
        angles = torch.cat((angles, angles), dim=-1)
    elif layout == "interleaved":
        angles = angles.repeat_interleave(2, dim=-1)
    out = out_dtype or wide
    return (angles.cos() * scaling).to(out), (angles.sin() * scaling).to(out)


def _fake(
    positions: Tensor, inv_freq: Tensor, *, layout: str = "half", out_dtype: torch.dtype | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    width = inv_freq.shape[0] * (1 if layout == "pairs" else 2)
    shape, dtype = (*positions.shape, width), out_dtype or at_least_fp32(inv_freq.dtype)
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


def _check(positions: Tensor, inv_freq: Tensor, *, layout: str = "half", **_: Any) -> None:
    integers = not positions.is_floating_point() and not positions.is_complex() and positions.dtype != torch.bool
    check(integers, "rotary_table", f"positions must be integers, not {positions.dtype}")
    check_floating("rotary_table", inv_freq=inv_freq)
    check_ranks("rotary_table", 1, inv_freq=inv_freq)
    check_choice("rotary_table", "layout", layout, LAYOUTS)


def inverse_frequencies(count: int, dtype: torch.dtype, device: torch.device, base: float = 10_000.0) -> Tensor:
    """Return the frequencies (count,) of the paper, in at least fp32, for samples."""
    exponents = -torch.arange(count, dtype=torch.float64) / count
    return (base**exponents).to(at_least_fp32(dtype)).to(device)


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every layout, scaled tables, wide results, long contexts, frequencies in half precision, no tokens."""
    dtype, device = draw.dtype, draw.device
    few = {"inv_freq": inverse_frequencies(8, dtype, device)}
    many = {"inv_freq": inverse_frequencies(64, dtype, device, base=500_000.0)}
    positions = torch.arange(3, 13, device=device).view(2, 5)
    long = torch.tensor([[0, 1, 4095, 32_767, 104_857, 131_071, 131_072]], dtype=torch.int32, device=device)
    grid = torch.arange(24, device=device).view(3, 2, 4).transpose(1, 2)
    scaled = {**few, "scaling": 1.2079441541679836, "out_dtype": dtype}
    return {layout: {"positions": positions, **few, "layout": layout, "out_dtype": dtype} for layout in LAYOUTS} | {
        "scaled": {"positions": positions, **scaled},
        "kept wide": {"positions": positions[0], "inv_freq": few["inv_freq"][:7]},
        "long context": {"positions": long, **many, "out_dtype": dtype},
        "frequencies in the op's dtype": {"positions": positions, "inv_freq": draw(8, scale=0.1, shift=0.5)},
        "three rows of positions": {"positions": grid, **scaled},
        "decode": {"positions": positions[:1, 4:], **few, "out_dtype": dtype},
        "no tokens": {"positions": positions[:, :0], **few},
    }


ROTARY_TABLE = declare(
    CanonicalOp(
        schema='rotary_table(Tensor positions, Tensor inv_freq, *, str layout="half", float scaling=1.0, '
        "ScalarType? out_dtype=None) -> (Tensor cos, Tensor sin)",
        reference=rotary_table,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=23,
    )
)
