"""Passes that remove needless copies, sums and scales."""
