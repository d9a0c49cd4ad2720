"""Where a state is read from and written to: in slots of a tensor that holds those of all sequences, or in its own.

state = states.index_select(0, slots)       or the tensor itself
states.index_copy_(0, kept, new)            or states.copy_(new), or state.copy_(new) and then either of these

Of several tokens of each sequence, one after the other:

state = core::token_states(states, slots, query_starts, num_tokens, bounded, dt_min, dt_max)
core::keep_token_states(states, new, kept, query_starts)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from core.common.ops.recurrent.tokens import READ, WRITTEN
from core.common.passes import Refused, same_sizes, view
from core.common.passes.recurrent.axes import seen


@dataclass(frozen=True, slots=True)
class States:
    """The tensor that holds the states, and the slots that are read and written; None for all rows in order.

    writers: the nodes that write the new state. query_starts, num_tokens: of packed sequences.
    """

    tensor: fx.Node
    slots: fx.Node | None
    kept: fx.Node | None
    writers: tuple[fx.Node, ...]
    query_starts: fx.Node | None = None
    num_tokens: fx.Node | None = None
    #: Of the steps that move the state on, by the names of the op's arguments; empty for no bound.
    bounds: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def arguments(self) -> dict[str, fx.Node | None]:
        """Return the slots by the names of the ops' arguments."""
        kept = None if self.kept is self.slots else self.kept
        return {"slots": self.slots, "kept": kept, "query_starts": self.query_starts}

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The nodes that reads and writes of the states depend on."""
        found = (self.tensor, self.slots, self.kept, self.query_starts, self.num_tokens, *self.bounds.values())
        return tuple(each for each in found if isinstance(each, fx.Node))


def loaded(node: Any) -> fx.Node | None:
    """Return the node that holds the state before the casts that what computes with it needs."""
    return view.without_exact_casts(node)[0] if isinstance(node, fx.Node) else None


def read_states(state: fx.Node, new: fx.Node, *, bounds: bool = False) -> States:
    """Return where a state comes from and where its new value goes; raise `Refused` where that is another place.

    state: as `loaded` gives it. bounds: whether the op takes bounds of the steps that are stated with the state.
    """
    tensor, slots = state, None
    stated: dict[str, Any] = {}
    starts: Any = None
    num_tokens: Any = None
    if state.target is READ:
        tensor, slots, starts, num_tokens = (view.operand(state, place, "") for place in range(4))
        stated = dict(zip(("bounded", "dt_min", "dt_max"), state.args[4:], strict=False))
        if stated and not bounds:
            raise Refused(state, f"{state} has bounds of steps, and the op knows none")
    elif view.kind(state) == "index_select":
        tensor, dim, slots = (view.operand(state, place, name) for place, name in enumerate(("input", "dim", "index")))
        if dim != 0:
            raise Refused(state, f"{state} selects states along dimension {dim}")
    inner = [user for each in _casts_of(new) for user in each.users if _copies(user, state, each)]
    writers, source = inner, state if inner else new
    kept: fx.Node | None = None
    if slots is not None:
        puts = partial(_puts, to=tensor) if starts is None else partial(_keeps, to=tensor, starts=starts)
        outer = [user for each in _casts_of(source) for user in each.users if puts(user, source=each)]
        if len(outer) != 1:
            raise Refused(state, f"the new state {new} is not written into {tensor}, from which it was read")
        writers, kept = [*inner, *outer], outer[0].args[2]  # type: ignore[assignment]  # as both have checked
    if not writers or len(inner) > 1:
        raise Refused(state, f"the new state {new} is not written where {state} was read")
    first = 0 if slots is None else 1
    if not same_sizes((view.shape(tensor) or ())[first:], (view.shape(new) or ())[first:]):
        raise Refused(state, f"the new state {new} has other sizes than {tensor}")
    counted = num_tokens if isinstance(num_tokens, fx.Node) else None
    return States(tensor, slots, kept, tuple(writers), starts, counted, stated)


def _casts_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and its casts."""
    yield node
    yield from (user for user in node.users if view.source_of_cast(user) is node)


def _copies(node: fx.Node, to: fx.Node, source: fx.Node) -> bool:
    known = node.target in ("copy_", torch.ops.aten.copy_.default)
    return known and node.args[:2] == (to, source) and len(node.args) == 2 and not node.kwargs


def _keeps(node: fx.Node, to: fx.Node, source: fx.Node, starts: fx.Node) -> bool:
    args = node.args
    return node.target is WRITTEN and len(args) == 4 and (args[0], args[1], args[3]) == (to, source, starts)


def _puts(node: fx.Node, to: fx.Node, source: fx.Node) -> bool:
    known = node.target in ("index_copy_", torch.ops.aten.index_copy_.default)
    args = node.args
    return known and len(args) == 4 and not node.kwargs and (args[0], args[1], args[3]) == (to, 0, source)


def interior(ends: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the nodes between inputs and ends, the first of which is the result; raise `Refused` where another node
    reads one of them that is no view of an input, or where they read something else."""
    found = dict.fromkeys(node for end in ends for node in view.between(end, *inputs))
    for node in found:
        if not node.op.startswith("call_"):
            raise Refused(node, f"{node} is read as well")
        outside = [user for user in node.users if user not in found]
        if outside and node is not ends[0] and not _shows(node, inputs):
            raise Refused(node, f"{outside[0]} reads {node}, which lies within")
    return tuple(found)


def _shows(node: fx.Node, inputs: Sequence[fx.Node]) -> bool:
    """Tell whether a node is nothing but a view of one of these."""
    found = seen(node, ends=inputs)
    return found is not None and found.node in inputs
