"""Canonical ops by families of kernels of the extension."""
