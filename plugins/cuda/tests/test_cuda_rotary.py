"""core_cuda/ops/rotary/{rotation,kernel}.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE, STYLES
from tests.kernel_cases import CPU, DTYPES, check, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import launching
from core_cuda.ops.rotary import rotation as rotary

OPS = (ROTARY, ROTARY_SINGLE, QK_NORM_ROTARY)
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few programs do the work where each takes a while, in the interpreter."""
    if launching.INTERPRETED:
        monkeypatch.setattr(launching, "num_multiprocessors", lambda: 1)


def kernel_for(op: Any) -> Any:
    return getattr(torch.ops.core_cuda, op.name)


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return cos and sin of angles that differ everywhere, also between a pair's two features."""
    angles = randn(*shape, seed=5, scale=2.0)
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_samples_agree_with_the_reference(op: Any, dtype: torch.dtype, kernel_device: torch.device) -> None:
    calls = [sample.kwargs for sample in op.samples(dtype, CPU)]
    for call in calls:
        assert rotary.why_not(op.bind((), call)) is None
    check(op, kernel_for(op), calls, kernel_device)


def forms(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield query, key and tables in the layouts that models leave, and in some that they do not."""
    merged = randn(1, 5, 8 * 16, dtype=dtype)
    query, key, _ = (part.unflatten(-1, (-1, 16)) for part in merged.split([64, 32, 32], dim=-1))
    yield {"query": query.transpose(1, 2), "key": key.transpose(1, 2), **tables(1, 1, 5, 16, dtype=dtype)}  # Llama
    yield {"query": query, "key": key, **tables(1, 5, 1, 8, dtype=dtype)}
    yield {"query": query[0], "key": key[0], **tables(5, 1, 16, dtype=dtype)}
    batch = randn(3, 5, 4, 16, dtype=dtype).transpose(1, 2), randn(3, 5, 1, 16, dtype=dtype, seed=1).transpose(1, 2)
    yield {"query": batch[0], "key": batch[1], **tables(3, 1, 5, 16, dtype=dtype)}  # own positions, one kv head
    yield {"query": batch[0], "key": batch[1], **tables(5, 16, dtype=dtype)}  # for all heads by broadcasting
    yield {"query": batch[0].contiguous(), "key": batch[1], **tables(1, 1, 1, 16, dtype=dtype)}
    apart = randn(3, 4, 16, 5, dtype=dtype).transpose(2, 3)
    yield {"query": apart, "key": apart[:, :2], **tables(5, 16, dtype=dtype)}
    yield {"query": randn(7, 16, dtype=dtype), "key": randn(7, 16, dtype=dtype, seed=2), **tables(7, 8, dtype=dtype)}
    yield {"query": randn(1, 2, 5, 10, dtype=dtype), "key": randn(1, 1, 5, 10, dtype=dtype), **tables(5, 10)}
    wide = randn(1, 2, 3, 40, dtype=dtype)
    yield {"query": wide, "key": wide[:, :1], **tables(3, 24, dtype=dtype), "rotary_dim": 24}


@pytest.mark.parametrize(
    ("style", "dtype"),
    [("half", torch.bfloat16), *((style, torch.float32) for style in STYLES)],
    ids=str,
)
def test_layouts(style: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    calls = [{**call, "style": style} for call in forms(dtype)]
    check(ROTARY, kernel_for(ROTARY), calls, kernel_device)
    norms: dict[str, Any] = {"eps": 1e-5, "query_weight": None}
    normed = [{**call, **norms, "key_weight": randn(call["key"].shape[-1], shift=1.0, dtype=dtype)} for call in calls]
    check(QK_NORM_ROTARY, kernel_for(QK_NORM_ROTARY), normed, kernel_device)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_is_where_the_arguments_say(dtype: torch.dtype, kernel_device: torch.device) -> None:
    wide = torch.float32
    base = next(forms(dtype))
    weights = {name: randn(16, scale=0.4, shift=1.0, seed=3) for name in ("query_weight", "key_weight")}
    ways: list[dict[str, Any]] = [
        {},
        {"norm_compute_dtype": wide, "normed_dtype": dtype, "out_dtype": wide},
        {"weight_dtype": dtype, "offset": 1.0},
        {"normed_dtype": dtype, "weight_dtype": wide, "compute_dtype": wide},
        {"compute_dtype": wide, "out_dtype": wide, "rotary_dim": 8, **tables(5, 4)},
    ]
    calls = [{**base, **weights, "eps": 1e-6, **way} for way in ways]
    check(QK_NORM_ROTARY, kernel_for(QK_NORM_ROTARY), calls, kernel_device)
    # A narrow compute_dtype rounds what comes in, which counts for more than rounding the result.
    call = {**next(forms(wide)), "compute_dtype": dtype}
    ours, _ = kernel_for(ROTARY)(**moved(call, kernel_device))
    rounded = {name: v.to(dtype).double() if isinstance(v, Tensor) else torch.float64 for name, v in call.items()}
    exact, _ = ROTARY.reference(**rounded)
    torch.testing.assert_close(ours.cpu(), exact.to(dtype).float(), rtol=0, atol=0)


def test_tables_of_the_other_half_are_used(kernel_device: torch.device) -> None:
    call = next(forms(torch.float32))
    swapped = {**call, "cos": call["cos"].flip(-1)}
    ours, wrong = (kernel_for(ROTARY)(**moved(c, kernel_device))[0] for c in (call, swapped))
    assert not torch.allclose(ours, wrong)


@pytest.mark.parametrize("size", [64, 128])
def test_every_candidate_computes_the_same(size: int, kernel_device: torch.device) -> None:
    merged = randn(9, 8, size, dtype=torch.bfloat16)
    query, key, value = merged.split([4, 2, 2], dim=1)
    starts, slots = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([5, 6, 7, 12, 13, 4, 9, 0, 0])
    inputs = moved(
        {"query": query, "key": key, "value": value, **tables(9, size), "slot_mapping": slots}, kernel_device
    )
    wanted: Any = None
    tried = rotary.candidates(9 * 8, size)
    assert tried[0] == rotary.choose(9 * 8, size) and len(set(tried)) == len(tried) > 2
    for config in tried if kernel_device.type == "cuda" else (tried[0], tried[-1]):
        caches = torch.zeros(2, 4, 4, 2, size, dtype=torch.bfloat16, device=kernel_device)
        places = {"key_cache": caches[0], "value_cache": caches[1], "query_starts": starts.to(kernel_device)}
        turned = rotary.rotate_and_write(**inputs, **places, config=config)
        found = [*turned, caches]
        wanted = wanted or found
        assert all(map(torch.equal, found, wanted))
        flat = caches.flatten(1, 2)
        real = slots[:7].to(kernel_device)
        assert torch.equal(flat[0][real], turned[1][:7]) and torch.equal(flat[1][real], inputs["value"][:7])
        assert not flat[:, 0].any()  # nobody writes padding


def test_weights_of_norms_may_be_every_second_element(kernel_device: torch.device) -> None:
    sample = next(s for s in QK_NORM_ROTARY.samples(torch.float32, CPU) if s.kwargs["query_weight"] is not None)
    for name in ("query_weight", "key_weight"):
        weight = sample.kwargs[name]
        if weight is not None:
            apart = torch.stack((weight, weight.flip(0)), dim=-1)[:, 0]
            call = {**sample.kwargs, name: apart}
            check(QK_NORM_ROTARY, rotary.qk_norm_rotary, [call], kernel_device)


def test_few_rows_are_spread_over_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)
    assert rotary.choose(40, 128) == rotary.RotaryConfig(rows=1, num_warps=1)
    assert rotary.choose(4096 * 40, 128) == replace(rotary.choose(40, 128), rows=16, num_warps=4)


def test_refuses_what_it_cannot_take() -> None:
    call = next(forms(torch.float32))
    assert rotary.why_not(ROTARY.bind((), call)) is None
    for change, named in (
        ({"query": call["query"].double()}, "query is torch.float64"),
        ({"compute_dtype": torch.float64}, "compute_dtype is torch.float64"),
        ({"key": call["key"][None]}, "key has rank 5"),
    ):
        reason = rotary.why_not(ROTARY.bind((), {**call, **change}))
        assert reason is not None and named in reason
