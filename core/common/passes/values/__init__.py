"""Fake values of nodes: made by hand, compared, their sizes as expressions."""
