"""The reason why something is not cached; told, and never worked around."""

from __future__ import annotations


class Uncacheable(Exception):
    """Something of a program that can't be written down as it is; the text says what."""
