"""The check that a model computes the same on the paged cache as by its own forward, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.engine.inspect.attention import SERVE, NotPageable, set_implementation
from core.engine.inspect.cache_codes import Rounding, amplification
from core.engine.inspect.probe import (
    SHORT,
    counts_from_zero,
    largest_difference,
    own_logits,
    probe_sequences,
    rounding_bound,
)

RunProbes = Callable[[Sequence[list[int]]], Mapping[str, list[Tensor]]]
"""Returns, by phase, the logits of each sequence's last two tokens, the last of them computed by that phase."""


def probe_limits(
    num_blocks: int, block_size: int, *, max_model_len: int, max_num_seqs: int, num_drafts: int
) -> tuple[int, int]:
    """Return the most tokens of a probe, and the most probes at once, that an empty cache of so many blocks holds.

    A cache that barely holds the longest context gets a shorter long probe, so that a short one still shares its steps.
    Where even two of the shortest have no room, there is one probe.
    """
    short = -(-(SHORT + 1 + num_drafts) // block_size)
    longest = min(block_size * max(num_blocks - short, num_blocks // 2), max_model_len)
    # The shortest probe has a token for prefill and one for decode.
    return (longest, max_num_seqs) if longest >= 2 and max_num_seqs > 1 else (max_model_len, 1)


def check_same_function(
    model: Any, run_probes: RunProbes, *, max_model_len: int, max_num_seqs: int, rounding: Rounding | None
) -> None:
    """Compare a prefill and one decode step with the model's own forward; raise `NotPageable` if they differ.

    This finds models that keep state outside attention (recurrent layers, shared caches), and models whose sequences
    see each other: a long and a short sequence share both steps, and each is compared with a run of its own.
    rounding: of a quantised cache. It is compared with the forward on transformers' cache of the same codes, where
    differences may be larger by `amplification`.
    """
    if not counts_from_zero(model):
        raise NotPageable("it takes no position_ids, or counts otherwise than 0, 1, 2, …")
    probes = probe_sequences(model, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    expected = own_logits(model, probes)
    bound = rounding_bound(model, probes, expected)
    if rounding is not None:
        plain, expected = expected, own_logits(model, probes, rounding.caching)
        if all(torch.equal(one, other) for one, other in zip(plain, expected, strict=True)):
            raise NotPageable(
                f"its forward takes keys and values past transformers' cache, so {rounding.dtype} of them "
                "can't be checked"
            )
        bound *= amplification(bound, rounding.dtype)
    set_implementation(model, SERVE)
    for phase, logits in run_probes(probes).items():
        difference = largest_difference(logits, expected)
        if not difference <= bound:
            raise NotPageable(
                f"a prefill and one {phase} step on the paged cache differ from its own forward by "
                f"{difference:.2g}, more than rounding ({bound:.2g}): it keeps state outside attention, or mixes "
                "sequences of a step"
            )
