"""Rotary position embeddings and their tables."""
