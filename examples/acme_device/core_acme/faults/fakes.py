"""Faults of the foreign library and of the shape rules declared for it.

Kernels and rules are torch's once registered, so these faults stay until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from core.common.fakes import FakeOp, ShapeRule, like
from torch import Tensor
from torch.nn import functional

from core_acme import foreign

Fakes = tuple[FakeOp, ...]
Fault = Callable[[Fakes], Fakes]
Kernel = Callable[..., Tensor]


def _with_rule(rule: ShapeRule) -> Fault:
    """Make a function the fault of its name: it is the shape rule of `silu_and_mul`."""
    name = f"{foreign.NAMESPACE}::silu_and_mul"
    return lambda fakes: tuple(replace(fake, rule=rule) if fake.op == name else fake for fake in fakes)


def _kernel_of(op: str) -> Callable[[Kernel], Fault]:
    """Make a function the fault of its name: it takes the place of an op's kernel."""

    def made(kernel: Kernel) -> Fault:
        def fault(fakes: Fakes) -> Fakes:
            foreign.LIBRARY.impl(op, kernel, "CPU", allow_override=True)
            return fakes

        return fault

    return made


fake_shape = _with_rule(like())  # forgets that the gate halves its rows


@_with_rule
def fake_dtype(gate_up: Tensor) -> Tensor:
    """Declare the dtype that the rule's author happened to use."""
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=torch.float32)


@_kernel_of("silu_and_mul")
def fake_strides(gate_up: Tensor) -> Tensor:
    """Give the result of a kernel that works column by column."""
    result = foreign.silu_and_mul(gate_up)
    return result.mT.contiguous().mT if result.dim() >= 2 else result


@_kernel_of("pad_rows")
def fake_alias(x: Tensor, multiple: int) -> Tensor:
    """Save the copy where there is nothing to pad."""
    return x if x.shape[0] % multiple == 0 else foreign.pad_rows(x, multiple)


@_kernel_of("silu_and_mul")
def fake_mutation(gate_up: Tensor) -> Tensor:
    """Save a buffer by computing the gate where it lies."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul(up).contiguous()
