"""Proof that an attention mask is causal or a causal window, so that the paged op may rebuild it from positions.

transformers describes a mask by a function of (batch, head, query position, key position). It is evaluated here on the
positions that can occur and compared with the claimed form; a mask that is not proven is not dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
EXHAUSTIVE = 8192
"""Up to this context every (query, key) pair is compared; beyond, rows are sampled: all keys of those where a rule is
likely to change."""
_PIECE = 64
_HEADS = 2  # two heads suffice to see that a mask depends on the head, which the op can't express


def prove_causal(mask_function: MaskFunction, max_len: int) -> tuple[int | None, str]:
    """Return (window, "") if the mask is causal within `window` latest positions (0: all), else (None, reason).

    max_len: the longest context that can occur; the proof covers positions 0 … max_len - 1 and two heads. Beyond
    `EXHAUSTIVE` positions it is no strict proof, since only a sample of the rows is compared.
    """
    try:
        window = _window(mask_function, max_len)
        for rows in _rows(max_len, window):
            differing = _compare(mask_function, rows, max_len, window)
            if differing is not None:
                return (
                    None,
                    f"at query {differing[0]}, key {differing[1]} it is neither causal nor a window of {window}",
                )
    except Exception as error:
        return None, f"its function can't be evaluated on plain positions: {type(error).__name__}: {error}"
    return window, ""


def _evaluate(mask_function: MaskFunction, rows: Tensor, max_len: int) -> Tensor:
    zero = torch.zeros((), dtype=torch.long)
    heads = torch.arange(_HEADS)[:, None, None]
    visible = torch.as_tensor(mask_function(zero, heads, rows[:, None], torch.arange(max_len)[None, :]))
    # What does not depend on the head is computed and compared once.
    return visible.expand(*visible.shape[:-2], len(rows), max_len)


def _window(mask_function: MaskFunction, max_len: int) -> int:
    """Read the window off the last row: how many keys it sees, or 0 where it sees all."""
    seen = int(_evaluate(mask_function, torch.tensor([max_len - 1]), max_len).flatten()[:max_len].sum())
    return 0 if seen == max_len else seen


def _rows(max_len: int, window: int) -> list[Tensor]:
    if max_len <= EXHAUSTIVE:
        return list(torch.arange(max_len).split(_PIECE))
    edges = {max_len - 1, *(2**k + d for k in range(max_len.bit_length()) for d in (-1, 0, 1))}
    edges |= {n * window + d for n in (1, 2, 3) for d in (-1, 0, 1)} if window else set()
    edges |= set(range(256))
    kept = torch.tensor(sorted(row for row in edges if 0 <= row < max_len))
    rows: list[Tensor] = list(kept.split(_PIECE))
    return rows


def _compare(mask_function: MaskFunction, rows: Tensor, max_len: int, window: int) -> tuple[int, int] | None:
    keys = torch.arange(max_len)[None, :]
    expected = keys <= rows[:, None]
    if window:
        expected &= keys > rows[:, None] - window
    wrong = _evaluate(mask_function, rows, max_len) != expected
    if not wrong.any():
        return None
    row, key = wrong.nonzero()[0, -2:].tolist()
    return int(rows[row]), key
