"""States of sequences in slots: the rows of a tensor that an op reads and writes, one of each for every token.

Row i of a call reads the state at slots[i], and writes the new one at kept[i]; where they are None, at i and at
slots[i]. A slot that one row writes no other row may read, so that rows may be computed in any order. Several rows may
write one slot that nobody reads, as padding does: which of them it then holds is not defined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, check, check_shape

FORMS = ("no slots", "slots", "slots, written to others")
"""How the samples of each op name the states, by what is special about them."""


def read(states: Tensor, slots: Tensor | None) -> Tensor:
    """Return the state of each row, (S, …); of states (N, …) themselves where there are no slots."""
    return states if slots is None else states.index_select(0, slots)


def write(states: Tensor, new: Tensor, slots: Tensor | None, kept: Tensor | None) -> None:
    """Write the new state of each row, (S, …), cast to the dtype of the states."""
    places = slots if kept is None else kept
    if places is None:
        states.copy_(new)
    else:
        states.index_copy_(0, places, new.to(states.dtype))


def check_slots(op: str, num_rows: int, states: Tensor, slots: Tensor | None, kept: Tensor | None) -> None:
    """Raise `RuntimeError` unless slots and kept are int64 and name a state for each row."""
    check_shape(op, (num_rows,), slots=slots, kept=kept)
    for name, index in (("slots", slots), ("kept", kept)):
        fits = index is None or index.dtype == torch.int64
        check(fits, op, f"{name} must be torch.int64, not {None if index is None else index.dtype}")
    if slots is None:
        check(states.shape[0] == num_rows, op, f"{states.shape[0]} states of {num_rows} rows need slots")


def with_slots(draw: Draw, num_rows: int, form: str) -> dict[str, Any]:
    """Return the arguments of a call in one of `FORMS`, for states in 2 * num_rows + 2 slots, or in num_rows.

    In the last form two rows read slot 0 and write others, as padding and sequences that begin do.
    """
    if form == "no slots":
        return {}
    order = torch.randperm(2 * num_rows, generator=torch.Generator().manual_seed(num_rows)) + 2
    slots, kept = order[:num_rows].clone(), order[:num_rows].clone()
    if form == "slots":
        return {"slots": slots.to(draw.device)}
    slots[: min(2, num_rows)] = 0
    return {"slots": slots.to(draw.device), "kept": kept.to(draw.device)}


def num_states(num_rows: int, form: str) -> int:
    """Return how many states the call of `with_slots` has."""
    return num_rows if form == "no slots" else 2 * num_rows + 2


def step_slots(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the slots of a call as a step has them, each row its own as far as there are any: to time the call."""
    found: dict[str, Tensor] = {}
    for name in ("slots", "kept"):
        index = arguments[name]
        if index is not None:
            found[name] = torch.arange(index.shape[0], device=index.device) % arguments["states"].shape[0]
    return found
