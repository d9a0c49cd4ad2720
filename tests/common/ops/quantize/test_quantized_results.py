"""core/common/ops/norm/quantized.py and core/common/ops/mlp/quantized.py: the ops before, then `core::quantize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.mlp.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.mlp.quantized import GATED_ACTIVATION_QUANTIZE
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from core.common.ops.quantize.symmetric import QUANTIZE
from tests.common.ops.canonical_oracle import Call, assert_raises, every_sample, run, sample

OPS = (RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE, GATED_ACTIVATION_QUANTIZE)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
OPTIONS = ("scale", "dtype", "granularity", "group_size")


def two_ops(op: CanonicalOp, call: Call) -> tuple[Tensor, ...]:
    """Return what the registered ops give one after another, the op's own way of joining them left out."""
    before: Call = {name: value for name, value in call.items() if name not in OPTIONS}
    first = {"rms_norm_quantize": RMS_NORM, "add_rms_norm_quantize": ADD_RMS_NORM}.get(op.name, GATED_ACTIVATION)
    if before.get("up", before) is None:
        first, before["gate_up"] = GATED_ACTIVATION_FUSED, before.pop("gate")
        del before["up"]
    value, *others = run(first, before)
    codes = run(QUANTIZE, {"x": value, **{name: call[name] for name in OPTIONS if name in call}})
    return *codes, *others


@DTYPES
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_each_sample_gives_what_the_two_ops_give(op: CanonicalOp, dtype: torch.dtype) -> None:
    for one in every_sample(op, dtype):
        results, wanted = run(op, one.kwargs), two_ops(op, dict(one.kwargs))
        assert len(results) == len(wanted)
        for result, right in zip(results, wanted, strict=True):
            assert result.dtype == right.dtype and torch.equal(result.double(), right.double()), one.name


def test_every_form_of_codes_is_among_the_samples() -> None:
    for op in OPS:
        forms = {(s.kwargs["dtype"], s.kwargs.get("granularity", "token")) for s in every_sample(op)}
        assert len(forms) == 6
        assert any(s.kwargs["scale"] is not None for s in every_sample(op))


def test_values_are_rounded_before_they_are_quantised() -> None:
    """A norm in bf16 gives codes of what bf16 holds: others than those of the values before."""
    call = sample(RMS_NORM_QUANTIZE, "int8 by token", torch.bfloat16) | {"normed_dtype": None}
    wide = RMS_NORM.reference(**{k: v for k, v in call.items() if k not in OPTIONS} | {"out_dtype": torch.float32})
    codes, _ = run(RMS_NORM_QUANTIZE, call)
    unrounded, _ = run(QUANTIZE, {"x": wide, "scale": None, "dtype": torch.int8})
    assert not torch.equal(codes, unrounded)


ERRORS: list[tuple[CanonicalOp, dict[str, Any], str]] = [
    (RMS_NORM_QUANTIZE, {"granularity": "group", "group_size": 7}, "positive divisor of 48"),
    (RMS_NORM_QUANTIZE, {"group_size": 16}, "has no meaning for granularity 'token'"),
    (RMS_NORM_QUANTIZE, {"dtype": torch.float8_e5m2}, "float8_e5m2 is none of"),
    (RMS_NORM_QUANTIZE, {"granularity": "channel"}, "granularity"),
    (RMS_NORM_QUANTIZE, {"scale": torch.ones(3)}, "scale must have shape"),
    (RMS_NORM_QUANTIZE, {"weight": torch.ones(47)}, "weight must have shape"),
    (ADD_RMS_NORM_QUANTIZE, {"residual": torch.ones(7, 47)}, "residual must have shape"),
    (GATED_ACTIVATION_QUANTIZE, {"kind": "mish"}, "kind"),
    (GATED_ACTIVATION_QUANTIZE, {"gate": torch.ones(7, 41)}, "must be even"),
    (GATED_ACTIVATION_QUANTIZE, {"up": torch.ones(7, 80), "gate_first": False}, "how one tensor holds both"),
    (GATED_ACTIVATION_QUANTIZE, {"up": torch.ones(7, 80), "interleaved": True}, "how one tensor holds both"),
]


@pytest.mark.parametrize(("op", "change", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_wrong_calls_are_refused(op: CanonicalOp, change: dict[str, Any], message: str) -> None:
    call = dict(next(every_sample(op)).kwargs)
    assert_raises(op, {**call, **change}, message)
