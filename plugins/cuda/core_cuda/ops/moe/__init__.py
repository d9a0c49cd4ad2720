"""Kernels of routers and grouped experts."""
