"""The error that says why something is not cached; it is reported, never worked around."""

from __future__ import annotations


class Uncacheable(Exception):
    """A part of a program has no exact text; the message says which."""
