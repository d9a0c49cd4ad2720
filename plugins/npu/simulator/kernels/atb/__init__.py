"""Kernels of ATB, the vendor's library for transformers."""
