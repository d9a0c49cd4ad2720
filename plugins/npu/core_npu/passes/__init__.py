"""Passes for models that call torch_npu's own ops: neighbouring calls become the fused op that does both."""
