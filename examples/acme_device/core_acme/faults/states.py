"""Faults of kernels on states in slots: each takes the implementations and returns those of recurrent layers wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from core.common.ops.canonical import OPS
from torch import Tensor

from core_acme.faults.ops import Fault, Function, Implementations, changing

Arguments = dict[str, Any]

_OPS = {f"core::{op.name}": op for op in OPS if op.name in ("causal_conv1d_update", "selective_state_update")}
_PER_ROW = ("x", "dt", "B", "C", "bounded")


def _wrong(wrong: Callable[[Function, Arguments], Any]) -> Fault:
    """Make a function the fault of its name: it is given the honest function and all arguments by name."""

    def fault(implementations: Implementations) -> Implementations:
        for name, op in _OPS.items():

            def change(honest: Function, bind: Callable[..., Any] = op.bind) -> Function:
                return lambda *args, **options: wrong(honest, dict(bind(args, options).args))

            implementations = changing(change, name.removeprefix("core::"))(implementations)
        return implementations

    return fault


@_wrong
def state_stale(honest: Function, given: Arguments) -> Any:
    """Compute on a copy of the states, and forget to write it back."""
    return honest(**given | {"states": given["states"].clone()})


@_wrong
def state_neighbour(honest: Function, given: Arguments) -> Any:
    """Take the order of the step's sequences for that of another one: each reads the state of the next."""
    slots = given["slots"]
    if slots is None:
        return honest(**given)
    return honest(**given | {"slots": slots.roll(-1), "kept": slots if given["kept"] is None else given["kept"]})


@_wrong
def state_not_reset(honest: Function, given: Arguments) -> Any:
    """Read where the state will be kept: what the sequence before has left there."""
    return honest(**given | {"slots": given["slots"] if given["kept"] is None else given["kept"]})


@_wrong
def state_border(honest: Function, given: Arguments) -> Any:
    """Count a chunk's tokens from 0 to one less than there are, where the state is kept."""
    if given["query_starts"] is None:
        return honest(**given)
    states, before = given["states"], given["states"].clone()
    result = honest(**given)
    states.copy_(before)
    honest(**given | _without_last(given))
    return result


def _without_last(given: Arguments) -> Arguments:
    """Return what differs in a call without each sequence's last row: these rows stand behind the others, as padding
    does."""
    starts, num_rows = given["query_starts"].long(), given["x"].shape[0]
    rows = torch.arange(num_rows, device=starts.device)
    sequence = torch.bucketize(rows, starts[1:], right=True)
    last = (rows == starts[(sequence + 1).clamp(max=len(starts) - 1)] - 1) | (rows >= starts[-1])
    order = last.long().argsort(stable=True)
    fewer = (starts.diff() > 0).long().cumsum(0)
    own = {name: given[name][order] for name in _PER_ROW if isinstance(given.get(name), Tensor)}
    return {**own, "query_starts": torch.cat((starts[:1], starts[1:] - fewer)).to(given["query_starts"].dtype)}
