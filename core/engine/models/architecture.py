"""Which models the engine can serve: causal language models that the installed transformers has code for."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import torch
from torch import nn

from core.engine.models.hf import import_transformers
from core.errors import ModelError


def check_architecture(asked: str, config: dict[str, Any]) -> list[str]:
    """Check that `config` (a `config.json`) names a causal language model, and return warnings about it.

    Raises ModelError for a `model_type` that is missing, unknown, known but not causal, or an encoder.
    """
    import_transformers()
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    known = set(importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING.keys())
    causal: dict[str, Any] = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            asked, found="config.json has no 'model_type'", remedy="set it to the architecture's name, such as 'llama'"
        )
    custom = bool(config.get("auto_map"))
    if model_type not in known:
        raise _unknown_type(asked, model_type, sorted(causal), custom=custom)
    if model_type not in causal:
        raise ModelError(
            asked,
            found=f"model_type {model_type!r} ({_architectures(config)}) has no causal language model in transformers",
            remedy="pass a decoder-only language model, such as a 'llama' or 'qwen3'",
        )
    if custom:
        return [f"custom code named in auto_map is not run; transformers' own {model_type!r} is used"]
    return []


def check_causal(asked: str, config: Any) -> None:
    """Raise ModelError if the model that `config` (a `PreTrainedConfig`) builds would not attend causally.

    transformers maps encoders such as BERT to a causal class too, for configurations with `is_decoder=True`; without
    that the weights load and attention looks ahead, which gives fluent nonsense.
    """
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    described = f"model_type {config.model_type!r} ({_architectures(config.to_dict())})"
    remedy = "pass a decoder-only language model, such as a 'llama' or 'qwen3'"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(asked, found=f"{described} is an encoder-decoder (is_encoder_decoder is true)", remedy=remedy)
    # GPT-NeoX is causal and says is_decoder=False, so the flag counts only for models that can also fill masks.
    if getattr(config, "is_decoder", None) is False and config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ModelError(asked, found=f"{described} is an encoder (is_decoder is false)", remedy=remedy)


def _unknown_type(asked: str, model_type: str, causal: list[str], *, custom: bool) -> ModelError:
    version = import_transformers().__version__
    found = f"model_type {model_type!r} is unknown to transformers {version}"
    if custom:
        found += ", and the custom code named in its auto_map is not run"
    close = difflib.get_close_matches(model_type, causal, n=1)
    hint = f"did you mean {close[0]!r}? Otherwise " if close else ""
    remedy = f"{hint}install a transformers that has this architecture"
    return ModelError(asked, found=found, remedy=remedy)


def _architectures(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) and names else "no architectures named"


def text_config(config: Any) -> Any:
    """Return the part of a `PreTrainedConfig` that describes the language model; itself for a text-only model."""
    return config.get_text_config(decoder=True)


def config_dtype(config: Any) -> torch.dtype:
    """Return the dtype that `config` states for the weights, or fp32 where it states none."""
    for part in (config, text_config(config)):
        stated = getattr(part, "dtype", None)
        dtype = getattr(torch, stated, None) if isinstance(stated, str) else stated
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.float32


def max_position(config: Any) -> int | None:
    """Return how many positions the model was made for, or None where it states no limit (recurrent models, ALiBi)."""
    part = text_config(config)
    for name in ("max_position_embeddings", "max_seq_len", "max_target_positions"):
        value = getattr(part, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def num_positions(model: Any, stated: int | None) -> int | None:
    """Return how many positions a model can count, of those that its configuration states.

    With a row for padding in its table of positions, it begins to count after that row (RoBERTa: 512 of 514).
    """
    tokens = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens)
    padding = (table.padding_idx for table in tables if table.num_embeddings == stated)
    before = max((row + 1 for row in padding if row is not None), default=0)
    return None if stated is None else stated - before


def stop_token_ids(model: Any) -> tuple[int, ...]:
    """Return the ids at which the model ends a text: of its generation config, else of its configuration."""
    for source in (getattr(model, "generation_config", None), text_config(model.config)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(int(i) for i in (ids if isinstance(ids, list | tuple) else (ids,)))
    return ()
