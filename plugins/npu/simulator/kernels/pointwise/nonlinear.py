"""The pointwise functions of torch.nn.functional; gated ones of two halves are in gated.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simulator.marshal import kernel

_PLAIN = {
    "Hardsigmoid": F.hardsigmoid,
    "Hardswish": F.hardswish,
    "Mish": F.mish,
    "Relu": F.relu,
    "Silu": F.silu,
    "Selu": F.selu,
}


def _register(name: str, function: Any) -> None:
    @kernel(f"aclnn{name}", "TT")
    def out_of_place(x: Tensor, out: Tensor) -> None:
        out.copy_(function(x))

    @kernel(f"aclnnInplace{name}", "T")
    def inside(x: Tensor) -> None:
        x.copy_(function(x))


for _name, _function in _PLAIN.items():
    _register(_name, _function)


@kernel("aclnnGelu", "TT")
def _gelu(x: Tensor, out: Tensor) -> None:
    # The kernel of this name is the tanh form; aclnnGeluV2 names its form.
    out.copy_(F.gelu(x, approximate="tanh"))


@kernel("aclnnGeluV2", "TIT")
def _gelu_named(x: Tensor, form: int, out: Tensor) -> None:
    out.copy_(F.gelu(x, approximate="tanh" if form == 1 else "none"))


@kernel("aclnnSoftplus", "TSST")
def _softplus(x: Tensor, beta: Any, threshold: Any, out: Tensor) -> None:
    out.copy_(F.softplus(x, beta, threshold))


@kernel("aclnnElu", "TSSST")
def _elu(x: Tensor, alpha: Any, scale: Any, input_scale: Any, out: Tensor) -> None:
    out.copy_(torch.ops.aten.elu(x, alpha, scale, input_scale))


@kernel("aclnnLeakyRelu", "TST")
def _leaky_relu(x: Tensor, slope: Any, out: Tensor) -> None:
    out.copy_(F.leaky_relu(x, slope))


@kernel("aclnnHardtanh", "TSST")
def _hardtanh(x: Tensor, low: Any, high: Any, out: Tensor) -> None:
    out.copy_(F.hardtanh(x, low, high))


@kernel("aclnnLogSigmoid", "TTT")
def _log_sigmoid(x: Tensor, out: Tensor, buffer: Tensor) -> None:
    out.copy_(F.logsigmoid(x))


@kernel("aclnnGlu", "TIT")
def _glu(x: Tensor, dim: int, out: Tensor) -> None:
    out.copy_(F.glu(x, dim))
