"""Kernels of attention over a paged cache: decode, prompts, the write of keys and values."""
