"""Passes that find attention, its cache and a quantisation of its result."""
