"""Kernels of the CUDA plugin, one file per family of canonical ops."""
