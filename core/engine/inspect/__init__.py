"""Inspects a model before it serves: its attention, its masks, its rounding."""
