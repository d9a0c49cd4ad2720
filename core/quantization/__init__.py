"""Quantised models: schemes, layers of codes and scales, quantising a model, compressed-tensors checkpoints."""
