"""Sizes of a bench that nobody asked for: those by default, as far as the model has positions for them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.bench.presets import find_preset
from core.engine.models.assets import embedded_model
from core.engine.models.hf import driven, import_transformers
from core.engine.models.tiny import causal_lm_types, tiny_config
from core.paths import local_path

if TYPE_CHECKING:
    from core.bench.bench import Settings


def fitted(settings: Settings, num_positions: int | None, *, context: bool, prompts: bool) -> Settings:
    """Return the settings with the context and the prompts cut to a model's positions, where these are by default.

    num_positions: None for a model without a limit. context, prompts: whether they are by default. A context that is
    too long becomes the largest power of two that all rounds of decode leave room for; prompts that are too long are
    left out, and `Settings.missing` says so. Where nothing fits, nothing is cut, and `Settings.check_length` refuses.
    """
    if num_positions is None:
        return settings
    growth = {cell.phase: cell.limit - cell.tokens for cell in settings.cells}
    room = num_positions - growth.get("decode", 0)
    if context and 0 < room < settings.context:
        settings = replace(settings, context=1 << (room.bit_length() - 1))
    kept = tuple(each for each in settings.prompts if each + growth["prefill"] <= num_positions)
    if prompts and kept:
        left_out = [f"prefill/{each}" for each in settings.prompts if each not in kept]
        why = dict.fromkeys(left_out, f"the model has {num_positions} positions")
        settings = replace(settings, prompts=kept, missing={**settings.missing, **why})
    return settings


def positions_of(model: str | None, preset: str | None) -> int | None:
    """Return how many positions a model has by its configuration, before it is loaded; None where that says nothing.

    Raises as `find_preset` does; a MODEL that can't be read is refused, with the reason, where it is loaded.
    """
    if preset is not None:
        config = find_preset(preset).config()
    else:
        config = None
        with suppress(Exception):
            config = _config(model)
    limit = None
    with suppress(ValueError):  # transformers refuses a configuration of several texts
        limit = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def _config(model: str | None) -> Any:
    folder = embedded_model() if model is None else local_path("a model", model)
    if model in causal_lm_types() and not folder.exists():
        return tiny_config(model)
    with driven(None):
        return import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
