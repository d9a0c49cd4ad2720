"""A linear layer in fp32 of rows and a weight in half precision, which are read as they are.

Routers of DeepSeek-V3 and GLM-4.5 cast both to fp32 first, the whole weight in each step. Products of two such numbers
are exact in fp32, in which the plugin's kernels add them up anyway: nothing is gained by the casts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.implementation import OpCall
from core_cuda.ops.linear import products
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import MAX_ROWS
from core_cuda.ops.registration import own_kernel


def why_not(call: OpCall) -> str | None:
    """Return why the kernels can't take x and weight, a call of `core::linear` of them, or None."""
    if call.args["bias"] is not None:
        return "it has a bias, which the kernel adds in no other dtype than x's"
    return products.why_not(call)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.float(), weight.float())


@own_kernel("widened_linear(Tensor x, Tensor weight) -> Tensor", _fake, _reference)
def widened_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in fp32: (..., K) and (N, K), of one dtype, to (..., N); for calls that `why_not` lets pass.

    The weight may be read before earlier kernels are done: it is a constant that no kernel writes.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not 0 < rows.shape[0] <= MAX_ROWS or weight.shape[0] == 0:
        return _reference(x, weight)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return skinny_linear(rows, weight, out_dtype=torch.float32).view(*x.shape[:-1], weight.shape[0])
