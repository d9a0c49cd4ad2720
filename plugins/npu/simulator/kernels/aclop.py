"""Kernels that torch_npu still runs by the operator's name: csrc/aclop.c."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import demand
from simulator.marshal import kernel


@kernel("aclopSwish", "LLC")
def swish(inputs: list[Tensor], outputs: list[Tensor], attributes: str) -> None:
    """x * sigmoid(scale * x)."""
    given = dict(each.split("=") for each in attributes.split(";") if each)
    x = inputs[0].float()
    outputs[0].copy_(x * torch.sigmoid(float(given.get("scale", 1.0)) * x))


@kernel("aclopTranspose", "LLC")
def transpose(inputs: list[Tensor], outputs: list[Tensor], attributes: str) -> None:
    """Permute, by a list of the host."""
    x, order = inputs
    demand(sorted(order.tolist()) == list(range(x.dim())), f"order {order.tolist()} of rank {x.dim()}")
    outputs[0].copy_(x.permute(order.tolist()))


@kernel("aclopIdentity", "LLC")
def identity(inputs: list[Tensor], outputs: list[Tensor], attributes: str) -> None:
    """Copy: how casts between plain storage formats run."""
    outputs[0].copy_(inputs[0].view(outputs[0].shape))
