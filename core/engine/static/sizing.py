"""Chooses how many rows a static cache has: as many as sequences are asked for, limited by memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

from core.device import Device
from core.engine.parallel.agreement import agree
from core.engine.static.rows import LEAST
from core.engine.steps.memory import DEFAULT_FRACTION, EASY, GRAPHS
from core.engine.steps.runner import EngineConfig

log = logging.getLogger("core.engine")


def choose_num_rows(
    row_bytes: int, device: Device, config: EngineConfig, *, max_model_len: int, longest_prompt: Callable[[], int]
) -> int:
    """Return how many rows of row_bytes each there are, at least one, and say so where fewer than asked for.

    longest_prompt: runs the longest prompt once and returns the bytes that it took meanwhile; called only where it
    matters. On several ranks, all have to come to the same number.
    """
    asked, num_rows = config.max_num_seqs, config.max_num_seqs
    if config.cache_tokens is not None:
        num_rows, why = config.cache_tokens // max_model_len, f"cache_tokens={config.cache_tokens}"
    elif asked > 1:
        most, total = config.memory_fraction or DEFAULT_FRACTION, device.parts.memory().total_bytes
        free = int(most * total) - device.parts.memory().taken_bytes
        if config.memory_fraction is not None or asked * row_bytes > EASY * free:
            free -= int(GRAPHS * longest_prompt())
            num_rows = max(free, 0) // max(row_bytes, 1)
            num_rows, why = num_rows if num_rows >= LEAST else 1, f"{max(free, 0) / 2**30:.2f} GiB are free"
    num_rows = max(1, min(asked, num_rows))
    if num_rows < asked:
        log.warning(
            "static cache for %d of %d sequences at once: each takes %.2f GiB of %d tokens, and %s",
            *(num_rows, asked, row_bytes / 2**30, max_model_len, why),
        )
    agree("the rows of the static cache", lambda: {"rows": num_rows})
    return num_rows
