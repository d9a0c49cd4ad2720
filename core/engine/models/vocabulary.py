"""The size of a model's vocabulary."""

from __future__ import annotations

from typing import Any


def vocab_size_of(model: Any) -> int:
    """Return how many rows the embedding has; a token id must be below it. Of a sharded model, those of all ranks."""
    embedding = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", embedding.weight.shape[0]))
