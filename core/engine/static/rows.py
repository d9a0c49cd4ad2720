"""Rows of a static cache, one for each sequence: each is written at its own position and masked by its own length.

A prompt runs on transformers' own cache, bound to one row. Decode runs on all rows together, on layers that differ from
transformers' in this alone: where new keys and values go. Legend of shapes: N rows, B of a step, which are the first
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.compilation.capture.breaks import get_held, hold, put_held
from core.engine.static.cache import changed
from core.engine.static.row_steps import PackedStep, RowStep

_KEYS, _INDEXER_KEYS = {"keys": 2, "values": 2}, {"indexer_keys": 1}
_LAYERS: dict[str, dict[str, int]] = {
    "StaticLayer": _KEYS,
    "StaticIndexedLayer": _KEYS | _INDEXER_KEYS,
    "LinearAttentionLayer": {},
    "LinearAttentionAndStaticFullAttentionLayer": _KEYS,
    "DummyLayer": {},
}
"""transformers' own cache layers, with what they write at the positions of tokens and the dimension of these; other
classes may keep anything."""


LEAST = 3
"""Rows that are allocated at least."""


class _Held(NamedTuple):
    """A tensor of the cache, in which all rows lie."""

    #: Of transformers' own cache: the layer, or a dict of it, that has a row's part under this name.
    holder: Any
    name: Any
    whole: Tensor
    #: The dimension of the rows, and the size of each there.
    dim: int
    size: int

    def row(self, number: int) -> Tensor:
        return self.whole.narrow(self.dim, number * self.size, self.size)


class Rows:
    """N rows in the place of a static cache's one."""

    def __init__(self, cache: Any, num_rows: int, *, packed: bool = False) -> None:
        """Allocate the rows; raise ValueError where a layer keeps what can't be told apart by rows.

        cache: has run a sequence, so that its layers are allocated; it is then used by `one` alone. packed: whether
        steps are a `PackedStep`.
        """
        self._own = cache
        self.num_rows = num_rows
        self.step = PackedStep(num_rows) if packed else RowStep()
        self._packed = packed
        #: All that rows are made of.
        self._held: list[_Held] = []
        #: Likewise, of the rowed layers: states, which a step moves on as a whole.
        self._states: list[tuple[Any, Any, Tensor]] = []
        layers = [self._rowed(layer) for layer in cache.layers]
        self._cache = changed(_RowedCache, cache)
        self._cache.layers, self._cache.step = layers, self.step

    @property
    def keeps_states(self) -> bool:
        """Whether steps move on states, so that none can be computed twice."""
        return bool(self._states)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that all rows lie in."""
        return tuple(held.whole for held in self._held)

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Those of the tensors that a step moves on as a whole."""
        return tuple(whole for _, _, whole in self._states)

    @contextmanager
    def one(self, row: int) -> Iterator[Any]:
        """Give transformers' own cache, empty, for one sequence; what is written is in this row."""
        views = [held.row(row) for held in self._held]
        for held, view in zip(self._held, views, strict=True):
            put_held(held.holder, held.name, view)
        self._own.reset()
        try:
            yield self._own
            if any(get_held(held.holder, held.name) is not view for held, view in zip(self._held, views, strict=True)):
                raise ValueError("its cache puts other tensors in the place of those that it has")
        finally:  # whoever moves the rows' memory must find nothing else that refers to it
            for held in self._held:
                put_held(held.holder, held.name, None)

    def begin(self, positions: Tensor, active: Tensor | None) -> Any:
        """Return the cache of a step in the first rows. positions: (B,), of its tokens; a row that is not in the step
        has a position that holds nothing yet. active: (B,) bool, which rows are in the step, for layers with states."""
        self.step.positions, self._active = positions, active
        for holder, name, whole in self._states:
            put_held(holder, name, whole.narrow(0, 0, positions.shape[0]).clone())
        hold([(self.step, "positions"), *((holder, name) for holder, name, _ in self._states)])
        return self._cache

    def end(self) -> None:
        """Keep what the step has done to the rows that are in it."""
        hold(())
        for holder, name, whole in self._states:
            moved = get_held(holder, name)
            rows = whole.narrow(0, 0, moved.shape[0])
            assert self._active is not None
            kept = self._active.view(-1, *[1] * (moved.dim() - 1))
            rows.copy_(torch.where(kept, moved, rows))
            put_held(holder, name, whole)
        self.step.positions = self._active = None

    def move(self, row: int, to: int) -> None:
        """Copy what a row holds to another one."""
        for held in self._held:
            held.row(to).copy_(held.row(row))

    def _rowed(self, layer: Any) -> Any:
        kind = type(layer)
        if kind.__module__ != "transformers.cache_utils" or kind.__name__ not in _LAYERS:
            raise ValueError(f"its cache has layers of its own class {kind.__name__}, which may keep anything")
        rowed = changed(_RowedLayer, layer)
        rowed.step = self.step
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(rowed, name, mine := dict(value))
                for key, each in value.items():
                    if isinstance(each, Tensor):
                        mine[key] = whole = self._hold(value, key, each)
                        self._states.append((mine, key, whole))
            elif isinstance(value, Tensor) and value.dim():
                if name not in (written := _LAYERS[kind.__name__]):
                    raise ValueError(f"its {kind.__name__} keeps {name!r}, of which rows are not known")
                setattr(rowed, name, self._hold(layer, name, value, written[name]))
        return rowed

    def _hold(self, holder: Any, name: Any, one: Tensor, written: int | None = None) -> Tensor:
        """Return what all rows of a tensor lie in. written: the dimension of its positions; None for a state."""
        if one.shape[0] != 1 or (self._packed and written is None):
            raise ValueError(f"its cache keeps {name!r} of shape {tuple(one.shape)}, of which rows are not known")
        dim = 0 if written is None or not self._packed else written
        # A batch that can be 2 and no more, 1 apart, would be a number in a trace, and no graph of 1 made of it.
        count = self.num_rows if self._packed else max(self.num_rows, LEAST)
        shape = [size * count if index == dim else size for index, size in enumerate(one.shape)]
        whole = torch.zeros(shape, dtype=one.dtype, device=one.device)
        self._held.append(_Held(holder, name, whole, dim, one.shape[dim]))
        return whole


class _RowedLayer:
    """The difference of a layer in rows from transformers' own."""

    step: RowStep
    keys: Tensor
    values: Tensor
    indexer_keys: Tensor
    max_cache_len: int

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, heads, 1, size) at the rows' positions; return all that the rows hold."""
        written = self.step.written
        return written(self.keys, key_states, _KEYS["keys"]), written(self.values, value_states, _KEYS["values"])

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write an indexer's keys (B, 1, size) at the rows' positions; return all that the rows hold."""
        return self.step.written(self.indexer_keys, indexer_key_states, _INDEXER_KEYS["indexer_keys"])

    def get_seq_length(self) -> Any:
        """Return the length that the model is told."""
        return self.step.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys masks are made for, and the first one's position."""
        return self.step.mask_length(self.max_cache_len), 0


class _RowedCache:
    step: RowStep

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the length that the model is told."""
        return self.step.length

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        """Return the rows' positions, of which masks are made."""
        return self.step.query_offset
