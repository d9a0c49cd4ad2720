"""Faults of the foreign library and of the shape rules declared for it.

Kernels and rules are torch's once registered, so these faults stay until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from core.common.fakes import FakeOp, ShapeRule, like
from torch import Tensor
from torch.nn import functional

from core_acme import foreign

Fakes = tuple[FakeOp, ...]


def _with_rule(fakes: Fakes, op: str, rule: ShapeRule) -> Fakes:
    name = f"{foreign.NAMESPACE}::{op}"
    return tuple(replace(fake, rule=rule) if fake.op == name else fake for fake in fakes)


def _install(op: str, kernel: Callable[..., Any]) -> None:
    foreign.LIBRARY.impl(op, kernel, "CPU", allow_override=True)


def fake_shape(fakes: Fakes) -> Fakes:
    """Forget that the gate halves its rows."""
    return _with_rule(fakes, "silu_and_mul", like())


def fake_dtype(fakes: Fakes) -> Fakes:
    """Declare the dtype that the rule's author happened to use."""

    def rule(gate_up: Tensor) -> Tensor:
        return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=torch.float32)

    return _with_rule(fakes, "silu_and_mul", rule)


def fake_strides(fakes: Fakes) -> Fakes:
    """Give the result of a kernel that works column by column."""

    def by_columns(gate_up: Tensor) -> Tensor:
        result = foreign.silu_and_mul(gate_up)
        return result.mT.contiguous().mT if result.dim() >= 2 else result

    _install("silu_and_mul", by_columns)
    return fakes


def fake_alias(fakes: Fakes) -> Fakes:
    """Save the copy where there is nothing to pad."""

    def pad_rows(x: Tensor, multiple: int) -> Tensor:
        return x if x.shape[0] % multiple == 0 else foreign.pad_rows(x, multiple)

    _install("pad_rows", pad_rows)
    return fakes


def fake_mutation(fakes: Fakes) -> Fakes:
    """Save a buffer by computing the gate where it lies."""

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate, inplace=True).mul(up).contiguous()

    _install("silu_and_mul", silu_and_mul)
    return fakes
