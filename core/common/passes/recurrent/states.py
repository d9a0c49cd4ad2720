"""Where a state is read from and written to: in slots of a tensor that holds those of all sequences, or in its own.

state = states.index_select(0, slots)       or the tensor itself
states.index_copy_(0, kept, new)            or states.copy_(new), or state.copy_(new) and then either of these

Of several tokens of each sequence, one after the other:

state = core::token_states(states, slots, query_starts, num_tokens)
core::keep_token_states(states, new, kept, query_starts)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from core.common.ops.recurrent.tokens import READ, WRITTEN
from core.common.passes import Refused, same_sizes, view


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

    @property
    def arguments(self) -> dict[str, fx.Node | None]:
        """Return the slots by the names of the ops' arguments."""
        kept = None if self.kept is self.slots else self.kept
        return {"slots": self.slots, "kept": kept, "query_starts": self.query_starts}

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The nodes that reads and writes of the states depend on."""
        found = (self.tensor, self.slots, self.kept, self.query_starts, self.num_tokens)
        return tuple(each for each in found if each is not None)


def loaded(node: Any) -> fx.Node | None:
    """Return the node that holds the state before the casts that what computes with it needs."""
    return view.without_exact_casts(node)[0] if isinstance(node, fx.Node) else None


def read_states(state: fx.Node, new: fx.Node) -> States:
    """Return where a state comes from and where its new value goes; raise `Refused` where that is another place.

    state: as `loaded` gives it.
    """
    tensor, slots = state, None
    starts: Any = None
    num_tokens: Any = None
    if state.target is READ:
        tensor, slots, starts, num_tokens = (view.operand(state, place, "") for place in range(4))
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
    return States(tensor, slots, kept, tuple(writers), starts, counted)


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
    reads one of them, or where they read something else."""
    found = dict.fromkeys(node for end in ends for node in view.between(end, *inputs))
    for node in found:
        if not node.op.startswith("call_"):
            raise Refused(node, f"{node} is read as well")
        outside = [user for user in node.users if user not in found]
        if outside and node is not ends[0]:
            raise Refused(node, f"{outside[0]} reads {node}, which lies within")
    return tuple(found)
