"""The device plugin for NVIDIA GPUs."""
