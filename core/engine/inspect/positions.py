"""How a model counts the positions of its tokens, found by running it.

Most take positions 0, 1, 2, …; some take them and count from another number where they are given none (RoBERTa: after
its padding index). Others take none: a module of theirs looks up rows of a table by a count of its own, which would
run on across the sequences of a step. Such a module is told the positions instead (`core.engine.steps.positions`).

Legend of shapes: T tokens, N rows of a table, D their size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from core.common.graphs.indexing import checked_indices
from core.common.graphs.torch_modes import CallsSeen, entered
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.probe import function_bound, given_difference, probe_tokens, relative_difference
from core.engine.models.architecture import max_position
from core.engine.models.forward import accepted_arguments

_NUM_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The numbers that a model gives to positions, and the rows of its table that it looks up by them."""

    #: The number of a sequence's first token.
    first: int = 0
    #: A token that has one number wherever it stands, and that number; None where all tokens are counted alike.
    padding: tuple[int, int] | None = None
    #: N; None where no table was found.
    size: int | None = None

    def of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """Return the numbers of tokens, int64. positions: from 0 in each sequence. tokens: their ids, of that shape."""
        numbers = positions + self.first
        if self.padding is None:
            return numbers
        token, number = self.padding
        return torch.where(tokens == token, number, numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """A module whose result is a row for each token, looked up by the model's own count."""

    #: The module's attribute that holds the table, (N, D).
    table: str
    rows: Rows
    #: Whether its result is (1, T, D) rather than (T, D).
    batched: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """How the tokens of a packed step get their positions."""

    #: The numbers that the model takes as position_ids; None where it takes none.
    given: Rows | None = None
    #: The modules that are told the positions.
    lookups: Mapping[nn.Module, Lookup] = field(default_factory=dict)

    @property
    def ordinary(self) -> bool:
        """Whether the model takes positions 0, 1, 2, …, or has none."""
        return not self.lookups and self.given in (None, Rows())


ZERO_BASED = Counting(given=Rows())
"""Of models that take positions 0, 1, 2, …."""


@torch.no_grad()
def find_counting(model: Any, *, max_len: int, attends: bool) -> Counting:
    """Run the model on a few tokens and return how it counts; raise `NotPageable` where that is not found.

    max_len: the longest context that will occur. attends: whether any layer attends. Without, a model may take no
    positions: its states alone know what was before.
    """
    takes = _takes_positions(model)
    if takes and given_difference(model) <= function_bound(model):
        return ZERO_BASED
    if not takes and not attends:
        return Counting()
    found = _lookups(model)
    if takes:
        every = {lookup.rows for lookup in found.values()}
        fitting = [rows for rows in every if given_difference(model, rows.first) <= function_bound(model)]
        if not fitting:
            raise NotPageable("given position_ids it computes otherwise than by its own count, from whatever number on")
        counting = Counting(given=fitting[0])
    elif found:
        counting = Counting(lookups=found)
    else:
        raise NotPageable("it takes no position_ids, and none of its modules looks up rows by a count of its own")
    for rows in fitting if takes else [lookup.rows for lookup in found.values()]:
        if rows.size is not None and rows.first + max_len > rows.size:
            raise NotPageable(f"its table of {rows.size} positions ends before a context of {max_len}")
    return counting


def _takes_positions(model: Any) -> bool:
    """Tell whether positions matter to the model's forward, which may hand them on without declaring them."""
    if "position_ids" in accepted_arguments(model):
        return True
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return False
    try:
        near, far = (_logits(model, _tokens(model), step) for step in (1, 2))
    except Exception:  # it may refuse what it does not know
        return False
    return relative_difference(far, near) > function_bound(model)


@torch.no_grad()
@checked_indices()
def _logits(model: Any, tokens: Sequence[int], step: int) -> Tensor:
    """Return the logits of tokens at the positions 0, step, 2 * step, …."""
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    positions = step * torch.arange(ids.shape[1], device=ids.device)[None]
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True).logits
    return logits


def _tokens(model: Any) -> list[int]:
    """Return tokens for half of the positions at most, none of them padding."""
    spared = _padding_tokens(model)
    length = max(2, min(_NUM_TOKENS, (max_position(model.config) or 2 * _NUM_TOKENS) // 2))
    return [token for token in probe_tokens(model, length + len(spared)) if token not in spared][:length]


def _padding_tokens(model: Any) -> set[int]:
    stated = (getattr(config, "pad_token_id", None) for config in (model.config, model.config.get_text_config()))
    own = (module.padding_idx for module in model.modules() if isinstance(module, nn.Embedding))
    return {each for each in (*stated, *own) if each is not None and each >= 0}


def _lookups(model: Any) -> dict[nn.Module, Lookup]:
    """Return the modules that look up one row after another, whatever the tokens are, and give these rows."""
    tokens = _tokens(model)
    found: dict[nn.Module, Lookup] = {}
    for seen in _seen(model, tokens):
        first = seen.numbers[0]
        if seen.numbers == list(range(first, first + len(tokens))) and seen.gives_rows():
            rows = Rows(first=first, size=seen.table.shape[0])
            found[seen.module] = Lookup(table=seen.attribute(), rows=rows, batched=seen.result.dim() == 3)
    middle = len(tokens) // 2
    for token in _padding_tokens(model) if found else ():
        for seen in _seen(model, [*tokens[:middle], token, *tokens[middle + 1 :]]):
            lookup = found.get(seen.module)
            if lookup is not None and seen.numbers[middle] != lookup.rows.first + middle:
                rows = Rows(first=lookup.rows.first, size=lookup.rows.size, padding=(token, seen.numbers[middle]))
                found[seen.module] = Lookup(table=lookup.table, rows=rows, batched=lookup.batched)
    return found


@dataclass(slots=True)
class _Seen:
    """A look-up of rows (N, D) by one number for each token, and what the module around it gave."""

    module: nn.Module
    table: Tensor
    numbers: list[int]
    result: Any = None

    def gives_rows(self) -> bool:
        """Tell whether the module's result is the rows and nothing else, from a table of its own."""
        if not isinstance(self.result, Tensor) or self.result.dim() not in (2, 3) or not self.attribute():
            return False
        rows = self.table[torch.tensor(self.numbers, device=self.table.device)]
        same = self.result.shape[-2:] == rows.shape and self.result.numel() == rows.numel()
        return same and self.result.dtype == rows.dtype and torch.equal(self.result.reshape(rows.shape), rows)

    def attribute(self) -> str:
        """Return the name of the module's attribute that is the table; "" where none is."""
        held = chain(self.module._parameters.items(), self.module._buffers.items(), vars(self.module).items())
        return next((name for name, value in held if isinstance(value, Tensor) and _same(value, self.table)), "")


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


@torch.no_grad()
@checked_indices()
def _seen(model: Any, tokens: Sequence[int]) -> list[_Seen]:
    """Run the model's own forward, given tokens alone, and return its look-ups by as many numbers."""
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    with _recorded(model, len(tokens)) as found:
        model(input_ids=ids, use_cache=False, return_dict=True)
    return found


@contextmanager
def _recorded(model: nn.Module, count: int) -> Iterator[list[_Seen]]:
    running: list[nn.Module] = []
    found: list[_Seen] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        running.pop()
        for seen in found:
            if seen.module is module:
                seen.result = result

    def note(table: Tensor, numbers: Tensor) -> None:
        if running and table.dim() == 2 and numbers.numel() == count and not numbers.is_floating_point():
            found.append(_Seen(running[-1], table, numbers.flatten().tolist()))

    def see(name: str, args: tuple[Any, ...]) -> None:
        if name == "embedding":
            note(args[0], args[1])
        elif name == "index_select" and args[1] == 0:
            note(args[0], args[2])
        elif name == "index" and len(args[1]) == 1 and args[1][0] is not None and args[1][0].dtype != torch.bool:
            note(args[0], args[1][0])

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(entered(CallsSeen(see)))
        yield found
