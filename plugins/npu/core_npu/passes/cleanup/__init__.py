"""Passes that take away copies, sums and scales that need not be."""
