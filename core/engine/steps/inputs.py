"""The tensors that a model is given for one step: tokens, places in the cache, block tables, rows of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.compilation.capture.inputs import InputSpec
from core.engine.steps.sampling import sampling_params_input
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Step

_UNKNOWN = -1
"""In place of a version: of a row that holds the blocks of no sequence, or of several."""
FIRST_GROUP = slice(0, 1)
"""The tables of a model whose layers form one group, and that has the sequences to itself."""


def table_names(group: int) -> tuple[str, str]:
    """Return the names of the block table and the slot mapping of a group of layers."""
    suffix = f"_{group}" if group else ""
    return f"block_table{suffix}", f"slot_mapping{suffix}"


def step_inputs(
    max_blocks: int,
    num_groups: int = 1,
    *,
    shaped: bool = False,
    chained: bool = False,
    lora: bool = False,
    recurrent: bool = False,
) -> dict[str, InputSpec]:
    """Declare a step's inputs: `tokens` flattened over `seqs` sequences, at most `max_blocks` cache blocks each, and
    `rows` of logits wanted. Each of `num_groups` groups of layers has a block table and a slot mapping of its own.
    shaped: of a program that shapes logits too, by the rows of `Histories`. chained: of a head, which leaves a hidden
    state in the slot behind each row of logits (`core.engine.heads.states`). lora: of a program with adapters
    (`core.engine.lora`). recurrent: of one whose layers keep states in slots (`core.engine.paged.recurrent`).

    Padding tokens point at the null block and belong to no sequence; padding sequences have length 0.
    """
    more: dict[str, InputSpec] = {}
    for group in range(1, num_groups):
        table, slots = table_names(group)
        more[table], more[slots] = InputSpec(("seqs", max_blocks), torch.int32), InputSpec(("tokens",), torch.int64)
    if shaped:
        more["history_rows"] = InputSpec(("tokens",), torch.int64)
    if chained:
        more["next_slots"] = InputSpec(("rows",), torch.int64)
    if lora:
        more["adapter_slots"] = InputSpec(("tokens",), torch.int64)
    if recurrent:
        more["state_slots"] = InputSpec(("seqs",), torch.int64)
        more["in_prompt"] = InputSpec(("tokens",), torch.bool)
    return {
        "input_ids": InputSpec(("tokens",), torch.int64),
        "position_ids": InputSpec(("tokens",), torch.int64),
        "slot_mapping": InputSpec(("tokens",), torch.int64),
        "block_table": InputSpec(("seqs", max_blocks), torch.int32),
        "seq_lens": InputSpec(("seqs",), torch.int32),
        "query_starts": InputSpec(("seqs + 1",), torch.int32, padding="edge"),
        "logit_rows": InputSpec(("rows",), torch.int64),
        **more,
        "sampling_params": sampling_params_input("rows"),
    }


def step_tensors(
    step: Step,
    *,
    max_blocks: int,
    block_size: int,
    device: torch.device,
    groups: slice = FIRST_GROUP,
    chained: bool = False,
    lora: bool = False,
    recurrent: bool = False,
) -> dict[str, Tensor]:
    """Return the declared inputs of a step but `sampling_params`; each sequence's blocks must suffice for its tokens.

    groups: which of the sequences' tables are the model's. chained, lora, recurrent: as of `step_inputs`.
    A draft that turns out wrong leaves keys and values in its slot. They lie behind the sequence's length, where
    attention does not read, and are overwritten when the sequence gets there.
    """
    sizes = {"tokens": step.num_tokens, "seqs": len(step.parts), "rows": step.num_rows}
    kinds = {"chained": chained, "lora": lora, "recurrent": recurrent}
    declared = step_inputs(max_blocks, groups.stop - groups.start, **kinds)
    del declared["sampling_params"]
    tensors = {name: torch.zeros(spec.resolve(sizes), dtype=spec.dtype) for name, spec in declared.items()}
    write_step(step, {name: tensor.numpy() for name, tensor in tensors.items()}, block_size=block_size, groups=groups)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


@dataclass(slots=True)
class Written:
    """What arrays of one phase hold from the step before, by which less is to be written for the next."""

    #: For each row of the block tables the `Sequence.version` whose blocks it holds, 0 for zeros.
    versions: list[int]
    #: Where that step had one token of each sequence: how many, and the bucket's number of `query_starts`.
    one_each: tuple[int, int] | None = None


def write_step(
    step: Step,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    *,
    block_size: int,
    groups: slice = FIRST_GROUP,
    written: Written | None = None,
) -> None:
    """Write the declared inputs of a step but `sampling_params` into arrays of a bucket's size, padding included.

    groups: which of the sequences' tables are the model's. written: what the arrays hold; what is up to date is
    skipped, and the rest noted.
    """
    num_seqs, num_tokens = len(step.parts), step.num_tokens
    firsts = np.array([part.first_position for part in step.parts])
    if num_tokens == num_seqs:  # one token each, as in decode
        seqs, ends = _counted(num_seqs)
        positions, stops = firsts, firsts + 1
    else:
        counts = np.array([part.num_tokens + len(part.drafts) for part in step.parts])
        ends, stops = counts.cumsum(), firsts + counts
        seqs = np.repeat(np.arange(num_seqs), counts)
        positions = np.arange(num_tokens) + np.repeat(stops - ends, counts)
    held = [len(part.sequence.tables[groups.start]) for part in step.parts]
    assert (stops <= np.array(held) * block_size).all()  # unused entries of a sequence's row name the null block
    places = positions // block_size
    width = arrays["block_table"].shape[1]
    changed = _changed_rows(step, arrays["block_table"].shape[0], written)
    for group in range(groups.start, groups.stop):
        tables, slots = (arrays[name] for name in table_names(group - groups.start))
        for row, sequence in changed:
            put(tables[row], sequence.tables[group] if sequence else [])
        blocks = tables.reshape(-1).take(places + seqs * width).astype(np.int64)
        put(slots, (blocks - places) * block_size + positions)
    if "next_slots" in arrays:
        put(arrays["next_slots"], _next_slots(step, stops, arrays["block_table"], block_size))
    if "adapter_slots" in arrays:
        put(arrays["adapter_slots"], np.array([part.sequence.adapter for part in step.parts])[seqs])
    if "state_slots" in arrays:
        put(arrays["state_slots"], [part.sequence.slot for part in step.parts])
        if step.phase != "decode":  # there no token is, nor was in an earlier step
            put(arrays["in_prompt"], positions < np.array([len(part.sequence.prompt) for part in step.parts])[seqs])
    put(arrays["position_ids"], positions)
    _write_tokens(step, arrays["input_ids"], ends)
    put(arrays["seq_lens"], stops)
    _write_rows(step, arrays, ends, written)
    if written is not None:
        for row, sequence in changed:
            written.versions[row] = _version(sequence)


def later_places(
    step: Step, arrays: Mapping[str, np.ndarray[Any, Any]], *, block_size: int, groups: slice = FIRST_GROUP
) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return what inputs of a step of one token each hold the second time, the third time, … (`Step.times`), in the
    places that are no padding; `input_ids`, and what stays the same, left out. arrays: as of the first time."""
    seqs, times = _counted(len(step.parts))[0], np.arange(1, step.times)[:, None]
    positions = np.array([part.first_position for part in step.parts]) + times
    places = positions // block_size
    found = {"position_ids": positions, "seq_lens": positions + 1}
    for group in range(groups.stop - groups.start):
        table, slots = table_names(group)
        blocks = arrays[table][seqs, places].astype(np.int64)
        found[slots] = (blocks - places) * block_size + positions
    return [{name: values[time] for name, values in found.items()} for time in range(step.times - 1)]


def _write_rows(
    step: Step, arrays: Mapping[str, np.ndarray[Any, Any]], ends: np.ndarray[Any, Any], written: Written | None
) -> None:
    """Write where sequences begin and which rows of logits are wanted, unless that is what the arrays hold."""
    starts, num_seqs = arrays["query_starts"], len(step.parts)
    same = (num_seqs, len(starts)) if step.num_tokens == num_seqs else None
    if written is not None:
        before, written.one_each = written.one_each, None  # an interrupt may leave the arrays half-written
        if before is not None and before == same:
            written.one_each = same
            return
    starts[0] = 0
    put(starts[1:], ends, padding=step.num_tokens)
    put(arrays["logit_rows"], _logit_rows(step, ends))
    if written is not None:
        written.one_each = same


def _changed_rows(step: Step, num_rows: int, written: Written | None) -> list[tuple[int, Sequence | None]]:
    """Return the rows of the block tables that must be written, with the sequence whose blocks they shall hold."""
    wanted: list[Sequence | None] = [*(part.sequence for part in step.parts), *[None] * (num_rows - len(step.parts))]
    if written is None:
        return list(enumerate(wanted))
    versions, now = written.versions, list(map(_version, wanted))
    if versions[:num_rows] == now:
        return []
    changed = [(row, sequence) for row, sequence in enumerate(wanted) if versions[row] != now[row]]
    for row, _ in changed:
        versions[row] = _UNKNOWN  # until all of it is written
    return changed


def _version(sequence: Sequence | None) -> int:
    return 0 if sequence is None else sequence.version


@lru_cache(maxsize=256)
def _counted(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return 0, 1, … and 1, 2, … for sequences of one token each; not to be written to."""
    numbers = np.arange(count + 1)
    return numbers[:-1], numbers[1:]


def _write_tokens(step: Step, array: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
    if len(ends) == step.num_tokens:
        put(array, [0 if part.ahead else part.sequence.token(part.first_position) for part in step.parts])
        return
    start = 0
    for part, end in zip(step.parts, ends.tolist(), strict=True):
        sequence, first = part.sequence, part.first_position
        if first + part.num_tokens <= len(sequence.prompt) and not part.drafts:
            array[start:end] = sequence.prompt_ids[first : first + part.num_tokens]
        else:
            array[start:end] = part.tokens
        start = end
    array[start:] = 0


def _logit_rows(step: Step, ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if step.num_rows == len(step.parts):
        return ends - 1
    each = zip(ends.tolist(), step.parts, strict=True)
    return np.array([row for end, part in each for row in range(end - part.num_rows, end)])


def _next_slots(
    step: Step, stops: np.ndarray[Any, Any], tables: np.ndarray[Any, Any], block_size: int
) -> np.ndarray[Any, Any]:
    """Return the slot behind each part's tokens, in the null block for parts without a next token."""
    emits = np.array([part.emits for part in step.parts])
    if not emits.any():
        return np.zeros(step.num_rows, dtype=np.int64)
    assert step.num_rows == len(step.parts)  # heads verify nothing
    places = np.where(emits, stops // block_size, 0)
    blocks = np.where(emits, tables[np.arange(len(places)), places], 0).astype(np.int64)
    slots: np.ndarray[Any, Any] = blocks * block_size + stops % block_size
    return slots


def put(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any] | list[int], padding: int = 0) -> None:
    """Write values into the beginning of an array, and padding behind them."""
    array[: len(values)] = values
    array[len(values) :] = padding
