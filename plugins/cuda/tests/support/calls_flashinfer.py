"""Calls of the kernels that write FlashInfer's schedules, for compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from core_cuda.flashinfer.planning import _FA2_PLAN, _FA3_PLAN, Bounds, Planned

PAGE = 16


def _planned(backend: str, tokens: int, sequences: int, chunks: int = 0) -> Planned:
    """Return a plan as it is after planning, with heads of 8B."""
    planned = Planned.__new__(Planned)
    sizes = {"heads": 32, "kv_heads": 8, "size": 128, "page": PAGE, "width": 128}
    form = {"dtype": torch.bfloat16, "scale": 0.1, "window": 0, "softcap": 0.0, "causal": True, "single": chunks > 0}
    planned.bounds = Bounds(backend=backend, tokens=tokens, sequences=sequences, **sizes, **form)
    planned.chunks = chunks
    planned._ints = torch.empty(2**16, dtype=torch.int32)
    names = _FA3_PLAN if backend == "fa3" else _FA2_PLAN
    planned._layout = dict.fromkeys(names, 1024) | {"num_tiles": 256, "tile": 128}
    return planned


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, call)."""
    for tokens, sequences in ((1024, 1), (64, 64), (4096, 256)):
        index = partial(torch.empty, dtype=torch.int32)
        shared = (index(sequences), index(sequences + 1), index(sequences, 128), 128)
        shared = (*shared, index(sequences + 2), index(sequences + 1), index(sequences * 128))
        name = f"{tokens} of {sequences}"
        yield f"tiles {name}", partial(_planned("fa2", tokens, sequences)._lay_tiles, shared)
        yield f"works {name}", partial(_planned("fa3", tokens, sequences)._deal_works, shared)
        if tokens == sequences:
            yield f"chunks {name}", partial(_planned("fa2", tokens, sequences, 2)._cut_chunks, shared)
