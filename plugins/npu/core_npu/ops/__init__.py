"""Canonical ops by the kernels of torch_npu, one file per family; nothing here imports torch_npu itself."""
