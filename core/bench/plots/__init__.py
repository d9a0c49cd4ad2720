"""Plots of a bench: one picture of all its cells, as SVG or by matplotlib."""
