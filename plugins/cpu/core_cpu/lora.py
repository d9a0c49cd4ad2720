"""`core::add_lora` by the extension's kernel: each row is multiplied by its own adapter, and by no other.

Plain products multiply every row by all slots and drop what is not its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.linear.lora import ADD_LORA
from core_cpu import extension
from core_cpu.own_ops import CALLED_BY, own_op
from core_cpu.row_limits import DTYPES


def _reference(base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, rank: int) -> Any:
    return ADD_LORA.reference(base, x, a, b, slots, rank=rank, sizes=[b.shape[0]])


_OF_ONE_LAYER = replace(
    ADD_LORA,
    schema="add_lora(Tensor base, Tensor x, Tensor a, Tensor b, Tensor slots, int rank) -> Tensor",
    reference=_reference,
    fake=lambda base, *_: base.new_empty(base.shape),
)
_of_layer = own_op(_OF_ONE_LAYER, "add_lora")
_of_layer_alike = own_op(_OF_ONE_LAYER, "add_lora", "_alike")


def add_lora(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, *, rank: int, sizes: Sequence[int]
) -> Tensor:
    """Add what adapters give to one layer after the other."""
    return _to_each(_of_layer, base, x, a, b, slots, rank, sizes)


def add_lora_alike(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, *, rank: int, sizes: Sequence[int]
) -> Tensor:
    """Do the same, each sum in one order."""
    return _to_each(_of_layer_alike, base, x, a, b, slots, rank, sizes)


def _to_each(
    add: Any, base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, rank: int, sizes: Sequence[int]
) -> Tensor:
    if len(sizes) == 1:
        only: Tensor = add(base, x, a, b, slots, rank)
        return only
    operands = zip(base.split(list(sizes), -1), a.split(b.shape[1]), b.split(list(sizes)), strict=True)
    return torch.cat([add(part, x, down, up, slots, rank) for part, down, up in operands], -1)


CALLED_BY.update({add_lora: _of_layer, add_lora_alike: _of_layer_alike})


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::add_lora`, or None, however many rows there are."""
    x = call.args["x"]
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    return extension.load("add_lora") or None


IMPLEMENTATIONS = (
    OpImplementation(op=ADD_LORA.qualified_name, name="cpu_add_lora", fn=add_lora, condition=why_not),
    OpImplementation(
        op=ADD_LORA.qualified_name,
        name="cpu_add_lora_alike",
        fn=add_lora_alike,
        condition=why_not,
        batch_invariant=True,
        on_request=True,
    ),
)
"""The kernel, one call for each layer; and the same with its sums in one order."""
