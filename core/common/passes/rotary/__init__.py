"""Passes that find rotary position embeddings, their tables, and what goes with them."""
