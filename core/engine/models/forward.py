"""What a model's forward takes, read from its signature."""

from __future__ import annotations

import inspect
from typing import Any


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
