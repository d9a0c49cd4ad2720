"""Products with few rows: core_cuda/ops/linear/{products,skinny,skinny_configs}.py and what was measured for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.common.numerics import judge
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall
from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.mlp.activation import ACTIVATIONS
from tests.kernel_cases import CPU, OpsSeen, check, moved, randn

pytest.importorskip("triton", reason="needs triton")

from core_cuda import tuned
from core_cuda.ops import launching
from core_cuda.ops.activation import Gate
from core_cuda.ops.linear.products import (
    _by_library,
    gated_linear,
    gated_linear_other,
    linear,
    linear_other,
    other_timed,
    why_not,
)
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import SkinnyConfig, candidates, default_config, is_hopper, timed
from core_cuda.ops.workspace import counters

HALF = (torch.bfloat16, torch.float16)
TILES = (
    SkinnyConfig("row", 4, 64),
    SkinnyConfig("tile", 32, 64, 4, 2),
    SkinnyConfig("tile", 32, 64, 4, 3, split_k=3),
    SkinnyConfig("tile", 64, 32, 4, 2, swap=True),
    SkinnyConfig("tile", 64, 32, 4, 2, split_k=5, swap=True),
)


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    return {
        "x": randn(rows, depth, dtype=dtype, seed=seed),
        "weight": randn(columns, depth, dtype=dtype, seed=seed + 1, scale=0.1),
        "bias": randn(columns, dtype=dtype, seed=seed + 2),
    }


def judged(result: torch.Tensor, op: CanonicalOp, call: dict[str, Any]) -> bool:
    exact = op.reference(**{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in call.items()})
    return bool(judge(result.cpu(), op.reference(**call), exact).passed)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        (LINEAR, linear),
        (LINEAR, linear_other),
        (GATED_LINEAR, gated_linear),
        (GATED_LINEAR, gated_linear_other),
    ],
    ids=["linear", "linear, other", "gated", "gated, other"],
)
def test_samples(op: CanonicalOp, kernel: Any, dtype: torch.dtype, kernel_device: torch.device) -> None:
    calls = [sample.kwargs for sample in op.samples(dtype, CPU)]
    turned = [call for call in calls if call["weight"].stride(1) != 1]
    assert all(why_not(OpCall(op=op.qualified_name, args=call)) for call in turned)
    check(op, kernel, [call for call in calls if call["weight"].stride(1) == 1], kernel_device)


@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_way_to_divide_the_work(config: SkinnyConfig, dtype: torch.dtype, kernel_device: torch.device) -> None:
    for rows, columns, depth in ((1, 136, 300), (5, 96, 256), (19, 72, 200)):
        if config.kernel == "row" and rows > 1:
            continue
        call = operands(rows, columns, depth, dtype)
        there = moved(call, kernel_device)
        first = skinny_linear(**there, config=config)
        assert judged(first, LINEAR, call), (rows, columns, depth)
        assert torch.equal(first, skinny_linear(**there, config=config))  # whoever comes last
        gate = Gate("silu")
        gated = skinny_linear(**there, gate=gate, config=config)
        assert judged(gated, GATED_LINEAR, {**call, "kind": "silu"}), (rows, columns, depth)
    assert not counters(1, kernel_device).any()


def test_what_a_tuner_tries_is_right(kernel_device: torch.device) -> None:
    for rows in (1, 3, 40, 100):
        call = operands(rows, 64, 512, torch.float16)
        for config in list(candidates(rows, 64, 512))[:: 3 if kernel_device == CPU else 1]:
            assert judged(skinny_linear(**moved(call, kernel_device), config=config), LINEAR, call), (rows, config)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gates(kind: str, kernel_device: torch.device) -> None:
    call = operands(3, 128, 64, torch.float16)
    for options in ({}, {"gate_first": False}, {"limit": 0.5, "up_offset": 1.0}):
        found = skinny_linear(**moved(call, kernel_device), gate=Gate(kind, **options), config=TILES[1])
        assert judged(found, GATED_LINEAR, {**call, "kind": kind, **options}), options


def test_rows_of_wider_tensors(kernel_device: torch.device) -> None:
    wide, tall = randn(4, 300, dtype=torch.bfloat16), randn(120, 128, dtype=torch.bfloat16, seed=3)
    call = {"x": wide[:, 64:192], "weight": tall[40:104]}
    for config in TILES[1:]:
        assert judged(skinny_linear(**moved(call, kernel_device), config=config), LINEAR, call)


def test_a_bias_may_be_every_second_element(kernel_device: torch.device) -> None:
    call = operands(3, 64, 128, torch.bfloat16)
    call["bias"] = torch.stack((call["bias"], call["bias"].flip(0)), dim=-1)[:, 0]
    assert judged(skinny_linear(**moved(call, kernel_device), config=TILES[1]), LINEAR, call)


def test_codes_of_fp8_with_their_scales(kernel_device: torch.device) -> None:
    x, weight = (randn(n, 256, seed=n).to(torch.float8_e4m3fn) for n in (6, 64))
    scales = (torch.rand(6) + 0.5, torch.rand(64) + 0.5)
    exact = (x.double() * scales[0][:, None].double()) @ (weight.double() * scales[1][:, None].double()).T
    for config in TILES:
        rows = 1 if config.kernel == "row" else 6
        there = [t.to(kernel_device) for t in (x[:rows], weight, scales[0][:rows], scales[1])]
        found = skinny_linear(there[0], there[1], scales=(there[2], there[3]), out_dtype=torch.bfloat16, config=config)
        assert judge(found.cpu(), exact[:rows].float().to(torch.bfloat16), exact[:rows]).passed


def test_only_rows_at_aligned_addresses_are_fetched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[bool] = []
    monkeypatch.setattr(launching, "launch", lambda *_, **options: fetched.append(options["FETCH"]))
    wide = torch.empty(64, 512 + 16, dtype=torch.bfloat16)
    for first in (0, 8, 1):  # 0, 16 and 2 bytes from an aligned address
        x, weight = torch.empty(4, 512, dtype=torch.bfloat16), wide[:, first : first + 512]
        for fetch in (True, False):
            skinny_linear(x, weight, config=SkinnyConfig("tile", 64, 64, 4, 2, fetch=fetch))
    assert fetched == [True, False, True, False, False, False]


def test_many_rows_whose_strides_torch_sees_apart_are_one_product() -> None:
    call = operands(200, 32, 64, torch.bfloat16)
    call["x"] = call["x"][None].transpose(0, 1)  # (200, 1, 64): torch alone multiplies each row by a copy of the weight
    with OpsSeen() as seen:
        out = _by_library(**call)
    assert out.shape == (200, 1, 32) and "aten.bmm.default" not in seen.names


def test_many_rows_and_other_dtypes_are_for_cublas(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    real = launching.launch

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.__name__)
        real(kernel, *args, **options)

    monkeypatch.setattr(launching, "launch", launch)
    for rows, dtype in ((200, torch.bfloat16), (3, torch.float32), (0, torch.bfloat16)):
        call = moved(operands(rows, 32, 64, dtype), kernel_device)
        torch.testing.assert_close(linear(**call), torch.nn.functional.linear(**call))
        assert not launched
    linear(**moved(operands(3, 32, 64, torch.bfloat16), kernel_device))
    assert launched == ["hopper_linear_kernel" if is_hopper() else "_tile_kernel"]


@pytest.mark.parametrize(
    "gated", [pytest.param(False, id="linear"), pytest.param(True, id="gated", marks=pytest.mark.slow)]
)
def test_the_other_kernel_is_timed_where_nobody_measured(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own kernels and cuBLAS are timed against each other up to a number of rows."""
    which = (gated_linear, gated_linear_other) if gated else (linear, linear_other)
    launched: list[str] = []
    real = launching.launch

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.__name__)
        real(kernel, *args, **options)

    monkeypatch.setattr(launching, "launch", launch)
    gate: dict[str, Any] = {"kind": "silu", "interleaved": False} if gated else {}
    own = {}
    for rows in (3, 20, 100, 200):
        call = operands(rows, 64, 64, torch.bfloat16) | gate
        for kernel in which:
            launched.clear()
            kernel(**call)
            own[rows, kernel] = launched == ["_tile_kernel"]
        assert (other_timed(OpCall(op="core::linear", args=call)) is None) == (rows <= 32)
        assert (own[rows, which[0]] != own[rows, which[1]]) == (rows <= 128)
    few_columns = operands(64, 64, 64, torch.bfloat16) | gate
    assert (other_timed(OpCall(op="core::linear", args=few_columns)) is None) is not gated
    assert own[3, which[0]] and not own[20, which[0]]
    alternating = OpCall(op="core::gated_linear", args=call | {"kind": "silu", "interleaved": True})
    assert "alternating" in str(other_timed(alternating))
    monkeypatch.setattr("core_cuda.ops.linear.products.winner", lambda *_, **__: (True, None))
    assert "is known" in str(other_timed(OpCall(op="core::linear", args=operands(3, 64, 64, torch.bfloat16) | gate)))


@pytest.mark.parametrize(
    ("columns", "depth", "config"),
    [
        (4096, 4096, SkinnyConfig("tile", 32, 256, 4, 4)),
        (4096, 14_336, SkinnyConfig("tile", 32, 256, 4, 4)),
        (2048, 2048, SkinnyConfig("tile", 32, 256, 4, 4, split_k=2)),
        (2048, 8192, SkinnyConfig("tile", 32, 256, 4, 4, split_k=2)),
        (128_256, 4096, SkinnyConfig("tile", 128, 128, 8, 2)),
    ],
)
def test_the_default_of_64_rows_is_what_tuners_found(
    columns: int, depth: int, config: SkinnyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winners of an H100 (of 4,096 columns and more) and of an H200 in layers (of 2,048)."""
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)
    monkeypatch.setattr(launching, "shared_bytes", lambda: 227 * 1024)
    monkeypatch.setattr(launching, "has_shared_operands", lambda: True)
    assert default_config(64, columns, depth) == config and timed(64, columns)
    fewer = default_config(33, columns, depth)  # whose shares of a split move fewer bytes
    assert replace(fewer, split_k=config.split_k) == config and timed(33, columns)


@pytest.mark.parametrize("rows", [33, 64])
def test_many_rows_by_the_default(rows: int, kernel_device: torch.device) -> None:
    call = operands(rows, 96, 600, torch.bfloat16)
    assert judged(linear_other(**moved(call, kernel_device)), LINEAR, call)


@pytest.mark.parametrize("size", [(64, 6144, False), (64, 14_336, True), (65, 4096, False), (128, 128_256, False)])
def test_where_cublas_won_at_many_rows_nothing_is_timed(
    size: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)
    rows, columns, gated = size
    assert not timed(rows, columns, gated=gated)
    assert timed(32, columns, gated=gated)


def test_calls_that_no_kernel_takes() -> None:
    call = operands(3, 32, 64, torch.bfloat16)
    assert why_not(OpCall(op="core::linear", args=call)) is None
    wrong = {"x": call["x"].float(), "weight": call["weight"].float()}
    assert "x is torch.float32" in str(why_not(OpCall(op="core::linear", args=wrong)))
    transposed = {**call, "weight": call["weight"].T.contiguous().T}
    assert "not one run of memory" in str(why_not(OpCall(op="core::linear", args=transposed)))


def test_defaults_fill_the_device_and_fit_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)
    for rows in (1, 2, 8, 16, 64, 128):
        for columns, depth, gated in ((4096, 4096, False), (14336, 4096, True), (2048, 8192, False), (64, 64, False)):
            found = list(candidates(rows, columns, depth, gated=gated))
            assert found[0] == default_config(rows, columns, depth, gated=gated) and len(set(found)) == len(found)
            for config in found:
                height = max(16, 1 << (rows - 1).bit_length())
                tile = (height + config.block_n * (1 + gated)) * config.block_k * 2
                assert config.kernel == "row" or tile * max(config.num_stages, 1) <= 227 * 1024
                assert 1 <= config.split_k <= 16


def test_what_was_measured_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"kernel": "tile", "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 2, "split_k": 2}
    known = {"columns": 4096, "depth": 4096, "gated": False}
    entries = [{"shape": {**known, "rows": 8}, "config": None}, {"shape": {**known, "rows": 2}, "config": config}]
    monkeypatch.setattr(tuned, "table", lambda: {"linear": entries})
    tuned._winner.cache_clear()

    def found(rows: int, **changes: Any) -> tuple[bool, Any]:
        return tuned.winner("linear", {"rows": rows, **known, **changes}, ranged=("rows",))

    try:
        assert found(1) == (True, config) and found(3) == (True, None)
        assert found(9) == (False, None) and found(1, gated=True) == (False, None)
        assert tuned.winner("decode_attention", known) == (False, None)
    finally:
        tuned._winner.cache_clear()


def test_the_nearest_length_decides_as_far_as_it_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [(1, 1024), (8, 1024), (1, 8192)]
    entries = [{"shape": {"seqs": s, "positions": p, "heads": 8}, "config": {"of": [s, p]}} for s, p in measured]
    monkeypatch.setattr(tuned, "table", lambda: {"attention": entries})
    tuned._winner.cache_clear()

    def found(seqs: int, positions: int) -> Any:
        shape = {"seqs": seqs, "positions": positions, "heads": 8}
        known, config = tuned.winner("attention", shape, ranged=("seqs",), near=("positions",))
        return config["of"] if known and config else None

    try:
        assert found(1, 1200) == [1, 1024] and found(1, 4096) == [1, 8192] and found(1, 900) == [1, 1024]
        assert found(3, 1200) == [8, 1024] and found(3, 4096) == [8, 1024]  # no more than four times as long
        assert found(3, 4097) is None and found(9, 1024) is None and found(1, 32768) == [1, 8192]
        assert found(1, 32769) is None and found(1, 100) is None
    finally:
        tuned._winner.cache_clear()


def test_files_of_measurements_hold_configurations() -> None:
    assert tuned.file_name("NVIDIA H200") == "nvidia_h200.json"
    for file in Path(tuned.__file__).parent.glob("*.json"):
        for entry in json.loads(file.read_text()).get("linear", ()):
            assert entry["config"] is None or SkinnyConfig(**entry["config"]).kernel in ("row", "tile")
            assert entry["shape"].keys() == {"rows", "columns", "depth", "gated"}
