"""core_cuda/ops/linear/hopper*.py: products with few rows at compute capability 9.

Gluon has no interpreter: test_cuda_compiles.py compiles the kernel, and its numbers are judged on a GPU.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import Fp64Mode, judge
from core.common.ops.declaration import CanonicalOp
from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from tests.kernel_cases import CPU, moved, randn

pytest.importorskip("triton", reason="needs triton")

from core_cuda.ops import launching
from core_cuda.ops.activation import Gate
from core_cuda.ops.linear import hopper, quantized, skinny_configs
from core_cuda.ops.linear.products import linear
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import SkinnyConfig, candidates, default_config, timed
from core_cuda.ops.workspace import counters

FP8 = torch.float8_e4m3fn
SIZES = (
    (torch.bfloat16, 5, 136, 512),
    (torch.float16, 7, 1000, 2048),
    (torch.bfloat16, 64, 4096, 4096),
    (torch.float16, 100, 192, 1040),
)
CONFIGS = (
    SkinnyConfig("hopper", 64, 64, 4, 3, 1),
    SkinnyConfig("hopper", 64, 128, 4, 3, 2),
    SkinnyConfig("hopper", 64, 64, 4, 4, 5),
)
GATES = (None, Gate("silu"), Gate("gelu", gate_first=False, limit=0.5, up_offset=1.0))
MULTIPROCESSORS = 132


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available() or not skinny_configs.is_hopper():
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    return torch.device("cuda")


@pytest.fixture
def sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose configurations as on an H100."""
    monkeypatch.setattr(skinny_configs, "is_hopper", lambda: True)
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: MULTIPROCESSORS)


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "x": randn(rows, depth, dtype=dtype),
        "weight": randn(columns, depth, dtype=dtype, seed=1, scale=0.1),
        "bias": randn(columns, dtype=dtype, seed=2),
    }


def judged(result: Tensor, op: CanonicalOp, call: dict[str, Any]) -> bool:
    exact = op.reference(**{k: v.double() if isinstance(v, Tensor) else v for k, v in call.items()})
    return bool(judge(result.cpu(), op.reference(**call), exact).passed)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "gate", [None, Gate("silu"), Gate("gelu", gate_first=False, limit=0.5, up_offset=1.0)], ids=str
)
def test_numbers(config: SkinnyConfig, gate: Gate | None, gpu: torch.device) -> None:
    for dtype, rows, columns, depth in SIZES:
        call = operands(rows, columns, depth, dtype)
        there = moved(call, gpu)
        first = skinny_linear(**there, gate=gate, config=config)
        op = LINEAR if gate is None else GATED_LINEAR
        options = {} if gate is None else asdict(gate)
        options.pop("interleaved", None)
        assert judged(first, op, {**call, **options}), (rows, columns, depth)
        assert torch.equal(first, skinny_linear(**there, gate=gate, config=config))  # whoever comes last
    assert not counters(1, gpu).any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 64, 128])
def test_what_a_tuner_tries_is_right(rows: int, gpu: torch.device) -> None:
    call = operands(rows, 512, 2048, torch.bfloat16)
    for config in candidates(rows, 512, 2048):
        if config.kernel == "hopper" and config.split_k in (1, 2, 7):
            assert judged(skinny_linear(**moved(call, gpu), config=config), LINEAR, call), (rows, config)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_codes(early: bool, gpu: torch.device) -> None:
    kernel = quantized.quantized_linear_early if early else quantized.quantized_linear
    for rows, columns, depth in ((1, 144, 512), (7, 1008, 1040), (33, 512, 4096), (64, 64, 256)):
        call = {
            "x_codes": randn(rows, depth, dtype=torch.float32).to(FP8),
            "x_scale": torch.rand(rows, 1),
            "w_codes": randn(columns, depth, dtype=torch.float32, seed=1).to(FP8),
            "w_scale": torch.rand(columns, 1),
            "bias": randn(columns, dtype=torch.bfloat16, seed=2),
            "out_dtype": torch.bfloat16,
        }
        found = kernel(**moved(call, gpu))
        wide = {k: v.double() if isinstance(v, Tensor) and v.dtype != FP8 else v for k, v in call.items()}
        with Fp64Mode():
            exact = QUANTIZED_LINEAR.reference(**wide)
        assert judge(found.cpu(), QUANTIZED_LINEAR.reference(**call), exact).passed, (rows, columns, depth)


@pytest.mark.gpu
def test_a_weight_that_was_just_written_is_seen_where_it_is_no_constant(gpu: torch.device) -> None:
    weight, x = torch.zeros(4096, 4096, device=gpu), torch.ones(4, 4096, device=gpu).to(FP8)
    scale = torch.ones((), device=gpu)
    wanted = torch.full((4, 4096), 4096.0, dtype=torch.bfloat16, device=gpu)
    for _ in range(50):
        codes = torch.zeros(4096, 4096, device=gpu, dtype=FP8)
        codes.copy_(weight.fill_(1))
        found = quantized.quantized_linear(x, scale, codes, scale, None, out_dtype=torch.bfloat16)
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_unaligned_rows_go_to_the_portable_kernel(gpu: torch.device) -> None:
    wide = randn(6, 301, dtype=torch.bfloat16)
    call = {"x": wide[:, 1:257], "weight": randn(64, 256, dtype=torch.bfloat16, seed=3)}
    there = moved(call, gpu)
    there["x"] = wide.to(gpu)[:, 1:257]
    assert not hopper.takes(there["x"], there["weight"])
    assert judged(skinny_linear(**there, config=CONFIGS[0]), LINEAR, call)


@pytest.mark.gpu
def test_a_graph_replays(gpu: torch.device) -> None:
    call = moved(operands(8, 512, 4096, torch.bfloat16), gpu)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = linear(**call)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            x = call["x"]
            for _ in range(20):
                found = linear(x, call["weight"], call["bias"])
        for _ in range(200):
            graph.replay()
        stream.synchronize()
    assert torch.equal(found, wanted)


def test_what_descriptors_cannot_load_is_not_taken() -> None:
    x, weight = (torch.empty(4, 512, dtype=torch.bfloat16) for _ in range(2))
    assert hopper.takes(x, weight)
    assert not hopper.takes(x.float(), weight.float()) and not hopper.takes(x, weight.half())
    assert not hopper.takes(x[:, 1:], weight)  # begins between two 16 bytes
    assert not hopper.takes(torch.empty(4, 500, dtype=torch.bfloat16)[:, :256], weight[:, :256])


@pytest.mark.usefixtures("sizes_only")
def test_defaults_fill_the_gpu_and_fit_it() -> None:
    for rows in (2, 8, 33, 64, 128):
        for columns, depth, gated in ((6144, 4096, False), (2048, 8192, False), (14336, 3584, True), (96, 64, False)):
            for bits in (16, 8):
                config = default_config(rows, columns, depth, gated=gated, bits=bits)
                parts, height = 2 if gated else 1, max(8, 1 << (rows - 1).bit_length())
                tile = (64 * parts + height) * config.block_k * bits // 8
                assert config.kernel == "hopper" and config.num_stages >= 2, (rows, columns, config)
                assert tile * config.num_stages + 128 * height < launching.shared_bytes(), (rows, columns, config)
                tiles = -(-columns // 64)
                assert config.split_k == 1 or tiles * config.split_k <= MULTIPROCESSORS, (rows, columns, config)


@pytest.mark.usefixtures("sizes_only")
def test_long_sums_with_few_columns_are_shared_and_short_ones_are_not() -> None:
    assert default_config(8, 4096, 14336).split_k == 2
    assert default_config(8, 2048, 2048).split_k == 1
    assert default_config(8, 28672, 4096).split_k == 1


@pytest.mark.usefixtures("sizes_only")
def test_one_row_stays_on_the_ordinary_units_and_all_others_are_timed() -> None:
    assert default_config(1, 4096, 4096).kernel == "row"
    assert default_config(1, 4096, 4096, bits=8).kernel == "hopper"
    assert all(timed(rows, 6144, gated=True) for rows in (2, 64, 128)) and not timed(129, 6144)


def test_elsewhere_nothing_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_configs, "is_hopper", lambda: False)
    assert all(config.kernel != "hopper" for rows in (1, 8, 64) for config in candidates(rows, 4096, 4096))


def test_codes_are_read_early_only_if_they_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_configs, "is_hopper", lambda: True)
    codes, scale = torch.empty(64, 64, dtype=FP8, device=CPU), torch.empty(1)
    call = {"x_codes": codes, "x_scale": scale, "w_codes": codes, "w_scale": scale, "out_dtype": torch.bfloat16}
    computed = QUANTIZED_LINEAR.bind((), call)
    assert "no constant" in str(quantized.why_not_early(computed)) and quantized.why_not(computed) is None
    bound = QUANTIZED_LINEAR.bind((), call, constants=frozenset({"w_codes", "w_scale"}))
    assert quantized.why_not_early(bound) is None
    monkeypatch.setattr(skinny_configs, "is_hopper", lambda: False)
    assert "compute capability 9 only" in str(quantized.why_not_early(bound))
