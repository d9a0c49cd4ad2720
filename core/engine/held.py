"""A causal language model of transformers that the caller holds already, as an engine takes it."""

from __future__ import annotations

from typing import Any

import torch

from core.engine.models.architecture import check_architecture, check_causal
from core.engine.models.hf import import_transformers
from core.engine.models.loading import LoadedModel, loaded_model
from core.errors import ModelError, UsageError


def as_loaded(given: Any, tokenizer: Any | None, device: torch.device) -> LoadedModel:
    """Return what an engine has to know of a model: of one that `load_model` returned, or of transformers' own object.

    The latter is put into evaluation mode, and its parameters need no gradient any more. tokenizer: its tokenizer;
    without one, prompts are token ids. Raises `UsageError` for anything else, and for weights elsewhere than on the
    device, and `ModelError` for a model that the engine can't serve.
    """
    if isinstance(given, LoadedModel):
        if tokenizer is not None:
            raise UsageError("Engine(…, tokenizer=…)", found="the loaded model has its own", remedy="leave it out")
        return given
    if not isinstance(given, import_transformers().PreTrainedModel):
        raise UsageError(
            f"Engine({given!r:.60})",
            found=f"{type(given).__name__}, no causal language model of transformers",
            remedy="pass such a model, or Engine.load(folder, device); any other module is for core.compile",
        )
    asked = f"an engine for a {type(given).__name__}"
    check_architecture(asked, given.config.to_dict())
    check_causal(asked, given.config)
    if not given.can_generate():
        found = "it has no output layer of its own"
        raise ModelError(asked, found=found, remedy="pass the model that AutoModelForCausalLM makes")
    places = {each.device for each in given.parameters()}
    own = torch.empty(0, device=device).device  # with its index, which the caller may have left out
    if places != {own}:
        raise UsageError(
            f"{asked} on {own}",
            found=f"its weights are on {', '.join(sorted(map(str, places)))}",
            remedy=f"move it there first: model.to({str(own)!r})",
        )
    missing = ModelError(
        "encode or decode text",
        found="the engine was given a model without its tokenizer",
        remedy="make it with tokenizer=…, or pass prompts as lists of token ids",
    )
    return loaded_model(
        given, dtype=given.dtype, load_time_s=0.0, logged=(), tokenizer=tokenizer, tokenizer_error=missing
    )
