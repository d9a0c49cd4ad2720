"""Kernels that compute a row alike whatever other rows a call has, for `deterministic="batch"`."""
