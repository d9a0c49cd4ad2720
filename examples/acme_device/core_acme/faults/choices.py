"""Faults of choices in graphs, as an indexer makes them of the positions that attention then sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from core.common.graphs.tape import Tape
from torch import Tensor

from core_acme.faults.graphs import Fault, spoiling

Function = Callable[..., Any]

_FEW = 32  # as experts are, which another kernel chooses


def _choosing(change: Callable[[Function], Function]) -> Fault:
    """Make a function the fault of its name: it says what choices of the largest among many call instead."""

    def spoil(tape: Tape) -> None:
        for index, call in enumerate(tape.calls):
            if call.op is torch.ops.aten.topk.default and call.args[0].shape[-1] > _FEW:
                tape.calls[index] = call._replace(op=change(call.op))

    return spoiling(spoil)


@_choosing
def choice_stale(op: Function) -> Function:
    """Let the kernel that chooses run beside the one that computes its scores."""
    before: list[Tensor] = []

    def chosen(scores: Tensor, *args: Any, **options: Any) -> Any:
        before.append(scores.clone())
        return op(before.pop(0) if len(before) > 1 else scores, *args, **options)

    return chosen


@_choosing
def choice_off_by_one(op: Function) -> Function:
    """Take ranks from 1 to k for those from 0 to k - 1."""

    def chosen(scores: Tensor, k: int, *args: Any, **options: Any) -> Any:
        return tuple(
            each[..., 1:].clone(memory_format=torch.contiguous_format) for each in op(scores, k + 1, *args, **options)
        )

    return chosen
