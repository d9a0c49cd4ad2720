"""Passes that find rotary position embeddings and their tables, and fuse them with norms and attention."""
