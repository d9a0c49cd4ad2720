"""core_cuda/ops/activation.py against the references of the canonical ops: every kind, layout and place of rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.ops.mlp.activation import ACTIVATIONS, GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.mlp.quantized import GATED_ACTIVATION_QUANTIZE
from tests.kernel_cases import CODED, CPU, DTYPES, check, check_codes, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops import activation

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
OPS = (GATED_ACTIVATION, GATED_ACTIVATION_FUSED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_gates_agree_with_the_reference_on_its_samples(
    op: Any, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check(op, getattr(activation, op.name), [s.kwargs for s in op.samples(dtype, CPU)], kernel_device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_length(dtype: torch.dtype, kernel_device: torch.device) -> None:
    calls = [
        {"gate_up": randn(*size, dtype=dtype, scale=2.0), "kind": "silu"} for size in ((9, 2), (5, 126), (2, 10_000))
    ]
    calls += [{**call, "interleaved": True, "gate_first": False} for call in calls]
    check(GATED_ACTIVATION_FUSED, activation.gated_activation_fused, calls, kernel_device)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_half_precision_rounds_as_eager_does(kind: str, kernel_device: torch.device) -> None:
    """Nearly every element is the reference's own: an activation that is not rounded would move a third of them."""
    call = {"gate": randn(16, 512, dtype=torch.bfloat16, scale=2.0), "up": randn(16, 512, dtype=torch.bfloat16, seed=1)}
    result = activation.gated_activation(**moved(call, kernel_device), kind=kind).cpu()
    assert (result != GATED_ACTIVATION.reference(**call, kind=kind)).float().mean() < 0.02


def test_results_lie_in_memory_as_the_references_do(kernel_device: torch.device) -> None:
    dtype = torch.bfloat16
    rows = randn(2, 4, 3, 64, dtype=dtype)
    gates = [
        rows.transpose(1, 2),
        rows.permute(2, 0, 1, 3),
        rows[::2, ::3, ::2, :32],
        randn(64, 6, dtype=dtype).t(),
        randn(64),
    ]
    gates += [randn(1, 64, dtype=dtype).expand(5, 64), randn(3, 128, dtype=dtype)[:, ::2]]
    calls = [{"gate": g, "up": randn(*g.shape, dtype=dtype, seed=1), "kind": "silu", "up_offset": 0.25} for g in gates]
    calls.append({**calls[0], "up": randn(*calls[0]["gate"].shape, seed=2), "limit": 0.7})
    check(GATED_ACTIVATION, activation.gated_activation, calls, kernel_device)
    wholes = [rows, rows.transpose(1, 2), rows.permute(2, 0, 1, 3), rows.transpose(2, 3)[0, :2, ::9, :2], rows[0, 0, 0]]
    fused = [{"gate_up": x, "kind": "gelu_tanh", **o} for x in wholes for o in ({}, {"interleaved": True})]
    check(GATED_ACTIVATION_FUSED, activation.gated_activation_fused, fused, kernel_device)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_values_that_are_not_finite(kind: str, kernel_device: torch.device) -> None:
    gate, up = randn(2, 64), randn(2, 64, seed=1)
    # The host's own gelu of infinity is NaN or not, by where it stands in the vector.
    gate[0, :4] = torch.tensor([float("nan"), 50.0 if kind == "gelu" else float("inf"), -float("inf"), -0.0])
    up[0, 4:7] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for limit in (0.0, 3.0):
        call = {"gate": gate, "up": up, "kind": kind, "limit": limit}
        result, wanted = activation.gated_activation(**moved(call, kernel_device)), GATED_ACTIVATION.reference(**call)
        torch.testing.assert_close(result.cpu(), wanted, equal_nan=True)


@pytest.mark.parametrize("whole_rows", [False, True])
def test_every_configuration_gives_the_same(whole_rows: bool, kernel_device: torch.device) -> None:
    gate, up = randn(3, 700).to(kernel_device), randn(3, 700, seed=1).to(kernel_device)
    wanted = GATED_ACTIVATION.reference(gate, up, kind="silu")
    configs = list(activation.candidates(3, 700, whole_rows=whole_rows))
    assert len(configs) > 2
    for config in configs[:: 1 if kernel_device.type == "cuda" else 3]:
        out = torch.empty_like(gate)
        activation.run_gate(gate, up, out, activation.Gate("silu"), config=config)
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_agree_with_the_reference_on_its_samples(dtype: torch.dtype, kernel_device: torch.device) -> None:
    (implementation,) = (i for i in IMPLEMENTATIONS if i.op == GATED_ACTIVATION_QUANTIZE.qualified_name)
    calls = [dict(s.kwargs) for s in GATED_ACTIVATION_QUANTIZE.samples(dtype, CPU)]
    taken = [call for call in calls if implementation.condition(GATED_ACTIVATION_QUANTIZE.bind((), call)) is None]
    assert len(taken) > len(calls) // 3
    check_codes(GATED_ACTIVATION_QUANTIZE, taken, activation.gated_activation_quantize, kernel_device)


@pytest.mark.parametrize(("dtype", "code"), CODED, ids=str)
@pytest.mark.parametrize("width", [63, 3008, 40_000])
def test_codes_are_those_of_the_product(
    width: int, dtype: torch.dtype, code: torch.dtype, kernel_device: torch.device
) -> None:
    rows = 1 + (width < 3000)
    gate_up = randn(rows, 2 * width, dtype=dtype, scale=2.0)
    forms: list[dict[str, Any]] = [
        {"scale": None},
        {"scale": torch.tensor(0.03), "granularity": "tensor"},
        {"scale": None, "granularity": "group", "group_size": 64},
    ]
    layouts: list[dict[str, Any]] = [
        {"gate": gate_up, "up": None},
        {"gate": gate_up, "up": None, "interleaved": True, "gate_first": False, "limit": 2.0},
        {"gate": gate_up[:, :width], "up": randn(rows, width, seed=3)},
    ]
    for form in forms[: 2 if width == 63 else 3]:
        calls = [{**layout, **form, "kind": "silu", "dtype": code} for layout in layouts]
        check_codes(GATED_ACTIVATION_QUANTIZE, calls, activation.gated_activation_quantize, kernel_device)


def test_blocks_hold_whole_groups() -> None:
    for size in (1, 128, 512, 4096):
        for rows in (1, 4096):
            assert activation.default_config(rows, 8192, region=size).block % size == 0
    assert activation.default_config(1, 3000, region=3000).block == 4096
