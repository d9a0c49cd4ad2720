"""Passes for models that call torch_npu's own ops: what these leave apart becomes the op that does both."""
