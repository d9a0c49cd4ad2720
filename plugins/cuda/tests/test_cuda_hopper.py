"""core_cuda/ops/attention/hopper*.py: prompts at compute capability 9.

Gluon has no interpreter: test_cuda_compiles.py compiles the kernel, and its numbers are judged on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.ops.attention.paged import ATTENTION
from tests.attention_cases import Call, judged, steps
from tests.kernel_cases import moved

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import launching
from core_cuda.ops.attention import hopper, prefill
from core_cuda.ops.attention.decode import Coding
from core_cuda.ops.attention.hopper import HopperConfig
from core_cuda.ops.attention.hopper_tiles import Step

BF16 = torch.bfloat16
LENS = ((300, 700), (130, 1031), (1, 400), (5, 5))
CASES: dict[str, tuple[dict[str, Any], HopperConfig]] = {
    "fresh": ({"lens": ((300, 300), (257, 257))}, HopperConfig(block_n=128, pack=4)),
    "context": ({}, HopperConfig(block_n=128, pack=2)),
    "padding": ({"padding": (37, 2)}, HopperConfig(block_n=128, pack=4)),
    "pages of 32": ({"page": 32}, HopperConfig(block_n=128, pack=1)),
    "not causal": ({"causal": False}, HopperConfig(block_n=128, pack=4)),
    "window": ({"lens": ((300, 1700), (700, 700)), "window": 200}, HopperConfig(block_n=128, pack=4)),
    "chunks": (
        {"lens": ((300, 1700), (700, 700), (200, 513)), "window": 256, "chunked": True},
        HopperConfig(block_n=128, pack=4),
    ),
    "odd chunks": ({"window": 100, "chunked": True}, HopperConfig(block_n=128, pack=1)),
    "heads of 64": ({"sizes": (64, 64)}, HopperConfig(block_n=128, pack=4, num_stages=3)),
    "heads of 80": ({"sizes": (80, 80), "heads": (4, 4)}, HopperConfig(block_n=128, pack=1)),
    "groups of 5": ({"sizes": (96, 96), "heads": (10, 2)}, HopperConfig(block_n=128, pack=1)),
    "heads of 256": ({"sizes": (256, 256), "window": 300}, HopperConfig(block_n=64, pack=2)),
    "latent": ({"sizes": (192, 128), "heads": (4, 4)}, HopperConfig(block_n=64, pack=1)),
}


@pytest.fixture
def gpu() -> torch.device:
    if launching.INTERPRETED or not torch.cuda.is_available() or launching.capability()[0] != 9:
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    return torch.device("cuda")


def call_of(lens: Any = LENS, **options: Any) -> Call:
    return steps(lens, **{"sizes": (128, 128), "heads": (8, 2), "page": 16, "dtype": BF16, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_numbers(case: str, dtype: torch.dtype, gpu: torch.device) -> None:
    options, config = CASES[case]
    judged(ATTENTION, prefill.prefill, call_of(**options, dtype=dtype), gpu, config=config)


@pytest.mark.gpu
def test_sinks(gpu: torch.device) -> None:
    call = call_of() | {"sinks": torch.linspace(-2, 3, 8)}
    judged(ATTENTION, prefill.prefill, call, gpu, config=HopperConfig(block_n=128, pack=4))


@pytest.mark.gpu
def test_what_another_sequence_holds_changes_no_bit(gpu: torch.device) -> None:
    config = HopperConfig(block_n=128, pack=4)
    call = moved(call_of(((300, 700), (200, 200))), gpu)
    before = prefill.prefill(**call, config=config)
    for name in ("query", "key", "value"):
        call[name] = call[name].clone()
        call[name][300:] = torch.nan
    after = prefill.prefill(**call, config=config)
    assert torch.equal(before[:300], after[:300]) and after[300:].isnan().all()


@pytest.mark.gpu
def test_results_become_codes(gpu: torch.device) -> None:
    config = HopperConfig(block_n=128, pack=4)
    call = moved(call_of(((300, 700), (200, 200))), gpu)
    numbers = prefill.prefill(**call, config=config)
    scale, used = torch.tensor(0.01, device=gpu), torch.zeros((), device=gpu)
    coding = Coding(torch.empty(numbers.shape, dtype=torch.float8_e4m3fn, device=gpu), scale, used)
    codes = prefill.prefill(**call, config=config, coding=coding)
    wanted = (numbers.float() / scale).clamp(-448, 448).to(codes.dtype)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8)) and used == scale


def chosen(tokens: int = 512, *, window: int = 0, softcap: float = 0.0, **options: Any) -> HopperConfig | None:
    call = call_of(((tokens, tokens),), **options)
    names = ("query", "key", "value", "key_cache", "value_cache", "block_table", "seq_lens", "query_starts")
    return hopper.choose(Step(*(call[name] for name in names), None, call["query"], None, None), window, softcap)


@pytest.fixture
def hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "capability", lambda: (9, 0))
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 32)


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    ("options", "pack"),
    [({}, 4), ({"heads": (10, 2)}, 1), ({"heads": (12, 2)}, 2), ({"window": 200}, 4), ({"sizes": (64, 64)}, 4)],
)
def test_a_tile_takes_no_more_heads_than_divide_a_group(options: Any, pack: int) -> None:
    assert chosen(**options) == HopperConfig(block_n=128, pack=pack)


@pytest.mark.usefixtures("hopper_gpu")
def test_wide_heads_take_fewer_keys_at_a_time() -> None:
    assert chosen(sizes=(192, 128)) == HopperConfig(block_n=64, pack=4)


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 64},
        {"softcap": 30.0},
        {"window": 200, "sizes": (64, 64)},
        {"dtype": torch.float32},
        {"sizes": (272, 272)},
        {"sizes": (72, 72)},
    ],
    ids=["few tokens", "soft cap", "window of narrow heads", "fp32", "wide heads", "not in pieces of 16"],
)
def test_what_the_other_kernel_takes(options: Any) -> None:
    assert chosen(**options) is None


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_capabilities(capability: tuple[int, int], hopper_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "capability", lambda: capability)
    assert chosen() is None


@pytest.mark.usefixtures("hopper_gpu")
def test_codes_in_the_cache_are_for_the_other_kernel() -> None:
    call = call_of(((512, 512),))
    codes = call["key_cache"].to(torch.float8_e4m3fn)
    step = Step(*(call[n] for n in ("query", "key", "value")), codes, codes, *(None,) * 7)
    assert hopper.choose(step, 0, 0.0) is None
