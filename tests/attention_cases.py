"""What tests of attention kernels share: calls of `core::attention` of every kind, and how a kernel is judged on one.

What holds no position of an earlier step is NaN.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from core.common.numerics import Fp64Mode, judge_pooled
from core.common.ops.attention.paged import ATTENTION
from tests.kernel_cases import CPU, moved, randn

Call = dict[str, Any]
CACHES = ("key_cache", "value_cache")
NEW = ("query", "key", "value")
CODES = torch.float8_e4m3fn


def judged(op: Any, kernel: Any, call: Call, device: torch.device, **config: Any) -> Tensor:
    """Judge a kernel's result and the caches it leaves, block 0 apart, and return the result."""
    ours, eager = ({n: v.clone() if n in CACHES else v for n, v in moved(call, d).items()} for d in (device, CPU))
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in call.items()}
    if call["key_cache"].dtype == CODES:
        wide |= {n: call[n].clone() for n in CACHES}
    taken = {name: v for name, v in ours.items() if name not in ("max_query_len", "mask")}
    result, expected = kernel(**taken, **config), op.reference(**eager)
    with Fp64Mode():
        exact = op.reference(**wide)
    assert (result.stride(), result.dtype) == (expected.stride(), expected.dtype)
    verdict = judge_pooled([result.cpu()], [expected], [exact])
    assert verdict.passed, verdict
    assert not result[int(call["query_starts"][-1]) :].any()
    for name in CACHES:
        left, wanted, true = ours[name].cpu(), eager[name][1:], wide[name][1:]
        assert torch.equal(left[0].view(torch.uint8), call[name][0].view(torch.uint8))  # nobody writes padding
        left, there = left[1:], ~wanted.float().isnan()
        assert torch.equal(there, ~left.float().isnan())
        if op is ATTENTION or name == "value_cache":
            assert torch.equal(left[there], wanted[there])
        else:
            verdict = judge_pooled([left[there]], [wanted[there]], [true[there]])
            assert verdict.passed, verdict
    return result


def steps(
    lens: tuple[tuple[int, int], ...],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (2, 1),
    sizes: tuple[int, int] = (16, 16),
    page: int = 4,
    padding: tuple[int, int] = (0, 0),
    **options: Any,
) -> Call:
    """Build a call: lens gives (new tokens, length) per sequence, padding more (tokens, sequences).

    Query, key and value are parts of one merged projection if their sizes agree. What holds no position of an earlier
    step is NaN: slots of the cache, and the rows of padding.
    """
    num_seqs, blocks_each = len(lens) + padding[1], max(-(-length // page) for _, length in lens) + 1
    order = 1 + torch.randperm(num_seqs * blocks_each, generator=torch.Generator().manual_seed(3))
    table = order.view(num_seqs, blocks_each).to(torch.int32)
    num_real = sum(new for new, _ in lens)
    if sizes[0] == sizes[1]:
        merged = randn(num_real + padding[0], heads[0] + 2 * heads[1], sizes[0], dtype=dtype, seed=4)
        merged[num_real:] = torch.nan
        parts = merged.split([heads[0], heads[1], heads[1]], dim=1)
    else:
        widths = ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))
        parts = tuple(randn(num_real + padding[0], *width, dtype=dtype, seed=i) for i, width in enumerate(widths))
    caches = [torch.full((1 + num_seqs * blocks_each, page, heads[1], size), torch.nan, dtype=dtype) for size in sizes]
    slots = []
    for i, (new, length) in enumerate(lens):
        places = torch.arange(length)
        own = table[i, places // page].long() * page + places % page
        for cache, size in zip(caches, sizes, strict=True):
            old = randn(length - new, heads[1], size, dtype=dtype, seed=i)
            cache.view(-1, heads[1], size)[own[: length - new]] = old
        slots += own[length - new :].tolist()
    starts = list(itertools.accumulate((new for new, _ in lens), initial=0))
    return {
        **dict(zip(NEW, parts, strict=True)),
        **dict(zip(CACHES, caches, strict=True)),
        "block_table": table,
        "slot_mapping": torch.tensor(slots + [0] * padding[0], dtype=torch.int64),
        "seq_lens": torch.tensor([length for _, length in lens] + [0] * padding[1], dtype=torch.int32),
        "query_starts": torch.tensor(starts + starts[-1:] * padding[1], dtype=torch.int32),
        "scale": sizes[0] ** -0.5,
        **options,
    }


PROMPTS = ((1, 1), (17, 17), (34, 34))
CHUNKS = ((20, 61), (1, 33), (0, 0), (3, 16), (17, 17))
CASES: dict[str, Call] = {
    "prompts": {"lens": PROMPTS},
    "chunks": {"lens": CHUNKS},
    "single tokens": {"lens": ((1, 1), (1, 16), (1, 17), (1, 40))},
    "padding": {"lens": CHUNKS, "padding": (23, 3)},
    "padding alone": {"lens": ((0, 0), (3, 3)), "padding": (40, 1)},
    "window below a tile": {"lens": CHUNKS, "window": 5},
    "window of one": {"lens": CHUNKS, "window": 1},
    "window over tiles": {"lens": ((40, 90), (1, 60)), "window": 40},
    "window of a tile": {"lens": (*PROMPTS, (1, 50)), "window": 16},
    "window above all": {"lens": CHUNKS, "window": 500},
    **{
        name: {"lens": ((20, 61), (1, 33), (0, 0), (3, 17), (17, 17), (40, 90)), "window": size, "chunked": True}
        for name, size in (("chunks below a tile", 5), ("chunks of a tile", 16), ("chunks over tiles", 40))
    },
    "both ways": {"lens": CHUNKS, "causal": False},
    "both ways in a window": {"lens": ((20, 61), (33, 40)), "causal": False, "window": 7},
    "soft-cap": {"lens": CHUNKS, "softcap": 1.5, "padding": (3, 0)},
    "high soft-cap": {"lens": CHUNKS, "softcap": 50.0, "scale": 0.9},
    "sinks": {"lens": CHUNKS, "sinks": torch.tensor([-1.0, 0.5, 3.0, 30.0]), "heads": (4, 2)},
    "sinks in a window": {"lens": CHUNKS, "sinks": torch.tensor([-torch.inf, 3.0]), "window": 3},
    "sinks in chunks": {"lens": CHUNKS, "sinks": torch.tensor([-1.0, 3.0]), "window": 16, "chunked": True},
    "pages of one": {"lens": CHUNKS, "page": 1},
    "pages of 24": {"lens": CHUNKS, "page": 24},
    "pages of 64": {"lens": CHUNKS, "page": 64},
    "heads of 80": {"lens": CHUNKS, "sizes": (80, 80)},
    "sizes that are no powers of two": {"lens": CHUNKS, "sizes": (24, 40)},
    "value half of key": {"lens": CHUNKS, "sizes": (64, 32)},
    "wide value": {"lens": ((5, 9),), "sizes": (16, 512), "heads": (2, 1)},
    "three heads of one": {"lens": PROMPTS, "heads": (6, 2)},
    "one kv head": {"lens": CHUNKS, "heads": (5, 1)},
    "no group": {"lens": CHUNKS, "heads": (2, 2)},
    "lengths of int64": {"lens": ((20, 50), (2, 3)), "seq_lens": torch.tensor([50, 3])},
}
