"""Gated activations, with a quantisation after."""
