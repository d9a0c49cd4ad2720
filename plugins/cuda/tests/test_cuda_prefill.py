"""core_cuda/ops/attention/{prefill,prefill_kernel,cache_write}.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from tests.attention_cases import CACHES, CASES, NEW, Call, judged, steps
from tests.kernel_cases import CPU, DTYPES, moved

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import launching
from core_cuda.ops.attention import prefill as prefill_attention
from core_cuda.ops.attention.prefill_config import PrefillConfig, PrefillShape, candidates, choose
from core_cuda.ops.cache_write import write_cache

SMALL = PrefillConfig(block_m=32, block_n=16, pack=2, num_warps=4, num_stages=2, tma=False)

ONE_TILE = replace(SMALL, pack=4, block_m=64)  # of a sequence's tokens and heads, as far as the samples go


@pytest.fixture(autouse=True)
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few programs do the work where each takes a while, in the interpreter."""
    if launching.INTERPRETED:
        monkeypatch.setattr(launching, "num_multiprocessors", lambda: 1)


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


TMA = replace(SMALL, tma=True)
CONFIGS = {
    "pointers": SMALL,
    "one head": replace(SMALL, pack=1, block_m=16, block_n=32),
    "four heads": replace(SMALL, pack=4),
}


@pytest.mark.parametrize("case", CASES)
def test_prefill(case: str, kernel_device: torch.device) -> None:
    judged(ATTENTION, prefill_attention.prefill, steps(**CASES[case]), kernel_device, config=TMA)


@pytest.mark.parametrize("wrong", [{"chunked": False}, {"window": 17}, {"window": 0, "chunked": False}], ids=str)
def test_other_chunks_are_told_apart(wrong: Call, kernel_device: torch.device) -> None:
    def mistaken(**call: Any) -> torch.Tensor:
        return prefill_attention.prefill(**call | wrong)

    with pytest.raises(AssertionError, match="error over bound"):
        judged(ATTENTION, mistaken, steps(**CASES["chunks of a tile"]), kernel_device, config=SMALL)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", ["padding", "window over tiles", "chunks over tiles"])
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
    tried = candidates(shape_of(call))
    assert tried[0] == choose(shape_of(call)) and len(set(tried)) == len(tried) > 1
    # All of them take a while on a host.
    for config in tried if kernel_device.type == "cuda" else tried[:2]:
        judged(ATTENTION, prefill_attention.prefill, call, kernel_device, config=config)


def test_long_prompts_take_larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)
    small = PrefillShape(
        num_tokens=128, num_seqs=1, num_heads=32, num_kv_heads=8, key_size=128, value_size=128, element_bytes=2
    )
    assert choose(small).block_m < choose(replace(small, num_tokens=4096)).block_m


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_what_the_step_itself_brings_is_not_read_from_the_cache(tma: bool, kernel_device: torch.device) -> None:
    call = moved(steps(((20, 45), (30, 30)), padding=(3, 1)), kernel_device)
    before = {name: v.clone() for name, v in call.items() if name in CACHES}
    inputs = {name: v for name, v in call.items() if name != "slot_mapping"}
    config = replace(SMALL, tma=tma)
    alone = prefill_attention.attend(**inputs, config=config)
    assert all(torch.equal(call[name].view(torch.uint8), was.view(torch.uint8)) for name, was in before.items())
    assert torch.equal(alone, prefill_attention.prefill(**call, config=config))


@pytest.mark.parametrize(
    ("lens", "options", "tokens"),
    [
        (((4, 4), (1, 9), (1, 21), (3, 6)), {}, [4, 5]),
        (((4, 4), (1, 9)), {"window": 5}, [4]),
        (((4, 4), (1, 9)), {"causal": False}, []),
        (((9, 9),), {}, []),
    ],
    ids=["mixed", "window", "not causal", "one sequence"],
)
def test_the_kernel_of_decode_serves_sequences_of_one_token(
    lens: Any, options: Any, tokens: list[int], monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    call, real, written = steps(lens, **options), prefill_attention.decode, []

    def decode(*args: Any, prompts: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        before = prompts.clone()
        real(*args, prompts=prompts.fill_(torch.nan), **kwargs)
        written.extend((~prompts.isnan().flatten(1).all(1)).nonzero().flatten().tolist())
        other = [row for row in range(len(prompts)) if row not in written]
        prompts[other] = before[other]
        return prompts

    monkeypatch.setattr(prefill_attention, "decode", decode)
    judged(ATTENTION, prefill_attention.prefill, call, kernel_device, config=SMALL)
    assert written == tokens


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
