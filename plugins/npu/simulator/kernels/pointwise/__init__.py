"""Kernels of one result per element: arithmetic, nonlinear functions, gates of two halves."""
