"""The plugin's passes on norms: a sum before, a cast after."""

from __future__ import annotations

from typing import Any

import npu_library
import pytest
import torch
from npu_rewriting import HALVES, cast, draw, rewritten
from torch import Tensor

from core_npu.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core_npu.passes.norm.cast import FUSE_ADD_RMS_NORM_CAST

npu_library.install()
ops: Any = torch.ops.npu
D = 64


def inputs(dtype: torch.dtype, size: int = D) -> dict[str, Tensor]:
    rows = {"x": draw(3, 5, size), "residual": draw(3, 5, size, seed=2), "gamma": draw(size, seed=3).abs() + 0.4}
    return cast(rows, dtype)


def summed(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    total = x + residual
    return ops.npu_rms_norm(total, gamma, 3e-4)[0], total


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_add_and_the_norm_of_its_sum_are_fused(dtype: torch.dtype) -> None:
    found = rewritten(summed, FUSE_ADD_RMS_NORM, **inputs(dtype))
    assert (found.matched, found.calls) == (1, ["npu_add_rms_norm"])
    assert found.node("npu_add_rms_norm").args[3] == 3e-4
    found.check()


def test_eps_left_out_is_the_schemas() -> None:
    found = rewritten(lambda x, residual, gamma: ops.npu_rms_norm(x + residual, gamma)[0],
                      FUSE_ADD_RMS_NORM, **inputs(torch.bfloat16))  # fmt: skip
    assert found.node("npu_add_rms_norm").args[3] == 1e-6
    found.check()


def test_rows_of_open_length_in_tokens_are_fused() -> None:
    found = rewritten(summed, FUSE_ADD_RMS_NORM, dynamic={"x": (0,), "residual": (0,)}, **inputs(torch.float16))
    assert found.matched == 1
    found.check()


def test_the_norms_factor_goes_on() -> None:
    found = rewritten(lambda x, residual, gamma: ops.npu_rms_norm(x + residual, gamma, 1e-5),
                      FUSE_ADD_RMS_NORM, **inputs(torch.float16))  # fmt: skip
    assert found.matched == 1
    found.check()


def test_of_two_norms_of_one_sum_the_first_takes_the_add() -> None:
    def twice(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return ops.npu_rms_norm(total, gamma)[0], ops.npu_rms_norm(total, gamma.sin(), 1e-3)[0]

    found = rewritten(twice, FUSE_ADD_RMS_NORM, **inputs(torch.bfloat16))
    assert (found.matched, found.calls) == (1, ["npu_add_rms_norm", "npu_rms_norm"])
    assert "npu_rms_norm norms total too, and takes the add" in found.reasons
    found.check()


def in_place(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    return ops.npu_rms_norm(x.sin().add_(residual), gamma)[0]


def written_between(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    first = x.sin()
    total = first + residual
    first.mul_(2)
    return ops.npu_rms_norm(total, gamma)[0], first


def scaled(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    return ops.npu_rms_norm(torch.add(x, residual, alpha=2), gamma)[0]


def broadcast(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    return ops.npu_rms_norm(x + residual[0], gamma)[0]


def other_weight(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    return ops.npu_rms_norm(x + residual, gamma.float())[0]


MISSES = {
    in_place: "adds in place",
    written_between: "written in between by mul_",
    scaled: "scales what it adds",
    broadcast: "differ in shape",
    other_weight: "gamma",
}


@pytest.mark.parametrize("function", MISSES, ids=lambda function: function.__name__)
def test_what_is_no_plain_sum_stays(function: Any) -> None:
    found = rewritten(function, FUSE_ADD_RMS_NORM, **inputs(torch.float16))
    assert (found.matched, found.calls) == (0, ["npu_rms_norm"])
    assert MISSES[function] in found.reasons
    assert torch.equal(found.before.outputs[0], found.after.outputs[0])


def test_fp32_and_odd_rows_stay() -> None:
    found = rewritten(summed, FUSE_ADD_RMS_NORM, **inputs(torch.float32))
    assert "no value in the graph has torch.bfloat16 or torch.float16" in found.report.skipped
    found = rewritten(summed, FUSE_ADD_RMS_NORM, **inputs(torch.float16, 72))
    assert (found.matched, found.reasons) == (0, "rows of total have 144 bytes, no multiple of 32")


def routed(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    y, _, total = ops.npu_add_rms_norm(x, residual, gamma, 2e-5)
    return y.float(), y, total


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_norm_that_is_read_in_fp32_gives_both(dtype: torch.dtype) -> None:
    found = rewritten(routed, FUSE_ADD_RMS_NORM_CAST, **inputs(dtype))
    assert (found.matched, found.calls) == (1, ["npu_add_rms_norm_cast"])
    assert found.node("npu_add_rms_norm_cast").args[3] == 2e-5
    # The cast is exact, so is the fusion.
    for old, new in zip(found.before.outputs, found.after.outputs, strict=True):
        assert torch.equal(old, new)


def flat(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    y, rstd, total = ops.npu_add_rms_norm(x, residual, gamma, 2e-5)
    return y.view(-1, D).to(torch.float32), y.float(), y.cos(), rstd, total


def test_flattened_rows_and_several_casts_read_one_result() -> None:
    found = rewritten(flat, FUSE_ADD_RMS_NORM_CAST, dynamic={"x": (0,), "residual": (0,)}, **inputs(torch.bfloat16))
    assert (found.matched, found.calls) == (1, ["npu_add_rms_norm_cast"])
    assert all(torch.equal(old, new) for old, new in zip(found.before.outputs, found.after.outputs, strict=True))


def other_cast(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    return ops.npu_add_rms_norm(x, residual, gamma)[0].to(torch.bfloat16)


def cast_of_sum(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    return ops.npu_add_rms_norm(x, residual, gamma)[2].float()


@pytest.mark.parametrize("function", [other_cast, cast_of_sum], ids=lambda function: function.__name__)
def test_other_casts_stay(function: Any) -> None:
    found = rewritten(function, FUSE_ADD_RMS_NORM_CAST, **inputs(torch.float16))
    assert (found.matched, found.calls) == (0, ["npu_add_rms_norm"])


def test_odd_rows_are_no_site_of_the_cast() -> None:
    found = rewritten(routed, FUSE_ADD_RMS_NORM_CAST, **inputs(torch.float16, 40))
    assert (found.matched, found.reasons) == (0, "rows of l_inputs_x_ have 80 bytes, no multiple of 32")
