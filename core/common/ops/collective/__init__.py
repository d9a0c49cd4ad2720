"""Collectives, and collectives with norms and products around them."""
