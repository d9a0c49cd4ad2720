"""A model on transformers' static cache: sequences in rows, where these give what the model gives alone, else one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.indexing import checked_indices
from core.device import Device
from core.engine.inspect.probe import (
    counts_from_zero,
    depends_on_longest,
    function_bound,
    probe_tokens,
    relative_difference,
)
from core.engine.models.forward import cache_name
from core.engine.static.cache import cache_tensors, full_mask, static_cache
from core.engine.static.masks import hold_row_masks, release_row_masks
from core.engine.static.rows import Rows
from core.engine.static.self_check import RunRows, told_of, why_not_in_rows
from core.engine.static.sizing import choose_num_rows
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError
from core.quantization.layers import continuous


class StaticModel:
    """A model bound to a static cache, which has one row or several."""

    def __init__(
        self, model: Any, device: Device, config: EngineConfig, *, max_model_len: int, masked: bool, packed: bool
    ) -> None:
        """Make the cache and compare what is computed on it with the model's own forward.

        masked: give the model a `full_mask`, for one that can't be traced without, or can't tell rows apart. packed:
        see `PackedStep`. Raises what the model or transformers raises where it has no static cache, and ValueError
        where it computes something else there.
        """
        self._model, self._device, self._max_model_len = model, device, max_model_len
        self._name = cache_name(model)
        #: What it was made with.
        self.way = {"masked": masked, "packed": packed}
        self._mask_len = max_model_len if masked else 0
        #: Whether the model is given positions, which avoids a read of the cache's length that many can't trace.
        self.takes_positions = counts_from_zero(model)
        #: The rows; None where the cache is transformers' own, of one row.
        self.rows: Rows | None = None
        #: Why there are no rows; "" where there are, or none were asked for.
        self.why_one = ""
        self._cache = static_cache(model, max_model_len)
        with continuous(model):  # what is compared is the cache, not which side of a step a code falls to
            self._check_one()
            row_bytes = sum(tensor.nbytes for tensor in cache_tensors(self._cache))
            how: Any = {"max_model_len": max_model_len, "longest_prompt": self._longest_prompt}
            num_rows = choose_num_rows(row_bytes, device, config, **how)
            if num_rows > 1:
                self._make_rows(num_rows)

    @property
    def manner(self) -> str:
        """How many sequences it serves at once, and why not more than one; "" where no more were asked for."""
        if self.rows is not None:
            return f"up to {self.num_rows} sequences at once"
        return f"one sequence at a time: {self.why_one}" if self.why_one else ""

    @property
    def num_rows(self) -> int:
        """Sequences at once."""
        return 1 if self.rows is None else self.rows.num_rows

    @property
    def keeps_states(self) -> bool:
        """Whether a step moves the cache on in a way that can't be repeated: transformers' own counts its tokens."""
        return self.rows is None or self.rows.keeps_states

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of the cache."""
        return cache_tensors(self._cache) if self.rows is None else self.rows.tensors

    @torch.no_grad()
    def prefill(self, tokens: list[int], row: int = 0) -> Tensor:
        """Empty a row, compute a prompt there, and return the logits (1, vocabulary) after its last token."""
        ids = torch.tensor([tokens], device=self._device.torch_device)
        positions = torch.arange(len(tokens), device=ids.device)[None]
        if self.rows is None:
            self._cache.reset()
            return self._forward(self._cache, ids, positions)[:, -1]
        with self.rows.one(row) as cache:
            return self._forward(cache, ids, positions)[:, -1]

    def decode(self, input_ids: Tensor, position_ids: Tensor | None, active: Tensor | None = None) -> Tensor:
        """Compute one token of each of the first B rows; return logits (B, vocabulary).

        input_ids, position_ids: (B,); the position of an inactive row is the first that holds nothing. active: (B,)
        bool, where rows keep states.
        """
        if self.rows is None:
            positions = None if position_ids is None else position_ids[None]
            return self._forward(self._cache, input_ids[None], positions)[:, -1]
        assert position_ids is not None
        cache, step = self.rows.begin(position_ids, active), self.rows.step
        logits = step.last(self._forward(cache, step.arranged(input_ids), step.arranged(position_ids)))
        self.rows.end()
        return logits

    def close(self) -> None:
        """Free the cache; a second call does nothing."""
        if self.rows is not None:
            release_row_masks()
        self.rows = self._cache = None

    def _forward(self, cache: Any, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        arguments: dict[str, Any] = {self._name: cache, "use_cache": True, "return_dict": True}
        if self.takes_positions and position_ids is not None:
            arguments["position_ids"] = position_ids
        if self._mask_len:
            arguments["attention_mask"] = full_mask(input_ids, self._mask_len)
        logits: Tensor = self._model(input_ids=input_ids, **arguments).logits
        return logits

    @torch.no_grad()
    @checked_indices()
    def _check_one(self) -> None:
        """Compare a prefill and one decode step with the model's own forward; raise ValueError if they differ."""
        length = min(8, self._max_model_len)
        tokens = probe_tokens(self._model, length)
        ids = torch.tensor([tokens], device=self._device.torch_device)
        expected = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -2:]
        got = [self.prefill(tokens[:-1]).clone()]  # the layers allocate here, on first use
        got.append(self.decode(ids[0, -1:], torch.tensor([length - 1], device=ids.device)))
        difference = relative_difference(torch.cat(got), expected)
        if not difference <= function_bound(self._model):
            raise ValueError(f"it differs from its forward without a cache by {difference:.2g}")

    def _longest_prompt(self) -> int:
        """Run the longest prompt and return the bytes that it took meanwhile."""
        parts = self._device.parts
        parts.reset_peak_memory()
        before = parts.memory().used_bytes
        self.prefill(probe_tokens(self._model, self._max_model_len))
        parts.synchronize()
        return max(0, parts.memory().peak_bytes - before)

    def _make_rows(self, num_rows: int) -> None:
        """Put rows in the place of the one, or say why they can't be."""
        self.why_one = depends_on_longest(self._model.config, self._max_model_len)
        if self.why_one:
            return
        hold_row_masks()
        try:
            self.rows = Rows(self._cache, num_rows, packed=self.way["packed"])
            run = RunRows(self._model, self.rows, prefill=self.prefill, decode=self.decode)
            self.why_one = why_not_in_rows(run, max_model_len=self._max_model_len)
        except Exception as error:  # the model's code may raise anything
            self.why_one = told_of(error)
        except BaseException:
            self.rows = None
            release_row_masks()
            raise
        if self.why_one:
            self.rows = None
            release_row_masks()
            # The one that rows were tried on holds no memory of its own.
            self._cache = static_cache(self._model, self._max_model_len)
            self._check_one()


def open_static(model: Any, device: Device, config: EngineConfig, *, max_model_len: int, reason: str) -> StaticModel:
    """Return a model on a static cache, in rows if it can have them in any way, plain before masked before packed.

    reason: why it can't be paged, for the `ModelError` where transformers has no static cache for it.
    """
    how: Any = {"max_model_len": max_model_len, "reason": reason}
    plain = prepare_static(model, device, config, **how)
    if not plain.why_one:
        return plain
    for masked, packed in ((True, False), (False, True)):
        with suppress(ModelError):
            other = prepare_static(model, device, config, masked=masked, packed=packed, **how)
            if other.rows is not None:
                plain.close()
                return other
            other.close()
    return plain


def prepare_static(
    model: Any,
    device: Device,
    config: EngineConfig,
    *,
    max_model_len: int,
    reason: str,
    masked: bool = False,
    packed: bool = False,
) -> StaticModel:
    """Return a `StaticModel`; raise `ModelError` where it can't be. reason: as of `open_static`."""
    try:
        return StaticModel(model, device, config, max_model_len=max_model_len, masked=masked, packed=packed)
    except Exception as error:
        raise ModelError(
            f"running {type(model).__name__}",
            found=f"it can't be paged ({reason}), and transformers' static cache fails: "
            f"{type(error).__name__}: {error}",
            remedy="this model needs an engine of its own; core.compile takes its forward as it is",
        ) from error
