"""Inspects what a model keeps in the paged cache, before anything is allocated or compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from core.device import Device
from core.engine.inspect.attention import AttentionLayer, NotPageable, inspect
from core.engine.inspect.cache_codes import CACHE_DTYPES, Scales, layer_scales, rounding
from core.engine.inspect.masks import ALL, EXHAUSTIVE
from core.engine.inspect.past import what_layers_ask
from core.engine.inspect.positions import find_counting
from core.engine.inspect.probe import depends_on_longest
from core.engine.inspect.recurrent import inspect_recurrence
from core.engine.paged.groups import LayerGroup, make_groups
from core.engine.paged.sizing import step_bytes
from core.engine.steps.positions import ServedPositions
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError


class PagedModel:
    """A model with its attention layers, in groups that look back equally far, and its layers that keep states; or
    `NotPageable`."""

    def __init__(
        self, model: Any, device: Device, config: EngineConfig, *, max_model_len: int, state_bytes: int = 0
    ) -> None:
        """Inspect the model, which stays as it is. state_bytes: of each position, besides keys and values."""
        self.model = model
        self._device = device
        #: The sizes that its programs are compiled for.
        self.prefill_sizes = config.prefill_sizes(device.capabilities, max_model_len)
        #: Tokens at most in a step that holds prompts, as a whole prompt may need, and as chunks of one do.
        self.max_step_tokens = self.chunk_tokens = config.max_step_tokens or max(self.prefill_sizes)
        self._max_num_seqs, self._max_len = config.max_num_seqs, max_model_len
        #: The layers that keep states of a sequence besides keys and values.
        self.recurrence = inspect_recurrence(model)
        if self.recurrence.layers and config.max_loras:
            raise NotPageable("it keeps recurrent states, and adapters of the layers that do are not implemented")
        if self.recurrence.layers and config.deterministic is not None:
            raise UsageError(
                f"deterministic={config.deterministic!r}",
                found=f"{type(model).__name__} keeps recurrent states, and no implementation of the ops that move them "
                "on is declared to give the same bits in any batch",
                remedy="leave it out",
            )
        if self.whole_prompts and config.max_step_tokens is None:
            self.max_step_tokens = max(self.max_step_tokens, max_model_len)
        #: What layers ask of transformers' cache.
        self.asked = what_layers_ask(model)
        self.layers = self._inspect(max_model_len)
        #: How the model gets the positions of a step's tokens.
        self.counting = find_counting(model, max_len=max_model_len, attends=bool(self.layers))
        self._codes = CACHE_DTYPES.get(config.kv_cache_dtype)
        if self._codes is not None and not self.layers:
            raise NotPageable("it has no attention layers, and so no keys and values")
        self.scales = self._scales()
        #: How the model's own forward gets a cache of the same codes; None where the cache holds no codes.
        self.rounding = None if self._codes is None else rounding(model, self.layers, self.scales, self._codes)
        if self._codes is not None:
            self.layers = {module: replace(each, dtype=self._codes) for module, each in self.layers.items()}
        first, *others = make_groups(self.layers, max_len=max_model_len, block_size=config.block_size)
        state_bytes += self._indexer_bytes(first)
        self.groups = (replace(first, bytes_per_position=first.bytes_per_position + state_bytes), *others)
        #: The attention implementation of transformers that the model came with.
        self.native_attention: str = model.config._attn_implementation

    @property
    def whole_prompts(self) -> bool:
        """Whether the model's code can't continue a prompt, so that without a graph later chunks go token by token."""
        return not self.recurrence.continues

    @property
    def num_slots(self) -> int:
        """Slots of recurrent states for sequences: those that leave hold theirs while others join."""
        return self._max_num_seqs + max(1, self._max_num_seqs // 8)

    def step_bytes(self) -> int:
        """Return the bytes that a step of the most tokens takes, its attention left out."""
        sizes: dict[str, int] = {"num_tokens": max(self.prefill_sizes), "num_rows": self._max_num_seqs}
        positions = ServedPositions(self.counting)
        return step_bytes(self.model, self._device, positions, asked=self.asked, max_len=self._max_len, **sizes)

    def _indexer_bytes(self, group: LayerGroup) -> int:
        """Return the bytes of a position that indexers keep, beside the layers of a group; raise where they can't."""
        if self.asked.indexers and group.reach != ALL:
            raise NotPageable("its indexers choose among all positions, and no attention layer sees these")
        if not self.asked.indexers and any(layer.indexed for layer in self.layers.values()):
            raise NotPageable("attention gets 'indices', and no layer keeps keys that they are chosen by")
        return sum(each.bytes_per_position for each in self.asked.indexers.values())

    def _inspect(self, max_model_len: int) -> dict[nn.Module, AttentionLayer]:
        mixed = depends_on_longest(self.model.config, max_model_len)
        if mixed:
            raise NotPageable(mixed)
        states = self.recurrence.layers
        layers = inspect(self.model, max_len=max_model_len, required=not states)
        told = [f"all {len(layers)} attention layers go through transformers' attention interface"] if layers else []
        if layers and max_model_len > EXHAUSTIVE:
            told.append(f"masks compared on sampled rows, as the context is longer than {EXHAUSTIVE}")
        if states:
            told.append(f"{len(states)} layers keep recurrent states in slots, and prompts share no beginning")
        if self.asked.indexers:
            told.append(
                f"{len(self.asked.indexers)} indexers keep keys of their own, and attention masks what they leave"
            )
        self.reason = "; ".join(told)
        return layers

    def _scales(self) -> dict[nn.Module, Scales]:
        """Return the scales that attention modules bring for a quantised cache; empty for any other cache."""
        if self._codes is None:
            return {}
        device = self._device.torch_device
        found = {module: layer_scales(module, layer, device) for module, layer in self.layers.items()}
        given = sum(any(scale is not None for scale in each) for each in found.values())
        self.reason += f"; keys and values as {self._codes}, with scales of {given} of {len(found)} layers, else 1"
        return found
