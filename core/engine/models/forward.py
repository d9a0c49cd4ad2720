"""What a model's forward takes: read from its signature, and as its own generation calls it on whole sequences."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


def accepted_arguments(model: Any) -> frozenset[str]:
    """Return the names of the parameters that the model's forward declares itself."""
    return frozenset(inspect.signature(model.forward).parameters)


def cache_name(model: Any) -> str:
    """Return the name under which the forward takes a `transformers.Cache`; purely recurrent models have their own."""
    accepted = accepted_arguments(model)
    for name in ("past_key_values", "cache_params"):
        if name in accepted:
            return name
    raise TypeError("its forward takes no cache object")


def whole_logits(model: Any, input_ids: Tensor, *, use_cache: bool = False) -> Tensor:
    """Return the logits (B, vocabulary) of the token that follows each of these sequences (B, T), as the model's own
    generation computes them from nothing but the tokens. use_cache: as a prompt's, whose cache is dropped."""
    logits: Tensor = model(**_whole_arguments(model, input_ids, use_cache)).logits[:, -1]
    return logits


def adds_tokens(model: Any) -> bool:
    """Tell whether the model's own generation gives the forward more than the tokens that there are.

    XLNet and XLM add one, in the place of which they predict: the logits of a forward on the tokens alone are not of
    the next token.
    """
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        given: Tensor = _whole_arguments(model, ids, use_cache=False)["input_ids"]
    except Exception:  # of models that can't be asked so; the check of a route compares with `generate` all the same
        return False
    return given.shape != ids.shape


def _whole_arguments(model: Any, input_ids: Tensor, use_cache: bool) -> dict[str, Any]:
    mask = torch.ones_like(input_ids)
    prepared = model.prepare_inputs_for_generation(input_ids, attention_mask=mask, use_cache=use_cache)
    return {**prepared, "use_cache": use_cache, "return_dict": True}
