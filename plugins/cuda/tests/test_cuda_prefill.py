"""core_cuda/ops/attention/{prefill,prefill_kernel,cache_write}.py."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import Fp64Mode, judge_pooled
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from tests.kernel_cases import CPU, DTYPES, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import launching
from core_cuda.ops.attention import prefill as prefill_attention
from core_cuda.ops.attention.prefill import PrefillConfig, PrefillShape
from core_cuda.ops.cache_write import write_cache

Call = dict[str, Any]
CACHES = ("key_cache", "value_cache")
NEW = ("query", "key", "value")
CODES = torch.float8_e4m3fn
SMALL = PrefillConfig(block_m=32, block_n=16, pack=2, num_warps=4, num_stages=2, tma=False)

ONE_TILE = replace(SMALL, pack=4, block_m=64)  # of a sequence's tokens and heads, as far as the samples go


@pytest.fixture(autouse=True)
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few programs do the work where each takes a while, in the interpreter."""
    if launching.INTERPRETED:
        monkeypatch.setattr(launching, "num_multiprocessors", lambda: 1)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for sample in ATTENTION.samples(dtype, CPU):
        reason = prefill_attention.why_not(ATTENTION.bind((), sample.kwargs))
        if sample.kwargs.get("mask") is not None:
            assert reason is not None and "mask" in reason
        else:
            assert reason is None
            judged(ATTENTION, prefill_attention.prefill, dict(sample.kwargs), kernel_device, config=ONE_TILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_of_rotary_attention_agree_with_the_reference(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for sample in ROTARY_ATTENTION.samples(dtype, CPU):
        if dtype != torch.float32 and sample.name not in ("wide tables", "wide", "going on wide", "qwen3", "gemma3"):
            continue
        reason = prefill_attention.why_not_rotary(ROTARY_ATTENTION.bind((), sample.kwargs))
        if sample.kwargs.get("out_dtype") not in (None, dtype):
            assert reason is not None and "out_dtype" in reason
        else:
            assert reason is None
            kernel = prefill_attention.prefill_rotary_attention
            judged(ROTARY_ATTENTION, kernel, dict(sample.kwargs), kernel_device, config=ONE_TILE)


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
    "both ways": {"lens": CHUNKS, "causal": False},
    "both ways in a window": {"lens": ((20, 61), (33, 40)), "causal": False, "window": 7},
    "soft-cap": {"lens": CHUNKS, "softcap": 1.5, "padding": (3, 0)},
    "high soft-cap": {"lens": CHUNKS, "softcap": 50.0, "scale": 0.9},
    "sinks": {"lens": CHUNKS, "sinks": torch.tensor([-1.0, 0.5, 3.0, 30.0]), "heads": (4, 2)},
    "sinks in a window": {"lens": CHUNKS, "sinks": torch.tensor([-torch.inf, 3.0]), "window": 3},
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
TMA = replace(SMALL, tma=True)
CONFIGS = {
    "pointers": SMALL,
    "one head": replace(SMALL, pack=1, block_m=16, block_n=32),
    "four heads": replace(SMALL, pack=4),
}


@pytest.mark.parametrize("case", CASES)
def test_prefill(case: str, kernel_device: torch.device) -> None:
    judged(ATTENTION, prefill_attention.prefill, steps(**CASES[case]), kernel_device, config=TMA)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", ["padding", "window over tiles"])
def test_prefill_in_other_tiles(case: str, config: str, kernel_device: torch.device) -> None:
    judged(ATTENTION, prefill_attention.prefill, steps(**CASES[case]), kernel_device, config=CONFIGS[config])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["window over tiles", "soft-cap"])
def test_prefill_in_half_precision(case: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    call = steps(**{"sizes": (64, 64), **CASES[case]}, dtype=dtype)
    judged(ATTENTION, prefill_attention.prefill, call, kernel_device, config=TMA)
    judged(ATTENTION, prefill_attention.prefill, call, kernel_device)


def shape_of(call: Call) -> PrefillShape:
    return PrefillShape(
        num_tokens=len(call["query"]),
        num_seqs=len(call["seq_lens"]),
        num_heads=call["query"].shape[1],
        num_kv_heads=call["key"].shape[1],
        key_size=call["query"].shape[2],
        value_size=call["value"].shape[2],
        element_bytes=call["query"].element_size(),
    )


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_every_candidate_computes_the_same(size: int, kernel_device: torch.device) -> None:
    call = steps(((50, 190), (1, 20)), sizes=(size, size), heads=(4, 1), page=16, dtype=torch.bfloat16)
    tried = prefill_attention.candidates(shape_of(call))
    assert tried[0] == prefill_attention.choose(shape_of(call)) and len(set(tried)) == len(tried) > 1
    # All of them take a while on a host.
    for config in tried if kernel_device.type == "cuda" else tried[:2]:
        judged(ATTENTION, prefill_attention.prefill, call, kernel_device, config=config)


def test_long_prompts_take_larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)
    small = PrefillShape(
        num_tokens=128, num_seqs=1, num_heads=32, num_kv_heads=8, key_size=128, value_size=128, element_bytes=2
    )
    assert prefill_attention.choose(small).block_m < prefill_attention.choose(replace(small, num_tokens=4096)).block_m


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_what_the_step_itself_brings_is_not_read_from_the_cache(tma: bool, kernel_device: torch.device) -> None:
    call = moved(steps(((20, 45), (30, 30)), padding=(3, 1)), kernel_device)
    before = {name: v.clone() for name, v in call.items() if name in CACHES}
    inputs = {name: v for name, v in call.items() if name != "slot_mapping"}
    config = replace(SMALL, tma=tma)
    alone = prefill_attention.attend(**inputs, config=config)
    assert all(torch.equal(call[name].view(torch.uint8), was.view(torch.uint8)) for name, was in before.items())
    assert torch.equal(alone, prefill_attention.prefill(**call, config=config))


@pytest.mark.parametrize("name", NEW)
def test_layouts_of_query_key_and_value(name: str, kernel_device: torch.device) -> None:
    call = steps(((20, 45), (30, 30)), heads=(2, 2))
    for other in (
        call[name].transpose(0, 1).contiguous().transpose(0, 1),  # heads before tokens
        call[name].transpose(1, 2).contiguous().transpose(1, 2),  # features apart
        torch.nn.functional.pad(call[name], (3, 0))[..., 3:],  # at no boundary of 16 bytes
    ):
        judged(ATTENTION, prefill_attention.prefill, {**call, name: other}, kernel_device, config=TMA)


def test_caches_of_two_halves_of_one_tensor(kernel_device: torch.device) -> None:
    call = steps(((20, 45), (30, 30)))
    both = torch.stack((call["key_cache"], call["value_cache"]), dim=2)  # (N, P, 2, K, D)
    call |= {"key_cache": both[:, :, 0], "value_cache": both[:, :, 1]}
    assert prefill_attention.why_not(ATTENTION.bind((), call)) is None
    result = prefill_attention.prefill(**moved(call, kernel_device), config=SMALL)
    torch.testing.assert_close(result.cpu(), ATTENTION.reference(**call))


def test_no_tokens(kernel_device: torch.device) -> None:
    call = moved(steps(((0, 0), (0, 0))), kernel_device)
    assert prefill_attention.prefill(**call).shape == (0, 2, 16)


def test_writing_the_cache_rounds_to_its_dtype(kernel_device: torch.device) -> None:
    call = moved(steps(((20, 45), (30, 30)), padding=(5, 0), sizes=(24, 40)), kernel_device)
    caches = [torch.zeros_like(call[name], dtype=torch.bfloat16) for name in CACHES]
    write_cache(call["key"], call["value"], *caches, call["slot_mapping"], call["query_starts"])
    for name, cache in zip(("key", "value"), caches, strict=True):
        flat = cache.view(-1, *cache.shape[2:])
        assert torch.equal(flat[call["slot_mapping"][:50]], call[name][:50].bfloat16())
        assert flat.count_nonzero() == call[name][:50].bfloat16().count_nonzero()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: {"query": c["query"].double()}, "query is torch.float64"),
        (lambda c: {"key_cache": c["key_cache"].half()}, "key_cache is torch.float16"),
        (lambda c: {"value": c["value"].half()}, "value is torch.float16"),
        (lambda c: {"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks"),
        (lambda c: {"scale": -0.5}, "scale is -0.5"),
        (lambda c: {"value_cache": c["value_cache"][:, 1:]}, "value_cache has strides"),
        (lambda c: {"key_cache": c["key_cache"].transpose(2, 3)}, "key_cache has strides"),
        (lambda c: {"query": torch.zeros(7, 4, 528)}, "heads have 528 features"),
        (lambda c: {"value": torch.zeros(7, 2, 384)}, "heads of value have 384 features"),
    ],
)
def test_refuses_what_it_cannot_take(change: Any, named: str) -> None:
    call = steps(((7, 7),))
    assert prefill_attention.why_not(ATTENTION.bind((), call)) is None
    reason = prefill_attention.why_not(ATTENTION.bind((), call | change(call)))
    assert reason is not None and named in reason
