"""Passes around rotations and the write of keys and values."""
