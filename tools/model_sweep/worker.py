"""A worker of the sweep over models: examines one class after the other, quietly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Examine one class on one thread; what libraries warn of is no matter of the sweep."""
    import logging
    import warnings

    import torch
    import transformers

    from model_sweep.measure import examine

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("core").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    return examine(request["family"], request["type"])
