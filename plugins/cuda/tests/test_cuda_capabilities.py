"""Kernels on GPUs of other compute capabilities, as such a GPU would say of itself: refusals, configurations.

test_cuda_compiles.py compiles for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE
from core.common.ops.implementation import OpCall
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR
from core.common.ops.moe.quantized_experts import QUANTIZED_GROUPED_LINEAR
from core.common.ops.norm.quantized import RMS_NORM_QUANTIZE
from core.common.ops.quantize.symmetric import QUANTIZE, QUANTIZED_LINEAR
from tests.attention_cases import steps

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops import conditions, launching
from core_cuda.ops.attention import decode_config, prefill_config
from core_cuda.ops.attention import prefill as prefill_attention
from core_cuda.ops.attention.decode_config import DecodeShape
from core_cuda.ops.attention.prefill_config import PrefillConfig, PrefillShape
from core_cuda.ops.linear import coded_configs, skinny_configs
from core_cuda.ops.linear.coded_configs import CodedShape
from core_cuda.ops.moe import grouped_configs, quantized_configs
from core_cuda.ops.moe.grouped_configs import GroupedShape
from core_cuda.ops.moe.quantized_configs import QuantizedShape

Pretend = Callable[[tuple[int, int], int], None]
FP8 = torch.float8_e4m3fn
AMPERE, ADA, HOPPER, SMALL_BLACKWELL = ((8, 0), 163), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)
"""Compute capability, and KiB of shared memory of a program."""
NO_CODES = "codes of torch.float8_e4m3fn need compute capability 8.9, and this GPU has 8.0"
SIZES = (64, 80, 128, 192, 256, 512)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return what makes the current GPU one of a compute capability, with KiB of shared memory for a program."""

    def be(capability: tuple[int, int], kib: int) -> None:
        monkeypatch.setattr(launching, "capability", lambda: capability)
        monkeypatch.setattr(launching, "shared_bytes", lambda: kib * 1024)
        monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)

    return be


def refusal(op: Any, call: dict[str, Any]) -> str | None:
    """Return why no kernel for an op takes a call, by the last of them; None where one does.

    The kernels of `deterministic="batch"` are left out, which take less and run on request alone.
    """
    kernels = [each for each in IMPLEMENTATIONS if each.op == op.qualified_name and not each.batch_invariant]
    reasons = [each.condition(op.bind((), call)) for each in kernels]
    return None if None in reasons else reasons[-1]


def experts_in(codes: torch.dtype) -> dict[str, Any]:
    """Return a call for four experts whose weights are codes of a dtype."""
    x, ends = torch.zeros(2, 64, dtype=torch.bfloat16), torch.full((4,), 2, dtype=torch.int32)
    weight = {"w_codes": torch.zeros(4, 32, 64).to(codes), "w_scale": torch.ones(4, 32, 1), "w_zero_point": None}
    return {"x": x, "x_scale": None, "ends": ends, **weight, "out_dtype": torch.bfloat16}


def calls_in_codes() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return calls that read or write codes of fp8."""
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    decode, prompt = (steps(((n, 100),), dtype=torch.bfloat16, max_query_len=n) for n in (1, 90))
    caches = {name: decode[name].to(FP8) for name in ("key_cache", "value_cache")}
    scales = {"x_scale": torch.ones(2, 1), "w_scale": torch.ones(32, 1)}
    product = {"x_codes": x.to(FP8), "w_codes": torch.zeros(32, 64).to(FP8), "bias": None, "out_dtype": torch.bfloat16}
    experts = experts_in(FP8)
    codes = {"w_codes": product["w_codes"], "w_scale": scales["w_scale"], "bias": None}
    return {
        "quantize": (QUANTIZE, {"x": x, "scale": None, "dtype": FP8}),
        "norm": (RMS_NORM_QUANTIZE, {"x": x, "weight": None, "eps": 1e-5, "scale": None, "dtype": FP8}),
        "decode": (ATTENTION, decode | caches),
        "prefill": (ATTENTION, prompt | {name: prompt[name].to(FP8) for name in caches}),
        "coded": (ATTENTION_QUANTIZE, decode | {"out_scale": torch.ones(()), "granularity": "tensor", "dtype": FP8}),
        "product": (QUANTIZED_LINEAR, product | scales),
        "experts": (QUANTIZED_GROUPED_LINEAR, experts | {"x": experts["x"].to(FP8), "x_scale": torch.ones(2, 1)}),
        "experts' weights": (QUANTIZED_GROUPED_LINEAR, experts),
        "weight": (WEIGHT_ONLY_LINEAR, {"x": x, "w_zero_point": None, "num_bits": 8} | codes),
    }


@pytest.mark.parametrize("name", calls_in_codes())
def test_codes_of_fp8_are_refused_where_the_gpu_has_no_instructions_for_them(name: str, pretend: Pretend) -> None:
    op, call = calls_in_codes()[name]
    pretend(*ADA)
    assert refusal(op, call) is None
    pretend(*AMPERE)
    assert refusal(op, call) == NO_CODES


def test_what_needs_no_codes_of_fp8_goes_on(pretend: Pretend) -> None:
    pretend(*AMPERE)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert refusal(QUANTIZE, {"x": x, "scale": None, "dtype": torch.int8}) is None
    assert conditions.dtypes(OpCall(op="core::rms_norm", args={"x": x})) is None
    assert conditions.dtypes(OpCall(op="core::rms_norm", args={"x": x.to(FP8)})) == NO_CODES
    assert refusal(QUANTIZED_GROUPED_LINEAR, experts_in(torch.int8)) is None
    int8 = {"w_codes": torch.zeros(32, 64, dtype=torch.int8), "w_scale": torch.ones(32, 1), "bias": None}
    assert refusal(WEIGHT_ONLY_LINEAR, {"x": x, "w_zero_point": None, "num_bits": 8} | int8) is None
    x_codes = {"x_codes": x.to(torch.int8), "x_scale": torch.ones(2, 1), "out_dtype": torch.bfloat16}
    assert refusal(QUANTIZED_LINEAR, x_codes | int8) is None
    for new in (1, 90):
        assert refusal(ATTENTION, steps(((new, 100),), dtype=torch.bfloat16, max_query_len=new)) is None


def test_a_gpu_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(multi_processor_count=108, shared_memory_per_block_optin=166_912)
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about if device == 3 else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert launching.shared_bytes.__wrapped__() == 163 * 1024
    assert launching.num_multiprocessors.__wrapped__() == 108
    assert launching.capability.__wrapped__() == (8, 0)


@pytest.mark.parametrize(("gpu", "used"), [(ADA, False), (HOPPER, True)], ids=["8.9", "9.0"])
def test_tensor_descriptors_are_off_below_9(
    gpu: tuple[Any, int], used: bool, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(*gpu)
    specs = []
    monkeypatch.setattr(launching, "launch", lambda *_, **options: specs.append(options["SPEC"]))
    call = steps(((20, 45),), dtype=torch.bfloat16, sizes=(64, 64))
    call = {name: value for name, value in call.items() if name not in ("slot_mapping", "max_query_len", "mask")}
    prefill_attention.attend(**call, config=PrefillConfig(block_m=32, block_n=16, pack=2, num_warps=4, num_stages=2))
    assert [spec.tma for spec in specs] == [used]


def decode_shape(rows: int, size: int, itemsize: int) -> DecodeShape:
    return DecodeShape(
        num_seqs=8, num_kv_heads=8, num_rows=rows, head_size=size, value_size=size, num_positions=4096,
        itemsize=itemsize,
    )  # fmt: skip


@pytest.mark.parametrize("gpu", [AMPERE, ADA, HOPPER, SMALL_BLACKWELL], ids=lambda gpu: str(gpu[0]))
def test_decode_fits_or_is_refused(gpu: tuple[Any, int], pretend: Pretend) -> None:
    pretend(*gpu)
    refused = []
    for rows, size, itemsize in itertools.product((1, 8, 32, 64), SIZES, (1, 2, 4)):
        shape = decode_shape(rows, size, itemsize)
        if decode_config.why_no_room(shape) is not None:
            refused.append((rows, size, itemsize))
            continue
        for config in decode_config.candidates(shape):
            wide = 1 << (size - 1).bit_length()
            tiles = max(config.num_stages - 1, 1) * config.block_n * 2 * wide * itemsize
            queries = max(rows, 16) * wide * max(itemsize, 2)
            assert tiles + queries <= gpu[1] * 1024 and config.num_stages >= 1, (shape, config)
    assert all(itemsize == 4 for *_, itemsize in refused)  # half precision always fits
    assert bool(refused) == (gpu[1] < 227)


def test_decode_of_wide_heads_in_fp32_is_refused_on_a_small_gpu(pretend: Pretend) -> None:
    call = steps(((4, 100),), heads=(16, 1), sizes=(512, 512), max_query_len=4)
    pretend(*HOPPER)
    assert refusal(ATTENTION, call) is None
    pretend(*ADA)
    assert "64 rows of 512 features needs" in str(refusal(ATTENTION, call))
    assert "this GPU has 101376" in str(refusal(ATTENTION, call))
    assert refusal(ATTENTION, steps(((4, 100),), heads=(16, 1), sizes=(128, 128), max_query_len=4)) is None


def test_prompts_go_alone_where_decode_has_no_room(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = []
    monkeypatch.setattr(launching, "launch", lambda *_, **options: specs.append(options.get("SPEC")))
    call = steps(((20, 45), (1, 30)), heads=(64, 1), sizes=(512, 512))
    call = {name: value for name, value in call.items() if name not in ("slot_mapping", "max_query_len", "mask")}
    for gpu, kernels in ((HOPPER, 2), (ADA, 1)):
        pretend(*gpu)
        specs.clear()
        prefill_attention.attend(**call)
        assert len(specs) == kernels and specs[0].prompts_only == (kernels == 2)


@pytest.mark.parametrize("gpu", [AMPERE, ADA, SMALL_BLACKWELL], ids=lambda gpu: str(gpu[0]))
def test_prefill_fits(gpu: tuple[Any, int], pretend: Pretend) -> None:
    pretend(*gpu)
    for size, itemsize, tokens, heads in itertools.product(SIZES, (2, 4), (64, 4096), (8, 64)):
        shape = PrefillShape(
            num_tokens=tokens, num_seqs=1, num_heads=heads, num_kv_heads=4, key_size=size, value_size=size,
            element_bytes=itemsize,
        )  # fmt: skip
        for config in prefill_config.candidates(shape):
            wide, part = 1 << (size - 1).bit_length(), min(1 << (size - 1).bit_length(), 256)
            tiles = max(config.num_stages - 1, 1) * config.block_n * (wide + part)
            assert (tiles + config.block_m * wide) * itemsize <= gpu[1] * 1024, (shape, config)
            assert config.block_m >= config.pack and min(config.block_m, config.block_n) >= 16


@pytest.mark.parametrize("gpu", [AMPERE, ADA, SMALL_BLACKWELL], ids=lambda gpu: str(gpu[0]))
def test_products_fit(gpu: tuple[Any, int], pretend: Pretend) -> None:
    pretend(*gpu)
    for rows, gated, bits in itertools.product((1, 8, 33, 64, 128), (False, True), (8, 16)):
        for config in skinny_configs.candidates(rows, 14336, 4096, gated=gated, bits=bits):
            tile = (max(16, 1 << (rows - 1).bit_length()) + config.block_n * (1 + gated)) * config.block_k * bits // 8
            assert config.kernel == "row" or (config.num_stages - 1) * tile <= gpu[1] * 1024, (rows, config)
            assert config.kernel == "row" or config.num_stages >= 2
    kinds = ((4, 128, False), (4, 32, False), (8, 4096, False), (8, 4096, True))
    for rows, (bits, group, coded_x) in itertools.product((1, 33, 64, 512, 4096), kinds):
        shape = CodedShape(rows, 14336, 4096, bits, group, coded_x=coded_x)
        for coded in coded_configs.candidates(shape):
            tile = coded.block_k * (coded.block_m * shape.x_bytes + coded.block_n * bits // 8)
            assert coded.num_stages >= 2 and (coded.num_stages - 1) * tile <= gpu[1] * 1024, (rows, coded)
    for tokens, experts in itertools.product((8, 64, 1024, 8192), (8, 128)):
        shape = GroupedShape(tokens=tokens, top_k=8, experts=experts, hidden=4096, inner=1536)
        for config in (c for c in grouped_configs.candidates(shape) if c.kernel == "tile"):
            for tile, matrices in ((config.up, 2), (config.down, 1)):
                stage = 2 * (config.block_m + matrices * tile.block_n) * tile.block_k
                assert tile.num_stages >= 2 and (tile.num_stages - 1) * stage <= gpu[1] * 1024, config


@pytest.mark.parametrize("gpu", [AMPERE, ADA, HOPPER, SMALL_BLACKWELL], ids=lambda gpu: str(gpu[0]))
@pytest.mark.parametrize(("w_bits", "x_bits", "group"), [(8, 8, 7168), (8, 8, 128), (8, 16, 7168), (4, 16, 32)])
def test_quantised_experts_fit(gpu: tuple[Any, int], w_bits: int, x_bits: int, group: int, pretend: Pretend) -> None:
    pretend(*gpu)
    for rows in (8, 512, 2048, 32768):
        shape = QuantizedShape(
            rows=rows, experts=64, columns=4096, depth=7168, group=group, w_bits=w_bits, x_bits=x_bits
        )
        for config in quantized_configs.candidates(shape):
            stage = config.block_k * (config.block_m * x_bits + config.block_n * w_bits) // 8
            assert config.num_stages >= 1 and (config.num_stages - 1) * stage <= gpu[1] * 1024, config
        assert quantized_configs.default_config(shape).num_stages >= 2, shape


def test_the_default_takes_what_there_is(pretend: Pretend) -> None:
    prompt = PrefillShape(
        num_tokens=4096, num_seqs=1, num_heads=32, num_kv_heads=8, key_size=128, value_size=128, element_bytes=2
    )
    large = {}
    for gpu in (HOPPER, ADA):
        pretend(*gpu)
        product = skinny_configs.default_config(64, 28672, 4096, gated=True)
        large[gpu] = [decode_config.choose(decode_shape(4, 128, 2)), prefill_config.choose(prompt), product]
    decode, prefill, _ = large[HOPPER]
    assert (decode.block_n, decode.num_stages) == (32, 4)
    assert prefill == PrefillConfig(block_m=128, block_n=64, pack=4, num_warps=8, num_stages=4)
    assert large[ADA][0] == decode
    assert large[ADA][1] == replace(prefill, num_stages=2)
