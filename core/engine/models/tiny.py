"""Tiny configurations of the models that transformers knows, for tests and sweeps.

A configuration class states its fields and their defaults. Rules on the fields' names scale all sizes down together,
and of the default's layers those are kept that show every kind of layer it has.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from core.engine.models.hf import driven
from core.engine.models.tiny_rules import (
    HEAD_SIZE,
    HEADS,
    INDICES,
    LAYERS,
    NUM_LAYERS,
    POSITIONS,
    REQUIRED,
    TOKEN,
    TOKEN_IDS,
    VOCABULARY,
    WINDOW,
    TinyRules,
)
from core.errors import CoreError, ModelError


def causal_lm_types() -> tuple[str, ...]:
    """Return every model type that transformers maps to a causal language model, in alphabetical order."""
    with driven(None):
        auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    return tuple(sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_config(model_type: str, *, max_positions: int = 256, vocab_size: int = 160, **changes: Any) -> Any:
    """Return a tiny configuration (`PreTrainedConfig`) of an architecture.

    changes: fields of the outermost configuration to set beside or instead of what the rules say. Raises `ModelError`
    with the reason where the rules don't lead to a valid one.
    """
    asked = f"a tiny configuration of {model_type!r}"
    if model_type not in causal_lm_types():
        raise ModelError(
            asked, found="transformers has no causal language model of that type", remedy="see causal_lm_types()"
        )
    rules = TinyRules(max_positions=max_positions, vocab_size=vocab_size)
    return shrunk_config(model_type, rules, **changes)


def shrunk_config(model_type: str, rules: TinyRules, **changes: Any) -> Any:
    """Return a configuration of any model type made tiny by these rules; arguments and errors as of `tiny_config`."""
    asked = f"a tiny configuration of {model_type!r}"
    with driven(None):
        known: Any = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
        try:
            return _Shrink(known[model_type], rules).config(changes)
        except CoreError:
            raise
        except Exception as error:  # validators of any configuration class run in there
            raise ModelError(
                asked,
                found=f"{type(error).__name__}: {' '.join(str(error).split())}",
                remedy="add an override for this type",
            ) from error


class _Shrink:
    """The tiny form of one configuration class."""

    def __init__(
        self,
        config_class: Any,
        rules: TinyRules,
        *,
        default: Any = None,
    ) -> None:
        """Read the class's fields, their values in `default` (its own default), and the layers to keep."""
        self._class = config_class
        self._rules = rules
        self._stated = {field.name: _stated(field) for field in dataclasses.fields(config_class)}
        self._overrides = dict(rules.overrides.get(config_class.model_type, {}))
        self._switches = {name: value for name, value in rules.switches.items() if name in self._stated}
        if "use_sliding_window" in self._switches:
            self._switches["sliding_window"] = WINDOW
        self._parts: dict[str, Any] = getattr(config_class, "sub_configs", {})
        nested = {name: self._overrides.pop(name) for name in self._parts if name in self._overrides}
        self._default = default if default is not None else config_class(**self._switches, **nested)
        self._nested_overrides = nested
        self._num_layers = self._count_layers()
        self._kept = self._keep()

    def config(self, changes: Mapping[str, Any]) -> Any:
        """Build it."""
        values: dict[str, Any] = dict(self._switches)
        for name, stated in self._stated.items():
            if TOKEN.fullmatch(name):
                values[name] = self._token(name, self._value(name))
                continue
            changed = self._changed(name, self._value(name), derived=stated is None)
            if changed is not None:
                values[name] = changed
        kinds = values.get("layer_types") or []
        # Windows that the default leaves unused: the class can do both, so show both.
        if values.get("sliding_window") and set(kinds) == {"full_attention"}:
            values["layer_types"] = ["sliding_attention", *kinds[1:]]
        return self._class(**{**values, **self._nested(), **self._overrides, **changes})

    def _value(self, name: str) -> Any:
        stated = self._stated[name]
        try:
            value = getattr(self._default, name)
        except Exception:  # a class may refuse to name one value for what differs by layer
            return stated
        return stated if value is None else value

    def _changed(self, name: str, value: Any, *, derived: bool) -> Any:
        """Return the tiny value, or None to leave the field to the class. derived: the class computes it by default."""
        if name in self._switches or name in self._parts or isinstance(value, bool):
            return None
        if self._is_per_layer(value):
            return [self._element(name, value[index]) for index in self._kept]
        if isinstance(value, list) and value and INDICES.fullmatch(name) and not derived:
            return [self._kept.index(index) for index in value if index in self._kept]
        if name == "num_kv_shared_layers" and value:
            return len(self._kept) if value >= self._num_layers else len(self._kept) // 2
        if derived and not REQUIRED.fullmatch(name) and not (value and "window" in name):
            return None
        if isinstance(value, int) and NUM_LAYERS.fullmatch(name):
            return len(self._kept)
        value = 1 if value is None and derived else value
        return self._element(name, value) if isinstance(value, int | float) else None

    def _element(self, name: str, value: Any) -> Any:
        # Zero means that the architecture does without.
        if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
            return value
        if POSITIONS.fullmatch(name):
            return self._rules.max_positions
        if VOCABULARY.fullmatch(name):
            return self._rules.vocab_size
        if "kv_lora_rank" in self._stated:
            # Latent attention has one key and value per query head, and calls the rotated part of a head `head_dim`.
            if name == "num_key_value_heads":
                return HEADS
            if name == "head_dim" and value in (1, self._value("qk_rope_head_dim")):
                return HEAD_SIZE // 2
        return next((tiny for pattern, tiny in self._rules.sizes if pattern.fullmatch(name)), value)

    def _token(self, name: str, value: Any) -> Any:
        if name in TOKEN_IDS:
            return TOKEN_IDS[name]
        others = [other for other in self._stated if TOKEN.fullmatch(other) and other not in TOKEN_IDS]
        return self._rules.vocab_size - 1 - others.index(name) if isinstance(value, int) else value

    def _nested(self) -> dict[str, Any]:
        parts = {name: getattr(self._default, name, None) for name in self._parts}
        return {
            name: _Shrink(type(part), self._rules, default=part).config(self._nested_overrides.get(name, {}))
            for name, part in parts.items()
            if dataclasses.is_dataclass(part)
        }

    def _count_layers(self) -> int:
        for name in self._stated:
            value = self._value(name)
            if NUM_LAYERS.fullmatch(name) and isinstance(value, int):
                return value
        # Some state their kinds of layers instead of a number.
        return next((len(v) for n in self._stated if isinstance(v := self._value(n), list) and "layers" in n), 0)

    def _is_per_layer(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) == self._num_layers > 0 and not _is_index_list(value)

    def _keep(self) -> list[int]:
        """Choose layers, in order, that show every value of every per-layer list; at least two."""
        values = {name: self._value(name) for name in self._stated}
        lists = {name: value for name, value in values.items() if self._is_per_layer(value)}
        wanted = {(name, repr(kind)) for name, kinds in lists.items() for kind in kinds}
        kept = set[int]()
        while wanted:
            shown = [{(n, repr(v[i])) for n, v in lists.items()} & wanted for i in range(self._num_layers)]
            best = max(range(self._num_layers), key=lambda i: len(shown[i]))
            kept.add(best)
            wanted -= shown[best]
        for index in range(self._num_layers):
            if len(kept) < LAYERS:
                kept.add(index)
        # Layers that reuse the keys and values of earlier ones need such earlier ones, of their own kind.
        shared = self._value("num_kv_shared_layers") if "num_kv_shared_layers" in self._stated else 0
        return sorted(kept) * (2 if 0 < shared < self._num_layers else 1)


def _stated(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _is_index_list(value: Sequence[Any]) -> bool:
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return numbers and len(value) > 1 and all(a < b for a, b in pairwise(value))
