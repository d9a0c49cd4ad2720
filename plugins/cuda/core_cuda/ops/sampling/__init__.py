"""Kernels that choose the next token."""
