"""States of sequences in slots: the rows of a tensor that an op reads and writes, one of each for every sequence.

Sequence i of a call reads its state at slots[i], and writes the new one at kept[i]; where they are None, at i and at
slots[i]. A slot that one sequence writes no other may read, so that they may be computed in any order. Several may
write one slot that nobody reads, as padding does: which of them it then holds is not defined.

Without query_starts each row of a call is one token of another sequence. query_starts (S + 1,) int32, as
`core::attention` has it, packs several tokens of each: those of sequence i are the rows from query_starts[i] to
query_starts[i + 1], in order. What lies behind the last is padding, and comes back as zero. The state of a sequence
without a row goes on unchanged, from slots to kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, check, check_ranks, check_shape

FORMS = ("no slots", "slots", "slots, written to others")
"""How the samples of each op name the states, by what is special about them."""
LENGTHS: Mapping[str, tuple[int, ...]] = {
    "sequences": (3, 1, 7),
    "sequences without tokens": (0, 4, 0, 1, 0),
    "sequences around chunks": (15, 16, 17, 63, 64, 65),
    "a long sequence": (150,),
    "sequences, all empty": (0, 0),
}
"""Tokens of each sequence of the packed samples of each op, by what is special about them."""


def read(states: Tensor, slots: Tensor | None) -> Tensor:
    """Return the state of each sequence, (S, …); of states (N, …) themselves where there are no slots."""
    return states if slots is None else states.index_select(0, slots)


def write(states: Tensor, new: Tensor, slots: Tensor | None, kept: Tensor | None) -> None:
    """Write the new state of each sequence, (S, …), cast to the dtype of the states."""
    places = slots if kept is None else kept
    if places is None:
        states.copy_(new)
    else:
        states.index_copy_(0, places, new.to(states.dtype))


def check_slots(
    op: str, num_rows: int, states: Tensor, slots: Tensor | None, kept: Tensor | None, query_starts: Tensor | None
) -> None:
    """Raise `RuntimeError` unless slots and kept are int64, query_starts int32, and each sequence has a state."""
    num_sequences = num_rows
    if query_starts is not None:
        check_ranks(op, 1, query_starts=query_starts)
        check(query_starts.dtype == torch.int32, op, f"query_starts must be torch.int32, not {query_starts.dtype}")
        check(
            query_starts.shape[0] > 1, op, "query_starts must hold the first row of one sequence at least, and its end"
        )
        num_sequences = query_starts.shape[0] - 1
    check_shape(op, (num_sequences,), slots=slots, kept=kept)
    for name, index in (("slots", slots), ("kept", kept)):
        fits = index is None or index.dtype == torch.int64
        check(fits, op, f"{name} must be torch.int64, not {None if index is None else index.dtype}")
    if slots is None:
        check(states.shape[0] == num_sequences, op, f"{states.shape[0]} states of {num_sequences} sequences need slots")


def with_slots(draw: Draw, num_sequences: int, form: str) -> dict[str, Any]:
    """Return the arguments of a call in one of `FORMS`, for states in 2 * num_sequences + 2 slots, or in num_sequences.

    In the last form two sequences read slot 0 and write others, as padding and sequences that begin do.
    """
    if form == "no slots":
        return {}
    order = torch.randperm(2 * num_sequences, generator=torch.Generator().manual_seed(num_sequences)) + 2
    slots, kept = order[:num_sequences].clone(), order[:num_sequences].clone()
    if form == "slots":
        return {"slots": slots.to(draw.device)}
    slots[: min(2, num_sequences)] = 0
    return {"slots": slots.to(draw.device), "kept": kept.to(draw.device)}


def num_states(num_sequences: int, form: str) -> int:
    """Return how many states the call of `with_slots` has."""
    return num_sequences if form == "no slots" else 2 * num_sequences + 2


def packed(
    draw: Draw,
    call: Callable[[int, int, str], dict[str, Any]],
    lengths: Sequence[int],
    *,
    form: str = "slots, written to others",
    padding: int = 0,
) -> dict[str, Any]:
    """Return a call of sequences of these lengths, and rows of padding behind them.

    call: returns the arguments of a call of so many rows and so many sequences, without slots. form: of `FORMS`.
    """
    arguments = call(sum(lengths) + padding, len(lengths), form)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=draw.device)
    return {**arguments, **with_slots(draw, len(lengths), form), "query_starts": starts}


def step_slots(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the slots of a call as a step has them, each sequence its own as far as there are any, and sequences that
    share the rows evenly: to time the call."""
    found: dict[str, Tensor] = {}
    for name in ("slots", "kept"):
        index = arguments[name]
        if index is not None:
            found[name] = torch.arange(index.shape[0], device=index.device) % arguments["states"].shape[0]
    starts = arguments["query_starts"]
    if starts is not None:
        rows = next(iter(arguments.values())).shape[0]
        found["query_starts"] = torch.linspace(0, rows, len(starts), device=starts.device).to(starts.dtype)
    return found
