"""Rotary position embedding: aclnnRotaryPositionEmbeddingV2, pair by pair, in the forms documented for A2 and A3."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import demand
from simulator.marshal import kernel

HALF, INTERLEAVE = 0, 1
BSND = 1


def _check_form(x: Tensor, table: Tensor, mode: int) -> None:
    """Raise unless rows and tables are of one of the forms TND and BSND; those with heads first are not simulated."""
    width = x.shape[-1]
    demand(table.dim() == x.dim() and table.shape[-1] == width, f"tables {tuple(table.shape)} for {tuple(x.shape)}")
    demand(width % 2 == 0 and width < 896, f"{width} features")
    if x.dim() == 3:
        tokens, heads, _ = x.shape
        demand(tuple(table.shape[:2]) in ((tokens, 1), (tokens, heads)), f"TND with tables {tuple(table.shape)}")
        demand(heads < 1000, f"{heads} heads")
        return
    batch, tokens, heads, _ = x.shape
    known = [(1, tokens, 1)] + ([(batch, tokens, 1), (batch, tokens, heads)] if mode == HALF else [])
    demand(tuple(table.shape[:3]) in known, f"BSND {tuple(x.shape)} with tables {tuple(table.shape)}, mode {mode}")
    demand((batch * heads if mode == INTERLEAVE else max(batch, heads)) < 1000, f"{batch} sequences, {heads} heads")


@kernel("aclnnRotaryPositionEmbeddingV2", "TTTITT")
def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, rotate: Tensor | None, out: Tensor) -> None:
    """Turn each pair of features by its angle; mode 0 pairs features a half apart, mode 1 neighbours."""
    demand(x.dtype == cos.dtype == sin.dtype and x.dtype.is_floating_point, f"x {x.dtype}, tables {cos.dtype}")
    demand(rotate is None and mode in (HALF, INTERLEAVE), "not simulated")
    demand(cos.shape == sin.shape, "tables of two shapes")
    _check_form(x, cos, mode)
    width = x.shape[-1]
    places = torch.arange(width)
    first, second = (places[: width // 2], places[width // 2 :]) if mode == HALF else (places[::2], places[1::2])
    wide, cosines, sines = (each.to(torch.float32) for each in (x, cos, sin))
    turned = torch.empty(x.shape, dtype=torch.float32)
    turned[..., first] = wide[..., first] * cosines[..., first] - wide[..., second] * sines[..., first]
    turned[..., second] = wide[..., second] * cosines[..., second] + wide[..., first] * sines[..., second]
    out.copy_(turned)


@kernel("aclnnApplyRotaryPosEmbV2", "TTTTIC")
def rotary_of_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: int, mode: str) -> None:
    """Turn query and key where they are; pairs of features half a head apart."""
    demand(mode == "half" and layout == BSND, "not simulated")
    demand(
        query.dim() == 4 and cos.shape == sin.shape == (*query.shape[:2], 1, query.shape[3]), "BSND, a table a token"
    )
    width = query.shape[-1] // 2
    for x in (query, key):
        first, second = (part.to(torch.float32) for part in x.split(width, dim=-1))
        (c1, c2), (s1, s2) = ([part.to(torch.float32) for part in table.split(width, dim=-1)] for table in (cos, sin))
        x.copy_(torch.cat((first * c1 - second * s1, second * c2 + first * s2), dim=-1))
