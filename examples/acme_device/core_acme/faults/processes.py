"""Faults of graphs on several processes: each takes the place of the honest graph backend."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from core.common.graphs.backend import GraphKey
from core.common.graphs.tape import Tape
from torch import Tensor, distributed

from core_acme.faults.graphs import EagerBackend, instead, spoiling
from core_acme.runner import RecordingBackend

Collective = Callable[..., Any]
_IN_TIME = 4


@spoiling
def collective_lost(tape: Tape) -> None:
    """See nothing of a sum between processes, as a recorder that knows the calls of this one alone."""
    _change(tape, _own_part, "all_reduce", "reduce_scatter")


@spoiling
def collective_late(tape: Tape) -> None:
    """Read where a collective lands before this one has landed."""
    _change(tape, _late, "all_reduce", "reduce_scatter", "all_gather")


@spoiling
def ranks_swapped(tape: Tape) -> None:
    """Number processes from the other end."""
    _change(tape, _swapped, "all_gather")


@spoiling
def collective_twice(tape: Tape) -> None:
    """Issue a sum when it is recorded and when it is waited for."""
    _change(tape, _twice, "all_reduce")


@spoiling
def collectives_exchanged(tape: Tape) -> None:
    """Let the second process hand in what is ready first."""
    if not distributed.is_initialized() or distributed.get_rank() != 1:
        return
    sums = [index for index, call in enumerate(tape.calls) if str(call.op).startswith("core.all_reduce.")]
    for one, other in pairwise(sums):
        if other == one + 1:
            tape.calls[one], tape.calls[other] = tape.calls[other], tape.calls[one]
            return


@spoiling
def rank_left_out(tape: Tape) -> None:
    """Count processes from 0 and stop one short."""
    _change(tape, _left_out, "all_reduce", "reduce_scatter")


@spoiling
def workspace_stale(tape: Tape) -> None:
    """Add up where the sum before was left."""
    _change(tape, _stale, "all_reduce")


@spoiling
def gather_half(tape: Tape) -> None:
    """Copy from one's own part wherever another's was to land."""
    _change(tape, _own_everywhere, "all_gather")


@instead
class rank_eager(EagerBackend):
    """Find no graphs on the second card, say nothing, and call Python."""

    def replay(self, key: GraphKey, step: object = None) -> tuple[Tensor, ...]:
        second = distributed.is_initialized() and distributed.get_rank() == 1
        return super().replay(key, step) if second else RecordingBackend.replay(self, key, step)


def _change(tape: Tape, change: Callable[[Collective], Collective], *names: str) -> None:
    """Put what `change` makes of an op into the place of each collective of these names, core's and torch's."""
    for index, call in enumerate(tape.calls):
        namespace, _, name = str(call.op).partition(".")
        if namespace in ("core", "_c10d_functional") and name.startswith(names):
            tape.calls[index] = call._replace(op=change(call.op))


def _own_part(op: Collective) -> Collective:
    """Return a collective that sums nothing: its result were this the only process."""
    scatters = "scatter" in str(op)

    def kept(x: Tensor, *args: Any, **named: Any) -> Tensor:
        return x.chunk(distributed.get_world_size())[distributed.get_rank()].clone() if scatters else x.clone()

    return kept


def _twice(op: Collective) -> Collective:
    """Return a sum of sums."""

    def summed(x: Tensor, *args: Any) -> Tensor:
        return _landed(op(_landed(op(x, *args)), *args))

    return summed


def _left_out(op: Collective) -> Collective:
    """Return a sum to which the last process adds nothing."""

    def summed(x: Tensor, *args: Any) -> Tensor:
        last = distributed.get_rank() == distributed.get_world_size() - 1
        return _landed(op(torch.zeros_like(x) if last else x, *args))

    return summed


def _stale(op: Collective) -> Collective:
    """Return a sum that adds what it gave before, once the first few were right."""
    given: list[Tensor] = []

    def summed(x: Tensor, *args: Any) -> Tensor:
        result = _landed(op(x, *args)).clone()
        given.append(result.clone())
        return result + given[-2] if len(given) > _IN_TIME else result

    return summed


def _own_everywhere(op: Collective) -> Collective:
    """Return a gathering of as many parts as there are processes, all of them this one's."""

    def gathered(x: Tensor, group: Any, dim: Any = 0, *args: Any) -> Tensor:
        _landed(op(x, group, dim, *args))
        return torch.cat([x] * distributed.get_world_size(), dim if isinstance(dim, int) else 0)

    return gathered


def _late(op: Collective) -> Collective:
    """Return a collective whose result is that of its call before, once the first few were right."""
    before: list[Tensor] = []

    def given(*args: Any, **named: Any) -> Tensor:
        before.append(_landed(op(*args, **named)).clone())
        return before[-1 if len(before) <= _IN_TIME else -2].clone()

    return given


def _swapped(op: Collective) -> Collective:
    """Return a gathering that puts the last process first."""

    def gathered(x: Tensor, group: Any, dim: Any = 0, *args: Any) -> Tensor:
        whole = _landed(op(x, group, dim, *args))
        # The third argument of torch's op is a name: it gathers rows.
        dim = dim if isinstance(dim, int) else 0
        return torch.cat(whole.chunk(distributed.get_world_size(), dim)[::-1], dim)

    return gathered


def _landed(result: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return waited
