"""Choosing tokens by their probability: aclnnTopKTopPSampleV2, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import demand
from simulator.marshal import kernel


def _kept(row: Tensor, k: int, p: float, ks_max: int) -> tuple[Tensor, Tensor]:
    """Return the places that stay, most probable first, and their logits: of the k largest, the first that sum to p."""
    values, places = row.sort(descending=True, stable=True)
    if 1 <= k <= min(ks_max, row.numel()):
        values, places = values[:k], places[:k]
    if p < 1.0:
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        stays = before < p if p > 0 else torch.arange(values.numel()) == 0
        values, places = values[stays], places[stays]
    return values, places


@kernel("aclnnTopKTopPSampleV2", "TTTTTDbIIbbTTTT")
def top_k_top_p_sample(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise: Tensor | None,
    min_p: Tensor | None,
    eps: float,
    wants_logits: bool,
    guess: int,
    ks_max: int,
    is_logits: bool,
    wants_sample: bool,
    chosen: Tensor,
    kept_logits: Tensor,
    places: Tensor,
    sorted_logits: Tensor,
) -> None:
    """The most probable token that stays; with noise, the one with the largest probability / (noise + eps)."""
    demand(min_p is None and is_logits and not wants_sample and logits.dim() == 2, "not simulated")
    demand(top_k.dtype == torch.int32 and top_p.dtype == logits.dtype, f"top_k {top_k.dtype}, top_p {top_p.dtype}")
    if wants_logits:
        kept_logits.fill_(-torch.inf)
    for index, row in enumerate(logits.float()):
        values, where = _kept(row, int(top_k[index]), float(top_p[index]), min(ks_max, 1024))
        weights = values.softmax(-1)
        if noise is not None:
            weights = weights / (noise[index, : weights.numel()].abs() + eps)
        chosen[index] = where[weights.argmax()]
        if wants_logits:
            kept_logits[index, where] = row[where]
