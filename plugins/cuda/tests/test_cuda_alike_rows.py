"""What the plugin declares batch-invariant, by the conformance suite's own cases, and planted kernels that are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.declaration import CanonicalOp, Sample, declared_ops
from core.common.ops.implementation import OpImplementation
from core.device import Device
from core.host.selection import select_device
from core_conformance.cases.ops import batches
from core_conformance.trial import Trial
from tests.conformance.support import run_case
from tests.kernel_cases import CPU, check
from tests.support import cpu

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops.alike.linear import multiply, tiles_of

pytestmark = pytest.mark.usefixtures("alike_products")

DECLARED = {each.name: each for each in IMPLEMENTATIONS if each.batch_invariant}
BY_ROWS = sorted(set(DECLARED) - {"cuda_attention_alike", "cuda_rotary_attention_alike"})  # test_cuda_alike.py has that


@pytest.fixture(autouse=True)
def compared(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the calls that were compared: in the interpreter, few by few rows."""
    found: list[str] = []
    compare, in_interpreter = batches._compare_batches, kernel_device.type == "cpu"

    def few(op: CanonicalOp, dtype: torch.dtype, device: torch.device, seed: int) -> Iterator[Sample]:
        names = batches.TOKENS.get(op.name, ())
        taken = (each for each in op.samples(dtype, device) if len({each.kwargs[n].shape[0] for n in names}) < 2)
        return islice(taken, 1 if op.name in ("sample", "grouped_mlp") else 3)

    def noting(trial: Trial, name: str, *rest: Any) -> None:
        found.append(name)
        compare(trial, name, *rest)

    monkeypatch.setattr(batches, "_compare_batches", noting)
    if in_interpreter:
        monkeypatch.setattr(batches, "BATCHES", (1, 7, 40))
        monkeypatch.setattr(batches, "calls", few)
    return found


def device_of(kernel_device: torch.device, *ops: OpImplementation) -> Device:
    return cpu(ops=ops) if kernel_device.type == "cpu" else replace(select_device("cuda"), ops=ops)


def judged(device: Device, dtype: str) -> list[str]:
    (case,) = (each for each in batches.collect(device, ConformanceProfile()) if each.id.endswith(dtype))
    return run_case(case, device)


def planted(name: str, fn: Any) -> OpImplementation:
    return replace(DECLARED[name], name="planted", fn=fn)


def test_what_is_declared() -> None:
    ops = {each.op.partition("::")[2] for each in DECLARED.values()}
    assert ops == {*batches.ROWS, *batches.TOKENS, *batches.ATTENTION} - {
        "quantized_linear",
        "weight_only_linear",
        "add_lora",
    }


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_keep_their_bits(name: str, kernel_device: torch.device, compared: list[str]) -> None:
    if name == "cuda_sample" and kernel_device.type == "cpu":
        pytest.skip("the interpreter takes minutes for it: test_cuda_sampling.py has its sums of integers")
    dtype = "bfloat16" if "grouped" in name else "float32"
    assert judged(device_of(kernel_device, DECLARED[name]), dtype) == []
    assert compared


def test_shares_that_the_number_of_rows_decides_are_found(kernel_device: torch.device) -> None:
    def split_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tiles = tiles_of(x.shape[0], *weight.shape, x.dtype)
        return multiply(x, weight, bias, replace(tiles, share=16 if len(x) < 16 else 32, whole=True))

    (found, *_) = judged(device_of(kernel_device, planted("cuda_linear_alike", split_by_rows)), "float32")
    assert "alone differ from the same among" in found


def test_kernels_whose_threads_or_tiles_the_number_of_rows_decides_declare_nothing() -> None:
    plain = {"cuda_rms_norm", "cuda_linear", "cuda_attention", "cuda_qk_norm_rotary", "cuda_grouped_mlp"}
    assert plain <= {each.name for each in IMPLEMENTATIONS if not each.batch_invariant}
    assert all(each.on_request for each in DECLARED.values() if each.name.endswith("_alike"))


@pytest.mark.parametrize("name", ["linear", "rms_norm", "add_rms_norm", "layer_norm"])
def test_samples_agree_with_the_reference(name: str, kernel_device: torch.device) -> None:
    of = DECLARED[f"cuda_{name}_alike"]
    op = declared_ops()[of.op]
    taken = [dict(each.kwargs) for each in op.samples(torch.bfloat16, CPU)]
    taken = [call for call in taken if of.condition(op.bind((), call)) is None]
    assert len(taken) > 1
    check(op, of.fn, taken, kernel_device)
