"""Passes around matrix products."""
