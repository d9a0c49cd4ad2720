"""The state before and after each token of packed sequences, as a model's code for one token reads and writes it.

What is before a token is what the token before it left: no call can return that before the model has computed it. So
these two ops state a recurrence and do not compute it. Code that moves a batch of states on by one token each, written
between them, is thereby said to run token by token along each sequence. A lift makes of it an op that does so; a graph
in which one of them is left can't run.

A state space may bound its steps in some tokens alone, as transformers' code for prompts does and its code for one
token does not: that is stated with the states, and the op bounds them.

Shapes: T tokens, S sequences, N states; slots and query_starts as in slots.py.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("core", "FRAGMENT")
_LIBRARY.define(
    "token_states(Tensor states, Tensor slots, Tensor query_starts, SymInt num_tokens, Tensor? bounded=None, "
    "float dt_min=0.0, float dt_max=0.0) -> Tensor"
)
_LIBRARY.define("keep_token_states(Tensor(a!) states, Tensor new, Tensor kept, Tensor query_starts) -> ()")
READ = torch.ops.core.token_states.default
WRITTEN = torch.ops.core.keep_token_states.default


def _token_states(
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    num_tokens: int,
    bounded: Tensor | None = None,
    dt_min: float = 0.0,
    dt_max: float = 0.0,
) -> Tensor:
    """Return the state before each token, (T, …), where no sequence has a second one; zeros for padding.

    bounded (T,) bool, dt_min, dt_max: as `core::selective_state_update` has them; what comes after is not bounded here.
    """
    found = states.new_zeros((num_tokens, *states.shape[1:]))
    for row, slot in _rows(slots, query_starts):
        found[row] = states[slot]
    return found


def _keep_token_states(states: Tensor, new: Tensor, kept: Tensor, query_starts: Tensor) -> None:
    """Write the state after the token of each sequence, of new (T, …), at kept (S,)."""
    for row, slot in _rows(kept, query_starts):
        states[slot] = new[row]


def _rows(slots: Tensor, query_starts: Tensor) -> list[tuple[int, int]]:
    """Return the row and the slot of each sequence with a token; raise `RuntimeError` where one has several."""
    starts = query_starts.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if max(lengths, default=0) > 1:
        raise RuntimeError(
            f"core::token_states: a sequence has {max(lengths)} tokens, and the state before its second one is known "
            "only when the first is computed; an op for the whole recurrence has to be lifted from the graph"
        )
    found = zip(starts, slots.tolist(), lengths, strict=False)
    return [(start, slot) for start, slot, length in found if length]


def _fake(states: Tensor, slots: Tensor, query_starts: Tensor, num_tokens: int, *_: object) -> Tensor:
    return states.new_empty((num_tokens, *states.shape[1:]))


_LIBRARY.impl("token_states", _token_states, "CompositeExplicitAutograd")
_LIBRARY.impl("keep_token_states", _keep_token_states, "CompositeExplicitAutograd")
torch.library.register_fake("core::token_states", _fake, lib=_LIBRARY)
torch.library.register_fake("core::keep_token_states", lambda *_: None, lib=_LIBRARY)


def is_stated(target: object) -> bool:
    """Tell whether a node of this target states a recurrence that an op still has to be found for."""
    return target is READ or target is WRITTEN


def first_stated(graph: fx.Graph) -> fx.Node | None:
    """Return the first node of a graph that states a recurrence; None where the graph can run."""
    return next((node for node in graph.nodes if is_stated(node.target)), None)
