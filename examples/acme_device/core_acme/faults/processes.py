"""Faults of graphs on several processes: each takes the place of the honest graph backend."""

from __future__ import annotations

from collections.abc import Callable
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
