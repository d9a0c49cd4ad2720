"""core_cuda/ops/moe/quantized_{grouped,configs,kernel}.py against the reference of `core::quantized_grouped_linear`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.moe.quantized_experts import QUANTIZED_GROUPED_LINEAR
from tests.kernel_cases import CPU, check, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops.moe.quantized_configs import QuantizedConfig, QuantizedShape, candidates, default_config
from core_cuda.ops.moe.quantized_grouped import quantized_grouped_linear, run_quantized_grouped, why_not

INT8, FP8, BF16, FP16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16
Call = dict[str, Any]
CONFIGS = {
    "weights left": QuantizedConfig(16, 64, 32, 4, 1, True),
    "weights right": QuantizedConfig(32, 16, 32, 4, 2, False),
    "whole groups": QuantizedConfig(16, 32, 64, 4, 2, True),
    "narrow steps": QuantizedConfig(16, 32, 16, 4, 1, False),
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8 codes": {"x": FP8, "weight": FP8},
    "int8 codes": {"x": INT8, "weight": INT8},
    "int8 codes, zero points": {"x": INT8, "weight": INT8, "x_zero": True, "zero": True},
    "int8 codes by fp8": {"x": INT8, "weight": FP8, "groups": 3},
    "fp8 codes by group": {"x": FP8, "weight": FP8, "groups": 3},
    "int8 codes by group": {"x": INT8, "weight": INT8, "groups": 3},
    "fp8 weights": {"weight": FP8},
    "int8 weights": {"weight": INT8},
    "int8 weights by group, zero points": {"weight": INT8, "groups": 3, "zero": True},
    "int4 weights": {"weight": torch.int32},
    "int4 weights by group, zero points": {"weight": torch.int32, "groups": 3, "zero": True},
}


def call(
    counts: tuple[int, ...] = (3, 0, 9, 1),
    *,
    weight: torch.dtype,
    x: torch.dtype = BF16,
    columns: int = 40,
    depth: int = 96,
    groups: int = 1,
    zero: bool = False,
    x_zero: bool = False,
    nobody: int = 2,
    out_dtype: torch.dtype = BF16,
) -> Call:
    """Return a call for experts with so many rows each, and as many of no expert as `nobody` says."""
    rows, experts, packed = sum(counts) + nobody, len(counts), weight == torch.int32
    codes = randn(experts, columns, depth, scale=40.0, seed=1).to(FP8 if weight == FP8 else INT8)
    if packed:
        words = randn(experts, columns, -(-depth // 8), dtype=torch.float64, seed=1, scale=2.0**30)
        codes = words.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    is_codes = x in (FP8, INT8)
    shape = (experts, columns, groups)
    return {
        "x": randn(rows, depth, scale=40.0 if is_codes else 1.0, seed=2).clamp(-127, 127).to(x),
        "x_scale": randn(rows, 1, scale=0.002, shift=0.01, seed=3) if is_codes else None,
        "ends": torch.tensor(counts).cumsum(0).to(torch.int32),
        "w_codes": codes,
        "w_scale": randn(*shape, scale=0.002, shift=0.01, seed=4),
        "w_zero_point": randn(*shape, scale=5.0, seed=5).to(INT8) if zero else None,
        "out_dtype": out_dtype,
        "num_bits": 4 if packed else 8,
        "x_zero_point": randn(rows, 1, scale=30.0, seed=6).to(INT8) if x_zero else None,
    }


def refused(given: Call) -> str | None:
    """Return the kernel's reason, the call bound as the op binds it."""
    return why_not(QUANTIZED_GROUPED_LINEAR.bind((), given))


def by(config: QuantizedConfig | None) -> Any:
    def computed(**given: Any) -> Tensor:
        return run_quantized_grouped(**given, config=config)

    return computed


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Fill what `torch.empty` gives, so that what no kernel wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_the_reference_is_met_on_its_samples(dtype: torch.dtype, kernel_device: torch.device) -> None:
    samples = [dict(sample.kwargs) for sample in QUANTIZED_GROUPED_LINEAR.samples(dtype, CPU)]
    assert [refused(given) for given in samples] == [None] * len(samples)
    check(QUANTIZED_GROUPED_LINEAR, quantized_grouped_linear, samples, kernel_device)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_every_format(name: str, config: str, kernel_device: torch.device) -> None:
    """In both results' dtypes, of which the reference rounds what it sums to bfloat16 first in one."""
    if config == "narrow steps" and "codes" in name:
        pytest.skip("the units sum 8-bit codes over 32 inputs at a time")
    by_group = config == "whole groups" and "groups" in FORMATS[name]
    if by_group and "codes" in name:
        pytest.skip("only weights alone are scaled before they are multiplied")
    sizes = {"depth": 192, "groups": 6} if by_group else {}
    for out_dtype in (BF16, FP16):
        given = call(**{**FORMATS[name], **sizes}, out_dtype=out_dtype)
        given["x"] = given["x"] if given["x_scale"] is not None else given["x"].to(out_dtype)
        assert refused(given) is None
        check(QUANTIZED_GROUPED_LINEAR, by(CONFIGS[config]), [given], kernel_device)


@pytest.mark.parametrize("name", ["fp8 codes", "int8 codes, zero points", "int4 weights", "int8 weights"])
@pytest.mark.usefixtures("unwritten_is_nan")
def test_sizes_that_fill_no_tile(name: str, kernel_device: torch.device) -> None:
    """Depths of one code more than a tile's, or not of whole int32; one scale for x; x in wider rows; scales apart."""
    calls = [call(**FORMATS[name], depth=depth, columns=columns) for depth, columns in ((33, 17), (77, 33))]
    last = call(**FORMATS[name])
    wide = torch.cat((last["x"], last["x"], last["x"]), 1)[:, 96:192]
    apart = last["w_scale"].transpose(0, 1).contiguous().transpose(0, 1)
    calls += [{**last, "x": wide, "w_scale": apart}, {**last, "w_codes": last["w_codes"].repeat(1, 2, 1)[:, :40]}]
    if last["x_scale"] is not None:
        one = {n: None if last[n] is None else last[n][1, 0] for n in ("x_scale", "x_zero_point")}
        calls.append({**last, **one})
    assert [refused(given) for given in calls] == [None] * len(calls)
    check(QUANTIZED_GROUPED_LINEAR, by(CONFIGS["weights left"]), calls, kernel_device)
    check(QUANTIZED_GROUPED_LINEAR, by(None), calls, kernel_device)


@pytest.mark.parametrize("counts", [(40, 0), (0, 0), (16, 16), (0, 33), (17, 15, 1, 0, 0)])
@pytest.mark.usefixtures("unwritten_is_nan")
def test_uneven_loads(counts: tuple[int, ...], kernel_device: torch.device) -> None:
    """All rows at one expert or at none, tiles filled to the last row; and what nobody has chosen is not read."""
    given = call(counts, weight=INT8, nobody=20)
    check(QUANTIZED_GROUPED_LINEAR, by(CONFIGS["weights left"]), [given], kernel_device)
    unused = torch.tensor([at for at, count in enumerate(counts) if not count], dtype=torch.int64)
    given["w_scale"].index_fill_(0, unused, torch.nan)
    result = by(None)(**moved(given, kernel_device))
    assert result[: sum(counts)].isfinite().all() and not result[sum(counts) :].any()


def test_many_experts(kernel_device: torch.device) -> None:
    counts = tuple(torch.randint(0, 3, (130,), generator=torch.Generator().manual_seed(0)).tolist())
    check(QUANTIZED_GROUPED_LINEAR, by(None), [call(counts, weight=INT8, depth=32, columns=16)], kernel_device)


@pytest.mark.parametrize("config", ["weights left", "weights right"])
def test_rows_do_not_depend_on_others_and_a_call_again_gives_the_same_bits(
    config: str, kernel_device: torch.device
) -> None:
    given = call(**FORMATS["int4 weights by group, zero points"])
    first, again = (by(CONFIGS[config])(**moved(given, kernel_device)) for _ in range(2))
    assert torch.equal(first, again)
    alone = {**given, "x": given["x"][3:12], "ends": torch.tensor([0, 0, 9, 9], dtype=torch.int32)}
    assert torch.equal(by(CONFIGS[config])(**moved(alone, kernel_device)), first[3:12])


@pytest.mark.parametrize("name", ["fp8 codes", "int8 codes by group", "int4 weights by group, zero points"])
def test_every_configuration_gives_the_same(name: str, kernel_device: torch.device) -> None:
    given = call(**{**FORMATS[name], "depth": 384}, counts=(20, 12))
    shape = QuantizedShape(
        rows=34, experts=2, columns=40, depth=384, group=384 // FORMATS[name].get("groups", 1),
        w_bits=given["num_bits"], x_bits=8 * given["x"].itemsize,
    )  # fmt: skip
    configs = list(candidates(shape))
    assert len(configs) == len(set(configs)) > 8
    for config in configs if kernel_device.type == "cuda" else configs[1::5]:
        check(QUANTIZED_GROUPED_LINEAR, by(config), [given], kernel_device)


@pytest.mark.parametrize(("w_bits", "x_bits"), [(8, 8), (8, 16), (4, 16)])
@pytest.mark.parametrize("group", [2048, 128, 96])
def test_configurations_fit_and_suit_the_number_of_rows(w_bits: int, x_bits: int, group: int) -> None:
    found = []
    depth = group * (2048 // group)
    for rows in (8, 512, 2048, 32768):
        shape = QuantizedShape(
            rows=rows, experts=128, columns=1536, depth=depth, group=group, w_bits=w_bits, x_bits=x_bits
        )
        default = default_config(shape)
        assert default == next(candidates(shape))
        found.append(default.block_m)
        for config in candidates(shape):
            stage = config.block_k * (config.block_m * x_bits + config.block_n * w_bits) // 8
            assert stage * config.num_stages <= 227 * 1024, config
            whole = group % config.block_k if x_bits == 8 else config.block_k % min(group, config.block_k)
            assert group == depth or whole == 0, config
    assert found == [16, 16, 32, 128]


def test_what_is_refused() -> None:
    values, codes = call(weight=INT8), call(x=FP8, weight=FP8, groups=6)
    for given, word in (
        ({**values, "x": values["x"].float()}, "x is torch.float32"),
        ({**values, "out_dtype": torch.float32}, "summed exactly enough for torch.bfloat16 and torch.float16"),
        ({**values, "w_scale": values["w_scale"].double()}, "w_scale is torch.float64"),
        (codes, "groups are of 16 inputs, and the kernel takes multiples of 32"),
        (call(weight=INT8, groups=12), "groups are of 8 inputs, and the kernel takes multiples of 16"),
        ({**values, "w_codes": values["w_codes"].transpose(1, 2).contiguous().transpose(1, 2)}, "one run of memory"),
        (call((1,) * 1024, weight=INT8, columns=1, depth=1), "1024 experts"),
    ):
        reason = refused(given)
        assert reason is not None and word in reason, word
