"""Passes around gated activations."""
