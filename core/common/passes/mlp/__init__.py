"""Passes that find gated activations and projections of gate and up."""
