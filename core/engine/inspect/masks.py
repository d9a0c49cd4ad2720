"""Proof that an attention mask is causal, in a window or in chunks, so that the paged op may rebuild it from positions.

transformers describes a mask by a function of (batch, head, query position, key position). It is evaluated here on the
positions that can occur and compared with the claimed form; a mask that is not proven is not dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
EXHAUSTIVE = 8192
"""Up to this context every (query, key) pair is compared; beyond, rows are sampled: all keys of those where a rule is
likely to change."""
_PIECE = 64
_HEADS = 2  # two heads suffice to see that a mask depends on the head, which the op can't express


class Reach(NamedTuple):
    """How far back a token sees."""

    #: Its latest positions, itself included, that it sees at most; 0 for all.
    window: int = 0
    #: Whether windows lie side by side from the first position on, and a token sees the part of its own up to itself.
    chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at this one sees."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.chunked else max(position - self.window + 1, 0)

    def __str__(self) -> str:
        return f"chunks of {self.window}" if self.chunked else f"a window of {self.window}"


ALL = Reach()


def prove_causal(
    mask_function: MaskFunction, max_len: int, device: torch.device | str = "cpu"
) -> tuple[Reach | None, str]:
    """Return (reach, "") if the mask is causal and hides nothing within that reach, else (None, reason).

    max_len: the longest context that can occur; the proof covers positions 0 … max_len - 1 and two heads. device: where
    the function's own tensors lie, such as the padding on the left that chunks begin behind. Beyond `EXHAUSTIVE`
    positions it is no strict proof, since only a sample of the rows is compared.
    """
    try:
        mask_function = _on(device, mask_function)
        reach = _reach(mask_function, max_len)
        for rows in _rows(max_len, reach.window):
            differing = _compare(mask_function, rows, max_len, reach)
            if differing is not None:
                return None, f"at query {differing[0]}, key {differing[1]} it is neither causal nor {reach}"
    except Exception as error:
        return None, f"its function can't be evaluated on plain positions: {type(error).__name__}: {error}"
    return reach, ""


def _on(device: torch.device | str, mask_function: MaskFunction) -> MaskFunction:
    """Return the function with its positions on a device, and its result on the host."""
    return lambda *positions: torch.as_tensor(mask_function(*(each.to(device) for each in positions))).cpu()


def _evaluate(mask_function: MaskFunction, rows: Tensor, max_len: int) -> Tensor:
    zero = torch.zeros((), dtype=torch.long)
    heads = torch.arange(_HEADS)[:, None, None]
    visible = torch.as_tensor(mask_function(zero, heads, rows[:, None], torch.arange(max_len)[None, :]))
    # What does not depend on the head is computed and compared once.
    return visible.expand(*visible.shape[:-2], len(rows), max_len)


def _reach(mask_function: MaskFunction, max_len: int) -> Reach:
    """Read the reach off the mask: the last row sees all keys, or a first one sees no key 0, and one key or several."""

    def seen(row: int) -> Tensor:
        return _evaluate(mask_function, torch.tensor([row]), max_len).flatten()[:max_len]

    last = seen(max_len - 1)
    if bool(last.all()):
        return ALL
    # By halves: within the reach key 0 is seen, behind it is not. What follows another rule fails the comparison.
    low, high = 0, max_len - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seen(middle)[0] else (low, middle)
    window = int(last.sum()) if last[0] else high
    return Reach(window, chunked=window > 1 and int(seen(high).sum()) == 1)


def _rows(max_len: int, window: int) -> list[Tensor]:
    if max_len <= EXHAUSTIVE:
        return list(torch.arange(max_len).split(_PIECE))
    edges = {max_len - 1, *(2**k + d for k in range(max_len.bit_length()) for d in (-1, 0, 1))}
    edges |= {n * window + d for n in (1, 2, 3, max_len // window) for d in (-1, 0, 1)} if window else set()
    edges |= set(range(256))
    kept = torch.tensor(sorted(row for row in edges if 0 <= row < max_len))
    rows: list[Tensor] = list(kept.split(_PIECE))
    return rows


def _compare(mask_function: MaskFunction, rows: Tensor, max_len: int, reach: Reach) -> tuple[int, int] | None:
    keys = torch.arange(max_len)[None, :]
    expected = keys <= rows[:, None]
    expected &= keys >= torch.tensor([reach.first_seen(row) for row in rows.tolist()])[:, None]
    wrong = _evaluate(mask_function, rows, max_len) != expected
    if not wrong.any():
        return None
    row, key = wrong.nonzero()[0, -2:].tolist()
    return int(rows[row]), key
