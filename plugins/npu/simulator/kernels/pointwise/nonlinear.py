"""The pointwise functions of torch.nn.functional; gated ones of two halves are in gated.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simulator.formulas import both, stored
from simulator.marshal import kernel

_PLAIN: dict[str, Any] = {
    "Hardsigmoid": F.hardsigmoid,
    "Hardswish": F.hardswish,
    "Mish": F.mish,
    "Relu": F.relu,
    "Silu": F.silu,
    "Selu": F.selu,
}
both({name: ("TT", function) for name, function in _PLAIN.items()})
stored(
    {
        # The kernel of this name is the tanh form; aclnnGeluV2 names its form.
        "Gelu": ("TT", lambda x: F.gelu(x, approximate="tanh")),
        "GeluV2": ("TIT", lambda x, form: F.gelu(x, approximate="tanh" if form == 1 else "none")),
        "Softplus": ("TSST", F.softplus),
        "Elu": ("TSSST", torch.ops.aten.elu),
        "LeakyRelu": ("TST", F.leaky_relu),
        "Hardtanh": ("TSST", F.hardtanh),
        "Glu": ("TIT", F.glu),
    }
)


@kernel("aclnnLogSigmoid", "TTT")
def _log_sigmoid(x: Tensor, out: Tensor, buffer: Tensor) -> None:
    out.copy_(F.logsigmoid(x))
