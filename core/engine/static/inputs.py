"""The inputs of decode on a static cache: a token and its position for each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.compilation.capture.inputs import InputSpec
from core.engine.static.model import StaticModel
from core.engine.static.slots import Slots
from core.engine.steps.sampling import GREEDY_ROW, sampling_params_input
from core.engine.steps.step import Step


def decode_inputs(static: StaticModel) -> dict[str, InputSpec]:
    """Declare the inputs: of `rows` rows, or of the one of transformers' own cache."""
    many = static.rows is not None
    size: int | str = "rows" if many else 1
    how: Any = {} if many else {"padding": "copy"}
    shapes = {"input_ids": InputSpec((size,), torch.int64, **how)}
    if many or static.takes_positions:
        shapes["position_ids"] = InputSpec((size,), torch.int64, **how)
    if many and static.keeps_states:
        shapes["active"] = InputSpec((size,), torch.bool)
    shapes["sampling_params"] = replace(sampling_params_input(size), **how)
    return shapes


def decode_tensors(
    names: Iterable[str],
    device: torch.device,
    tokens: Sequence[int],
    positions: Sequence[int],
    *,
    active: Sequence[bool] | None = None,
    params: Tensor | None = None,
) -> dict[str, Any]:
    """Return the inputs of these names. active: None for all rows. params: (rows, 4) on the host; None for greedy."""
    values: dict[str, Any] = {"input_ids": tokens, "position_ids": positions}
    values["active"] = [True] * len(tokens) if active is None else active
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    tensors["sampling_params"] = torch.tensor([GREEDY_ROW]).repeat(len(tokens), 1) if params is None else params
    return {name: tensors[name].to(device, non_blocking=True) for name in names}


def step_tensors(
    step: Step, slots: Slots, names: Iterable[str], device: torch.device, *, last_position: int, sampled: bool
) -> dict[str, Any]:
    """Return the inputs of a step of one token each, for all rows up to the last that a sequence has.

    Rows that are not in the step have the position that they write next. last_position: of a row. sampled: whether the
    tokens are chosen as the sequences ask, and not the likeliest.
    """
    num_rows = slots.num_used
    tokens, positions, active = [0] * num_rows, [0] * num_rows, [False] * num_rows
    for row, holder in slots.holders:
        positions[row] = min(holder.num_computed, last_position)
    rows = [part.sequence.slot - 1 for part in step.parts]
    for row, part in zip(rows, step.parts, strict=True):
        (tokens[row],), positions[row], active[row] = part.tokens, part.first_position, True
    params = torch.tensor([GREEDY_ROW]).repeat(num_rows, 1)
    if sampled:
        params[rows] = step.sampling_params(params.device)
    return decode_tensors(names, device, tokens, positions, active=active, params=params)
