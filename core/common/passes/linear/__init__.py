"""Passes that find linear layers and merge those of one input."""
