"""Attention over a paged cache and over dense keys and values."""
