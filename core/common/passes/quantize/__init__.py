"""Passes that join a quantisation to the op before it."""
