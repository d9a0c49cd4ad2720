"""Rows of a static cache, one for each sequence: each is written at its own position and masked by its own length.

A prompt runs on transformers' own cache, bound to one row. Decode runs on all rows together, on layers that differ from
transformers' in this alone: where new keys and values go. Legend of shapes: N rows, B of a step, which are the first
ones, T tokens of each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_LAYERS = {
    "StaticLayer": ("keys", "values"),
    "StaticIndexedLayer": ("keys", "values", "indexer_keys"),
    "LinearAttentionLayer": (),
    "LinearAttentionAndStaticFullAttentionLayer": ("keys", "values"),
    "DummyLayer": (),
}
"""transformers' own cache layers, with what they write at the positions of tokens; other classes may keep anything."""


@dataclass(slots=True)
class RowStep:
    """The step being run, set around each call of the model."""

    #: Of each row's token, (B, 1) int64; None between steps.
    positions: Tensor | None = None
    #: The length of the cache that the model is told; None tells it `positions`.
    told: int | None = None


class Rows:
    """N rows in the place of a static cache's one."""

    def __init__(self, cache: Any, num_rows: int) -> None:
        """Allocate the rows; raise ValueError where a layer keeps what can't be told apart by rows.

        cache: has run a sequence, so that its layers are allocated; it is then used by `one` alone.
        """
        self._own = cache
        self.num_rows = num_rows
        self.step = RowStep()
        #: All that rows are made of: who holds it, under which name, the tensor (N, …).
        self._held: list[tuple[Any, Any, Tensor]] = []
        #: Likewise, of the rowed layers: states, which a step moves on as a whole.
        self._states: list[tuple[Any, Any, Tensor]] = []
        layers = [self._rowed(layer) for layer in cache.layers]
        self._cache = _with(_RowedCache, cache)
        self._cache.layers, self._cache.step = layers, self.step

    @property
    def keeps_states(self) -> bool:
        """Whether steps move on states, so that none can be computed twice."""
        return bool(self._states)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors (N, …) that all rows lie in."""
        return tuple(whole for _, _, whole in self._held)

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Those of the tensors that a step moves on as a whole."""
        return tuple(whole for _, _, whole in self._states)

    @contextmanager
    def one(self, row: int) -> Iterator[Any]:
        """Give transformers' own cache, empty, for one sequence; what is written is in this row."""
        views = [whole[row : row + 1] for _, _, whole in self._held]
        for (holder, name, _), view in zip(self._held, views, strict=True):
            _put(holder, name, view)
        self._own.reset()
        try:
            yield self._own
            if any(_get(holder, name) is not view for (holder, name, _), view in zip(self._held, views, strict=True)):
                raise ValueError("its cache puts other tensors in the place of those that it has")
        finally:  # whoever moves the rows' memory must find nothing else that refers to it
            for holder, name, _ in self._held:
                _put(holder, name, None)

    def begin(self, positions: Tensor, active: Tensor | None) -> Any:
        """Return the cache of a step in the first rows. positions: (B,), of its tokens; a row that is not in the step
        has a position that holds nothing yet. active: (B,) bool, which rows are in the step, for layers with states."""
        self.step.positions, self._active = positions[:, None], active
        for holder, name, whole in self._states:
            _put(holder, name, whole.narrow(0, 0, positions.shape[0]).clone())
        return self._cache

    def end(self) -> None:
        """Keep what the step has done to the rows that are in it."""
        for holder, name, whole in self._states:
            moved = _get(holder, name)
            rows = whole.narrow(0, 0, moved.shape[0])
            assert self._active is not None
            kept = self._active.view(-1, *[1] * (moved.dim() - 1))
            rows.copy_(torch.where(kept, moved, rows))
            _put(holder, name, whole)
        self.step.positions = self._active = None

    def move(self, row: int, to: int) -> None:
        """Copy what a row holds to another one."""
        for whole in self.tensors:
            whole[to].copy_(whole[row])

    def _rowed(self, layer: Any) -> Any:
        kind = type(layer)
        if kind.__module__ != "transformers.cache_utils" or kind.__name__ not in _LAYERS:
            raise ValueError(f"its cache has layers of its own class {kind.__name__}, which may keep anything")
        rowed = _with(_RowedLayer, layer)
        rowed.step = self.step
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(rowed, name, mine := dict(value))
                for key, each in value.items():
                    if isinstance(each, Tensor):
                        mine[key] = whole = self._hold(value, key, each)
                        self._states.append((mine, key, whole))
            elif isinstance(value, Tensor) and value.dim():
                if name not in _LAYERS[kind.__name__]:
                    raise ValueError(f"its {kind.__name__} keeps {name!r}, of which rows are not known")
                setattr(rowed, name, self._hold(layer, name, value))
        return rowed

    def _hold(self, holder: Any, name: Any, one: Tensor) -> Tensor:
        if one.shape[0] != 1:
            raise ValueError(f"its cache keeps {name!r} in {one.shape[0]} rows for one sequence")
        whole = torch.zeros((self.num_rows, *one.shape[1:]), dtype=one.dtype, device=one.device)
        self._held.append((holder, name, whole))
        return whole


class _RowedLayer:
    """The difference of a layer in rows from transformers' own."""

    step: RowStep
    keys: Tensor
    values: Tensor
    indexer_keys: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, heads, T, size) at the rows' positions; return the whole rows."""
        return _written(self.keys, key_states, self.step, 2), _written(self.values, value_states, self.step, 2)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write an indexer's keys (B, T, size) at the rows' positions; return the whole rows."""
        return _written(self.indexer_keys, indexer_key_states, self.step, 1)

    def get_seq_length(self) -> Any:
        """Return the length that the model is told."""
        return _told(self.step)


class _RowedCache:
    step: RowStep

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the length that the model is told."""
        return _told(self.step)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the rows' positions, of which masks are made."""
        return self.step.positions


def _with(difference: type, original: Any) -> Any:
    """Return a shallow copy of a layer or a cache that has these methods before its own."""
    kind = _class_with(difference, cast("Any", type(original)))
    made = kind.__new__(kind)
    vars(made).update(vars(original))
    return made


@functools.cache
def _class_with(difference: type, base: type) -> Any:
    return type(f"Rowed{base.__name__}", (difference, base), {})


def _told(step: RowStep) -> Any:
    return step.positions if step.told is None else step.told


def _written(whole: Tensor, new: Tensor, step: RowStep, dim: int) -> Tensor:
    positions = step.positions
    assert positions is not None
    rows = whole.narrow(0, 0, new.shape[0])  # a slice might be shorter, as far as a trace knows
    index = positions.view(-1, *[1] * (dim - 1), positions.shape[1], *[1] * (new.dim() - dim - 1))
    rows.scatter_(dim, index.expand_as(new), new)
    return rows


def _get(holder: Any, name: Any) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _put(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
