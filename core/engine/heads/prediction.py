"""The multi-token prediction layers of a checkpoint, by transformers' code for them."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from core.engine.heads.head import Head
from core.engine.models.bounds import check_finite
from core.engine.models.hf import driven, import_transformers
from core.engine.models.loading import LoadedModel
from core.engine.models.reading import described
from core.errors import ModelError

_IGNORED = "_keys_to_ignore_on_load_unexpected"
"""Patterns of names: what a model leaves in its checkpoint."""


class Prediction(Head):
    """The first multi-token prediction layer; its own output stands for the next hidden state.

    DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 2.2.
    """

    def __init__(self, mtp: Any) -> None:
        """mtp: transformers' `MtpModel`, which has embedding and output layer of the served model."""
        super().__init__(mtp.config, mtp.embed_tokens)
        self.mtp = mtp

    def compute(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output with its norm, twice."""
        # transformers counts the token's own position.
        out = self.mtp.forward_layer(0, states, positions + 1, None, inputs_embeds=embedded)
        return out, out

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits (1, R, V)."""
        logits: Tensor = self.mtp._project_to_logits(hidden)
        return logits


def load_prediction(loaded: LoadedModel) -> tuple[Prediction, list[str]]:
    """Read the layers from the served model's folder, to its device and in its dtype; return warnings, too.

    Raises `ModelError` where the checkpoint has none, or transformers can't read them.
    """
    asked = "draft by the model's own heads"
    model: Any = loaded.model
    transformers = import_transformers()
    found: Any = getattr(importlib.import_module("transformers.modeling_layers"), "MtpModel", None)
    count = getattr(model.config.get_text_config(), "num_mtp_layers", None) or 0
    remedy = "draft without a draft model, or by one in a folder of its own"
    if loaded.path is None:
        raise ModelError(asked, found="the model was built, and not read from a folder", remedy=remedy)
    if not count:
        kind = model.config.model_type
        raise ModelError(asked, found=f"transformers knows no such layers of this {kind!r} checkpoint", remedy=remedy)
    if not hasattr(found, "forward_layer"):
        version = transformers.__version__
        raise ModelError(asked, found=f"transformers {version} can't run them", remedy="install a newer transformers")
    first: int = model.config.get_text_config().num_hidden_layers
    # transformers looks among these names, which hold the layers' numbers of published sizes only.
    names = [rf"model\.layers\.{number}\." for number in range(first, first + count)]
    before = vars(model).get(_IGNORED)
    try:
        setattr(model, _IGNORED, [*(getattr(model, _IGNORED) or ()), *names])
        with driven(None) as logged:
            mtp = found.from_pretrained(model, device_map={"": str(next(model.parameters()).device)})
    except Exception as error:  # conversions of any model run in there
        raise ModelError(asked, found=f"transformers could not load them: {described(error)}", remedy=remedy) from error
    finally:
        delattr(model, _IGNORED)
        if before is not None:
            setattr(model, _IGNORED, before)
    check_finite(asked, mtp)
    del mtp.layers[1:]
    more = [f"of the checkpoint's {count} multi-token prediction layers the first drafts alone"] if count > 1 else []
    return Prediction(mtp), [*logged, *more]
