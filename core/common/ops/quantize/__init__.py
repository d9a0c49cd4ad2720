"""Quantisation to codes with scales, and back."""
