"""The engine that the cells of a phase share, sized and compiled for them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.bench.cells import Cell
from core.bench.rounds import lacks_memory
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.inspect.cache_codes import Rounding
    from core.engine.models.loading import LoadedModel

_FILL_TOKENS = 8192
SPARE = 4  # tokens, so that no sequence ends, and leaves, inside a measured step


class Engines:
    """The engine of a phase's cells, one bucket for each cell, made when the first of them is measured.

    So starting counts once for a phase, as it does where a model is served. One engine exists at a time.
    """

    def __init__(self, loaded: LoadedModel, device: Device, config: EngineConfig, cells: Sequence[Cell]) -> None:
        """config: what a user chose; sizes and buckets are those of the cells."""
        self.loaded = loaded
        self.device = device
        self._asked = config
        self._cells = tuple(cells)
        self._served: tuple[Cell, ...] = ()
        self._engine: Engine | None = None
        self.rounding: Rounding | None = None
        """How the last engine's quantised cache rounds, for the checks; None where it holds no codes."""

    def open(self, cell: Cell) -> Engine:
        """Return an idle engine that has a bucket for the cell; valid until the next call for another phase."""
        if self._engine is not None and cell in self._served:
            return self._engine
        self.close()
        alike = tuple(each for each in self._cells if each.phase == cell.phase)
        try:
            return self._make(alike if cell in alike else (cell,))
        except Exception as error:
            # The cache for all cells may be too large although that for one is not.
            if len(alike) == 1 or not (isinstance(error, ModelError) or lacks_memory(error)):
                raise
        gc.collect()  # the failed engine may hold its cache in a reference cycle
        self.device.parts.empty_cache()
        return self._make((cell,))

    def close(self) -> None:
        """Close the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._served = None, ()

    def num_fills(self, cell: Cell) -> int:
        """Return how many steps the prompts of a decode cell take at most, while the first sequences generate."""
        return -(-cell.batch * cell.tokens // max(self._fill_bucket(self._served) - self._most(self._served), 1))

    def _make(self, cells: tuple[Cell, ...]) -> Engine:
        self._served = cells
        self._engine = Engine(self.loaded, self.device, self._config(cells))
        self.rounding = self._engine.cache_rounding
        return self._engine

    @staticmethod
    def _most(cells: Sequence[Cell]) -> int:
        return max(cell.batch for cell in cells)

    def _fill_bucket(self, cells: Sequence[Cell]) -> int:
        return max(self._most(cells), min(max(cell.batch * cell.tokens for cell in cells), _FILL_TOKENS))

    def _config(self, cells: tuple[Cell, ...]) -> EngineConfig:
        longest = self.loaded.max_position
        fills = max(self.num_fills(cell) for cell in cells)
        length = -(-(max(cell.limit for cell in cells) + fills + SPARE) // 16) * 16
        options = replace(self._asked.options, cache=False)  # what starting takes is part of the report
        prefill = cells[0].phase == "prefill"
        if prefill:
            mode = options.mode
            modes = mode if isinstance(mode, Mapping) else {} if mode is None else {"prefill": mode}
            options = replace(options, mode={**modes, "decode": "off"})  # never run: a prompt ends with its first token
        lengths = tuple(sorted({cell.tokens for cell in cells}))
        return replace(
            self._asked,
            max_num_seqs=self._most(cells),
            max_model_len=length if longest is None else min(length, longest),
            decode_buckets=tuple(sorted({cell.batch for cell in cells})),
            prefill_buckets=lengths if prefill else (self._fill_bucket(cells),),
            prefix_caching=False,  # a prompt is computed anew in each round
            sampling=("greedy",),
            options=options,
        )
