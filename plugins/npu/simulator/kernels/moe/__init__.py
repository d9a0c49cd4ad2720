"""Mixture of experts: routing, grouped products, and rows as codes."""
